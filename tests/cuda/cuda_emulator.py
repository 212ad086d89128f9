"""Builds the CUDA kernels for the CPU and launches them with the calling convention of the driver API.

Owns the compiler command of the emulation build and the NumPy <-> kernel argument conversion. Knows no kernel by
heart: every ``extern "C" __global__`` function of cuda_src/*.cu is exported.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[2]
CUDA_SOURCES = ROOT / "cuda_src"
EMULATION = Path(__file__).resolve().parent / "emu"

KERNEL = re.compile(r'extern "C" __global__ void __launch_bounds__\((\w+)\)\s+(\w+)(##D)?\(')
MACRO_KERNEL = re.compile(r"^([A-Z_]+)\((\d+)\)$", re.MULTILINE)
SANITIZERS = ("-fsanitize=address,undefined", "-fsanitize-sections=cuda_shared", "-fno-sanitize-recover=all", "-g")


def kernel_names(source: Path) -> list[str]:
    """Names of the kernels that a .cu file defines, those stamped out by a macro per size included."""
    text = source.read_text()
    names = []
    for _, name, pasted in KERNEL.findall(text.replace("\\\n", "\n")):
        names += [name + size for _, size in MACRO_KERNEL.findall(text)] if pasted else [name]
    return names


def build(target: Path, sanitize: bool, newer: str | None = None) -> Path:
    """Compiles all kernels with g++ into the shared library ``target``/libkernels.so and returns its path. newer: the
    build for newer cards (a folder of cuda_src) whose kernels take the place of others."""
    target.mkdir(parents=True, exist_ok=True)
    library = target / "libkernels.so"
    units = []
    for source in sorted(CUDA_SOURCES.glob("*.cu")):
        unit = target / f"{source.stem}.cpp"
        own = CUDA_SOURCES / newer / source.name if newer else source
        lines = [
            f'#include "{own if own.exists() else source}"',
            *(f"EMU_KERNEL({name})" for name in kernel_names(source)),
        ]
        unit.write_text("\n".join(lines) + "\n")
        units.append(unit)
    flags = [
        "-std=c++17",
        "-DFERMION_EMU",
        "-fPIC",
        "-shared",
        "-mavx2",
        "-mfma",
        "-mf16c",
        "-ffp-contract=off",
        "-w",
        "-ldl",
    ]
    flags += ["-O1", *SANITIZERS] if sanitize else ["-O2"]
    includes = [f"-I{EMULATION}", f"-I{CUDA_SOURCES}"]
    objects = [str(unit) for unit in units] + [str(EMULATION / "fake_driver.cpp")]
    subprocess.run(
        ["g++", *flags, *includes, *objects, str(EMULATION / "cuda_emu.cpp"), "-o", str(library)],
        check=True,
    )
    return library


@dataclass(frozen=True)
class HostBuffer:
    """A kernel argument: bytes in host memory."""

    array: NDArray[Any]

    @property
    def address(self) -> int:
        return int(self.array.ctypes.data)


class Emulator:
    """Launches kernels of an emulation library; arrays live in ordinary memory."""

    def __init__(self, library: Path, order: int = 0) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.emu_set_order(ctypes.c_uint(order))
        self._library.emu_allocate.restype = ctypes.c_void_p
        self._library.emu_allocate.argtypes = [ctypes.c_size_t]
        self._library.emu_free.argtypes = [ctypes.c_void_p]

    def upload(self, array: NDArray[Any]) -> HostBuffer:
        """A copy of ``array`` in memory that starts at a multiple of 64 bytes and ends with its last byte, so that
        the address sanitizer sees any access beyond it."""
        address = self._library.emu_allocate(array.nbytes)
        memory = (ctypes.c_ubyte * array.nbytes).from_address(address)
        weakref.finalize(memory, self._library.emu_free, address)
        copy: NDArray[Any] = np.frombuffer(memoryview(memory).cast("B"), array.dtype).reshape(array.shape)
        copy[...] = array
        return HostBuffer(copy)

    def download(self, buffer: HostBuffer) -> NDArray[Any]:
        """What the kernels left in ``buffer``."""
        return buffer.array

    def launch(self, kernel: str, grid: tuple[int, int], threads: int, *arguments: object) -> None:
        """Runs ``kernel`` over ``grid`` blocks; arguments are buffers, None (null pointer) or ctypes scalars."""
        values = [
            ctypes.c_void_p(argument.address)
            if isinstance(argument, HostBuffer)
            else ctypes.c_void_p(None)
            if argument is None
            else argument
            for argument in arguments
        ]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))  # type: ignore[arg-type]
        function = getattr(self._library, f"emu_{kernel}")
        function((ctypes.c_uint * 2)(*grid), ctypes.c_uint(threads), pointers)
