"""What the interpreter raises when a kernel does something that a GPU would get wrong."""


class KernelFault(RuntimeError):
    """A kernel did something wrong: an access out of bounds, a race, a barrier that hangs.

    The message says what happened, then where: the Python line if the PTX carries line
    information, the instruction, the kernel, the CTA and the thread. The same facts are
    attributes, `None` where they are not known.
    """

    def __init__(
        self, what: str, *, where=None, instruction=None, kernel=None, cta=None, thread=None
    ):
        self.what = what
        self.where = where
        self.instruction = instruction
        self.kernel = kernel
        self.cta = cta
        self.thread = thread
        lines: list[str] = [what]
        if where is not None:
            lines.append(f"at {where}")
        if instruction is not None:
            lines.append(f"in the instruction {instruction}")
        if kernel is not None:
            place = f"of the kernel {kernel}"
            if cta is not None:
                place += f", CTA {cta}"
            if thread is not None:
                place += f", thread {thread}"
            lines.append(place)
        super().__init__("\n  ".join(lines))


class Misstep(Exception):
    """A fault found deep inside, before the instruction that caused it is known.

    `lane` is the first guilty lane of the running batch, if one lane is to blame. The
    machine turns it into a `KernelFault`.
    """

    def __init__(self, what: str, lane: int | None = None):
        self.what = what
        self.lane = lane
        super().__init__(what)


class Unsupported(NotImplementedError):
    """PTX that the interpreter does not know, named with its line."""
