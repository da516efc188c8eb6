"""A relocatable ELF object, made by hand, whose symbols jump to addresses in this process.

The compiled host code calls the CUDA runtime through undefined symbols. Linked together with
this object, it calls our Python functions instead, whatever libraries the process has loaded;
and no C compiler is needed to make it.
"""

import platform
import struct
from collections.abc import Mapping

_TEXT, _STRTAB, _SHSTRTAB = 1, 3, 4  # numbers of sections
_HEADER = 64
_SECTION_NAMES = b"\0.text\0.symtab\0.strtab\0.shstrtab\0.note.GNU-stack\0"


def undefined_symbols(obj: bytes) -> list[str]:
    """Names that an ELF object of 64 bits uses and does not define."""
    if obj[:5] != b"\x7fELF\x02":
        raise ValueError(f"not a 64-bit ELF object: it starts with {obj[:5]!r}")
    (offset,) = struct.unpack_from("<Q", obj, 0x28)
    size, count = struct.unpack_from("<HH", obj, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", obj, offset + i * size) for i in range(count)]
    names = []
    for section in sections:
        if section[1] != 2:  # SHT_SYMTAB
            continue
        strings = sections[section[6]][4]
        for at in range(section[4], section[4] + section[5], 24):
            name, info, _, defined_in = struct.unpack_from("<IBBH", obj, at)
            if defined_in == 0 and name and info >> 4:
                end = obj.index(b"\0", strings + name)
                names.append(obj[strings + name : end].decode())
    return names


def stub_object(addresses: Mapping[str, int | None]) -> bytes:
    """An x86-64 object in which each name is a function that jumps to its address.

    Where that is None the function returns 0.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        raise NotImplementedError(
            f"kernels run on x86-64 CPUs only, as their host code does; this is "
            f"{platform.machine()}"
        )
    text, strings, symbols = b"", b"\0", b"\0" * 24
    for name, address in addresses.items():
        code = b"\x31\xc0\xc3"  # xor eax, eax; ret
        if address is not None:  # movabs rax, address; jmp rax
            code = b"\x48\xb8" + struct.pack("<Q", address) + b"\xff\xe0"
        info = 0x12  # global, function
        symbols += struct.pack("<IBBHQQ", len(strings), info, 0, _TEXT, len(text), len(code))
        strings += name.encode() + b"\0"
        text += code.ljust(16, b"\xcc")

    bodies = [b"", text, symbols, strings, _SECTION_NAMES, b""]
    # name, type, flags (2 allocated, 4 executable), link, info, align, entry size
    kinds = [
        ("", 0, 0, 0, 0, 0, 0),
        (".text", 1, 6, 0, 0, 16, 0),
        (".symtab", 2, 0, _STRTAB, 1, 8, 24),
        (".strtab", 3, 0, 0, 0, 1, 0),
        (".shstrtab", 3, 0, 0, 0, 1, 0),
        (".note.GNU-stack", 1, 0, 0, 0, 1, 0),
    ]
    data, headers = b"", b""
    for (name, kind, flags, link, info, align, entry), body in zip(kinds, bodies, strict=True):
        data += b"\0" * (-len(data) % 16)
        at = _SECTION_NAMES.index(b"\0" + name.encode() + b"\0") + 1 if name else 0
        headers += struct.pack(
            "<IIQQQQIIQQ",
            at,
            kind,
            flags,
            0,
            _HEADER + len(data) if kind else 0,
            len(body),
            link,
            info,
            align,
            entry,
        )
        data += body
    data += b"\0" * (-len(data) % 16)
    identity = b"\x7fELF\x02\x01\x01" + b"\0" * 9
    machine = struct.pack(
        "<HHIQQQIHHHHHH",
        1,  # relocatable
        62,  # x86-64
        1,
        0,
        0,
        _HEADER + len(data),
        0,
        _HEADER,
        0,
        0,
        64,
        len(kinds),
        _SHSTRTAB,
    )
    return identity + machine + data + headers
