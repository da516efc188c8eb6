"""Launches of PTX on NumPy arrays: the device side, without any host code."""

from collections.abc import Sequence

import numpy as np

from ._fault import KernelFault
from ._machine import DEFAULT_BUDGET, Launch, program
from ._memory import Array, Global, Store
from ._parse import parse


class Device:
    """The memory of a pretended GPU, and a PTX module to launch kernels of."""

    def __init__(self, ptx: str, budget: int = DEFAULT_BUDGET):
        self.ptx = ptx
        self.module = parse(ptx)
        self.budget = budget
        self.memory = Global()
        self.arrays: list[tuple[np.ndarray, Array]] = []
        self.variables: dict[str, Array] = {}
        for variable in self.module.variables.values():
            if variable.space in ("global", "const"):
                data = variable.data or bytes(variable.size)
                self.variables[variable.name] = self.memory.add(
                    variable.name,
                    np.frombuffer(data, np.uint8),
                    constant=variable.space == "const",
                )

    def upload(self, array: np.ndarray, name: str, *, written: bool, scratch: bool) -> int:
        """**Returns:** the address. The same memory given twice is one array."""
        for known, place in self.arrays:
            same = known.__array_interface__["data"][0] == array.__array_interface__["data"][0]
            if same and known.nbytes == array.nbytes and array.nbytes:
                place.name = f"{place.name}, {name}"
                return place.base
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        place = self.memory.add(name, data, tracked=written or scratch)
        place.whole = written
        self.arrays.append((array, place))
        return place.base

    def launch(self, name: str, grid, block, params: Sequence[bytes], shared: int = 0) -> None:
        """Runs one kernel to its end. **Raises:** `KernelFault`."""
        if name not in self.module.kernels:
            raise ValueError(f"no kernel {name} in the PTX; it has {list(self.module.kernels)}")
        kernel = self.module.kernels[name]
        self.check_launch(kernel, grid, block)
        ready = program(self.ptx, name)
        places, size = ready.params
        store = Store(size)
        for variable, data in zip(kernel.params, params, strict=True):
            at = places[variable.name]
            store.data[at : at + variable.size] = np.frombuffer(data, np.uint8)
        launch = Launch(ready, grid, block, shared, store, self.memory, self.variables, self.budget)
        launch.run()

    def check_launch(self, kernel, grid, block) -> None:
        def refuse(what):
            raise KernelFault(f"launch failed: {what}", kernel=kernel.name)

        if min(grid) < 1 or min(block) < 1:
            refuse(f"grid {tuple(grid)} of blocks {tuple(block)}: every size must be at least 1")
        if grid[0] > 2**31 - 1 or max(grid[1:]) > 65535:
            refuse(f"grid {tuple(grid)}: at most 2147483647 x 65535 x 65535")
        threads = block[0] * block[1] * block[2]
        if threads > 1024 or block[2] > 64:
            refuse(f"blocks {tuple(block)}: at most 1024 threads, and 64 in z")
        if kernel.block is not None and tuple(block) != kernel.block:
            refuse(f"blocks {tuple(block)}, but it was compiled for {kernel.block}")
        if kernel.cluster not in (None, (1, 1, 1)):
            raise NotImplementedError(
                f"the PTX interpreter does not know clusters; {kernel.name} has {kernel.cluster}"
            )

    def download(self) -> None:
        """Copies what the kernels wrote back. **Raises:** `KernelFault` for what they did not."""
        for array, place in self.arrays:
            first = self.memory.first_unwritten(place) if place.whole else None
            if first is not None:
                index = np.unravel_index(first // array.itemsize, array.shape)
                raise KernelFault(
                    f"unwritten: no kernel wrote `{place.name}` at index "
                    f"{tuple(int(i) for i in index)} (byte {first} of {place.size})"
                )
            if not place.touched:
                continue
            if not array.flags.writeable:
                raise KernelFault(f"the kernel wrote to `{place.name}`, which is read-only")
            array.reshape(-1).view(np.uint8)[:] = self.memory.bytes_of(place)


def run_ptx(
    ptx: str,
    params: Sequence,
    *,
    kernel: str | None = None,
    grid: Sequence[int] = (1, 1, 1),
    block: Sequence[int] = (32, 1, 1),
    shared: int = 0,
    names: Sequence[str] = (),
    written: Sequence[int] = (),
    scratch: Sequence[int] = (),
    budget: int = DEFAULT_BUDGET,
) -> None:
    """Runs one kernel of a PTX text, with a launch given by hand.

    **Arguments:**

    - `ptx`: The text of a module.
    - `params`: One a parameter: an array (its address is passed, and it is changed in place),
        a NumPy scalar, or bytes.
    - `kernel`: Its name. Left out, the first one's. (Keyword only, as all that follow.)
    - `grid`, `block`: Sizes in x, y and z.
    - `shared`: Bytes of dynamic shared memory.
    - `names`: What messages call the parameters.
    - `written`: Numbers of the parameters that the kernel must write, every byte of them.
    - `scratch`: Numbers of those that start without contents, and may be written in part.
    - `budget`: How many instructions may run before it counts as an endless loop.

    **Raises:** `KernelFault`, see there; `NotImplementedError` for PTX that is not known.
    """
    device = Device(ptx, budget)
    packed = []
    for i, value in enumerate(params):
        name = names[i] if i < len(names) else f"argument {i}"
        if isinstance(value, np.ndarray):
            address = device.upload(value, name, written=i in written, scratch=i in scratch)
            packed.append(address.to_bytes(8, "little"))
        else:
            packed.append(value if isinstance(value, bytes) else value.tobytes())
    if kernel is None:
        kernel = next(iter(device.module.kernels))
    device.launch(kernel, tuple(grid), tuple(block), packed, shared)
    device.download()
