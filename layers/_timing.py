"""What the benchmarks of all layers share: how a contender is called, compared and timed.

Calls are queued without waiting, and contenders take turns, round by round, in an order that is
drawn anew each round: a clock that drifts meets all of them.
"""

import dataclasses
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp


class Run(Protocol):
    """A contender with its inputs, ready to be called."""

    setup_ms: float | None  # what has to be made before, and is not part of a call
    pullback_alone: bool  # whether `backward` is only that, or forward and backward together

    def forward(self) -> Any:
        """Queues a forward pass."""

    def backward(self) -> Any:
        """Queues a backward pass; where `pullback_alone` is False, after a forward pass."""

    def wait(self, result: Any) -> None:
        """Returns once `result` is there."""

    def results(self, backward: bool) -> list[jax.Array]:
        """The output, and the gradients if they are wanted, in JAX's memory and layout."""
        ...


@dataclasses.dataclass(frozen=True)
class Contender:
    """One implementation: ours, or a rival.

    `load()` imports what it needs and returns it; `prepare(loaded, case, inputs, smoke)` makes a
    `Run`; `can(case)` says whether it is meant for the case at all. One that is `on_request` runs
    only if it is asked for; one that runs `anywhere` needs no GPU.
    """

    name: str
    title: str
    load: Callable[[], Any]
    prepare: Callable[..., Run]
    can: Callable[[Any], bool]
    on_request: bool = False
    anywhere: bool = False


class JaxRun:
    """`function(*primals, *others)` under `jax.jit`; gradients are those of the primals.

    JAX keeps no tape between jitted calls, so forward and backward are timed together.
    """

    setup_ms: float | None = None
    pullback_alone: bool = False

    def __init__(
        self, function: Callable, primals: Sequence, cotangent: jax.Array, others: Sequence = ()
    ):
        def both(primals, others, cotangent):
            out, pullback = jax.vjp(lambda *some: function(*some, *others), *primals)
            # The output is returned too, so that no part of the forward pass is dropped.
            return out, pullback(cotangent)

        self._forward, self._both = jax.jit(function), jax.jit(both)
        self._primals, self._others, self._cotangent = tuple(primals), tuple(others), cotangent

    def forward(self) -> Any:
        return self._forward(*self._primals, *self._others)

    def backward(self) -> Any:
        return self._both(self._primals, self._others, self._cotangent)

    def wait(self, result: Any) -> None:
        jax.block_until_ready(result)

    def results(self, backward: bool) -> list[jax.Array]:
        if not backward:
            return [self.forward()]
        out, gradients = self.backward()
        return [out, *gradients]


class TorchRun:
    """`function(*leaves)` in torch. The graph of one forward pass serves all backward passes."""

    setup_ms: float | None
    pullback_alone: bool = True

    def __init__(
        self,
        function: Callable,
        leaves: Sequence,
        cotangent: Any,
        *,
        restore: Callable[[Any], Any] = lambda x: x,
        setup_ms: float | None = None,
    ):
        """`restore` brings an output or a gradient into the layout of JAX's inputs."""
        self._function, self._leaves, self._cotangent = function, tuple(leaves), cotangent
        self._restore, self.setup_ms, self._out = restore, setup_ms, None

    def forward(self) -> Any:
        return self._function(*self._leaves)

    def backward(self) -> Any:
        import torch

        if self._out is None:
            self._out = self.forward()
        return torch.autograd.grad(self._out, self._leaves, self._cotangent, retain_graph=True)

    def wait(self, result: Any) -> None:
        synchronize_torch()

    def results(self, backward: bool) -> list[jax.Array]:
        found = [self.forward(), *(self.backward() if backward else ())]
        return [jnp.from_dlpack(self._restore(x.detach()).contiguous()) for x in found]


def as_torch(x: jax.Array) -> Any:
    """A copy in torch's own memory."""
    import torch

    return torch.from_dlpack(jax.block_until_ready(x)).clone()


def synchronize_torch() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def difference(got: Sequence[jax.Array], want: Sequence[jax.Array]) -> float:
    """The largest relative difference of arrays, each in the Euclidean norm, as far as both lists go.

    NaN and infinities differ from everything.
    """
    worst = 0.0
    for one, other in zip(got, want, strict=False):
        if one.shape != other.shape:
            return math.inf
        one, other = one.astype(jnp.float32), other.astype(jnp.float32)
        off = float(jnp.linalg.norm((one - other).ravel()))
        size = float(jnp.linalg.norm(other.ravel()))
        relative = off / size if size else off
        worst = max(worst, relative if math.isfinite(relative) else math.inf)
    return worst


def first_call(call: Callable, wait: Callable) -> float:
    """Seconds of a call, compilation and all."""
    start = time.perf_counter()
    wait(call())
    return time.perf_counter() - start


def median_ms(call: Callable, wait: Callable, times: int = 5) -> float:
    """Of single calls, each waited for, after one that is not counted."""
    wait(call())
    return statistics.median(turn(call, wait, 1) for _ in range(times))


def turn(call: Callable, wait: Callable, calls: int) -> float:
    """Milliseconds a call, of `calls` calls that are queued one after the other."""
    start = time.perf_counter()
    result = None
    for _ in range(calls):
        result = call()
    wait(result)
    return (time.perf_counter() - start) / calls * 1e3


def take_turns(
    runs: Mapping[str, Run],
    *,
    rounds: int,
    turn_ms: float,
    passes: Mapping[str, tuple[str, ...]],
) -> tuple[dict[str, dict[str, list[float]]], dict[str, str]]:
    """Times all of them in `rounds` rounds. A turn has as many calls as fill `turn_ms`, 1 to 50.

    **Returns:** milliseconds a call by contender and pass, a number a round; and what failed.
    """
    order = random.Random(0)
    entries = [(name, one) for name in runs for one in passes[name]]
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in runs}
    failed: dict[str, str] = {}
    calls: dict[tuple[str, str], int] = {}
    for _ in range(rounds):
        for name, one in order.sample(entries, len(entries)):
            if name in failed:
                continue
            run = runs[name]
            call = getattr(run, one)
            try:
                if (name, one) not in calls:
                    run.wait(call())
                    guess = turn(call, run.wait, 1)
                    calls[name, one] = max(1, min(50, math.ceil(turn_ms / guess)))
                run.wait(call())  # what ran before it is out of the caches
                taken = turn(call, run.wait, calls[name, one])
            except Exception as error:  # noqa: BLE001  # one that fails is a line, not the end
                failed[name] = brief(error)
                continue
            samples[name].setdefault(one, []).append(taken)
    return {name: found for name, found in samples.items() if name not in failed}, failed


def brief(error: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
