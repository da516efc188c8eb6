"""CuTe DSL kernels as Equinox modules, and layers built of them.

The public names are below; `eqxcute.layers` has the layers, `eqxcute.testing` what tests of kernels need. Importing does
nothing but define names: no GPU is asked, CuTe is not imported.
"""

from . import _derivative as _derivative  # gives the primitive its derivatives
from ._arch import architecture as architecture
from ._control import cond as cond
from ._errors import (
    ArchitectureError as ArchitectureError,
)
from ._errors import (
    BackendError as BackendError,
)
from ._errors import (
    CacheError as CacheError,
)
from ._errors import (
    CacheWarning as CacheWarning,
)
from ._errors import (
    CompileError as CompileError,
)
from ._errors import (
    CompileTimeout as CompileTimeout,
)
from ._errors import (
    DtypeError as DtypeError,
)
from ._errors import (
    SlowPathWarning as SlowPathWarning,
)
from ._errors import (
    SpecError as SpecError,
)
from ._kernel import Kernel as Kernel
from ._kernel import attribute as attribute
from ._kernel import static as static

__version__ = "0.1.0"
