"""What a compiled kernel says of itself."""

from __future__ import annotations

import struct

_ELF = b"\x7fELF\x02\x01"  # 64 bits, little-endian
_SECTIONS_AT, _SECTION_SIZE_AT = 0x28, 0x3A
_SECTION = struct.Struct("<IIQQQQIIQQ")  # name, type, flags, address, offset, size, link, info, alignment, entry size
_REGISTERS = 0x2F  # EIATTR_REGCOUNT: symbol, registers of a thread
_WITH_BYTES = 4  # an attribute whose value lies behind it, rather than in its two last bytes


def registers_of(cubin: bytes) -> int | None:
    """Registers of a thread of the kernel in `cubin`, of the hungriest if there are several.

    They are in section `.nv.info`, as the CUDA binary utilities show it (`cuobjdump -elf`). None where the file does
    not say.
    """
    found = [struct.unpack("<II", value)[1] for kind, value in _attributes(cubin) if kind == _REGISTERS]
    return max(found, default=None)


def _attributes(cubin: bytes) -> list[tuple[int, bytes]]:
    """(kind, value) of all attributes with values of their own in `.nv.info`."""
    info, found, at = _section(cubin, b".nv.info"), [], 0
    while at + 4 <= len(info):
        form, kind, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _WITH_BYTES:
            found.append((kind, info[at : at + size]))
            at += size
    return found


def _section(cubin: bytes, name: bytes) -> bytes:
    """The bytes of the section of that name; empty if there is none."""
    if not cubin.startswith(_ELF):
        return b""
    (first,) = struct.unpack_from("<Q", cubin, _SECTIONS_AT)
    size, count, of_names = struct.unpack_from("<HHH", cubin, _SECTION_SIZE_AT)
    sections = [_SECTION.unpack_from(cubin, first + i * size) for i in range(count)]
    names = sections[of_names][4]
    for section in sections:
        start = names + section[0]
        if cubin[start : cubin.index(b"\0", start)] == name:
            return cubin[section[4] : section[4] + section[5]]
    return b""
