"""The attention kernels once each, for a tool that watches every access:

    EQXCUTE_CACHE_DIR=/tmp/kernels python tests/gpu/sanitize_attention.py
    EQXCUTE_CACHE_DIR=/tmp/kernels compute-sanitizer --tool memcheck python tests/gpu/sanitize_attention.py
    EQXCUTE_CACHE_DIR=/tmp/kernels compute-sanitizer --tool racecheck python tests/gpu/sanitize_attention.py mask lists

The first run fills the cache of kernels. Words after the script pick cases by their names. Ragged ends everywhere: 130
queries, 200 keys, head dims of 40. With `--on-cpu` it runs the references of the kernels, which says that the cases are sound.
"""

import contextlib
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Of XLA's, arrays of their own: an access past one's end is not inside of another.
os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")

import jax
import jax.numpy as jnp
from attention_cases import Problem, by_kernels, normal, qkv
from eqxcute.layers import tile_map
from eqxcute.layers.attention import CausalMask, DocumentMask, SlidingWindowMask

import eqxcute

Q, K = 130, 200


def sizes(dim=64, v_dim=None, dtype="bfloat16", heads=4, kv_heads=2):
    return qkv(2, Q, K, heads, kv_heads, dim, v_dim, dtype=dtype)


def mask(c):
    return SlidingWindowMask(50, 40), None


def captured_mask(c):
    documents = DocumentMask(c["ids"], c["kv_ids"])
    return documents & (lambda b, h, q, kv: (c["table"][b, q, kv]) & (kv < c["lengths"][b])), None


def score_of(x):
    return lambda c: (CausalMask(), lambda s, *at: 4 * jnp.tanh(s / 4) + x(c["x"], *at) * s)


READS = {
    "scalar": ((), lambda x, b, h, q, kv: x),
    "head": ((4,), lambda x, b, h, q, kv: x[h]),
    "query": ((2, Q), lambda x, b, h, q, kv: x[b, q]),
    "key": ((K,), lambda x, b, h, q, kv: x[kv]),
    "pair": ((Q, K), lambda x, b, h, q, kv: x[q, kv]),
    "distance": ((4, 41), lambda x, b, h, q, kv: x[h, jnp.clip(kv - q, -20, 20) + 20]),
    "bucket": ((7,), lambda x, b, h, q, kv: x[(q * 3 + kv * 5 + h) % 7]),
}


def cases():
    """Name, problem and options of the kernels."""
    for dim in (40, 64, 128, 256):
        yield f"plain {dim}", Problem(lambda c: (None, None), sizes(dim)), {}
    yield "plain 192 128", Problem(lambda c: (None, None), sizes(192, 128)), {}
    for dim in (40, 128):
        yield f"float32 {dim}", Problem(mask, sizes(dim, dtype="float32")), {}
    yield "float32 tf32", Problem(mask, sizes(64, dtype="float32")), {"precision": "tf32"}
    yield "mask", Problem(mask, sizes()), {}
    yield "mask deterministic", Problem(mask, sizes()), {"deterministic": True}
    yield "mask deterministic 256", Problem(mask, sizes(256)), {"deterministic": True}
    arrays = sizes() | {"ids": jnp.arange(Q) // 60, "kv_ids": jnp.arange(K) // 70}
    arrays |= {"table": normal(8, 2, Q, K) > -1, "lengths": jnp.asarray([0, 170])}
    yield "mask captured", Problem(captured_mask, arrays), {}
    tiles = tile_map(mask({})[0], Q, K, tile=(64, 128))
    yield "lists", Problem(mask, sizes()), {"tiles": tiles}
    of_heads = lambda b, h, q, kv: q + 30 * h >= kv + 20 * b  # noqa: E731
    yield "lists of heads", Problem(lambda c: (of_heads, None), sizes()), {}
    yield "empty", Problem(lambda c: ((lambda *_: False), None), sizes()), {}
    for name, (shape, x) in READS.items():
        problem = Problem(score_of(x), sizes(16) | {"x": normal(9, *shape)})
        yield f"score {name}", problem, {}
        yield f"score {name} deterministic", problem, {"deterministic": True}
    yield "score 256", Problem(score_of(READS["pair"][1]), sizes(256) | {"x": normal(9, Q, K)}), {}


def main(words):
    on_cpu = "--on-cpu" in words
    words = [w for w in words if not w.startswith("--")]
    with eqxcute.architecture("sm_90a") if on_cpu else contextlib.nullcontext():
        for name, problem, options in cases():
            if words and not any(w in name for w in words):
                continue
            start = time.perf_counter()
            got = jax.block_until_ready(by_kernels(problem, **options))
            # An access that was wrong without a fault may show here.
            wrong = [n for n, x in got.items() if n != "lse" and not bool(jnp.isfinite(x).all())]
            seconds = time.perf_counter() - start
            print(
                f"{name:28}{seconds:6.1f} s{'  NOT FINITE: ' if wrong else ''}{' '.join(wrong)}",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
