"""`MultiheadAttention`: Equinox's layer, its attention by `FlexAttention`."""

import math
import warnings
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from eqxcute import SlowPathWarning
from eqxcute._fallback import warn_once

from ._entry import MaskFn, ScoreFn, check_function
from ._functions import Block, mask_block, score_block_guarded, trace_mask, trace_score
from ._layer import FlexAttention
from ._masks import AbstractMask, AndMask, Index, Verdict
from ._reference import wide
from ._scores import AbstractScore

NAME: Final = "MultiheadAttention"

Mask = Bool[Array, "q_len kv_len"] | Bool[Array, "heads q_len kv_len"] | MaskFn
ProcessHeads = Callable[[Any, Any, Any], tuple[Any, Any, Any]]


class Heads(NamedTuple):
    """What the projections give, a head an entry of the middle axis."""

    q: Any  # q_len heads dim
    k: Any  # kv_len kv_heads dim
    v: Any  # kv_len kv_heads v_dim


class MultiheadAttention(eqx.Module):
    r"""`equinox.nn.MultiheadAttention`, with its attention computed by [`FlexAttention`][].

    $$y = \sum_h W^O_h\, \mathrm{Attention}\bigl(W^Q_h x^Q,\ W^K_{n(h)} x^K,\ W^V_{n(h)} x^V\bigr),
    \qquad n(h) = \lfloor h \cdot \mathrm{num\_kv\_heads} / \mathrm{num\_heads} \rfloor$$

    with one $W^K$ and $W^V$ for each query head unless `num_kv_heads` says otherwise.

    Arguments, fields and calls are Equinox's, and the same `key` gives the same weights. What is
    more is keyword only: `mask_fn`, `score_fn`, `num_kv_heads`, `scale` and `implementation`.

    Leaves stand in Equinox's order, so `equinox.tree_serialise_leaves` moves weights between the
    two layers. Leaves of `mask_fn` and `score_fn` come after them (`CausalMask` has one, its
    `offset`); to read an Equinox file into such a layer, read it into one without them and put
    them in by `equinox.tree_at`.

    !!! warning "A query that may see no key"

        Its attention is 0 here, on every path, so that it gives the output bias or 0. Equinox
        gives the mean of all values, those that the mask forbids included.

    !!! info "Cost"

        Memory grows with the length, not with its square, unless an array is given as `mask`, or
        dropout is active: it acts on the attention weights, which a fused kernel never holds. So
        it runs in plain JAX as in Equinox, holds `heads x q_len x kv_len` weights, and drops the
        same ones for the same `key`.
    """

    query_proj: eqx.nn.Linear
    key_proj: eqx.nn.Linear
    value_proj: eqx.nn.Linear
    output_proj: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    mask_fn: MaskFn | None
    score_fn: ScoreFn | None

    num_heads: int = eqx.field(static=True)
    query_size: int = eqx.field(static=True)
    key_size: int = eqx.field(static=True)
    value_size: int = eqx.field(static=True)
    output_size: int = eqx.field(static=True)
    qk_size: int = eqx.field(static=True)
    vo_size: int = eqx.field(static=True)
    use_query_bias: bool = eqx.field(static=True)
    use_key_bias: bool = eqx.field(static=True)
    use_value_bias: bool = eqx.field(static=True)
    use_output_bias: bool = eqx.field(static=True)
    num_kv_heads: int = eqx.field(static=True)
    scale: float | None = eqx.field(static=True)
    implementation: str | None = eqx.field(static=True)

    def __init__(
        self,
        num_heads: int,
        query_size: int,
        key_size: int | None = None,
        value_size: int | None = None,
        output_size: int | None = None,
        qk_size: int | None = None,
        vo_size: int | None = None,
        use_query_bias: bool = False,
        use_key_bias: bool = False,
        use_value_bias: bool = False,
        use_output_bias: bool = False,
        dropout_p: float = 0.0,
        inference: bool = False,
        dtype: Any = None,
        *,
        mask_fn: MaskFn | None = None,
        score_fn: ScoreFn | None = None,
        num_kv_heads: int | None = None,
        scale: float | None = None,
        implementation: str | None = None,
        key: PRNGKeyArray,
    ):
        """**Arguments:**

        - `num_heads`: Number of query heads.
        - `query_size`: Channels of `query`.
        - `key_size`, `value_size`, `output_size`: Channels of `key_`, of `value` and of the
            output. Default `query_size`.
        - `qk_size`, `vo_size`: Channels a head, of queries and keys, and of values. Default
            `query_size // num_heads`.
        - `use_query_bias`, `use_key_bias`, `use_value_bias`, `use_output_bias`: Whether the
            projections add a bias.
        - `dropout_p`: The fraction of attention weights that dropout sets to 0.
        - `inference`: Whether dropout does nothing. `equinox.nn.inference_mode` sets it.
        - `dtype`: Of the weights. Default float32, or float64 in JAX's 64-bit mode.
        - `mask_fn`, `score_fn`: As for [`FlexAttention`][]; `h` is the query head, and `b` is 0,
            as one call is one example. Float arrays in them train. (Keyword only arguments.)
        - `num_kv_heads`: Number of heads of keys and values, a divisor of `num_heads`:
            grouped-query attention (Ainslie et al. 2023), multi-query attention at 1. Default
            `num_heads`. (Keyword only argument.)
        - `scale`: Factor on `q . k`. Default `1 / sqrt(qk_size)`. (Keyword only argument.)
        - `implementation`: `None` picks, `"cute"` insists on the GPU kernel, `"xla"` is plain
            JAX. (Keyword only argument.)
        - `key`: For the initial weights. (Keyword only argument.)

        **Raises:**

        `ValueError` for sizes that do not fit, and what [`FlexAttention`][] raises.
        """
        num_heads = _at_least_1("num_heads", num_heads)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads % _at_least_1("num_kv_heads", num_kv_heads):
            raise ValueError(
                f"{NAME}: num_heads must be a multiple of num_kv_heads, but num_heads is "
                f"{num_heads} and num_kv_heads is {num_kv_heads}."
            )
        key_size = query_size if key_size is None else key_size
        value_size = query_size if value_size is None else value_size
        output_size = query_size if output_size is None else output_size
        qk_size = _at_least_1("qk_size", query_size // num_heads if qk_size is None else qk_size)
        vo_size = _at_least_1("vo_size", query_size // num_heads if vo_size is None else vo_size)
        attention = FlexAttention(mask_fn, score_fn, scale=scale, implementation=implementation)

        def linear(in_size: int, out_size: int, use_bias: bool, key: PRNGKeyArray):
            return eqx.nn.Linear(in_size, out_size, use_bias=use_bias, dtype=dtype, key=key)

        # In this order, as weights are to be Equinox's for the same key.
        qkey, kkey, vkey, okey = jr.split(key, 4)
        self.query_proj = linear(query_size, num_heads * qk_size, use_query_bias, qkey)
        self.key_proj = linear(key_size, num_kv_heads * qk_size, use_key_bias, kkey)
        self.value_proj = linear(value_size, num_kv_heads * vo_size, use_value_bias, vkey)
        self.output_proj = linear(num_heads * vo_size, output_size, use_output_bias, okey)
        self.dropout = eqx.nn.Dropout(dropout_p, inference=inference)
        self.mask_fn = attention.mask_fn
        self.score_fn = attention.score_fn

        self.num_heads = num_heads
        self.query_size = query_size
        self.key_size = key_size
        self.value_size = value_size
        self.output_size = output_size
        self.qk_size = qk_size
        self.vo_size = vo_size
        self.use_query_bias = use_query_bias
        self.use_key_bias = use_key_bias
        self.use_value_bias = use_value_bias
        self.use_output_bias = use_output_bias
        self.num_kv_heads = num_kv_heads
        self.scale = attention.scale
        self.implementation = attention.implementation

    def __call__(
        self,
        query: Float[Array, "q_len query_size"],
        key_: Float[Array, "kv_len key_size"],
        value: Float[Array, "kv_len value_size"],
        mask: Mask | None = None,
        *,
        key: PRNGKeyArray | None = None,
        inference: bool | None = None,
        deterministic: bool | None = None,
        process_heads: ProcessHeads | None = None,
    ) -> Float[Array, "q_len output_size"]:
        """**Arguments:**

        - `query`, `key_`, `value`: One example. Under `jax.vmap` a batch is one call of the
            kernel.
        - `mask`: Where it is False the query does not see the key: an array of bools, `(q_len,
            kv_len)` or `(num_heads, q_len, kv_len)`. Or a function as `mask_fn`, for what
            differs from call to call, such as a `DocumentMask` of each example. Both `mask` and
            `mask_fn` must allow a position.
        - `key`: For dropout. (Keyword only argument.)
        - `inference`: Whether dropout does nothing; `None` asks the `dropout` field. (Keyword
            only argument.)
        - `deterministic`: Equinox's deprecated name of `inference`. (Keyword only argument.)
        - `process_heads`: A function of the query heads `(q_len, num_heads, qk_size)`, the key
            heads `(kv_len, num_kv_heads, qk_size)` and the value heads `(kv_len, num_kv_heads,
            vo_size)`, which returns new ones of these shapes: rotary embeddings, say. Where
            their dtypes differ, attention runs in the widest. (Keyword only argument.)

        **Returns:**

        An array of shape `(q_len, output_size)`.

        **Raises:**

        `ValueError` for shapes that do not fit, `TypeError` for a mask that holds no bools,
        `RuntimeError` where dropout is active without a `key`, `NotImplementedError` where it is
        with `implementation="cute"`.
        """
        if deterministic is not None:
            inference = deterministic
            warnings.warn(
                f"{NAME}: deterministic= is deprecated, as in Equinox. Use inference=.",
                stacklevel=2,
            )
        query, key_, value = map(jnp.asarray, (query, key_, value))
        self._check(query, key_, value)
        heads = Heads(
            _project(self.query_proj, query, self.num_heads),
            _project(self.key_proj, key_, self.num_kv_heads),
            _project(self.value_proj, value, self.num_kv_heads),
        )
        if process_heads is not None:
            heads = _processed(process_heads, heads)
        mask_fn = _both(self._mask_fn(mask, len(query), len(key_)), self.mask_fn)
        if self._drops(inference, key) and 0 not in (len(query), len(key_)):
            attended = _explicit(self, heads, mask_fn, inference, key)
        else:
            # Equinox's products promote, and `FlexAttention` wants one dtype.
            dtype = jnp.result_type(*heads)
            attention = FlexAttention(
                mask_fn, self.score_fn, scale=self.scale, implementation=self.implementation
            )
            attended = attention(*(x.astype(dtype) for x in heads))
        flat = attended.reshape(len(query), math.prod(attended.shape[1:]))
        return jax.vmap(self.output_proj)(flat)

    def _check(self, query: Array, key_: Array, value: Array) -> None:
        sizes = {"query": self.query_size, "key_": self.key_size, "value": self.value_size}
        for (name, size), x in zip(sizes.items(), (query, key_, value), strict=True):
            if x.ndim != 2 or x.shape[1] != size:
                hint = " For a batch use jax.vmap." if x.ndim > 2 else ""
                raise ValueError(
                    f"{NAME}: {name} must have shape (length, {size}), but has {x.shape}.{hint}"
                )
        if len(key_) != len(value):
            raise ValueError(
                f"{NAME}: key_ and value must be equally long, but key_ has length {len(key_)} "
                f"and value has length {len(value)}."
            )

    def _mask_fn(self, mask: Any, q_len: int, kv_len: int) -> Callable | None:
        """The argument `mask` as a mask function."""
        if mask is None or callable(mask):
            check_function("mask", mask)
            return mask
        table = jnp.asarray(mask)
        if table.dtype != jnp.bool_:
            raise TypeError(
                f"{NAME}: mask must hold bools (True: may attend), not {table.dtype.name}. "
                "Compare first, e.g. `mask != 0`; what is added to scores is a score_fn."
            )
        shapes = (q_len, kv_len), (self.num_heads, q_len, kv_len)
        if table.shape not in shapes:
            raise ValueError(
                f"{NAME}: mask must have shape (q_len, kv_len) = {shapes[0]} or (num_heads, "
                f"q_len, kv_len) = {shapes[1]}, but has {table.shape}."
            )
        return _TableMask(table)

    def _drops(self, inference: bool | None, key: PRNGKeyArray | None) -> bool:
        """Whether dropout is active: as `eqx.nn.Dropout` decides, and any layer put in its place is."""
        dropout = self.dropout
        if dropout is None:
            return False
        if isinstance(dropout, eqx.nn.Dropout):
            never = isinstance(dropout.p, int | float) and dropout.p == 0
            if never or (dropout.inference if inference is None else inference):
                return False
            if key is None:
                raise RuntimeError(
                    f"{NAME}: dropout is active and needs a key: call with key=, or with "
                    "inference=True for no dropout."
                )
        if self.implementation == "cute":
            raise NotImplementedError(
                f'{NAME}: implementation="cute" cannot drop attention weights. Use '
                'inference=True, dropout_p=0, or implementation="xla" or None.'
            )
        return True


class _TableMask(AbstractMask):
    """An array of verdicts."""

    table: Bool[Array, "q_len kv_len"] | Bool[Array, "heads q_len kv_len"]

    def __call__(self, b: Index, h: Index, q_idx: Index, kv_idx: Index) -> Verdict:
        del b
        return self.table[q_idx, kv_idx] if self.table.ndim == 2 else self.table[h, q_idx, kv_idx]


def _both(first: Callable | None, second: Callable | None) -> Callable | None:
    if first is None or second is None:
        return second if first is None else first
    return AndMask(first, second)


def _project(proj: Callable, x: Array, heads: int) -> Array:
    flat = jax.vmap(proj)(x)
    return flat.reshape(len(x), heads, flat.shape[1] // heads)


def _processed(process_heads: ProcessHeads, heads: Heads) -> Heads:
    new = Heads(*process_heads(*heads))
    for name, before, after in zip(("query", "key", "value"), heads, new, strict=True):
        if before.shape != after.shape:
            raise ValueError(
                f"{NAME}: process_heads must not change the shape of the heads, but gave {name} "
                f"heads of shape {after.shape} for {before.shape}."
            )
    return new


def _explicit(
    layer: MultiheadAttention,
    heads: Heads,
    mask_fn: Callable | None,
    inference: bool | None,
    key: PRNGKeyArray | None,
) -> Array:
    """Attention by way of its weights, step for step as Equinox, whose numbers these are."""
    q_len, kv_len = len(heads.q), len(heads.k)
    if layer.implementation != "xla":
        warn_once(
            f"{NAME} dropout",
            f"{NAME}: dropout on attention weights runs in plain JAX and holds heads x q_len x "
            f"kv_len = {layer.num_heads} x {q_len} x {kv_len} weights an example, since the fused "
            'kernel cannot drop any. Pass implementation="xla" to say that this is meant, or use '
            "dropout_p=0. (Said once a process.)",
            SlowPathWarning,
        )
    weights = _weights(heads, mask_fn, layer.score_fn, layer.scale)
    keys = None if key is None else jr.split(key, layer.num_heads)

    def drop(weights, key):
        return layer.dropout(weights, key=key, inference=inference)

    dropped = jax.vmap(drop)(weights.reshape(layer.num_heads, q_len, kv_len), keys)
    return jnp.einsum("ngqk,kne->qnge", dropped.reshape(weights.shape), heads.v)


def _weights(heads: Heads, mask_fn: Any, score_fn: Any, scale: float | None) -> Array:
    """The attention weights, `kv_heads group q_len kv_len`."""
    (q_len, num_heads, dim), (kv_len, kv_heads, _) = heads.q.shape, heads.k.shape
    for fn in (mask_fn, score_fn):
        if isinstance(fn, AbstractMask | AbstractScore):
            fn.check_sizes(1, num_heads, q_len, kv_len)
    group = num_heads // kv_heads
    # Narrow dtypes round here as they do in Equinox, which divides.
    q = heads.q / math.sqrt(dim) if scale is None else heads.q * scale
    logits = jnp.einsum("qngd,knd->ngqk", q.reshape(q_len, kv_heads, group, dim), heads.k)
    dtype = logits.dtype
    s = logits.astype(wide(dtype))[None]
    block = Block(
        jnp.zeros(1, jnp.int32),
        jnp.arange(num_heads, dtype=jnp.int32).reshape(kv_heads, group),
        jnp.arange(q_len, dtype=jnp.int32),
        jnp.arange(kv_len, dtype=jnp.int32),
    )
    allowed = None
    if mask_fn is not None:
        program, captured = trace_mask(mask_fn, heads)
        allowed = mask_block(program, program.environment(captured), block)
    if score_fn is not None:
        program, captured = trace_score(score_fn, s.dtype, heads)
        s = score_block_guarded(
            program, program.environment(captured, wide=True), s, block, allowed
        )
        finite = s != -jnp.inf
        allowed = finite if allowed is None else allowed & finite
    if allowed is None:
        return jax.nn.softmax(s)[0].astype(dtype)
    # A finite fill: no row is all -inf, which would be NaN.
    p = jax.nn.softmax(jnp.where(allowed, s, jnp.finfo(s.dtype).min))
    return jnp.where(allowed.any(-1, keepdims=True), p, 0)[0].astype(dtype)


def _at_least_1(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{NAME}: {name} must be a Python int, not {type(value).__name__}.")
    if value < 1:
        raise ValueError(f"{NAME}: {name} must be at least 1, but is {value}.")
    return int(value)
