"""Attention with any mask and any change of the scores."""

from ._entry import flex_attention as flex_attention
from ._layer import FlexAttention as FlexAttention
from ._masks import (
    AbstractMask as AbstractMask,
)
from ._masks import (
    AndMask as AndMask,
)
from ._masks import (
    CausalMask as CausalMask,
)
from ._masks import (
    ChunkedMask as ChunkedMask,
)
from ._masks import (
    DilatedMask as DilatedMask,
)
from ._masks import (
    DocumentMask as DocumentMask,
)
from ._masks import (
    FullMask as FullMask,
)
from ._masks import (
    NotMask as NotMask,
)
from ._masks import (
    OrMask as OrMask,
)
from ._masks import (
    PaddingMask as PaddingMask,
)
from ._masks import (
    PrefixLMMask as PrefixLMMask,
)
from ._masks import (
    SlidingWindowMask as SlidingWindowMask,
)
from ._scores import (
    AbstractScore as AbstractScore,
)
from ._scores import (
    AdditiveBias as AdditiveBias,
)
from ._scores import (
    ALiBi as ALiBi,
)
from ._scores import (
    ComposedScore as ComposedScore,
)
from ._scores import (
    RelativeBias as RelativeBias,
)
from ._scores import (
    SoftCap as SoftCap,
)
from ._scores import (
    alibi_slopes as alibi_slopes,
)
