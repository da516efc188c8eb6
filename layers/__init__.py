"""Layers."""

from .attention import FlexAttention as FlexAttention
from .attention import flex_attention as flex_attention
