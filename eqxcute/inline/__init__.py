"""Scalar JAX functions inside kernels."""

from ._bound import Span as Span, bound as bound
from ._code import Argument as Argument, Code as Code, Equation as Equation
from ._differentiate import Derivative as Derivative, Read as Read, differentiate as differentiate
from ._evaluate import evaluate as evaluate, evaluate_prepared as evaluate_prepared
from ._trace import Program as Program, describe as describe, trace as trace
