"""What `python -m eqxcute.layers.bench attention` times: shapes, how work is counted, and rivals.

A layer's `_cases.py` has `CASES`, `make_inputs(case, seed)`, `CONTENDERS` (ours first) and
`INPUTS`. A case has `name`, `title`, `why`, `flops(backward)`, `facts()` and `smoke()`, the same
case at a size for any CPU.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from .._timing import (
    Contender,
    JaxRun,
    TorchRun,
    as_torch,
    median_ms,
    synchronize_torch,
)
from ._entry import flex_attention
from ._masks import CausalMask, DocumentMask, SlidingWindowMask
from ._scores import SoftCap

INPUTS: Final = {
    "dtype": "bfloat16",
    "distribution": "standard normal: q, k, v and the output's cotangent, from jax.random.key(seed)",
}
SLOPE: Final = 0.05  # of the score "relpos"
CAP: Final = 20.0  # of the score "softcap"


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape, self-attention. Work is what the formula needs, not what a kernel does:
    `4 dim` operations for each pair of a query and a key that the mask lets through, forward; 2.5
    times that, backward (five products of matrices, forward has two)."""

    name: str
    why: str
    batch: int
    length: int
    heads: int
    kv_heads: int
    dim: int
    mask: str = "causal"  # "full", "causal", "window", "document"
    score: str = "none"  # "none", "relpos": score - 0.05 (q - kv), "softcap": 20 tanh(score / 20)
    window: int = 1024  # how many keys a query of "window" sees, itself counted
    documents: int = 8  # of equal length, causal inside

    @property
    def pairs(self) -> int:
        """Of a query and a key that it may see, over batch and heads."""

        def causal(n):
            return n * (n + 1) // 2

        n, w = self.length, min(self.window, self.length)
        a_head = {
            "full": n * n,
            "causal": causal(n),
            "window": causal(w) + (n - w) * w,
            "document": self.documents * causal(n // self.documents),
        }[self.mask]
        return self.batch * self.heads * a_head

    def flops(self, backward: bool = False) -> int:
        forward = 4 * self.dim * self.pairs
        return forward * 5 // 2 if backward else forward

    @property
    def title(self) -> str:
        heads = str(self.heads) if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        mask = {
            "window": f"window {self.window}",
            "document": f"causal, {self.documents} documents",
        }.get(self.mask, self.mask)
        score = {"none": "", "relpos": ", relative-position score", "softcap": ", soft-cap 20"}
        return (
            f"{self.batch} x {self.length}, {heads} heads of {self.dim}, {mask}{score[self.score]}"
        )

    def facts(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "title": self.title, "pairs": self.pairs}

    def smoke(self) -> "Case":
        kv_heads = 1 if self.heads > self.kv_heads else 2
        small = {"batch": 1, "length": 32, "dim": 8, "window": 8, "documents": 4}
        return dataclasses.replace(self, heads=2, kv_heads=kv_heads, **small)

    def mask_fn(self, ids: jax.Array | None) -> Callable | None:
        if self.mask == "full":
            return None
        if self.mask == "window":
            return SlidingWindowMask(left=self.window - 1)
        return CausalMask() if ids is None else CausalMask() & DocumentMask(ids)

    def score_fn(self) -> Callable | None:
        return {"none": None, "relpos": relative_position, "softcap": SoftCap(CAP)}[self.score]


def relative_position(score, b, h, q_idx, kv_idx):
    return score - SLOPE * (q_idx - kv_idx)


CASES: Final = (
    Case("A1", "long-context training", 2, 8192, 16, 16, 128),
    Case("A2", "no mask: an encoder", 2, 8192, 16, 16, 128, mask="full"),
    Case("A3", "many short rows", 8, 2048, 16, 16, 128),
    Case("A4", "one long row", 1, 16384, 16, 16, 128),
    Case("A5", "small heads: softmax weighs more", 2, 8192, 32, 32, 64),
    Case("A6", "grouped queries", 2, 8192, 32, 4, 128),
    Case("A7", "most tiles are empty", 1, 16384, 16, 16, 128, mask="window"),
    Case("A8", "a mask that reads an array", 1, 16384, 16, 16, 128, mask="document"),
    Case("A9", "a score of indices", 2, 8192, 16, 16, 128, score="relpos"),
    Case("A10", "a score with tanh", 2, 8192, 16, 16, 128, score="softcap"),
)


class Inputs(NamedTuple):
    q: jax.Array
    k: jax.Array
    v: jax.Array
    cotangent: jax.Array
    ids: jax.Array | None  # of documents, int32


def document_ids(case: Case) -> jax.Array:
    each = case.length // case.documents
    return jnp.asarray(np.repeat(np.arange(case.documents, dtype=np.int32), each))


def make_inputs(case: Case, seed: int) -> Inputs:
    keys = jr.split(jr.key(seed), 4)
    shape = (case.batch, case.length, case.heads, case.dim)
    kv_shape = (case.batch, case.length, case.kv_heads, case.dim)
    q, k, v, cotangent = (
        jr.normal(key, size, jnp.bfloat16)
        for key, size in zip(keys, (shape, kv_shape, kv_shape, shape), strict=True)
    )
    ids = document_ids(case) if case.mask == "document" else None
    return Inputs(q, k, v, cotangent, ids)


def _ours(_, case: Case, inputs: Inputs, smoke: bool) -> JaxRun:
    """The tile map is made inside, at each call; document ids are traced."""
    score_fn = case.score_fn()
    # A rival's figure must not meet that of a fallback: on a GPU the kernel, or an error.
    how = None if smoke else "cute"

    def attend(q, k, v, ids=None):
        return flex_attention(q, k, v, case.mask_fn(ids), score_fn, implementation=how)

    others = () if inputs.ids is None else (inputs.ids,)
    return JaxRun(attend, inputs[:3], inputs.cotangent, others)


def _jax_nn(implementation: Literal["cudnn", "xla"]) -> Callable[..., JaxRun]:
    def prepare(_, case: Case, inputs: Inputs, smoke: bool) -> JaxRun:
        options: dict[str, Any] = {"is_causal": case.mask != "full"}
        if case.mask == "window":
            options["local_window_size"] = (case.window - 1, 0)

        def attend(q, k, v):
            return jax.nn.dot_product_attention(q, k, v, implementation=implementation, **options)

        return JaxRun(attend, inputs[:3], inputs.cotangent)

    return prepare


def _load_fa4_jax():
    import fa4_jax

    return fa4_jax


def _fa4_jax(fa4_jax, case: Case, inputs: Inputs, smoke: bool) -> JaxRun:
    def attend(q, k, v):
        return fa4_jax.flash_attn(q, k, v, causal=case.mask == "causal")

    return JaxRun(attend, inputs[:3], inputs.cotangent)


def _load_tokamax():
    import tokamax

    return tokamax


def _tokamax(tokamax, case: Case, inputs: Inputs, smoke: bool) -> JaxRun:
    def attend(q, k, v):
        return tokamax.dot_product_attention(
            q, k, v, is_causal=case.mask == "causal", implementation="mosaic"
        )

    return JaxRun(attend, inputs[:3], inputs.cotangent)


def _leaves(inputs: Inputs, heads_first: bool = False) -> tuple[list, Any]:
    """q, k and v as torch's leaves, and the cotangent."""
    *leaves, cotangent = (as_torch(x) for x in inputs[:4])
    if heads_first:
        *leaves, cotangent = (x.transpose(1, 2).contiguous() for x in (*leaves, cotangent))
    return [x.requires_grad_() for x in leaves], cotangent


def _heads_second(x):
    return x.transpose(1, 2)


def _load_flex():
    import torch
    from torch.nn.attention import flex_attention

    # A graph that is kept for many backward passes must not give its buffers away.
    import torch._functorch.config as functorch  # isort: skip

    functorch.donated_buffer = False
    return torch, flex_attention


def _flex(loaded, case: Case, inputs: Inputs, smoke: bool) -> TorchRun:
    torch, flex = loaded
    torch.compiler.reset()  # each case is compiled for its own sizes, as if it were the first
    leaves, cotangent = _leaves(inputs, heads_first=True)
    ids: Any = None if inputs.ids is None else as_torch(inputs.ids)
    masks = {
        "causal": lambda b, h, i, j: i >= j,
        "window": lambda b, h, i, j: (i >= j) & (i - j < case.window),
        "document": lambda b, h, i, j: (i >= j) & (ids[i] == ids[j]),
    }
    scores = {
        "relpos": lambda s, b, h, i, j: s - SLOPE * (i - j),
        "softcap": lambda s, b, h, i, j: CAP * torch.tanh(s / CAP),
    }
    blocks = setup_ms = None
    if case.mask in masks:
        device, n = leaves[0].device.type, case.length

        def make():
            mask = masks[case.mask]
            return flex.create_block_mask(
                mask, None, None, n, n, device=device, _compile=device == "cuda"
            )

        blocks, setup_ms = make(), median_ms(make, lambda _: synchronize_torch())
    # Compiled everywhere but in a trial on a CPU, where that takes a C++ compiler.
    attend = flex.flex_attention
    if leaves[0].is_cuda:
        attend = torch.compile(attend, dynamic=False)
    options = {"score_mod": scores.get(case.score), "block_mask": blocks}
    options["enable_gqa"] = case.heads != case.kv_heads
    return TorchRun(
        lambda q, k, v: attend(q, k, v, **options),
        leaves,
        cotangent,
        restore=_heads_second,
        setup_ms=setup_ms,
    )


def _load_torch():
    import torch
    import torch.nn.attention

    return torch


def _torch_cudnn(torch, case: Case, inputs: Inputs, smoke: bool) -> TorchRun:
    leaves, cotangent = _leaves(inputs, heads_first=True)
    causal, grouped = case.mask == "causal", case.heads != case.kv_heads

    def attend(q, k, v):
        with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.CUDNN_ATTENTION]):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=causal, enable_gqa=grouped
            )

    return TorchRun(attend, leaves, cotangent, restore=_heads_second)


