"""Scalar JAX functions inside kernels."""

from ._code import Argument as Argument, Code as Code, Equation as Equation
from ._differentiate import Derivative as Derivative, Read as Read, differentiate as differentiate
from ._evaluate import evaluate as evaluate
from ._trace import Program as Program, describe as describe, trace as trace
