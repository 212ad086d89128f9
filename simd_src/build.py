"""Describes the native extension `engine._simd`: its sources, the flags of each, and the declarations Python sees.

Every simd_src/*.c is compiled by itself. A file named *_<tier>.c may use that tier's instructions and is only called
after dispatch has asked the processor; everything else is built for the oldest x86-64. The *_api.h headers hold plain
prototypes and structs: the compiler includes them and cffi parses them, so the two cannot differ.
"""

from __future__ import annotations

import re
from pathlib import Path

import cffi

SOURCE_DIR = Path(__file__).resolve().parent
MODULE = "engine._simd"

TIER_FLAGS = {
    "scalar": [],
    "ssse3": ["-mssse3"],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avxvnni": ["-mavx2", "-mfma", "-mf16c", "-mavxvnni"],
    "avx512": [
        *("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni"),
        "-mprefer-vector-width=512",
    ],
}
# No -march=native, -ffast-math or implicit contraction: each would change results from machine to machine, and
# older compilers make -ffast-math flush denormals in the whole process.
COMMON_FLAGS = ["-std=gnu11", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]


def sources() -> list[Path]:
    """All C sources of the kernels, in a stable order."""
    return sorted(SOURCE_DIR.glob("*.c"))


def flags(source: Path) -> list[str]:
    """Compiler flags of one source, by the tier in its name."""
    tier = re.search(r"_([a-z0-9]+)$", source.stem)
    return COMMON_FLAGS + (TIER_FLAGS.get(tier[1], []) if tier else [])


def api_headers() -> list[Path]:
    """Headers that both cffi and the compiler read."""
    return sorted(SOURCE_DIR.glob("*_api.h"))


def declarations(header: Path) -> str:
    """A header without its include guard, as cffi wants it."""
    return "\n".join(line for line in header.read_text().splitlines() if not line.startswith("#"))


def make_ffi() -> cffi.FFI:
    """The binding: everything the API headers declare."""
    ffi = cffi.FFI()
    for header in api_headers():
        ffi.cdef(declarations(header))
    includes = "\n".join(f'#include "{header.name}"' for header in api_headers())
    ffi.set_source(MODULE, f"#include <stdint.h>\n#include <stddef.h>\n{includes}")
    return ffi
