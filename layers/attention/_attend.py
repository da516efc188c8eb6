"""The attention kernels as JAX sees them: forward and backward, their derivatives, `jax.vmap` of them.

Dims, as in signatures: `...` leading dims, q queries, k keys, n kv heads, g query heads of each, d and e the head dims of k
and of v, c columns of `rows`.

What tells a kernel where it is are arrays, so that shards and mapped axes need nothing of their own:

- `rows`, `... c`: of each entry of the batch, in column 0 the functions' index `b`; the others index axes that `jax.vmap`
  added to a list or to a captured array, one column an axis.
- `heads`, `n g`: the functions' index `h`.
- `lists`: a pair of what a tile map says of queries' tiles and of keys' tiles, each `(tiles, partial, full, order)`, whose
  first dims `MapLayout` names; the second may be None in the forward kernel, which hands it on. None without a mask.
- `mask_arrays`, `score_arrays`: what the functions capture, prepared.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import eqxcute
from eqxcute import ArchitectureError, InlineError, _arch, _fallback
from eqxcute._sharding import whole

from . import _config, _reference
from ._compiled import Functions
from ._config import MapLayout
from ._tiles import transposed

FLOATS = ("float16", "bfloat16", "float32")
NAMES = ("flex_attention_out", "flex_attention_lse")  # for policies of `jax.checkpoint`


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    functions: Functions,
    arrays: tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]],
    lists: Any,
    layout: MapLayout | None,
    **settings: Any,
) -> tuple[jax.Array, jax.Array]:
    """Output and LSE of q `... q n g d`, k `... k n d` and v `... k n e`, of any d and e. No size is 0.

    `arrays` are the mask's and the score's, `settings` the kernel's other fields.
    """
    *lead, _, kv_heads, group, _ = q.shape
    v_dim = v.shape[-1]
    q, settings["scale"] = _scaled_up(q, settings["scale"])
    rows = jnp.arange(math.prod(lead), dtype=jnp.int32).reshape(*lead, 1)
    heads = jnp.arange(kv_heads * group, dtype=jnp.int32).reshape(kv_heads, group)
    kernel = ForwardKernel(functions, layout, **settings)
    out, lse = kernel(*map(_padded, (q, k, v)), rows, heads, lists, *arrays)
    return lax.slice_in_dim(out, 0, v_dim, axis=-1), lse


def _scaled_up(q: jax.Array, scale: float) -> tuple[jax.Array, float]:
    """With a scale above 0: kernels take the largest product for the largest score."""
    if abs(scale) < float(jnp.finfo(jnp.float32).tiny):  # 0 in the kernel, and 0 times -inf is NaN
        return q * 0, 1.0
    if scale > 0:
        return q, scale
    return -q, -scale


def padded_dims(*arrays: jax.Array) -> tuple[int, ...]:
    """The last dims as kernels have them: multiples of 8, at least 8."""
    return tuple(max(8, -(-x.shape[-1] // 8) * 8) for x in arrays)


def _padded(x: jax.Array) -> jax.Array:
    """Zeros change no product."""
    more = padded_dims(x)[0] - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, more)]) if more else x


class ForwardKernel(eqxcute.Kernel):
    """Output and LSE. Reverse mode is `BackwardKernel`, forward mode plain JAX, tile by tile."""

    signature = (
        "... q n g d!%8, ... k n d!%8, ... k n e!%8, ... c!, n g, {}, {}, {} "
        "-> ... q n g e, ... n g q"
    )
    parallel = ("n",)
    dtypes: ClassVar = {"q": FLOATS, "k": FLOATS, "v": FLOATS}
    checkpoint_names = NAMES

    functions: Functions = eqxcute.static()
    layout: MapLayout | None = eqxcute.static()  # of lists; None without a mask
    precision: str | None = eqxcute.static()  # of float32: "tf32" or "3xtf32"
    scale: float = eqxcute.attribute(dtype="float32")
    deterministic: bool = eqxcute.static(False)  # of the backward kernel
    sizing: _config.Sizing = eqxcute.static(_config.Sizing())
    config: Any = eqxcute.static(None)  # by default that for the architecture

    def out_dtypes(self, q, k, v, *rest):
        return v.dtype, jnp.float32

    def workspace(self, q, k, v, *rest):
        counter = jax.ShapeDtypeStruct((1,), jnp.int32)  # how many tiles are taken
        if not self.sizing.split:
            return (counter,)
        *lead, q_len, kv_heads, group, _ = q.shape
        lines = math.prod(lead) * kv_heads * group
        parts = _config.parts_of(self.sizing, lines, q_len, k.shape[-3]), math.prod(lead)
        shapes = (*parts, q_len, kv_heads, group, v.shape[-1]), (*parts, kv_heads, group, q_len)
        return counter, *[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]

    def launch(
        self,
        stream,
        q,
        k,
        v,
        rows,
        heads,
        lists,
        mask_arrays,
        score_arrays,
        out,
        lse,
        *scratch,
    ):
        from ._kernels.forward import Forward
        from ._kernels.forward90 import Forward90

        functions = self.functions
        config = self.config or self._tiles(q, v)
        codes = functions.mask_code, functions.score_code
        if isinstance(config, _config.Sm90Forward):
            kernel, extra = Forward90(config, *codes, self.layout), (scratch,)
        else:
            kernel, extra = Forward(config, *codes, self.layout, _passes(self.precision)), ()
        mask_arrays = functions.mask_operands(mask_arrays)
        score_arrays = functions.score_operands(score_arrays)
        lists = None if lists is None else lists[0]
        where = rows, heads, lists, mask_arrays, score_arrays
        kernel(stream, q, k, v, *where, out, lse, *extra, self.scale)

    def _tiles(self, q, v) -> Any:
        """Hopper's kernel where it has tiles."""
        tile = None if self.layout is None else self.layout.tile
        if _arch.current() == _config.HOPPER:
            facts, dim, v_dim, dtype = _facts(q, v)
            scored = self.functions.score is not None
            found = _config.hopper_forward(facts, dim, v_dim, dtype, tile, scored=scored)
            if found is not None:
                return _config.sized(found, self.sizing, facts, dim, v_dim, tile)
        tiles = functools.partial(_config.forward, costly=self.functions.costly_score)
        return _configured(tiles, q, v, tile)

    def reference(self, q, k, v, rows, heads, lists, mask_arrays, score_arrays):
        plan = _plan(self, q, k, v)
        operands = _operands(self, q, k, v, rows, heads, mask_arrays, score_arrays)
        return _outputs(_reference.forward(plan, operands), q)

    def jvp(self, residuals, tangents):
        (q, k, v, rows, heads, _, mask_arrays, score_arrays), (out, lse) = residuals
        plan = _plan(self, q, k, v)
        operands = _operands(self, q, k, v, rows, heads, mask_arrays, score_arrays)
        dq, dk, dv, *_, dscore = tangents
        dots = _reference.Operands(
            _queries(dq),
            _keys(dk),
            _keys(dv),
            (None,) * len(mask_arrays),
            _rows_of(self.functions, dscore, rows),
        )
        given = _reference.Outputs(_queries(out), _folded(lse, 3))
        return _outputs(_reference.tangents(plan, operands, given, dots), q)

    def vjp(self, residuals, cotangents, *, needed):
        (q, k, v, rows, heads, lists, mask_arrays, score_arrays), (out, lse) = residuals
        dout, dlse = cotangents
        *_, wanted = needed
        given = q, k, v, out, lse, dout, dlse
        where = rows, heads, _both(lists), mask_arrays, score_arrays
        dq, dk, dv, captured = self._backward(tuple(map(bool, wanted)), q, v)(*given, *where)
        captured = tuple(
            None if g is None else g.astype(x.dtype)
            for g, x in zip(captured, score_arrays, strict=True)
        )
        return dq, dk, dv, None, None, _nothing(lists), _nothing(mask_arrays), captured

    def _backward(self, wanted: tuple[bool, ...], q, v):
        """The kernel, or plain JAX where there is none."""
        functions, missing = self.functions, _without_backward(q, v, self.deterministic)
        try:
            functions = functions.differentiated(beside=(q, v))
        except InlineError as error:
            missing = str(error)
        else:
            derived = functions.derived(wanted)
            read = set() if derived is None else {r.operand for r in derived.reads}
            wanted = tuple(i in read for i in range(len(wanted)))
        kernel = BackwardKernel(
            functions, self.layout, self.precision, wanted, self.scale, self.deterministic
        )
        if missing is None:
            return kernel
        _fallback.choose("The gradient of FlexAttention", None, missing=missing)
        return kernel.reference

    def batch(self, axis_size, batched, q, k, v, rows, *shared):
        lead = [_with_axis(axis_size, x, f) for x, f in zip((q, k, v), batched[:3], strict=True)]
        _check_grid(lead[0], lead[1], self.layout)
        grown = _grown(self, axis_size, batched[3:], rows, *shared)
        return grown.like(self)(*lead, *grown.arguments)


