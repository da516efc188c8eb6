"""Who does what in a kernel of warp roles, and the rings of shared memory between them.

    plan = Plan(roles=(Role("load", 4, 24), Role("compute", 8, 240)), rings=(Ring("k", 2, 32768), ...))

is data: it is checked when the kernel is built, and what is copied into a slot of a ring is counted against it when the
kernel is traced, so that neither registers, nor arrivals, nor bytes can differ from what is written down.

    ring       slots that one warp fills by TMA, and others read: full when all its bytes are there, empty when each
               of the reading warps has let go
    loader     the warp that fills rings; the other three warps of its warpgroup only give their registers back
"""

import dataclasses

import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Constexpr

REGISTERS = 65536  # of an SM
WARPGROUP_WARPS = 4
MAILS = 2  # slots of a mailbox


@dataclasses.dataclass(frozen=True)
class Role:
    """Warps that do one thing for the whole life of a CTA: whole warpgroups, since registers are given to those."""

    name: str
    warps: int
    registers: int  # a thread


@dataclasses.dataclass(frozen=True)
class Ring:
    """Slots of shared memory. `readers` names the role whose warps let go of them."""

    name: str
    stages: int
    bytes: int  # that fill a slot
    readers: str = "compute"


@dataclasses.dataclass(frozen=True)
class Plan:
    """Roles in the order of their warps, and rings."""

    roles: tuple[Role, ...]
    rings: tuple[Ring, ...]

    def __post_init__(self):
        for role in self.roles:
            if role.warps % WARPGROUP_WARPS:
                raise ValueError(f"role {role.name}: {role.warps} warps are no whole warpgroups")
            if role.registers % 8 or not 24 <= role.registers <= 256:
                raise ValueError(
                    f"role {role.name}: {role.registers} registers; setmaxnreg takes multiples of 8 from 24 to 256"
                )
        used = sum(32 * r.warps * r.registers for r in self.roles)
        if used > REGISTERS:
            raise ValueError(
                f"the roles take {used} registers of {REGISTERS}: the kernel would hang"
            )
        names = {r.name for r in self.roles}
        for ring in self.rings:
            if ring.readers not in names:
                raise ValueError(f"ring {ring.name}: no role is called {ring.readers}")
            if ring.stages < 1 or ring.bytes % 16 or not 0 < ring.bytes < 1 << 20:
                raise ValueError(f"ring {ring.name}: {ring.stages} slots of {ring.bytes} bytes")

    @property
    def threads(self) -> int:
        return 32 * sum(r.warps for r in self.roles)

    def first_warp(self, name: str) -> int:
        names = [r.name for r in self.roles]
        return sum(r.warps for r in self.roles[: names.index(name)])

    def role(self, name: str) -> Role:
        return next(r for r in self.roles if r.name == name)

    def make(self, name: str):
        """The ring's barriers. After the last one: `start_rings`."""
        ring = next(r for r in self.rings if r.name == name)

        def group(arrivals):
            return pipeline.CooperativeGroup(pipeline.Agent.Thread, arrivals)

        return pipeline.PipelineTmaAsync.create(
            num_stages=ring.stages,
            producer_group=group(1),
            consumer_group=group(self.role(ring.readers).warps),
            tx_count=ring.bytes,
            defer_sync=True,
        )

    def make_mailbox(self, readers: str):
        """A ring of `MAILS` slots that one warp fills by plain stores, and all warps of a role read. All lanes arrive."""

        def group(warps):
            return pipeline.CooperativeGroup(pipeline.Agent.Thread, 32 * warps)

        return pipeline.PipelineAsync.create(
            num_stages=MAILS,
            producer_group=group(1),
            consumer_group=group(self.role(readers).warps),
            defer_sync=True,
        )

    def count(self, name: str, *slots) -> None:
        """What is copied under one slot of a ring, as tensors in shared memory of one stage each."""
        ring = next(r for r in self.rings if r.name == name)
        found = sum(bytes_of(x) for x in slots)
        if found != ring.bytes:
            raise ValueError(f"ring {name}: {found} bytes are copied into a slot of {ring.bytes}")


def bytes_of(x) -> int:
    return cute.cosize(x.layout) * x.element_type.width // 8


def start_rings() -> None:
    """Barriers are seen by all threads."""
    pipeline.pipeline_init_arrive()
    pipeline.pipeline_init_wait()


@cute.jit
def start_copies(slot, copies: Constexpr, index):
    """Starts to copy tile `index` of each tensor into a slot: of each the copy, and its parts in shared memory and in the
    array."""
    for atom, shared, array in copies:
        cute.copy(atom, array[None, index], shared[None, slot.index], tma_bar_ptr=slot.barrier)
