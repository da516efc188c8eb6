"""What may be tuned in the bias + ReLU kernels, apart from the kernels."""

import dataclasses
import math
from typing import Literal

VECTOR_BYTES = 16  # the widest access a thread has on every GPU from Ampere on
STRIPS = 8  # strips a line of a narrow array is stretched to: at most 1/9 of the threads idle
# The column sum: threads of a CTA along a row, along a column, and loads in flight a thread.
COLUMNS, GROUPS, LOADS = 32, 16, 8

LoadHint = Literal["none", "no_allocate", "streaming"]
StoreHint = Literal["none", "no_allocate", "streaming"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How a kernel walks its arrays. Frozen: it is in the compile key.

    See `_kernels/lines.py` for what a line and a strip are.
    """

    threads: int = 256  # a CTA; each owns 16 bytes of a line, so a strip is 16 * threads bytes
    lines: int = 4  # loads in flight a thread and array, before the first is used
    ctas: int = 0  # CTAs that share all the work; 0: as many as there is work for
    load: LoadHint = "none"
    store: StoreHint = "none"

    def __post_init__(self):
        if self.threads % 32 or not 32 <= self.threads <= 1024:
            raise ValueError(
                f"`threads` must be a multiple of 32 from 32 to 1024, got {self.threads}."
            )
        if not 1 <= self.lines <= 16:
            raise ValueError(f"`lines` must be from 1 to 16, got {self.lines}.")
        if self.ctas < 0:
            raise ValueError(f"`ctas` must be 0 (no limit) or more, got {self.ctas}.")
        for name in ("load", "store"):
            hint = getattr(self, name)
            if hint not in ("none", "no_allocate", "streaming"):
                raise ValueError(
                    f"`{name}` must be 'none', 'no_allocate' or 'streaming', got {hint!r}."
                )


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
