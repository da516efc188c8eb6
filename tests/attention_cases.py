"""What tests of the attention kernels share: a call with all that it captures, its outputs and gradients by the kernels and
by plain JAX, and random masks and scores.

Nothing here needs a GPU.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from eqxcute.layers import flex_attention

from eqxcute import _registry
from eqxcute._kernel import name_of
from eqxcute._primitive import kernel_p
from eqxcute.testing import assert_as_accurate

Functions = Callable[[Mapping[str, Any]], tuple[Any, Any]]


class Problem(NamedTuple):
    """`functions(arrays)` gives mask_fn and score_fn. `options` are the call's, of the kernels and of plain JAX."""

    functions: Functions
    arrays: dict[str, jax.Array]  # q, k and v, and what the functions and `options` take from it
    options: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda c: {}


def plain(c):
    return None, None


def normal(seed: int, *shape: int, dtype: Any = "float32") -> jax.Array:
    """By numpy, as JAX would compile for each shape."""
    values = np.random.default_rng((seed, *shape)).normal(size=shape)
    return jnp.asarray(values.astype(jnp.dtype(dtype)))


def qkv(
    batch=1, q_len=130, kv_len=200, heads=2, kv_heads=1, dim=16, v_dim=None, dtype="float32", seed=0
) -> dict[str, jax.Array]:
    v_dim = dim if v_dim is None else v_dim
    return {
        "q": normal(seed, batch, q_len, heads, dim, dtype=dtype),
        "k": normal(seed + 1, batch, kv_len, kv_heads, dim, dtype=dtype),
        "v": normal(seed + 2, batch, kv_len, kv_heads, v_dim, dtype=dtype),
    }


def zeros_q(q_len: int, kv_len: int, dim: int = 16, dtype: Any = "float32"):
    """q = 0, random keys, v[j] = j; one batch entry, one head. A row is the mean of the numbers of the keys that it sees."""
    arrays = qkv(1, q_len, kv_len, 1, 1, dim, dtype=dtype)
    v = np.broadcast_to(np.arange(kv_len)[None, :, None, None], arrays["v"].shape)
    return arrays | {"q": jnp.zeros_like(arrays["q"]), "v": jnp.asarray(v.astype(jnp.dtype(dtype)))}


def is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def attend(problem: Problem, arrays: Mapping[str, Any], implementation: str, **options: Any):
    """Output and LSE."""
    mask, score = problem.functions(arrays)
    return flex_attention(
        *(arrays[n] for n in "qkv"),
        *(mask, score),
        return_lse=True,
        implementation=implementation,
        **problem.options(arrays),
        **options,
    )


def cotangents(problem: Problem) -> tuple[jax.Array, jax.Array]:
    *batch, q_len, heads, _ = problem.arrays["q"].shape
    v = problem.arrays["v"]
    out = normal(5, *batch, q_len, heads, v.shape[-1], dtype=v.dtype)
    return out, normal(6, *batch, heads, q_len)


def derivatives(problem: Problem, implementation: str, **options: Any):
    """A jitted function of arrays and cotangents: `out`, `lse`, and as `dx` the gradient of each float array `x`."""

    @jax.jit
    def run(arrays, cotangents):
        def outputs(moving):
            return attend(problem, {**arrays, **moving}, implementation, **options)

        found, pull = jax.vjp(outputs, {n: x for n, x in arrays.items() if is_float(x)})
        (gradients,) = pull(cotangents)
        named = {f"d{n}": gradients[n] for n in arrays if n in gradients}
        return {"out": found[0], "lse": found[1], **named}

    return run


def by_kernels(problem: Problem, **options: Any) -> dict[str, jax.Array]:
    return derivatives(problem, "cute", **options)(problem.arrays, cotangents(problem))


