"""Small kernels, one a feature of the bridge. Every test folder uses them."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import equinox as eqx
import jax
import jax.numpy as jnp
from cutlass import Float32, Int32

import eqxcute

THREADS = 64


def index():
    """This thread's number in the grid."""
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    return cta * THREADS + tid


def cover(n, bound_kernel, stream):
    """Launches a bound kernel on at least `n` threads."""
    bound_kernel.launch(
        grid=[cute.ceil_div(n, THREADS), 1, 1], block=[THREADS, 1, 1], stream=stream
    )


class Saxpy(eqxcute.Kernel):
    """`out = alpha * x + beta * y`: a static field and an attribute."""

    signature = "n, n -> n"
    alpha: float = eqxcute.static()
    beta: float = eqxcute.attribute(1.0)

    def reference(self, x, y):
        return self.alpha * x + self.beta * y

    @cute.jit
    def launch(self, stream, x, y, out):
        if x.shape[0] > 0:
            cover(x.shape[0], self.kernel(x, y, out, self.beta), stream)

    @cute.kernel
    def kernel(self, x, y, out, beta):
        i = index()
        if i < x.shape[0]:
            out[i] = (self.alpha * x[i].to(Float32) + beta * y[i].to(Float32)).to(out.element_type)


class Attributes(eqxcute.Kernel):
    """Attributes of every type, declared out of alphabetical order."""

    signature = "... -> ..."
    z: int = eqxcute.attribute(2)
    a: float = eqxcute.attribute(0.5)
    m: bool = eqxcute.attribute(True)
    k: int = eqxcute.attribute(3, dtype="int64")
    d: float = eqxcute.attribute(0.25, dtype="float64")

    def reference(self, x):
        return x * self.z + self.a + (1.0 if self.m else 0.0) + self.k * self.d

    @cute.jit
    def launch(self, stream, x, out):
        cover(x.shape[0], self.kernel(x, out, self.z, self.a, self.m, self.k, self.d), stream)

    @cute.kernel
    def kernel(self, x, out, z, a, m, k, d):
        i = index()
        if i < x.shape[0]:
            more = Float32(1.0) if m else Float32(0.0)
            out[i] = x[i] * z.to(Float32) + a + more + k.to(Float32) * d.to(Float32)


class ScaleBy(eqxcute.Kernel):
    """`out = scale * x`, `scale` a 0-d array."""

    signature = "..., () -> ..."

    def reference(self, x, scale):
        return scale * x

    @cute.jit
    def launch(self, stream, x, scale, out):
        cover(x.shape[0], self.kernel(x, scale, out), stream)

    @cute.kernel
    def kernel(self, x, scale, out):
        i = index()
        if i < x.shape[0]:
            out[i] = scale[0] * x[i]


class SinCos(eqxcute.Kernel):
    """Two outputs, of which only the first is a float."""

    signature = "... n -> ... n, ... n"

    def out_dtypes(self, x):
        return x.dtype, jnp.int32

    def reference(self, x):
        return 2 * x, (x > 0).astype(jnp.int32)

    @cute.jit
    def launch(self, stream, x, double, positive):
        cover(x.shape[0] * x.shape[1], self.kernel(x, double, positive), stream)

    @cute.kernel
    def kernel(self, x, double, positive):
        i, n = index(), x.shape[1]
        if i < x.shape[0] * n:
            r, c = i // n, i % n
            double[r, c] = x[r, c] * 2.0
            positive[r, c] = Int32(1) if x[r, c] > 0.0 else Int32(0)


class State(NamedTuple):
    m: Any
    v: Any


class Accumulate(eqxcute.Kernel):
    """`m + g + v`, into the buffer of `m`, named by its path; `v` may be None."""

    signature = "[n, n], n -> n"
    aliases = {"state.m": "out"}

    def reference(self, state, g):
        return state.m + g + (0 if state.v is None else state.v)

    @cute.jit
    def launch(self, stream, state, g, out):
        if cutlass.const_expr(state.v is None):
            cover(g.shape[0], self.two(g, out), stream)
        else:
            cover(g.shape[0], self.three(state.v, g, out), stream)

    @cute.kernel
    def two(self, g, out):  # `out` starts as `state.m`
        i = index()
        if i < g.shape[0]:
            out[i] = out[i] + g[i]

    @cute.kernel
    def three(self, v, g, out):
        i = index()
        if i < g.shape[0]:
            out[i] = out[i] + g[i] + v[i]


class AccumulateByNumber(Accumulate):
    """The same alias, by number: array 0 of the arguments, array 0 of the outputs."""

    aliases = {0: 0}


class Momentum(eqxcute.Kernel):
    """One step of momentum: a pytree in, a pytree out, with None in both; both buffers are taken over."""

    signature = "[n, n, n], n -> n, n"
    aliases = {"state['m'].m": "out['m'].m", "state['x']": "out['x']"}
    rate: float = eqxcute.static(0.5)

    def out_tree(self, state, g):
        return {"m": State(0, None), "x": 1}

    def reference(self, state, g):
        m = self.rate * state["m"].m + g
        return {"m": State(m, None), "x": state["x"] - m}

    @cute.jit
    def launch(self, stream, state, g, out):
        assert state["m"].v is None
        assert out["m"].v is None
        cover(g.shape[0], self.kernel(g, out["m"].m, out["x"]), stream)

    @cute.kernel
    def kernel(self, g, m, x):  # both start as the state was
        i = index()
        if i < g.shape[0]:
            new = m[i] * self.rate + g[i]
            m[i] = new
            x[i] = x[i] - new


