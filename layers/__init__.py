"""Layers."""

from .attention import FlexAttention as FlexAttention, flex_attention as flex_attention
from .bias_act import BiasReLU as BiasReLU, bias_relu as bias_relu