class BackwardKernel(eqxcute.Kernel):
    """Cotangents of q, k and v, and in float32 those of the score's `wanted` arrays."""

    parallel = ("n",)
    dtypes: ClassVar = {"q": FLOATS, "k": FLOATS, "v": FLOATS}

    functions: Functions = eqxcute.static()
    layout: MapLayout | None = eqxcute.static()
    precision: str | None = eqxcute.static()
    wanted: tuple[bool, ...] = eqxcute.static()
    scale: float = eqxcute.attribute(dtype="float32")
    deterministic: bool = eqxcute.static(False)
    config: Any = eqxcute.static(None)

    @property
    def _captured(self) -> list[str]:
        """The terms of the score's arrays."""
        score = self.functions.score
        ranks = () if score is None else score.ranks
        return [" ".join(f"s{i}_{j}" for j in range(n)) or "()" for i, n in enumerate(ranks)]

    @property
    def signature(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]  # an instance's own
        captured = self._captured
        moving = [term for term, wanted in zip(captured, self.wanted, strict=True) if wanted]
        inputs = [
            *("... q n g d!%8", "... k n d!%8", "... k n e!%8"),
            *("... q n g e!%8", "... n g q") * 2,
            *("... c!", "n g", "{}", "{}", f"[{', '.join(captured)}]" if captured else "{}"),
        ]
        outputs = ["... q n g d", "... k n d", "... k n e", *moving]
        return f"{', '.join(inputs)} -> {', '.join(outputs)}"

    @property
    def sums(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return tuple(f"gradients[3][{i}]" for i, wanted in enumerate(self.wanted) if wanted)

    def out_dtypes(self, q, k, v, *rest):
        return q.dtype, k.dtype, v.dtype, *[jnp.float32] * sum(self.wanted)

    def out_tree(self, *arguments):
        return 0, 0, 0, tuple(0 if wanted else None for wanted in self.wanted)

    def workspace(self, q, k, v, *rest):
        *lead, q_len, kv_heads, group, dim = q.shape
        shapes = _config.backward_workspace(
            math.prod(lead), kv_heads * group, q_len, dim, self.deterministic
        )
        scratch = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        if self.deterministic:
            moving = [x for x, wanted in zip(rest[-1], self.wanted, strict=True) if wanted]
            words = [_config.words_workspace(x.shape) for x in moving]
            scratch += [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in words]
        return tuple(scratch)

    def launch(
        self,
        stream,
        q,
        k,
        v,
        out,
        lse,
        dout,
        dlse,
        rows,
        heads,
        lists,
        mask_arrays,
        score_arrays,
        gradients,
        *workspace,
    ):
        from ._kernels.backward import Backward
        from ._kernels.backward90 import Backward90

        functions, queries = self.functions, None
        derived = functions.derived(self.wanted)
        config = self.config or self._tiles(q, v)
        codes = functions.mask_code, functions.score_code, derived
        if self.deterministic:
            tile = None if self.layout is None else self.layout.tile
            queries = _configured(_config.queries, q, v, tile)
        if isinstance(config, _config.Sm90Backward):
            kernel = Backward90(config, *codes, self.layout, self.deterministic, queries)
        else:
            passes = _passes(self.precision)
            kernel = Backward(config, *codes, self.layout, passes, self.deterministic, queries)
        mask_arrays = functions.mask_operands(mask_arrays)
        score_arrays = functions.score_operands(score_arrays)
        where = rows, heads, lists, mask_arrays, score_arrays
        kernel(stream, q, k, v, out, lse, dout, dlse, *where, *gradients, workspace, self.scale)

    def _tiles(self, q, v) -> Any:
        """Hopper's kernel where it has tiles."""
        tile = None if self.layout is None else self.layout.backward_tile
        if _arch.current() == _config.HOPPER:
            scored = self.functions.score is not None
            found = _config.hopper_backward(*_facts(q, v), tile, scored=scored)
            if found is not None:
                return found
        return _configured(_config.backward, q, v, tile)

    def reference(
        self, q, k, v, out, lse, dout, dlse, rows, heads, lists, mask_arrays, score_arrays
    ):
        plan = _plan(self, q, k, v)
        operands = _operands(self, q, k, v, rows, heads, mask_arrays, score_arrays)
        wide = tuple(
            x.astype(jnp.float32) if wanted else None
            for x, wanted in zip(score_arrays, self.wanted, strict=True)
        )
        moving, back = jax.vjp(lambda some: _rows_of(self.functions, some, rows), wide)
        score = tuple(x if m is None else m for x, m in zip(operands.score, moving, strict=True))
        operands = operands._replace(score=score)
        found = _reference.cotangents(
            plan,
            operands,
            _reference.Outputs(_queries(out), _folded(lse, 3)),
            _reference.Outputs(_queries(dout), _folded(dlse, 3)),
            operands._replace(
                mask=(None,) * len(operands.mask), score=moving, rows=None, heads=None
            ),
        )
        dq = jnp.moveaxis(found.q, 3, 1).reshape(q.shape)
        dk, dv = (jnp.moveaxis(d, 2, 1).reshape(x.shape) for d, x in ((found.k, k), (found.v, v)))
        return dq, dk, dv, back(found.score)[0]

    def batch(self, axis_size, batched, *arguments):
        """A gradient an example: an array that all examples share gets one too, as if there were one for each."""
        lead = [
            _with_axis(axis_size, x, f) for x, f in zip(arguments[:7], batched[:7], strict=True)
        ]
        _check_grid(lead[0], lead[1], self.layout)
        rows, heads, lists, mask_arrays, score_arrays = arguments[7:]
        *flags, score_flags = batched[7:]
        score_arrays = tuple(
            _with_axis(axis_size, x, f) if w else x
            for x, f, w in zip(score_arrays, score_flags, self.wanted, strict=True)
        )
        score_flags = tuple(f or w for f, w in zip(score_flags, self.wanted, strict=True))
        flags = (*flags, score_flags)
        grown = _grown(self, axis_size, flags, rows, heads, lists, mask_arrays, score_arrays)
        return grown.like(self)(*lead, *grown.arguments)


def _passes(precision: str | None) -> int:
    """How many products of tensor cores make one of float32 numbers."""
    return 3 if precision == "3xtf32" else 1


def _facts(q, v) -> tuple[_arch.Facts, int, int, str]:
    """What tables of tiles are asked with, of CuTe's tensors: the GPU, dim, v_dim and dtype."""
    dtype = q.element_type.__name__.lower()
    return _arch.ARCHITECTURES[_arch.current()], q.shape[-1], v.shape[-1], dtype


def _configured(choose, q, v, tile: tuple[int, int] | None) -> Any:
    """What `choose` of `_config.py` says of CuTe's tensors."""
    facts = _facts(q, v)
    found = choose(*facts, tile or _config.MAP_TILE)
    if found is None:
        _, dim, v_dim, dtype = facts
        raise ArchitectureError(
            f"FlexAttention: the kernel has no tiles of {dtype} with dim {dim} and v_dim {v_dim} that fit the "
            f'shared memory of {_arch.current()}. Run plain JAX with implementation="xla".'
        )
    return found


def _without_backward(q: jax.Array, v: jax.Array, deterministic: bool) -> str | None:
    """Why there is no backward kernel, as a clause. Nothing where the architecture is not known yet."""
    try:
        architecture = _arch.current()
    except ArchitectureError:
        return None
    facts = _arch.ARCHITECTURES[architecture]
    sizes = q.shape[-1], v.shape[-1]
    tables = [_config.backward, *([_config.queries] if deterministic else [])]
    if all(table(facts, *sizes, q.dtype.name) for table in tables):
        return None
    return (
        f"the kernel has no tiles of {q.dtype} with dim {sizes[0]} and v_dim {sizes[1]} that fit the shared memory of "
        f"{architecture}"
    )


# The arrays as the reference has them: one leading dim, heads before lengths.


def _folded(x: jax.Array, rank: int) -> jax.Array:
    """The leading dims in one, before the last `rank`."""
    cut = x.ndim - rank
    return x.reshape(math.prod(x.shape[:cut]), *x.shape[cut:])


def _queries(x: jax.Array) -> jax.Array:
    """... q n g d -> b n g q d."""
    return jnp.moveaxis(_folded(x, 4), 1, 3)


def _keys(x: jax.Array) -> jax.Array:
    """... k n d -> b n k d."""
    return jnp.moveaxis(_folded(x, 3), 1, 2)


def _outputs(found: _reference.Outputs, q: jax.Array) -> tuple[jax.Array, jax.Array]:
    """b n g q e, b n g q -> ... q n g e, ... n g q."""
    lead = q.shape[:-4]
    out = jnp.moveaxis(found.out, 3, 1)
    return out.reshape(*lead, *out.shape[1:]), found.lse.reshape(*lead, *found.lse.shape[1:])


def _plan(kernel, q: jax.Array, k: jax.Array, v: jax.Array) -> _reference.Plan:
    *lead, q_len, kv_heads, group, _ = q.shape
    mask, score = kernel.functions.mask, kernel.functions.score
    return _reference.Plan(
        mask=None if mask is None else mask.program,
        score=None if score is None else score.program,
        scale=kernel.scale,
        wide=_reference.wide(q.dtype),
        batch=math.prod(lead),
        kv_heads=kv_heads,
        group=group,
        q_len=q_len,
        kv_len=k.shape[-3],
        precision=_reference.PRECISIONS[kernel.precision],
        mask_by_row=() if mask is None else mask.by_row,
        score_by_row=() if score is None else score.by_row,
    )


def _operands(kernel, q, k, v, rows, heads, mask_arrays, score_arrays) -> _reference.Operands:
    rows = _folded(rows, 1)
    mask = kernel.functions.mask
    return _reference.Operands(
        _queries(q),
        _keys(k),
        _keys(v),
        () if mask is None else mask.for_rows(mask_arrays, rows),
        _rows_of(kernel.functions, score_arrays, rows),
        rows[:, 0],
        heads,
    )


def _rows_of(functions: Functions, arrays: Sequence[Any], rows: jax.Array) -> tuple[Any, ...]:
    """The score's arrays, or what stands for them, as the reference has them."""
    score = functions.score
    return () if score is None else score.for_rows(arrays, _folded(rows, 1))


# Tile lists, and cotangents that are known to be 0.


def _both(lists: Any) -> Any:
    """The lists of both directions."""
    if lists is None or lists[1] is not None:
        return lists
    return lists[0], transposed(lists[0])


def _nothing(tree: Any) -> Any:
    return jax.tree.map(lambda _: None, tree)


# `jax.vmap`: the new axis is one more leading dim.


class _Grown(NamedTuple):
    functions: Functions
    layout: MapLayout | None
    arguments: tuple  # from `rows` on

    def like(self, kernel):
        return dataclasses.replace(kernel, functions=self.functions, layout=self.layout)


def _check_grid(q: jax.Array, k: jax.Array, layout: MapLayout | None) -> None:
    """What `flex_attention` checks of the leading dims that it sees."""
    *lead, q_len, kv_heads, group, _ = q.shape
    sizes = *lead, q_len, k.shape[-3], kv_heads, group
    if not all(isinstance(n, int) for n in sizes):
        return  # symbolic, in an export
    smallest = _config.SMALLEST_TILE
    tile = (smallest, smallest) if layout is None else layout.tile
    heads = math.prod(lead) * kv_heads * group
    _, tiles = _config.grid_tiles(heads, (q_len, k.shape[-3]), tile)
    if tiles >= 2**31:
        raise ValueError(
            f"FlexAttention: under jax.vmap, batch, heads and lengths make {tiles} tiles of {_config.SMALLEST_TILE}, and a "
            "GPU takes at most 2**31 - 1. Map a part at a time, as jax.lax.map does with batch_size=, or use "
            'implementation="xla".'
        )


def _with_axis(size: int, x: jax.Array, has_it: bool) -> jax.Array:
    return x if has_it else jnp.broadcast_to(x, (size, *x.shape))


def _grown(kernel, size: int, batched, rows, heads, lists, mask_arrays, score_arrays) -> _Grown:
    """What says where the kernel is, over one more axis. What has the axis is indexed by a new column of `rows`."""
    of_rows, of_heads, of_lists, of_mask, of_score = batched
    column, layout, functions = rows.shape[-1], kernel.layout, kernel.functions
    rows = _with_axis(size, rows, of_rows)
    heads = heads[0] if of_heads else heads  # the same for all
    if any(jax.tree.leaves(of_lists)):
        lists = jax.tree.map(lambda x, f: whole(_with_axis(size, x, f)), lists, of_lists)
        layout = dataclasses.replace(layout, columns=(column, *layout.columns))
    mask, score = functions.mask, functions.score
    functions = Functions(
        mask if mask is None else mask.over_axis(column, of_mask),
        score if score is None else score.over_axis(column, of_score),
    )
    if any(jax.tree.leaves((of_lists, of_mask, of_score))):
        shape = (*rows.shape[:-1], 1)
        rows = jnp.concatenate([rows, lax.broadcasted_iota(jnp.int32, shape, 0)], -1)
    arrays = jax.tree.map(whole, (mask_arrays, score_arrays))
    return _Grown(functions, layout, (rows, heads, lists, *arrays))