class _Fa4(NamedTuple):
    """FlashAttention-4's functions, and the device functions of the cases that need them."""

    attend: Callable
    varlen: Callable
    block_sparsity: Callable
    document: Callable
    relpos: Callable
    passed_on: Callable


def _load_fa4() -> _Fa4:
    import cutlass
    from cutlass import cute
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func, utils
    from flash_attn.cute.compute_block_sparsity import compute_block_sparsity

    @cute.jit
    def document(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        ids = aux_tensors[0]
        same = ids[cutlass.Int32(q_idx[0])] == ids[cutlass.Int32(kv_idx[0])]
        return (q_idx >= kv_idx) & utils.scalar_to_ssa(same, cutlass.Boolean)

    @cute.jit
    def relpos(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        return score - (q_idx - kv_idx).to(cutlass.Float32) * cute.full_like(score, SLOPE)

    @cute.jit
    def passed_on(grad, score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        return grad  # of a score to which a number is added

    return _Fa4(
        flash_attn_func,
        flash_attn_varlen_func,
        compute_block_sparsity,
        document,
        relpos,
        passed_on,
    )


def _fa4(fa4: _Fa4, case: Case, inputs: Inputs, smoke: bool) -> TorchRun:
    leaves, cotangent = _leaves(inputs)
    options: dict[str, Any] = {"causal": case.mask in ("causal", "window")}
    setup_ms = None
    if case.mask == "window":
        options["window_size"] = (case.window - 1, 0)
    if inputs.ids is not None:
        ids = [as_torch(inputs.ids)]
        sizes = (128, 128, case.batch, case.heads, case.length, case.length)

        def make():
            return fa4.block_sparsity(*sizes, fa4.document, ids, "cuda")

        blocks, setup_ms = make(), median_ms(make, lambda _: synchronize_torch())
        options |= {"mask_mod": fa4.document, "aux_tensors": ids, "block_sparse_tensors": blocks}
    if case.score == "relpos":
        options |= {"score_mod": fa4.relpos, "score_mod_bwd": fa4.passed_on}
    if case.score == "softcap":
        options["softcap"] = CAP
    return TorchRun(
        lambda q, k, v: _first(fa4.attend(q, k, v, **options)),
        leaves,
        cotangent,
        setup_ms=setup_ms,
    )


def _fa4_varlen(fa4: _Fa4, case: Case, inputs: Inputs, smoke: bool) -> TorchRun:
    """Documents as rows of their own: no mask is evaluated, but they must be contiguous."""
    leaves, cotangent = _leaves(inputs)
    each = case.length // case.documents
    starts = as_torch(jnp.arange(case.documents + 1, dtype=jnp.int32) * each)

    def attend(q, k, v):
        out = fa4.varlen(
            *(x[0] for x in (q, k, v)),
            cu_seqlens_q=starts,
            cu_seqlens_k=starts,
            max_seqlen_q=each,
            max_seqlen_k=each,
            causal=True,
        )
        return _first(out)[None]

    return TorchRun(attend, leaves, cotangent)


def _first(result):
    return result[0] if isinstance(result, tuple) else result


def _dense(case: Case) -> bool:
    return case.mask in ("full", "causal") and case.score == "none"


def _windowed(case: Case) -> bool:
    return case.mask in ("full", "causal", "window") and case.score == "none"


def _any(case: Case) -> bool:
    return True


def _nothing() -> None:
    return None


# JAX's first: whoever loads cuDNN first decides its version for the process.
CONTENDERS: Final = (
    Contender("eqxcute", "eqxcute", _nothing, _ours, _any, anywhere=True),
    Contender("cudnn", "cuDNN (jax.nn)", _nothing, _jax_nn("cudnn"), _windowed),
    Contender(
        "xla",
        "plain JAX (jax.nn)",
        _nothing,
        _jax_nn("xla"),
        _windowed,
        on_request=True,
        anywhere=True,
    ),
    Contender("fa4-jax", "fa4-jax", _load_fa4_jax, _fa4_jax, _dense),
    Contender("tokamax", "Tokamax (mosaic)", _load_tokamax, _tokamax, _dense),
    Contender("fa4", "flash-attn-4 (torch)", _load_fa4, _fa4, _any),
    Contender(
        "fa4-varlen",
        "flash-attn-4 varlen (torch)",
        _load_fa4,
        _fa4_varlen,
        lambda case: case.mask == "document" and case.batch == 1,
    ),
    Contender("flex", "FlexAttention (torch)", _load_flex, _flex, _any),
    Contender("torch-cudnn", "cuDNN (torch)", _load_torch, _torch_cudnn, _dense),
)
