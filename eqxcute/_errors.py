"""What eqxcute raises, and the messages that more than one place needs.

A message says what was called, what came, what was expected and what to do instead.
It never prints the contents of an array.
"""


class SpecError(ValueError):
    """Arguments, outputs or fields that do not fit a kernel's signature."""


class DtypeError(TypeError):
    """A dtype that a kernel, or CuTe, does not take."""


class InlineError(TypeError):
    """A function that cannot run inside a kernel. The message names it, its file and line, and what to write instead."""


class ArchitectureError(RuntimeError):
    """No GPU architecture to compile for, or one that CuTe does not know."""


class BackendError(RuntimeError):
    """Something that has to run on a GPU, asked for where it cannot."""


class CompileError(RuntimeError):
    """CuTe refused a kernel. The compiler's own error is the `__cause__`."""


class CompileTimeout(TimeoutError):
    """Tracing a kernel took longer than `EQXCUTE_COMPILE_TIMEOUT` seconds."""


class CacheError(RuntimeError):
    """A cache folder that cannot be trusted: its entries are executable code."""


class CacheWarning(UserWarning):
    """The cache could not help; the kernel was compiled instead."""


class SlowPathWarning(UserWarning):
    """The result is right, and slower than it might be. Warned once a reason."""


def sizes(shape: tuple[int, ...]) -> str:
    """`(3, 4)` as users write shapes."""
    return "(" + ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "") + ")"


def untied(kernel: str, dim: str, first: tuple[str, int], second: tuple[str, int]) -> SpecError:
    """Two places give different sizes to one dim."""
    (name1, size1), (name2, size2) = first, second
    return SpecError(
        f"`{kernel}`: `{name1}` and `{name2}` must agree on `{dim}`, but `{name1}` has "
        f"`{dim}={size1}` and `{name2}` has `{dim}={size2}`.\n"
        f"`{dim}` stands in both terms of the signature, so it is one size. Reshape one of them, "
        f"or if `{name2}` has a leading batch axis, call the kernel under `jax.vmap`."
    )