class Histogram(eqxcute.Kernel):
    """Counts of the values 0 to bins - 1: an output that starts at zero, sized by a static field."""

    signature = "n -> bins"
    initial = {"counts": 0}
    bins: int = eqxcute.static()

    def reference(self, x):
        return jnp.zeros(self.bins, x.dtype).at[x].add(1)

    @cute.jit
    def launch(self, stream, x, counts):
        if x.shape[0] > 0:
            cover(x.shape[0], self.kernel(x, counts), stream)

    @cute.kernel
    def kernel(self, x, counts):
        i = index()
        if i < x.shape[0]:
            cute.arch.atomic_add(counts.iterator + x[i], Int32(1))


class ColumnMajor(eqxcute.Kernel):
    """`2 x`, read and written column by column: both arrays are column-major in memory."""

    signature = "m n -> m n"
    layouts = {"x": (1, 0), "out": (1, 0)}

    def reference(self, x):
        return 2 * x

    @cute.jit
    def launch(self, stream, x, out):
        cover(x.shape[0] * x.shape[1], self.kernel(x, out), stream)

    @cute.kernel
    def kernel(self, x, out):
        i, m = index(), x.shape[0]
        if i < m * x.shape[1]:
            out[i % m, i // m] = x[i % m, i // m] * 2.0


class Reverse(eqxcute.Kernel):
    """`x` backwards, by way of a scratch array and a second launch."""

    signature = "n -> n"

    def workspace(self, x):
        return (jax.ShapeDtypeStruct(x.shape, x.dtype),)

    def reference(self, x):
        return x[::-1]

    @cute.jit
    def launch(self, stream, x, out, scratch):
        cover(x.shape[0], self.backwards(x, scratch), stream)
        cover(x.shape[0], self.copy(scratch, out), stream)

    @cute.kernel
    def backwards(self, x, out):
        i, n = index(), x.shape[0]
        if i < n:
            out[n - 1 - i] = x[i]

    @cute.kernel
    def copy(self, x, out):
        i = index()
        if i < x.shape[0]:
            out[i] = x[i]


class Table(eqx.Module):
    values: Any
    scale: float = eqx.field(static=True)


class LookUp(eqxcute.Kernel):
    """`scale * values[x]`: the kernel's own arrays, in a sub-module, are operands; `eqxcute.cond` guards the read."""

    signature = "... -> ..."
    table: Table

    def out_dtypes(self, x):
        return self.table.values.dtype

    def reference(self, x):
        inside = (x >= 0) & (x < self.table.values.shape[0])
        return jnp.where(inside, self.table.scale * self.table.values[jnp.clip(x, 0)], 0.0)

    @cute.jit
    def launch(self, stream, x, out):
        cover(x.shape[0], self.kernel(self.table.values, x, out), stream)

    @cute.kernel
    def kernel(self, values, x, out):
        i = index()
        if i < x.shape[0]:
            out[i] = self.look_up(values, x[i])

    def look_up(self, values, j):  # undecorated: a plain `if` would not be a branch on the device
        inside = (j >= 0) & (j < values.shape[0])
        return eqxcute.cond(inside, lambda: values[j] * self.table.scale, lambda: Float32(0.0))


class AnyTree(eqxcute.Kernel):
    """The sum of the first entries of all arrays of a pytree, `{}`."""

    signature = "n, {} -> n"

    def reference(self, x, tree):
        return x + sum(leaf.reshape(-1)[0] for leaf in jax.tree.leaves(tree))

    @cute.jit
    def launch(self, stream, x, tree, out):
        cover(x.shape[0], self.kernel(x, tuple(jax.tree.leaves(tree)), out), stream)

    @cute.kernel
    def kernel(self, x, leaves, out):
        i = index()
        if i < x.shape[0]:
            total = x[i]
            for leaf in leaves:
                total += leaf[0, 0] if cute.rank(leaf) == 2 else leaf[0]
            out[i] = total


class Copy(eqxcute.Kernel):
    """A copy, in every dtype that kernels take."""

    signature = "... -> ..."

    def reference(self, x):
        return x

    @cute.jit
    def launch(self, stream, x, out):
        cover(x.shape[0], self.kernel(x, out), stream)

    @cute.kernel
    def kernel(self, x, out):
        i = index()
        if i < x.shape[0]:
            out[i] = x[i]


class RowSum(eqxcute.Kernel):
    """Sums over rows of a baked-in width, offsets of which may pass 2**31; it has a derivative of its own."""

    signature = "... n!%4 -> ..."

    def reference(self, x):
        return x.sum(-1)

    @cute.jit
    def launch(self, stream, x, out):
        if x.shape[0] > 0:
            cover(x.shape[0], self.kernel(x, out), stream)

    @cute.kernel
    def kernel(self, x, out):
        i = index()
        if i < x.shape[0]:
            total = Float32(0.0)
            for c in range(x.shape[1]):
                total += x[i, c].to(Float32)
            out[i] = total.to(out.element_type)