def by_plain_jax(problem: Problem) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """In float64 and in the arrays' dtypes, on the CPU: that compiles fast, and is not under test."""
    cpu = jax.devices("cpu")[0]

    def put(x, wide):
        return jax.device_put(np.asarray(x, np.float64) if wide and is_float(x) else x, cpu)

    given = problem.arrays, cotangents(problem)
    peer = derivatives(problem, "xla")(*jax.tree.map(lambda x: put(x, False), given))
    with jax.enable_x64(True):
        oracle = derivatives(problem, "xla")(*jax.tree.map(lambda x: put(x, True), given))
    return jax.tree.map(np.asarray, (oracle, peer))


def agree(got, oracle, peer, slack: float = 2.0, keys: int = 1) -> None:
    """Each array at most twice as wrong as plain JAX in its dtype; a handful of numbers eight times, since plain JAX's error
    is then a draw or two, which may be a lucky one. Of what is float32, 2**-20 of the largest entry is allowed besides: so
    exact are three products of tf32, and the fast exponential. More where there are many keys: they are added one slice
    after the other, and the error of a sum of n terms grows with the root of n.

    **Raises:** `AssertionError`, naming the arrays that are not.
    """
    wrong = []
    for name, x in got.items():
        ulps = max(8.0, keys**0.5) if x.dtype == jnp.float32 else 1.0
        few = slack if np.size(x) > 8 else max(slack, 8.0)
        one = np.asarray(x)
        try:
            assert_as_accurate(one, oracle=oracle[name], peer=peer[name], slack=few, ulps=ulps)
        except AssertionError as error:
            wrong.append(f"{name}: {' '.join(str(error).split())}")
    assert not wrong, "\n".join(wrong)


def close(got, want, name: str = "") -> None:
    """Two results of one dtype that may differ in the order of sums: by 2**-20 of the largest entry in float32, else by two
    units in its last place."""
    eps = float(jnp.finfo(got.dtype).eps)
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite], err_msg=name)
    allowed = max(2 * eps, 2.0**-20) * np.abs(want[finite]).max(initial=0)
    np.testing.assert_allclose(got[finite], want[finite], rtol=0, atol=allowed, err_msg=name)


def check(problem: Problem, **options: Any) -> dict[str, jax.Array]:
    """Outputs and gradients by the kernels against float64. `options`: of the kernels alone."""
    got = by_kernels(problem, **options)
    for name, x in problem.arrays.items():
        assert not is_float(x) or got[f"d{name}"].dtype == x.dtype
    assert got["lse"].dtype == jnp.float32
    oracle, peer = by_plain_jax(problem)
    agree(got, oracle, peer, keys=problem.arrays["k"].shape[-3])
    return got


def launches(function: Callable, *arguments: Any) -> Counter:
    """How often a compiled function launches each kernel: "forward_kernel", "backward_kernel". Without a GPU, as traced."""
    if jax.default_backend() == "gpu":
        text = jax.jit(function).lower(*arguments).compile().as_text()
        return Counter(re.findall(r'custom_call_target="eqxcute\.(\w+)\.', text))
    return Counter(_kernels(jax.make_jaxpr(function)(*arguments).jaxpr))


def kernels_made() -> int:
    """How many kernels this process has, compiled or from the cache on disk."""
    return len(_registry._targets)


