"""What tests of kernels need: compile for any GPU, run on a CPU, compare with the reference, time.

None of it needs a GPU, but for `benchmark` to mean something.
"""

import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from . import _arch, _compile
from ._kernel import Kernel, attributes_of, brings, is_array, name_of
from ._primitive import Call, Plan, View, flatten, interpreting, plan_of, view_of


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A kernel as the compiler leaves it. `object` is what is linked into the process: host code around the cubin."""

    name: str
    architecture: str
    ptx: str
    cubin: bytes
    object: bytes


def compile_count() -> int:
    """**Returns:**

    How often this process has called the CuTe compiler. Kernels taken from a cache do not count.
    """
    return _compile.count()


def compile_only(kernel: Kernel, *arguments: Any, architecture: str = "sm_90a") -> Compiled:
    """Compiles a kernel for a named GPU, on any machine, past all caches.

    **Arguments:**

    - `kernel`: The kernel.
    - `arguments`: Arrays or `jax.ShapeDtypeStruct`s. Only dtypes, ranks and dims marked `!` matter.
    - `architecture`: The GPU. (Keyword only argument.)

    **Returns:**

    A `Compiled`, whose PTX carries line numbers.

    **Raises:**

    `eqxcute.CompileError` if the compiler refuses it.
    """
    with _arch.architecture(architecture):
        found, plan, _ = _analyse(kernel, arguments)
        return _build(found, plan, architecture)


def _analyse(kernel: Kernel, arguments: tuple) -> tuple[View, Plan, list]:
    def as_array(leaf):
        is_struct = isinstance(leaf, jax.ShapeDtypeStruct)
        return np.zeros(leaf.shape, leaf.dtype) if is_struct else np.asarray(jnp.asarray(leaf))

    operands, call = flatten(kernel, jax.tree.map(as_array, arguments))
    found = view_of(call, operands)
    return found, plan_of(found), [np.asarray(x) for x in operands]


def _build(found: View, plan: Plan, architecture: str) -> Compiled:
    symbol = _compile.symbol_of(found, _compile.key_of(found, plan, architecture))
    built = _compile.build(found, plan, symbol, architecture, inspect=True)
    return Compiled(symbol, architecture, built.ptx or "", built.cubin or b"", built.object)


_interpreted: dict[str, Compiled] = {}


def interpret(kernel: Kernel, *arguments: Any, architecture: str = "sm_80") -> Any:
    """Runs a kernel's PTX on the CPU, every access checked, and returns what the GPU would.

    The kernel is compiled for `architecture`; its own host code computes grids and packs parameters; its launches run
    lane by lane in NumPy. Small shapes take seconds.

    **Arguments:**

    - `kernel`: The kernel.
    - `arguments`: Arrays, as for `kernel(*arguments)`.
    - `architecture`: The GPU whose instructions are interpreted. (Keyword only argument.)

    **Returns:**

    The outputs, as `kernel(*arguments)`.

    **Raises:**

    `eqxcute.testing.KernelFault` for an access outside its array, a misaligned or racing one, a read of memory that
    nothing wrote, a barrier that some threads never reach, or an output left unwritten. It names the instruction, the
    thread and the line of Python. On Hopper also for a wrong number of arrivals or bytes (who waits for what is said),
    memory or registers touched while a bulk copy or `wgmma` is in flight, and a missing fence. `NotImplementedError`
    for an instruction that the interpreter does not know: clusters and Blackwell's tensor memory are among them.
    """
    found, plan, operands = _analyse(kernel, arguments)
    outputs = _interpret(found, plan, operands, _arch.check(architecture))
    return jax.tree.unflatten(found.tree, list(map(jnp.asarray, outputs)))


@contextlib.contextmanager
def interpreted(architecture: str = "sm_80"):
    """Inside, kernels run through `interpret` on a CPU, wherever they are: in layers, under `jit`, `grad` and `vmap`.

    ```python
    with eqxcute.testing.interpreted():
        out = jax.grad(loss)(model)  # the numbers of the real kernels, every access checked
    ```

    **Arguments:**

    - `architecture`: The GPU whose instructions are interpreted.
    """
    with _arch.architecture(architecture), interpreting(architecture):
        yield


def run_interpreted(call: Call, architecture: str, *operands: Any) -> list[Any]:
    """What a kernel's lowering becomes inside `interpreted`.

    **Arguments:**

    - `call`: The kernel's call, without its arrays.
    - `architecture`: The GPU whose instructions are interpreted.
    - `operands`: The arrays.

    **Returns:**

    The outputs, in order.
    """
    wanted = view_of(call, [jax.typeof(x) for x in operands]).outputs

    def run(*arrays):
        # NumPy alone: JAX must not be called while it waits for this.
        arrays = [np.asarray(x) for x in arrays]
        found = view_of(call, arrays)
        return _interpret(found, plan_of(found), arrays, architecture)

    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in wanted]
    return list(jax.pure_callback(run, shapes, *operands, vmap_method="sequential"))


def _interpret(found: View, plan: Plan, operands: Sequence[Any], architecture: str) -> list:
    """The outputs, in NumPy."""
    from . import _ptx

    with _arch.architecture(architecture):
        key = _compile.key_of(found, plan, architecture)
        if key not in _interpreted:
            _interpreted[key] = _build(found, plan, architecture)
    compiled = _interpreted[key]

    def in_memory(array, value):
        return np.transpose(np.reshape(value, array.shape), array.order).copy(order="C")

    inputs = [in_memory(array, np.array(x)) for array, x in zip(plan.inputs, operands, strict=True)]
    outputs = [np.empty(array.memory_shape, array.dtype) for array in plan.outputs]
    scratch = [np.empty(array.memory_shape, array.dtype) for array in plan.workspace]
    started = {o: inputs[i] for i, o in plan.aliases if i < len(inputs)}
    started |= {
        o: np.full(plan.outputs[o].memory_shape, value, plan.outputs[o].dtype)
        for o, value in plan.initial
    }
    outputs = [started.get(o, output) for o, output in enumerate(outputs)]
    initial = [outputs[o] for o, _ in plan.initial]
    names = [a.name for a in plan.inputs] + [plan.outputs[o].name for o, _ in plan.initial]
    first = len(names)
    names += [a.name for a in (*plan.outputs, *plan.workspace)] + list(attributes_of(found.kernel))
    _ptx.execute(
        compiled.object,
        compiled.name,
        compiled.ptx,
        [*inputs, *initial, *outputs, *scratch, *attributes_of(found.kernel).values()],
        names=names,
        written=[first + o for o in range(len(outputs)) if o not in started],
        scratch=[first + len(outputs) + i for i in range(len(scratch))],
    )
    return [
        np.transpose(output, np.argsort(array.order)).reshape(want.shape)
        for output, array, want in zip(outputs, plan.outputs, found.outputs, strict=True)
    ]


def assert_as_accurate(
    actual: Any, *, oracle: Any, peer: Any, slack: float = 2.0, ulps: float = 1.0
) -> None:
    """`actual` may be at most `slack` times as wrong as `peer`.

    **Arguments:**

    - `actual`: What is tested. Pytrees are compared leaf by leaf.
    - `oracle`: The same in a wider dtype. (Keyword only argument.)
    - `peer`: The same in plain JAX, in the dtype of `actual`: so the allowance is measured on these inputs, not
        picked. (Keyword only argument.)
    - `slack`: See above. (Keyword only argument.)
    - `ulps`: Allowed besides, in units of the largest entry's last place, for a `peer` that happens to be exact.
        (Keyword only argument.)

    Integers and booleans must be equal; NaN and infinities must stand in the same places.

    **Raises:**

    `AssertionError`, naming the worst entry.
    """
    trees = [jax.tree.leaves(tree) for tree in (actual, oracle, peer)]
    if len({len(leaves) for leaves in trees}) != 1:
        raise AssertionError(f"Different numbers of arrays: {[len(leaves) for leaves in trees]}.")
    for got, want, other in zip(*trees, strict=True):
        _leaf_as_accurate(got, want, other, slack, ulps)


def _leaf_as_accurate(actual, oracle, peer, slack: float, ulps: float) -> None:
    if actual.shape != oracle.shape or actual.dtype != peer.dtype:
        raise AssertionError(
            f"Got {actual.dtype}{actual.shape}; the oracle has shape {oracle.shape}, the peer dtype {peer.dtype}."
        )
    if not jnp.issubdtype(actual.dtype, jnp.floating):
        np.testing.assert_array_equal(np.asarray(actual), np.asarray(oracle))
        return
    eps = float(jnp.finfo(actual.dtype).eps)
    if not float(jnp.finfo(oracle.dtype).eps) < eps:
        raise AssertionError(
            f"The oracle is {oracle.dtype}, no wider than {actual.dtype}: it would allow anything."
        )
    got, want, other = (np.asarray(x).astype(np.float64) for x in (actual, oracle, peer))
    for kind in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(kind(got), kind(want), err_msg=kind.__name__)
    finite = np.isfinite(want)
    if not finite.any():
        return
    error = np.zeros(want.shape)
    error[finite] = np.abs(got[finite] - want[finite])
    if not np.isfinite(other[finite]).all():
        raise AssertionError("The peer is not finite where the oracle is: it would allow anything.")
    peer_error = np.abs(other[finite] - want[finite]).max()
    floor = ulps * eps * np.abs(want[finite]).max()
    allowed = slack * peer_error + floor
    worst = np.unravel_index(error.argmax(), error.shape)
    if error[worst] > allowed:
        raise AssertionError(
            f"Off by {error[worst]:.3g} at {tuple(map(int, worst))}: got {got[worst]:.6g}, want {want[worst]:.6g}. "
            f"Allowed {allowed:.3g} = {slack} * {peer_error:.3g} (plain JAX in {actual.dtype}) + {floor:.3g}. "
            f"{np.mean(error > allowed):.1%} of entries are over."
        )


def check_kernel(
    kernel: Kernel, *arguments: Any, gradients: bool = True, interpreted: bool = False
) -> None:
    """Checks a kernel against its reference in float64: values, and gradients for random cotangents.

    **Arguments:**

    - `kernel`: The kernel; it needs a `reference`.
    - `arguments`: Arrays.
    - `gradients`: Whether to check reverse mode too. (Keyword only argument.)
    - `interpreted`: Runs the kernel through `interpret`, instead of on the default device. (Keyword only argument.)

    **Raises:**

    `AssertionError` if the kernel is more than twice as far from float64 as its reference is in the arguments' dtypes.
    """
    if not brings(kernel, "reference"):
        raise ValueError(f"`{name_of(kernel)}` has no `reference` to be checked against.")
    arguments = jax.tree.map(jnp.asarray, arguments)
    actual = (
        interpret(kernel, *arguments)
        if interpreted
        else jax.jit(lambda *some: kernel(*some))(*arguments)
    )
    peer = jax.jit(lambda *some: kernel.reference(*some))(*arguments)
    with jax.enable_x64(True):
        wide = jax.tree.map(
            lambda leaf: _on_cpu(_widened(leaf)) if is_array(leaf) else leaf, kernel
        )
        oracle = wide.reference(*jax.tree.map(_on_cpu, jax.tree.map(_widened, arguments)))
    assert_as_accurate(actual, oracle=oracle, peer=peer)
    floats = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(arguments)]
    if not gradients or not any(floats):
        return
    cotangents = [
        jr.normal(jr.key(i), out.shape).astype(out.dtype)
        if jnp.issubdtype(out.dtype, jnp.floating)
        else None
        for i, out in enumerate(jax.tree.leaves(peer))
    ]
    assert_as_accurate(
        _gradients(kernel, arguments, cotangents),
        oracle=_widened_gradients(wide, arguments, cotangents),
        peer=_gradients(kernel.reference, arguments, cotangents),
    )


def _gradients(function: Callable, arguments: tuple, cotangents: list) -> list:
    leaves, tree = jax.tree.flatten(arguments)
    moving = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]

    def of_moving(some):
        full = list(leaves)
        for i, leaf in zip(moving, some, strict=True):
            full[i] = leaf
        outputs = jax.tree.leaves(function(*jax.tree.unflatten(tree, full)))
        return [out for out, ct in zip(outputs, cotangents, strict=True) if ct is not None]

    def pulled(some, ct):
        return jax.vjp(of_moving, some)[1](ct)[0]

    return jax.jit(pulled)([leaves[i] for i in moving], [ct for ct in cotangents if ct is not None])


def _widened_gradients(kernel: Kernel, arguments: tuple, cotangents: list) -> list:
    with jax.enable_x64(True):
        wide = [None if ct is None else _on_cpu(_widened(ct)) for ct in cotangents]
        arguments = jax.tree.map(_on_cpu, jax.tree.map(_widened, arguments))
        return _gradients(kernel.reference, arguments, wide)


def _widened(leaf):
    return leaf.astype(jnp.float64) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


def _on_cpu(leaf):
    """The oracle is computed there: a GPU library may lack a float64 routine, and is under test itself."""
    return jax.device_put(leaf, jax.devices("cpu")[0])


def benchmark(function: Callable, *arguments: Any, calls: int = 20, rounds: int = 7) -> float:
    """Times `function(*arguments)` on the default device.

    Calls are queued without waiting, so a call that takes longer on the device than its dispatch on the host (about
    30 us) is timed without it. Repeated calls find small arrays in the device's cache.

    **Arguments:**

    - `function`: Compiled by `jax.jit` first, unless it is already.
    - `arguments`: Arrays.
    - `calls`: In a round. (Keyword only argument.)
    - `rounds`: Of which the median counts. (Keyword only argument.)

    **Returns:**

    Seconds a call.
    """
    jitted = function if hasattr(function, "lower") else jax.jit(function)
    jax.block_until_ready(jitted(*arguments))
    timed = functools.partial(_round, jitted, arguments, calls)
    return statistics.median(timed() for _ in range(rounds))


def _round(function: Callable, arguments: tuple, calls: int) -> float:
    result = None
    start = time.perf_counter()
    for _ in range(calls):
        result = function(*arguments)
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls


def __getattr__(name: str):
    if name == "KernelFault":
        from ._ptx import KernelFault

        return KernelFault
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
