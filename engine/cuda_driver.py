"""One CUDA card through the driver API: memory, kernels from PTX, two streams that compute and one that copies.

Only libcuda.so.1 is needed, from driver 390 (the last for Fermi cards) on; its compiler turns the PTX into machine code
at load and keeps the result in ~/.nv. Every failure is a KernelError that names the call; after one, the context is
suspect and the process should end. Knows nothing of models.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy.typing as npt

from engine.errors import KernelError, OutOfMemory

Array = npt.NDArray[Any]
Argument: TypeAlias = "int | float | ctypes._SimpleCData[Any] | None"

_LIBRARY = "libcuda.so.1"
_OUT_OF_MEMORY = 2  # CUresult
_ALREADY_REGISTERED = 712
_ERROR_LOG_BUFFER, _ERROR_LOG_BYTES = 5, 6  # CUjit_option
_COMPUTE_MAJOR, _COMPUTE_MINOR = 75, 76  # CUdevice_attribute
_EVENT_WITHOUT_TIMING, _STREAM_NON_BLOCKING = 2, 1
_HOST_REGISTER_READ_ONLY = 8


class Card(Protocol):
    """What prefill needs of a card. Addresses are plain numbers; launches, writes and reads happen in order, copies
    beside them, and so do launches and reads that say `beside`: in order among themselves, from `branch` to `merge`,
    and less urgent."""

    @property
    def name(self) -> str:
        """For logs."""

    def free_bytes(self) -> int:
        """Memory that `allocate` could still give."""

    def allocate(self, nbytes: int) -> int:
        """Address of new memory, a multiple of 256. OutOfMemory."""

    def write(self, address: int, array: Array) -> None:
        """Copy a C-contiguous array in; it may be changed on return."""

    def clear(self, address: int, nbytes: int) -> None:
        """Fill with zeros, ordered with launches."""

    def read(self, array: Array, address: int) -> None:
        """Fill a C-contiguous array, after everything launched so far."""

    def read_later(self, array: Array, address: int, *, beside: bool = False) -> None:
        """Enqueue a read, ordered with launches; the array is filled when a later `read` or `finish` returns."""

    def launch(
        self, kernel: str, grid: tuple[int, int], threads: int, *arguments: Argument, beside: bool = False
    ) -> None:
        """Enqueue a kernel. int arguments are addresses (64 bits); scalars come as ctypes values, null as None."""

    def branch(self) -> None:
        """What is enqueued beside from here on comes behind everything launched so far."""

    def merge(self) -> None:
        """What is launched from here on comes behind everything enqueued beside so far."""

    def copy(self, pieces: Sequence[tuple[int, Array]], after: object) -> object:
        """Copy arrays in beside the computation, once `after` (of `mark`, or None) has passed. Returns what `wait`
        takes. The arrays must stay as they are until then."""

    def pin(self, array: Array, *, written: bool = False) -> bool:
        """Page-lock an array, so that copies of it run beside the computation; False if the system refuses. written:
        the card will copy into it."""

    def mark(self) -> object:
        """A point in the computation, behind everything launched so far."""

    def wait(self, copied: object) -> None:
        """Let launches from here on wait for a copy."""

    def finish(self, mark: object) -> None:
        """Return when the computation has passed a mark."""

    def synchronize(self) -> None:
        """Return when nothing is running or copied any more."""

    def close(self) -> None:
        """Give back all memory, after an error too. Idempotent."""


class CudaCard:
    """A card behind libcuda. The thread that made it must be the one that uses it."""

    def __init__(self, ptx: Path, device: int = 0, *, newest: int = 1000) -> None:
        """Load all kernels of the modules in the directory `ptx`, each in the form for the newest cards that this one
        can run: a folder `sm_80` holds forms for compute capability 8.0 on. newest: disregard forms for later ones.
        KernelError if there is no driver, no such device, or if it refuses the PTX."""
        try:
            self._lib = ctypes.CDLL(_LIBRARY)
        except OSError as error:
            raise KernelError(f"no NVIDIA driver: {error}") from error
        self._call("cuInit", ctypes.c_uint(0))
        handle, count = ctypes.c_int(), ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        if device >= count.value:
            raise KernelError(f"there is no CUDA device {device}: the driver sees {count.value}")
        self._call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(device))
        self._device, self._context = handle, ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), handle)
        self._functions: dict[str, ctypes.c_void_p] = {}
        self._events: list[ctypes.c_void_p] = []
        self._registered: list[int] = []
        self._compute, self._second, self._copies, self._crossing = (ctypes.c_void_p() for _ in range(4))
        try:
            self._call("cuCtxSetCurrent", self._context)
            self._name = self._describe(handle)
            flags = ctypes.c_uint(_STREAM_NON_BLOCKING)
            for stream, priority in ((self._compute, -1), (self._second, 0), (self._copies, -1)):
                # A card that knows no priorities, such as Fermi's, takes each as 0.
                self._call("cuStreamCreateWithPriority", ctypes.byref(stream), flags, ctypes.c_int(priority))
            self._call("cuEventCreate", ctypes.byref(self._crossing), ctypes.c_uint(_EVENT_WITHOUT_TIMING))
            own = min(newest, 10 * self.capability[0] + self.capability[1])
            self._modules = [self._load(path) for path in modules_for(ptx, own)]
        except BaseException:
            self.close()
            raise

    @property
    def name(self) -> str:
        """Model, compute capability and driver."""
        return self._name

    def close(self) -> None:
        """Release the context with all memory in it; it may be broken. Idempotent."""
        if self._context:
            for stream in (self._compute, self._second, self._copies):  # copies into memory of ours may be under way
                if stream:
                    self._lib.cuStreamSynchronize(stream)
            for address in self._registered:
                self._lib.cuMemHostUnregister(ctypes.c_void_p(address))
            self._lib.cuDevicePrimaryCtxRelease(self._device)
            self._context = ctypes.c_void_p()

    def free_bytes(self) -> int:
        """Free memory, as the driver tells it."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def allocate(self, nbytes: int) -> int:
        """Address of new memory. OutOfMemory."""
        address = ctypes.c_uint64()
        status = self._lib.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(max(nbytes, 1)))
        if status == _OUT_OF_MEMORY:
            raise OutOfMemory(f"the card has no {nbytes} bytes in one piece; {self.free_bytes()} are free")
        self._check("cuMemAlloc_v2", status)
        return address.value

    def write(self, address: int, array: Array) -> None:
        """Copy in, ordered with launches."""
        self._in(address, array, self._compute)
        self._call("cuStreamSynchronize", self._compute)

    def clear(self, address: int, nbytes: int) -> None:
        """Enqueue zeros."""
        zero, size = ctypes.c_ubyte(0), ctypes.c_size_t(nbytes)
        self._call("cuMemsetD8Async", ctypes.c_uint64(address), zero, size, self._compute)

    def read(self, array: Array, address: int) -> None:
        """Copy out, behind all launches."""
        self.read_later(array, address)
        self._call("cuStreamSynchronize", self._compute)

    def read_later(self, array: Array, address: int, *, beside: bool = False) -> None:
        """Copy out in order; at once if the array is not page-locked."""
        target, size = ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes)
        stream = self._second if beside else self._compute
        self._call("cuMemcpyDtoHAsync_v2", target, ctypes.c_uint64(address), size, stream)

    def launch(
        self, kernel: str, grid: tuple[int, int], threads: int, *arguments: Argument, beside: bool = False
    ) -> None:
        """Enqueue a kernel."""
        values = [kernel_argument(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        extent = [ctypes.c_uint(size) for size in (*grid, 1, threads, 1, 1, 0)]
        stream = self._second if beside else self._compute
        self._call("cuLaunchKernel", self._functions[kernel], *extent, stream, pointers, None)

    def branch(self) -> None:
        """The second stream waits for the first."""
        self._cross(self._compute, self._second)

    def merge(self) -> None:
        """The first stream waits for the second."""
        self._cross(self._second, self._compute)

    def copy(self, pieces: Sequence[tuple[int, Array]], after: object) -> object:
        """Enqueue copies on the copy stream."""
        if after is not None:
            self._call("cuStreamWaitEvent", self._copies, after, ctypes.c_uint(0))
        for address, array in pieces:
            self._in(address, array, self._copies)
        return self._record(self._copies)

    def mark(self) -> object:
        """An event on the computing stream."""
        return self._record(self._compute)

    def wait(self, copied: object) -> None:
        """The computing stream waits for the event of a copy."""
        self._call("cuStreamWaitEvent", self._compute, copied, ctypes.c_uint(0))

    def finish(self, mark: object) -> None:
        """Wait for the event of a mark."""
        self._call("cuEventSynchronize", mark)

    def synchronize(self) -> None:
        """All streams are idle on return; events may be used again."""
        for stream in (self._copies, self._second, self._compute):
            self._call("cuStreamSynchronize", stream)
        for event in self._events:
            self._call("cuEventDestroy_v2", event)
        self._events.clear()

    def pin(self, array: Array, *, written: bool = False) -> bool:
        """Page-lock the array where it lies, so that copies of it run at full speed beside the computation. False if
        the system does not allow it (a limit on locked memory, or a driver that cannot lock read-only mappings)."""
        address = ctypes.c_void_p(array.ctypes.data)
        for flags in (0,) if written else (_HOST_REGISTER_READ_ONLY, 0):
            status = self._lib.cuMemHostRegister_v2(address, ctypes.c_size_t(array.nbytes), ctypes.c_uint(flags))
            if status == 0:
                self._registered.append(array.ctypes.data)
            if status in (0, _ALREADY_REGISTERED):
                return True
        return False

    def _in(self, address: int, array: Array, stream: ctypes.c_void_p) -> None:
        source = ctypes.c_void_p(array.ctypes.data)
        self._call("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(address), source, ctypes.c_size_t(array.nbytes), stream)

    def _record(self, stream: ctypes.c_void_p) -> ctypes.c_void_p:
        event = ctypes.c_void_p()
        self._call("cuEventCreate", ctypes.byref(event), ctypes.c_uint(_EVENT_WITHOUT_TIMING))
        self._call("cuEventRecord", event, stream)
        self._events.append(event)
        return event

    def _cross(self, ahead: ctypes.c_void_p, behind: ctypes.c_void_p) -> None:
        """One stream waits for what is in another by now. A wait keeps to the record before it: one event will do."""
        self._call("cuEventRecord", self._crossing, ahead)
        self._call("cuStreamWaitEvent", behind, self._crossing, ctypes.c_uint(0))

    def _load(self, path: Path) -> ctypes.c_void_p:
        text = path.read_bytes()
        module, log = ctypes.c_void_p(), ctypes.create_string_buffer(8192)
        options = (ctypes.c_int * 2)(_ERROR_LOG_BUFFER, _ERROR_LOG_BYTES)
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), len(log))
        status = self._lib.cuModuleLoadDataEx(
            ctypes.byref(module), ctypes.c_char_p(text), ctypes.c_uint(2), options, values
        )
        self._check(f"cuModuleLoadDataEx of {path.name}", status, log.value.decode(errors="replace"))
        for line in text.decode().splitlines():
            if ".entry " in line:
                name = line.partition(".entry ")[2].partition("(")[0].strip()
                function = ctypes.c_void_p()
                self._call("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(name.encode()))
                self._functions[name] = function
        return module

    def _describe(self, device: ctypes.c_int) -> str:
        name = ctypes.create_string_buffer(100)
        self._call("cuDeviceGetName", name, ctypes.c_int(len(name)), device)
        numbers = []
        for attribute in (_COMPUTE_MAJOR, _COMPUTE_MINOR):
            value = ctypes.c_int()
            self._call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(attribute), device)
            numbers.append(value.value)
        self.capability = (numbers[0], numbers[1])
        version = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(version))
        driver = f"{version.value // 1000}.{version.value % 1000 // 10}"
        return f"{name.value.decode()} (compute {numbers[0]}.{numbers[1]}, driver API {driver})"

    def _call(self, function: str, *arguments: object) -> None:
        self._check(function, getattr(self._lib, function)(*arguments))

    def _check(self, call: str, status: int, detail: str = "") -> None:
        if status:
            name = ctypes.c_char_p()
            self._lib.cuGetErrorName(ctypes.c_int(status), ctypes.byref(name))
            text = name.value.decode() if name.value else f"status {status}"
            raise KernelError(f"{call} failed: {text}{': ' + detail if detail else ''}")


def modules_for(ptx: Path, capability: int) -> list[Path]:
    """The PTX files for a card: of each name, the form for the latest capability (80 for 8.0) up to the card's."""
    folders = {int(folder.name.removeprefix("sm_")): folder for folder in ptx.glob("sm_*")}
    chosen = {path.name: path for path in sorted(ptx.glob("*.ptx"))}
    for minimum, folder in sorted(folders.items()):
        if minimum <= capability:
            chosen |= {path.name: path for path in sorted(folder.glob("*.ptx"))}
    return [chosen[name] for name in sorted(chosen)]


def kernel_argument(argument: Argument) -> ctypes._SimpleCData[Any]:
    """The value whose address a launch takes: addresses and null as 64 bits, floats as float32, ctypes values as they
    are."""
    if isinstance(argument, float):
        return ctypes.c_float(argument)
    if argument is None or isinstance(argument, int):
        return ctypes.c_uint64(argument or 0)
    return argument
