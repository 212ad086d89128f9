"""A card that is the CPU: the kernels of the emulation behind the interface that prefill uses."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.cuda_driver import Argument, Array, kernel_argument
from engine.errors import OutOfMemory


class EmulatedCard:
    """Everything happens at once and in order. memory: bytes that can be allocated. log: launches and copies."""

    name = "emulated card"
    pins = True

    def __init__(self, library: Path, memory: int = 1 << 30) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.emu_set_order(ctypes.c_uint(0))
        self._library.emu_allocate.restype = ctypes.c_void_p
        self._library.emu_allocate.argtypes = [ctypes.c_size_t]
        self._library.emu_free.argtypes = [ctypes.c_void_p]
        self._memory = memory
        self.allocated: dict[int, int] = {}
        self.log: list[str] = []

    def free_bytes(self) -> int:
        return self._memory - sum(self.allocated.values())

    def allocate(self, nbytes: int) -> int:
        if nbytes > self.free_bytes():
            raise OutOfMemory(f"{nbytes} bytes")
        address = int(self._library.emu_allocate(nbytes))
        ctypes.memset(address, 0xFF, nbytes)  # what nothing wrote is NaN
        self.allocated[address] = nbytes
        return address

    def release(self, address: int) -> None:
        del self.allocated[address]
        self._library.emu_free(address)

    def write(self, address: int, array: Array) -> None:
        assert array.flags.c_contiguous
        ctypes.memmove(address, array.ctypes.data, array.nbytes)

    def read(self, array: Array, address: int) -> None:
        assert array.flags.c_contiguous
        ctypes.memmove(array.ctypes.data, address, array.nbytes)

    def launch(self, kernel: str, grid: tuple[int, int], threads: int, *arguments: Argument) -> None:
        assert all(1 <= extent <= 65535 for extent in grid)
        values: list[Any] = [kernel_argument(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        getattr(self._library, f"emu_{kernel}")((ctypes.c_uint * 2)(*grid), ctypes.c_uint(threads), pointers)
        self.log.append(kernel)

    def copy(self, pieces: Sequence[tuple[int, Array]], after: object) -> object:
        for address, array in pieces:
            self.write(address, array)
        self.log.append("copy")
        return object()

    def pin(self, array: Array) -> bool:
        return self.pins

    def mark(self) -> object:
        return object()

    def wait(self, copied: object) -> None:
        assert copied is not None

    def finish(self, mark: object) -> None:
        assert mark is not None

    def synchronize(self) -> None:
        self.log.append("synchronize")
