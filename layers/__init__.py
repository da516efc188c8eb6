"""Layers."""

from .attention import (
    FlexAttention as FlexAttention,
    MultiheadAttention as MultiheadAttention,
    TileMap as TileMap,
    flex_attention as flex_attention,
    tile_map as tile_map,
)
from .bias_act import BiasReLU as BiasReLU, bias_relu as bias_relu
