"""CuTe DSL kernels as Equinox modules, and layers built of them.

The public names are below; `eqxcute.layers` has the layers, `eqxcute.testing` what tests of kernels need. Importing does
nothing but define names: no GPU is asked, CuTe is not imported.
"""

from . import _derivative as _derivative  # gives the primitive its derivatives
from ._arch import architecture as architecture
from ._control import cond as cond
from ._errors import (
    ArchitectureError as ArchitectureError,
    BackendError as BackendError,
    CacheError as CacheError,
    CacheWarning as CacheWarning,
    CompileError as CompileError,
    CompileTimeout as CompileTimeout,
    DtypeError as DtypeError,
    InlineError as InlineError,
    SlowPathWarning as SlowPathWarning,
    SpecError as SpecError,
)
from ._kernel import Kernel as Kernel, attribute as attribute, static as static
from .inline._pointwise import Pointwise as Pointwise, pointwise as pointwise

__version__ = "0.1.0"
