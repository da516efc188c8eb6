"""What may be tuned in kernels that walk whole arrays, apart from the kernels."""

import dataclasses
from typing import Literal

VECTOR_BYTES = 16  # the widest access a thread has on every GPU from Ampere on
STRIPS = 8  # strips a line of a narrow array is stretched to: at most 1/9 of the threads idle

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


# What BiasReLU's forward kernel, walked in the same way, was fastest with on an H200: see CONTRIBUTING.md.
POINTWISE = Config(threads=128, lines=1, ctas=0)
