"""Reads sm_20 machine code: which instructions a kernel's loops hold.

Enough of the encoding to count: an instruction is eight bytes, its form in the lowest four bits, its operation in the
highest six. Only the operations that the counts tell apart are named; others get their numbers.
"""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass

OPERATIONS = {
    (0, 0x0C): "FFMA", (0, 0x14): "FADD", (0, 0x16): "FMUL", (0, 0x02): "FMNMX", (0, 0x08): "FSETP", (0, 0x32): "MUFU",
    (2, 0x06): "MOV32I", (2, 0x0C): "FMUL32I", (2, 0x02): "IADD32I", (2, 0x0E): "LOP32I",
    (3, 0x12): "IADD", (3, 0x14): "IMUL", (3, 0x08): "IMAD", (3, 0x10): "ISCADD", (3, 0x1A): "LOP", (3, 0x18): "SHL",
    (3, 0x16): "SHR", (3, 0x1C): "BFE", (3, 0x06): "ISETP", (3, 0x0C): "ICMP",
    (4, 0x0A): "MOV", (4, 0x08): "SEL", (4, 0x06): "I2F", (4, 0x07): "I2I", (4, 0x04): "F2F", (4, 0x05): "F2I",
    (4, 0x14): "BAR", (4, 0x0B): "S2R", (4, 0x10): "NOP",
    (5, 0x20): "LD", (5, 0x21): "LD", (5, 0x24): "ST", (5, 0x25): "ST",
    (7, 0x10): "BRA", (7, 0x20): "EXIT",
}  # fmt: skip
LOCAL_LOADS, LOCAL_STORES = (0x30, "LDS", "LDL"), (0x32, "STS", "STL")
WIDTHS = {5: ".64", 6: ".128"}
"""Of shared loads, by three bits of the instruction; others have 32 bits or fewer."""
BRANCH, MEMORY = 7, 5
HALF_RATE = frozenset({"I2F", "I2I", "F2F", "F2I", "SHL", "SHR", "BFE", "IMUL", "IMAD"})
"""Sixteen lanes of a multiprocessor do these: a warp takes two clocks."""


@dataclass(frozen=True)
class Loop:
    """A backward branch and what it repeats: instruction counts by operation, inner loops included."""

    first: int
    last: int
    counts: Counter[str]

    @property
    def size(self) -> int:
        """Instructions of one pass through the loop's text."""
        return self.last - self.first + 1

    @property
    def ffma_share(self) -> float:
        """Share of fused multiply-adds among the instructions."""
        return self.counts["FFMA"] / self.size

    @property
    def spills(self) -> int:
        """Accesses to spilled registers."""
        return self.counts["LDL"] + self.counts["STL"]


@dataclass(frozen=True)
class Code:
    """A kernel: all its instructions in order, and its loops, in order of their ends."""

    operations: tuple[str, ...]
    loops: tuple[Loop, ...]


def operation(word: int) -> str:
    """Name of the operation in an instruction word."""
    form, number = word & 15, word >> 58
    for code, shared, local in (LOCAL_LOADS, LOCAL_STORES):
        if (form, number) == (MEMORY, code):
            width = WIDTHS.get(word >> 5 & 7, "") if shared == "LDS" else ""
            return shared + width if word >> 56 & 1 else local
    return OPERATIONS.get((form, number), f"{form:x}.{number:02x}")


def parse(cubin: bytes) -> dict[str, Code]:
    """Kernel name -> code, from the ELF image that the assembler makes."""
    table, count, names = struct.unpack_from("<Q", cubin, 40)[0], *struct.unpack_from("<HH", cubin, 60)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + 64 * i) for i in range(count)]
    strings = headers[names][4]
    kernels = {}
    for name_at, _, _, _, offset, size, *_ in headers:
        name = cubin[strings + name_at : cubin.index(b"\0", strings + name_at)].decode()
        if name.startswith(".text."):
            kernels[name.removeprefix(".text.")] = _code(struct.unpack_from(f"<{size // 8}Q", cubin, offset))
    return kernels


def _code(words: tuple[int, ...]) -> Code:
    operations = tuple(operation(word) for word in words)
    loops = []
    for at, word in enumerate(words):
        if operations[at] == "BRA":
            distance = (word >> 26 & 0xFFFFFF) - (word >> 49 & 1) * (1 << 24)
            target = at + 1 + distance // 8
            if target <= at:
                loops.append(Loop(target, at, Counter(operations[target : at + 1])))
    return Code(operations, tuple(loops))
