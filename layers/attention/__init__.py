"""Attention with any mask and any change of the scores."""

from ._entry import flex_attention as flex_attention
from ._layer import FlexAttention as FlexAttention
from ._masks import (
    AbstractMask as AbstractMask,
    AndMask as AndMask,
    CausalMask as CausalMask,
    ChunkedMask as ChunkedMask,
    DilatedMask as DilatedMask,
    DocumentMask as DocumentMask,
    FullMask as FullMask,
    NotMask as NotMask,
    OrMask as OrMask,
    PaddingMask as PaddingMask,
    PrefixLMMask as PrefixLMMask,
    SlidingWindowMask as SlidingWindowMask,
)
from ._multihead import MultiheadAttention as MultiheadAttention
from ._scores import (
    AbstractScore as AbstractScore,
    AdditiveBias as AdditiveBias,
    ALiBi as ALiBi,
    ComposedScore as ComposedScore,
    RelativeBias as RelativeBias,
    SoftCap as SoftCap,
    alibi_slopes as alibi_slopes,
)
from ._tiles import TileLists as TileLists, TileMap as TileMap, tile_map as tile_map
