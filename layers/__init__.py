"""Layers."""

from .attention import FlexAttention as FlexAttention
from .attention import flex_attention as flex_attention
from .bias_act import bias_relu as bias_relu
from .bias_act import BiasReLU as BiasReLU
