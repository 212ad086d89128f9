"""Assembles PTX for Fermi (sm_20) with the compiler library of the last driver for those cards; no GPU needed.

The library, libnvidia-ptxjitcompiler.so.390.157, is what an owner's driver uses to compile the shipped PTX. It exports
the PTX compiler API that NVIDIA documents for newer toolkits. It may crash on instructions it does not know, so each
module is assembled in a child process.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PLACES = ("nvidia/legacy-390xx/libnvidia-ptxjitcompiler.so.390.157", "libnvidia-ptxjitcompiler.so.390.157")
TIMEOUT_SECONDS = 300


class AssemblerError(Exception):
    """The library refused a module or died on it; the message holds its log."""


@dataclass(frozen=True)
class Assembled:
    """The sm_20 ELF image of a module and the assembler's verbose log."""

    cubin: bytes
    log: str


def find_library(environment: Mapping[str, str]) -> Path | None:
    """The 390.157 library: FERMI_JIT, or where the Debian packages put it; None if it is not there."""
    if "FERMI_JIT" in environment:
        return Path(environment["FERMI_JIT"])
    candidates = (Path("/usr/lib/x86_64-linux-gnu") / place for place in PLACES)
    return next((path for path in candidates if path.exists()), None)


def assemble(library: Path, ptx: str) -> Assembled:
    """Compiles PTX text to sm_20 code. Raises AssemblerError."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "in.ptx", Path(folder) / "out.cubin"
        source.write_text(ptx)
        command = [sys.executable, __file__, str(library), str(source), str(target)]
        child = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
        if child.returncode < 0:
            raise AssemblerError(f"the assembler died with signal {-child.returncode}")
        if child.returncode or not target.exists():
            raise AssemblerError(child.stdout + child.stderr)
        return Assembled(target.read_bytes(), child.stdout)


def _assemble_here(library: str, source: str, target: str) -> int:
    """The child's part: prints the log, writes the image, returns the library's status."""
    lib = ctypes.CDLL(library)
    ptx = Path(source).read_bytes()
    handle, size = ctypes.c_void_p(), ctypes.c_size_t()
    status = lib.nvPTXCompilerCreate(ctypes.byref(handle), ctypes.c_size_t(len(ptx)), ctypes.c_char_p(ptx))
    if status:
        print(f"nvPTXCompilerCreate failed with status {status}")
        return int(status)
    options = (ctypes.c_char_p * 2)(b"--gpu-name=sm_20", b"--verbose")
    status = lib.nvPTXCompilerCompile(handle, ctypes.c_int(2), options)
    for kind in ("Error", "Info"):
        getattr(lib, f"nvPTXCompilerGet{kind}LogSize")(handle, ctypes.byref(size))
        if size.value:
            log = ctypes.create_string_buffer(size.value + 1)
            getattr(lib, f"nvPTXCompilerGet{kind}Log")(handle, log)
            print(log.value.decode(errors="replace"))
    if status == 0:
        lib.nvPTXCompilerGetCompiledProgramSize(handle, ctypes.byref(size))
        image = ctypes.create_string_buffer(size.value)
        lib.nvPTXCompilerGetCompiledProgram(handle, image)
        Path(target).write_bytes(image.raw)
    lib.nvPTXCompilerDestroy(ctypes.byref(handle))
    return int(status)


if __name__ == "__main__":
    sys.exit(_assemble_here(*sys.argv[1:]))