def _kernels(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive is kernel_p:
            name = name_of(eqn.params["call"].restore([None] * len(eqn.invars))[0])
            yield re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from _kernels(inner)


# ---------------------------------------------------------------- random masks and scores

AXES = ("b", "h", "q", "kv")
DIMS = (8, 16, 24, 40, 64, 80, 96, 128)
Index = Callable[..., Any]  # of arrays, b, h, q_idx, kv_idx


class _Maker:
    """Draws a problem. Everything is drawn before anything is traced: a function is the same each time."""

    def __init__(self, seed: int, longest: int):
        self.rng = np.random.default_rng(seed)
        self.dtype = self.pick(("float32", "bfloat16"))
        batch, kv_heads, group = (int(self.rng.integers(1, n)) for n in (4, 3, 4))
        lengths = [int(self.rng.integers(1, longest + 1)) for _ in range(2)]
        self.sizes = dict(zip(AXES, (batch, kv_heads * group, *lengths), strict=True))
        dim = self.pick(DIMS)
        v_dim = dim if self.chance(0.7) else self.pick(DIMS)
        sizes = (batch, *lengths, kv_heads * group, kv_heads, dim, v_dim)
        self.arrays = qkv(*sizes, dtype=self.dtype, seed=seed)

    def pick(self, of):
        return of[int(self.rng.integers(len(of)))]

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def number(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high))

    def capture(self, values: np.ndarray, dtype: str) -> str:
        name = f"c{len(self.arrays) - 3}"
        self.arrays[name] = jnp.asarray(values.astype(jnp.dtype(dtype)))
        return name

    # Integers made of indices.

    def index(self, depth: int = 2) -> Index:
        if depth == 0 or self.chance(0.3):
            return self.leaf()
        x, y = self.index(depth - 1), self.index(depth - 1)
        n = self.number(2, 9)
        return self.pick(
            (
                lambda c, *at: x(c, *at) + y(c, *at),
                lambda c, *at: x(c, *at) - y(c, *at),
                lambda c, *at: x(c, *at) * n,
                lambda c, *at: x(c, *at) // n,
                lambda c, *at: x(c, *at) % n,
                lambda c, *at: jnp.abs(x(c, *at) - n),
                lambda c, *at: jnp.minimum(x(c, *at), y(c, *at)),
                lambda c, *at: jnp.maximum(x(c, *at), n),
                lambda c, *at: jnp.clip(x(c, *at), -n, 5 * n),
                lambda c, *at: x(c, *at) ^ n,
                lambda c, *at: jnp.where(x(c, *at) > y(c, *at), n, x(c, *at)),
            )
        )

    def leaf(self) -> Index:
        if self.chance(0.15):
            read = self.read(lambda shape: self.rng.integers(0, 7, shape), "int32")
            return lambda c, *at: read(c, *at).astype(jnp.int32)
        return self.pick(
            (
                lambda c, b, h, q, kv: q,
                lambda c, b, h, q, kv: kv,
                lambda c, b, h, q, kv: q - kv,
                lambda c, b, h, q, kv: q + kv,
                lambda c, b, h, q, kv: h,
                lambda c, b, h, q, kv: b,
            )
        )

    def read(self, values: Callable, dtype: str, whole: float = 0.6) -> Index:
        """An entry of a new array: at indices of its own axes, or at any number made of them."""
        if self.chance(whole):
            axes = [axis for axis in range(4) if self.chance(0.5)] or [self.number(0, 4)]
            name = self.capture(values([self.sizes[AXES[axis]] for axis in axes]), dtype)
            return lambda c, *at: c[name][tuple(at[axis] for axis in axes)]
        size = self.number(1, 40)
        name, i = self.capture(values([size]), dtype), self.index(1)
        if self.chance(0.5):
            return lambda c, *at: c[name][i(c, *at) % size]
        return lambda c, *at: c[name][jnp.clip(i(c, *at), 0, size - 1)]

    # Masks.

    def condition(self) -> Index:
        n, near, ahead = self.number(2, 9), self.number(3, 120), self.number(-20, 60)
        x, y = self.index(), self.index()
        cheap = (
            lambda c, b, h, q, kv: q + ahead >= kv,
            lambda c, b, h, q, kv: jnp.abs(q - kv) < near,
            lambda c, b, h, q, kv: q // near == kv // near,
            lambda c, b, h, q, kv: (q * 7 + kv * 13 + h) % 5 != n % 5,
            lambda c, *at: x(c, *at) <= y(c, *at) + ahead,
            lambda c, *at: x(c, *at) % n != 1,
        )
        if self.chance(0.6):
            return self.pick(cheap)
        kind = self.number(0, 4)
        if kind == 0:  # of queries and keys, one of each document
            ids = [self.capture(np.sort(self.draw(axis, 4)), "int32") for axis in ("q", "kv")]
            return lambda c, b, h, q, kv: c[ids[0]][q] == c[ids[1]][kv]
        if kind == 1:
            most = self.sizes["kv"] + 1
            lengths = self.capture(self.rng.integers(0, most, self.sizes["b"]), "int32")
            return lambda c, b, h, q, kv: kv < c[lengths][b]
        if kind == 2:
            return self.read(lambda shape: self.rng.random(shape) < 0.6, "bool", whole=1.0)
        floats = self.read(self.rng.standard_normal, "float32")
        return lambda c, *at: floats(c, *at) > -0.5

    def draw(self, axis: str, below: int) -> np.ndarray:
        return self.rng.integers(0, below, self.sizes[axis])

    def mask(self) -> Index | None:
        if self.chance(0.15):
            return None
        found = self.condition()
        for _ in range(self.number(0, 3)):
            found = self.pick((_both, _both, _either, _first_not))(found, self.condition())
        return found

    # Scores, of a size that softmax can still tell apart.

    def value(self) -> Index:
        """A float that something is captured for, or that indices make."""
        if self.chance(0.25):
            x, n = self.index(), self.number(3, 30)
            return lambda c, *at: jnp.sin(x(c, *at).astype(jnp.float32) / n)
        dtype = self.pick(("float32", self.dtype))
        if self.chance(0.15):
            name = self.capture(self.small(()), dtype)
            return lambda c, *at: c[name]
        return self.read(self.small, dtype)

    def small(self, shape) -> np.ndarray:
        return np.asarray(0.5 * self.rng.standard_normal(shape))

    def step(self) -> Callable:
        """A change of the score: of s, arrays, and indices."""
        w, when = self.value(), self.condition()
        cap, slope = self.number(2, 12), self.number(1, 9) / 100

        def x(s, c, *at):
            return w(c, *at).astype(s.dtype)

        def distance(s, c, b, h, q, kv):
            return jnp.minimum(jnp.abs(q - kv), 50).astype(s.dtype)

        return self.pick(
            (
                lambda s, c, *at: s + x(s, c, *at),
                lambda s, c, *at: s + x(s, c, *at),
                lambda s, c, *at: s * (1 + 0.5 * jnp.tanh(x(s, c, *at))),
                lambda s, c, *at: jnp.exp(0.3 * jnp.tanh(x(s, c, *at))) * s,
                lambda s, c, *at: cap * jnp.tanh(s / cap) + x(s, c, *at) ** 2,
                lambda s, c, *at: s - slope * distance(s, c, *at) * jax.nn.sigmoid(x(s, c, *at)),
                lambda s, c, *at: jnp.where(when(c, *at), s + x(s, c, *at), 0.5 * s),
                lambda s, c, *at: jax.nn.silu(s) + jnp.sin(s) * x(s, c, *at),
            )
        )

    def score(self) -> Callable | None:
        if self.chance(0.15):
            return None
        steps = [self.step() for _ in range(self.number(1, 4))]
        if self.chance(0.1):
            when = self.condition()
            steps.append(lambda s, c, *at: jnp.where(when(c, *at), s, -jnp.inf))

        def score(s, c, *at):
            for step in steps:
                s = step(s, c, *at)
            return s

        return score


def _both(x, y):
    return lambda c, *at: x(c, *at) & y(c, *at)


def _either(x, y):
    return lambda c, *at: x(c, *at) | y(c, *at)


def _first_not(x, y):
    return lambda c, *at: ~x(c, *at) | y(c, *at)


def random_problem(seed: int, longest: int = 300) -> Problem:
    """Sizes, dtype, a mask and a score, and what they capture. Known by its seed, the same anywhere."""
    make = _Maker(seed, longest)
    mask, score = make.mask(), make.score()

    def functions(c):
        return (
            None if mask is None else lambda b, h, q_idx, kv_idx: mask(c, b, h, q_idx, kv_idx),
            None
            if score is None
            else lambda s, b, h, q_idx, kv_idx: score(s, c, b, h, q_idx, kv_idx),
        )

    return Problem(functions, make.arrays)
