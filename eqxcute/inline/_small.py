"""For which scores tanh can be a polynomial of few terms, which costs no special function."""

from ._code import Code, Equation, constant

SMALL = 0.5  # up to which it is: `_device.py` has the terms


def small_scores(code: Code, name: str = "score") -> float | None:
    """How large a score may be, either way, for `small` to hold.

    **Arguments:**

    - `code`: Of a program.
    - `name`: The argument that is a score.

    **Returns:**

    The largest size for which the argument of every tanh is small. None where there is no tanh, or one of anything but the
    score times, or over, constants.
    """
    factors: list[float | None] = []  # of the score, where a value is a multiple of it
    found = []
    for e in code.equations:
        inputs = [factors[n] for n in e.inputs]
        if e.op == "tanh":
            found.append(inputs[0])
        factors.append(_factor(code, e, inputs, name) if e.dtype == "float32" else None)
    largest = max((0.0 if x is None else abs(x) for x in found), default=0.0)
    if None in found or not 0.0 < largest < float("inf"):
        return None
    return SMALL * (1 - 2.0**-20) / largest  # roundings of the product stay within


def _factor(code: Code, e: Equation, inputs: list[float | None], name: str) -> float | None:
    if e.op == "argument":
        return 1.0 if e["name"] == name else None
    if e.op in ("copy", "stop_gradient"):
        return inputs[0]
    if e.op == "neg":
        return None if inputs[0] is None else -inputs[0]
    if e.op not in ("mul", "div"):
        return None
    a, b = inputs
    x, y = (_number(code.equations[n]) for n in e.inputs)
    if a is not None and y:
        return a * y if e.op == "mul" else a / y
    return b * x if b is not None and x and e.op == "mul" else None


def _number(e: Equation) -> float | None:
    return float(constant(e)) if e.op == "const" else None
