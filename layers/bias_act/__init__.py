"""Bias + ReLU: one pass over memory forward, one backward."""

from ._entry import bias_relu as bias_relu
from ._layer import BiasReLU as BiasReLU
