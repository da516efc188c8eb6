from typing import Any

import equinox as eqx
from jaxtyping import Array, Float

from eqxcute._fallback import check_name, choose

from ._entry import (
    NAME,
    MaskFn,
    Precision,
    ScoreFn,
    check_function,
    check_precision,
    check_scale,
    flex_attention,
)
from ._tiles import TileMap


class FlexAttention(eqx.Module):
    r"""Scaled dot-product attention, with any mask and any change of the scores.

    $$o_i = \sum_{j:\,\mathrm{mask}(b, h, i, j)} \mathrm{softmax}_j\bigl(
    \mathrm{score}(\mathrm{scale} \cdot q_i^\top k_j, b, h, i, j)\bigr)\, v_j$$

    The module has no weights of its own. `mask_fn`, `score_fn` and `sink` are ordinary parts of
    the pytree: arrays in them are leaves, and train.

    !!! info "Cost"

        Memory grows with the length, forward and backward, not with its square. The kernel skips
        tiles that the mask empties. In plain JAX their products are skipped where the whole batch
        agrees, and the mask is still evaluated.

    !!! warning

        A `lambda` made anew at each step is a new function to `jax.jit`, which then traces
        anew. Give the layer a function defined once, or a mask module: its arrays may change.
    """

    mask_fn: MaskFn | None
    score_fn: ScoreFn | None
    sink: Float[Array, " heads"] | Float[Array, ""] | None
    scale: float | None = eqx.field(static=True)
    deterministic: bool = eqx.field(static=True)
    precision: Precision | None = eqx.field(static=True)
    implementation: str | None = eqx.field(static=True)

    def __init__(
        self,
        mask_fn: MaskFn | None = None,
        score_fn: ScoreFn | None = None,
        *,
        scale: float | None = None,
        sink: Float[Array, " heads"] | Float[Array, ""] | None = None,
        deterministic: bool = False,
        precision: Precision | None = None,
        implementation: str | None = None,
    ):
        """**Arguments:**

        - `mask_fn`: `mask_fn(b, h, q_idx, kv_idx) -> bool`: True where the query may see the
            key. A function or a mask module. Default: everything.
        - `score_fn`: `score_fn(score, b, h, q_idx, kv_idx) -> score`. A function or a score
            module. Default: the score as it is.
        - `scale`: Factor on `q . k`. Default `1 / sqrt(dim)`. (Keyword only argument.)
        - `sink`: A logit per query head that takes part in the softmax without a value.
            (Keyword only argument.)
        - `deterministic`, `precision`: As for [`flex_attention`][]. (Keyword only arguments.)
        - `implementation`: `None` picks, `"cute"` insists on the GPU kernel, `"xla"` is plain
            JAX. (Keyword only argument.)
        """
        check_function("mask_fn", mask_fn)
        check_function("score_fn", score_fn)
        check_name(NAME, implementation)
        if implementation == "cute":
            choose(NAME, implementation)
        self.mask_fn = mask_fn
        self.score_fn = score_fn
        self.scale = check_scale(scale)
        self.sink = sink
        self.deterministic = deterministic
        self.precision = check_precision(precision)
        self.implementation = implementation

    def __call__(
        self,
        q: Float[Array, "*batch q_len heads dim"],
        k: Float[Array, "*batch kv_len kv_heads dim"],
        v: Float[Array, "*batch kv_len kv_heads v_dim"],
        *,
        return_lse: bool = False,
        tiles: TileMap | None = None,
    ) -> Any:
        """**Arguments:**

        - `q`, `k`, `v`: As for [`flex_attention`][]. Leading batch dims and `jax.vmap` both work.
        - `return_lse`: Also return the LSE, `*batch heads q_len`. (Keyword only argument.)
        - `tiles`: What [`tile_map`][] made of the layer's mask. (Keyword only argument.)

        **Returns:**

        `*batch q_len heads v_dim` in `v`'s dtype; with `return_lse` a pair.
        """
        return flex_attention(
            q,
            k,
            v,
            self.mask_fn,
            self.score_fn,
            scale=self.scale,
            sink=self.sink,
            return_lse=return_lse,
            tiles=tiles,
            deterministic=self.deterministic,
            precision=self.precision,
            implementation=self.implementation,
        )
