"""PTX text to a list of instructions.

The grammar that compilers emit is regular enough for a scanner of statements: each ends in
`;`, except labels, braces and the line directives (`.loc`, `.file`, `.version`, ...). Inline
PTX opens a scope of its own, with registers and labels that shadow those outside, so names
are resolved through a chain of scopes.
"""

import dataclasses
import functools
import re

from ._fault import Unsupported


@dataclasses.dataclass(frozen=True, slots=True)
class Reg:
    """A register: its number in the kernel, and its name for messages."""

    index: int
    name: str
    type: str  # of the declaration: "b32", "pred", ...
    negated: bool = False  # `!%p1` as an operand


@dataclasses.dataclass(frozen=True, slots=True)
class Imm:
    """A literal. `kind` is "int", "f32" or "f64"; for floats `value` holds the bits."""

    value: int
    kind: str = "int"


@dataclasses.dataclass(frozen=True, slots=True)
class Special:
    """A register that the machine fills, `%tid.x`."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Sym:
    """The address of a variable, plus an offset."""

    name: str
    offset: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Mem:
    """`[base + offset]`; base is a `Reg`, a `Sym` or an `Imm`."""

    base: object
    offset: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """`[map, {x, y, ...}]`: a place in what a tensor map describes."""

    map: Mem
    coordinates: tuple


@dataclasses.dataclass(frozen=True, slots=True)
class Vec:
    """`{a, b, ...}`."""

    items: tuple


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """`a|b`: two destinations, the second a predicate."""

    first: object
    second: object


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """The operands of `call`: name, results and arguments by parameter name."""

    name: str
    results: tuple
    arguments: tuple


SINK = Special("_")


@dataclasses.dataclass(slots=True)
class Instruction:
    op: str  # "ld.global.v4.b32"
    mods: tuple  # its parts: ("ld", "global", "v4", "b32")
    args: tuple
    guard: Reg | None  # runs only where this holds (`negated` inverts)
    line: int  # in the PTX text
    text: str
    where: str | None  # "file.py:17", from the line information
    index: int = 0
    target: int = -1  # of a branch


@dataclasses.dataclass(slots=True)
class Variable:
    """A named piece of memory, in the module or in a function."""

    name: str
    space: str  # "global", "const", "shared", "local", "param"
    size: int  # 0: the launch says (dynamic shared memory)
    align: int
    data: bytes | None = None


@dataclasses.dataclass(slots=True)
class Kernel:
    name: str
    params: list  # of Variable, in order
    code: list  # of Instruction
    registers: list  # of Reg
    variables: dict  # name -> Variable: shared, local, and call parameters
    labels: frozenset  # indices of instructions that a branch may reach
    block: tuple | None = None  # .reqntid
    max_block: tuple | None = None  # .maxntid
    cluster: tuple | None = None  # .reqnctapercluster


@dataclasses.dataclass(slots=True)
class Module:
    target: str  # "sm_90a"
    kernels: dict[str, Kernel]
    variables: dict[str, Variable]  # module scope


_TYPE_SIZE = {"pred": 1, "f16x2": 4, "bf16x2": 4, "s16x2": 4, "u16x2": 4, "f32x2": 8}
_LINE_DIRECTIVE = re.compile(r"\.(loc|file|version|target|address_size)\s")
_STATEMENT = re.compile(r"\s*(?:(?P<brace>[{}])|(?P<label>[$\w]+)\s*:(?!:)|(?P<rest>\S))")
_NUMBER = re.compile(r"[+-]?(?:0[xX][0-9a-fA-F]+|\d+)U?$")
_NAME = re.compile(r"[%$\w][\w$.%]*$")
_VARIABLE = re.compile(
    r"(?:\.(?P<link>extern|visible|weak|common)\s+)*\.(?P<space>global|const|shared|local|param)\s+"
    r"(?:\.align\s+(?P<align>\d+)\s+)?(?:\.v(?P<vec>[248])\s+)?\.(?P<type>\w+)\s+"
    r"(?:\.ptr\s*(?:\.\w+\s*(?:\d+\s+)?)*)?"
    r"(?P<name>[%$\w]+)\s*(?P<dims>(?:\[\d*\])*)\s*(?:=\s*(?P<init>.*))?$",
    re.S,
)


def _found(match: re.Match[str] | None, text: str) -> re.Match[str]:
    """A match in PTX that would be malformed without one."""
    if match is None:
        raise Unsupported(f"the PTX {text[:80]!r}")
    return match


def type_size(name: str) -> int:
    """Bytes of a PTX type: 4 for "f32"."""
    if name in _TYPE_SIZE:
        return _TYPE_SIZE[name]
    return int(_found(re.search(r"(\d+)$", name), name).group(1)) // 8


@functools.lru_cache(maxsize=64)
def parse(text: str) -> Module:
    """Reads a PTX module. Equal texts are read once."""
    return _Parser(text).module()


def _uncommented(text: str) -> str:
    def blank(match):  # keep the line numbers
        return "\n" * match.group().count("\n") or " "

    return re.sub(r"/\*.*?\*/|//[^\n]*", blank, text, flags=re.S)


def _split(text: str) -> list[str]:
    """Splits at commas that are outside of brackets."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        if char in "[{(":
            depth += 1
        elif char in "]})":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    return [*parts, last] if last or parts else []


def _integer(text: str) -> int:
    return int(text.rstrip("U"), 0) if not re.match(r"[+-]?0\d", text) else int(text.rstrip("U"), 8)


class _Parser:
    def __init__(self, text: str):
        self.text = _uncommented(text)
        self.pos = 0
        files = re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', self.text)
        self.files = {int(number): name for number, name in files}
        self.starts = [m.start() for m in re.finditer("\n", self.text)]
        self.target = "sm_80"
        self.kernels: dict[str, Kernel] = {}
        self.variables: dict[str, Variable] = {}

    def module(self) -> Module:
        while (item := self.statement()) is not None:
            kind, body, line = item
            if kind == "text":
                self.module_level(body, line)
        return Module(self.target, self.kernels, self.variables)

    def line_at(self, pos: int) -> int:
        import bisect

        return bisect.bisect_left(self.starts, pos) + 1

    def statement(self):
        """The next (kind, text, line); None at the end. Kinds: "brace", "label", "text"."""
        match = _STATEMENT.match(self.text, self.pos)
        if match is None:
            return None
        kind = match.lastgroup
        if kind is None:
            raise RuntimeError("Internal error: a PTX statement of no kind.")
        start = match.start(kind)
        line = self.line_at(start)
        if kind != "rest":
            self.pos = match.end()
            return kind, match.group(kind), line
        if _LINE_DIRECTIVE.match(self.text, start):
            end = self.text.find("\n", start)
            self.pos = end = len(self.text) if end < 0 else end
            return "text", self.text[start:end].strip(), line
        if self.text.startswith(".section", start):  # debug information: not ours to read
            self.pos = self.text.index("}", start) + 1
            return "text", ".section", line
        ends = ";"
        if re.match(r"(\.\w+\s+)*\.(entry|func)\b", self.text[start : start + 200]):
            ends = "{;"  # a header ends where its body begins
        end = start
        while self.text[end] not in ends:
            end += 1
        self.pos = end + (self.text[end] == ";")
        return "text", " ".join(self.text[start:end].split()), line

    def module_level(self, body: str, line: int) -> None:
        if body.startswith(".target"):
            self.target = body.split()[1].rstrip(",")
        elif re.match(r"(\.\w+ )*\.entry\b", body):
            self.kernel(body)
        elif re.match(r"(\.\w+ )*\.func\b", body):
            if _found(_STATEMENT.match(self.text, self.pos), body).group("brace") == "{":
                name = _found(re.search(r"\.func\s*(?:\([^)]*\))?\s*([$\w]+)", body), body)
                raise Unsupported(f"a PTX function with a body, {name.group(1)}, line {line}")
        elif (variable := self.variable(body)) is not None:
            self.variables[variable.name] = variable
        elif not body.startswith((".version", ".address_size", ".file", ".section", ".pragma")):
            raise Unsupported(f"PTX line {line}: {body[:80]}")

    def variable(self, body: str) -> Variable | None:
        match = _VARIABLE.match(body)
        if match is None:
            return None
        width = type_size(match["type"]) * int(match["vec"] or 1)
        size = width
        for dim in re.findall(r"\[(\d*)\]", match["dims"]):
            size *= int(dim or 0)
        data = None
        if match["init"] is not None:
            data = self.initial(match["init"], type_size(match["type"]), size)
            size = max(size, len(data))
        return Variable(match["name"], match["space"], size, int(match["align"] or width), data)

    def initial(self, text: str, width: int, size: int) -> bytes:
        out = bytearray()
        for word in re.findall(r"[^\s,{}]+", text):
            if word[:2] in ("0f", "0F", "0d", "0D"):
                value = int(word[2:], 16)
            elif _NUMBER.match(word):
                value = _integer(word)
            else:
                raise Unsupported(f"an initial value that is an address: {word}")
            out += (value & ((1 << 8 * width) - 1)).to_bytes(width, "little")
        return bytes(out).ljust(size, b"\0")

    def kernel(self, header: str) -> None:
        name = _found(re.search(r"\.entry\s+([$\w]+)", header), header).group(1)
        inside = re.search(r"\((.*?)\)", header)
        params = [self.variable(p) for p in _split(inside.group(1))] if inside else []

        def triple(directive):
            match = re.search(rf"\.{directive}\s+([\d, ]+)", header)
            if match is None:
                return None
            sizes = [int(x) for x in match.group(1).replace(",", " ").split()]
            return tuple(sizes + [1] * (3 - len(sizes)))

        code, registers, variables, labels = _Body(self, name).read()
        self.kernels[name] = Kernel(
            name,
            params,
            code,
            registers,
            variables,
            labels,
            triple("reqntid"),
            triple("maxntid"),
            triple("reqnctapercluster"),
        )


class _Body:
    """Reads one function body."""

    def __init__(self, parser: _Parser, kernel: str):
        self.parser = parser
        self.kernel = kernel
        self.code: list[Instruction] = []
        self.registers: list[Reg] = []
        self.variables: dict[str, Variable] = {}
        self.scopes: list[dict] = []  # register and variable names of the open scopes
        self.labels: dict = {}  # (scope number, label) -> instruction index
        self.path: list[int] = []  # numbers of the open scopes
        self.scope_count = 0
        self.where: str | None = None
        self.branches: list = []

    def read(self):
        while True:
            item = self.parser.statement()
            if item is None:
                raise Unsupported(f"the PTX of {self.kernel} ends inside its body")
            kind, body, line = item
            if kind == "brace":
                if self.brace(body):
                    break
            elif kind == "label":
                self.labels[self.path[-1], body] = len(self.code)
            else:
                self.text(body, line)
        reached = set()
        for instruction, path in self.branches:
            name = instruction.args[0].name
            for scope in reversed(path):
                if (scope, name) in self.labels:
                    instruction.target = self.labels[scope, name]
                    break
            else:
                raise Unsupported(f"PTX line {instruction.line}: no label {name}")
            reached.add(instruction.target)
        return self.code, self.registers, self.variables, frozenset(reached)

    def brace(self, which: str) -> bool:
        if which == "{":
            self.scopes.append({})
            self.path.append(self.scope_count)
            self.scope_count += 1
            return False
        self.scopes.pop()
        self.path.pop()
        return not self.scopes

    def text(self, body: str, line: int) -> None:
        if re.match(r"\.loc\s", body):
            self.location(body)
        elif body.startswith(".reg"):
            self.declare(body)
        elif not body.startswith("."):
            self.instruction(body, line)
        elif (variable := self.parser.variable(body)) is not None:
            unique = f"{variable.name}#{len(self.variables)}"
            self.variables[unique] = dataclasses.replace(variable, name=unique)
            self.scopes[-1][variable.name] = unique
        elif not body.startswith((".pragma", ".file", ".section")):
            raise Unsupported(f"PTX line {line}: {body[:80]}")

    def location(self, body: str) -> None:
        # An inlined function has the place that it was inlined at behind its own.
        place = _found(re.match(r"\.loc\s+(\d+)\s+(\d+)", body), body)
        file, number = int(place.group(1)), int(place.group(2))
        if number:
            self.where = f"{self.parser.files.get(file, f'file {file}')}:{number}"

    def declare(self, body: str) -> None:
        match = _found(re.match(r"\.reg\s+(?:\.v[24]\s+)?\.(\w+)\s+(.*)", body), body)
        for item in _split(match.group(2)):
            ranged = re.match(r"([%$\w]+)<(\d+)>$", item)
            names = [item]
            if ranged:
                names = [f"{ranged.group(1)}{i}" for i in range(int(ranged.group(2)))]
            for name in names:
                register = Reg(len(self.registers), name, match.group(1))
                self.registers.append(register)
                self.scopes[-1][name] = register

    def instruction(self, body: str, line: int) -> None:
        text, guard = body, None
        match = re.match(r"@(!?)([%$\w]+)\s+(.*)$", body)
        if match:
            found = self.lookup(match.group(2))
            if not isinstance(found, Reg):
                raise Unsupported(f"PTX line {line}: the guard {match.group(2)} is no register")
            guard = dataclasses.replace(found, negated=match.group(1) == "!")
            body = match.group(3)
        op, _, rest = body.partition(" ")
        mods = tuple(op.replace("::", "@").split("."))
        mods = tuple(m.replace("@", "::") for m in mods)
        if mods[0] == "call":
            args = (self.call(rest, line),)
        elif mods[0] == "bra":
            args = (Sym(rest.strip()),)
        else:
            args = tuple(self.operand(a, line) for a in _split(rest))
        instruction = Instruction(
            op, mods, args, guard, line, text, self.where, index=len(self.code)
        )
        if mods[0] == "bra":
            self.branches.append((instruction, tuple(self.path)))
        self.code.append(instruction)

    def call(self, rest: str, line: int) -> Call:
        parts = _split(rest)

        def names(part):
            return tuple(self.lookup(n) for n in _split(part.strip("() ")))

        results = names(parts.pop(0)) if parts[0].startswith("(") else ()
        name = parts.pop(0)
        arguments = names(parts.pop(0)) if parts and parts[0].startswith("(") else ()
        return Call(name, results, arguments)

    def lookup(self, name: str):
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return None

    def operand(self, text: str, line: int):
        if text == "_":
            return SINK
        if text[0] == "{":
            return Vec(tuple(self.operand(a, line) for a in _split(text[1:-1])))
        if text[0] == "[":
            base, *more = _split(text[1:-1])
            if len(more) == 1 and more[0][0] == "{":
                places = tuple(self.operand(a, line) for a in _split(more[0][1:-1]))
                return Tensor(self.address(base, line), places)
            return self.address(text[1:-1].strip(), line)
        if "|" in text:
            first, second = text.split("|")
            return Pair(self.operand(first.strip(), line), self.operand(second.strip(), line))
        if text[0] == "!":
            return dataclasses.replace(self.operand(text[1:].strip(), line), negated=True)
        if re.match(r"0[fF][0-9a-fA-F]{8}$", text):
            return Imm(int(text[2:], 16), "f32")
        if re.match(r"0[dD][0-9a-fA-F]{16}$", text):
            return Imm(int(text[2:], 16), "f64")
        if _NUMBER.match(text):
            return Imm(_integer(text))
        if text == "WARP_SZ":
            return Imm(32)
        if _NAME.match(text):
            found = self.lookup(text)
            if isinstance(found, Reg):
                return found
            if text.startswith("%"):
                return Special(text[1:])
            return Sym(found or text)
        match = re.match(r"([$\w]+)\s*\+\s*(\d+)$", text)
        if match:
            return Sym(self.lookup(match.group(1)) or match.group(1), int(match.group(2)))
        raise Unsupported(f"PTX line {line}: the operand {text!r}")

    def address(self, text: str, line: int) -> Mem:
        match = re.match(r"([%$\w.]+)\s*(?:\+\s*(-?(?:0x)?[0-9a-fA-F]+)|-\s*(\d+))?$", text)
        if match is None:  # textures have more in here
            raise Unsupported(f"PTX line {line}: the address [{text}]")
        offset = int(match.group(2), 0) if match.group(2) else -int(match.group(3) or 0)
        base = self.operand(match.group(1), line)
        if isinstance(base, Imm):
            return Mem(Imm(0), base.value + offset)
        return Mem(base, offset)
