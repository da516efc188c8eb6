"""Control flow for code inside a kernel that CuTe's preprocessor does not see.

Inside `@cute.jit` and `@cute.kernel` a plain `if` is a branch on the device. In undecorated helpers and lambdas it is not;
these functions are for those.
"""


def cond(pred, true_fn, false_fn, *operands):
    """`true_fn(*operands)` where `pred` holds, else `false_fn(*operands)`. Only one of them runs.

    **Arguments:**

    - `pred`: A CuTe Boolean, or a Python bool, which is decided while compiling.
    - `true_fn`, `false_fn`: Functions that return the same types: a CuTe number, a tuple of them, or None.

    **Returns:**

    What the function that ran returned.
    """
    if isinstance(pred, bool):
        return (true_fn if pred else false_fn)(*operands)
    from . import _launcher  # here, since it imports CuTe

    return _launcher.cond(pred, true_fn, false_fn, operands)
