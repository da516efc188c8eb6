"""What may be tuned in the bias + ReLU kernels, apart from the kernels."""

import math

from eqxcute.inline._walk import STRIPS, VECTOR_BYTES, Config as Config

# The column sum: threads of a CTA along a row, along a column, and loads in flight a thread.
COLUMNS, GROUPS, LOADS = 32, 16, 8

# The fastest of 18 and of 22 settings on an H200, for 16384 x 8192 in bfloat16 and float32: see CONTRIBUTING.md.
FORWARD = Config(threads=128, lines=1, ctas=0)
BACKWARD = Config(threads=128, lines=1, ctas=1056)  # 8 CTAs for each of an H200's 132 processors


def parts_shape(rows: int, width: int, itemsize: int, config: Config) -> tuple[int, int, int]:
    """Of the backward kernel's partial sums: (walkers, repeats, width), float32.

    `repeats`: how often each column stands in a line. About `ctas` strips in all, whatever the
    shape.
    """
    vector = VECTOR_BYTES // itemsize
    if width == 0:
        return 1, 1, 0
    period = width // math.gcd(width, vector)
    line = period * max(STRIPS * config.threads // period, 1)
    repeats = line * vector // width
    walkers = config.ctas // -(-line // config.threads)
    if config.ctas == 0 or isinstance(
        rows, int
    ):  # `jax.export` may have sizes that are no numbers yet
        blocks = -(-rows // (repeats * config.lines))
        walkers = blocks if config.ctas == 0 else min(walkers, blocks)
    return max(walkers, 1), repeats, width
