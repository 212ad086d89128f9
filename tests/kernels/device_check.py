"""Runs the committed PTX on a CUDA card: every kernel against float64, with timings.

    python tests/kernels/device_check.py [--build sm_80] [--small-only] [--only NAME] [--repeat N]

Needs Python 3.11+, NumPy and an NVIDIA driver; no toolkit, no installed project. The very bytes of cuda_src/ptx are
loaded through the driver API, whose compiler is the last link of the chain for any card newer than Fermi. Prints one
line per check and exits with 1 if a deviation exceeds its bound.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "cuda"))
from cuda_cases import REAL, SMALL, SPLIT_BOUNDS, Case, Check  # noqa: E402

PTX = ROOT / "cuda_src" / "ptx"

ERROR_LOG_BUFFER, ERROR_LOG_BYTES = 5, 6  # CUjit_option
COMPUTE_MAJOR, COMPUTE_MINOR = 75, 76  # CUdevice_attribute


class Driver:
    """The few driver-API calls this script needs; every failure raises RuntimeError with the driver's name for it."""

    def __init__(self) -> None:
        self._lib = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", ctypes.c_uint(0))
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        name = ctypes.create_string_buffer(100)
        self.call("cuDeviceGetName", name, ctypes.c_int(100), device)
        capability = [ctypes.c_int(), ctypes.c_int()]
        for value, attribute in zip(capability, (COMPUTE_MAJOR, COMPUTE_MINOR), strict=True):
            self.call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(attribute), device)
        version = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(version))
        self.description = (
            f"{name.value.decode()}, compute {capability[0].value}.{capability[1].value}, "
            f"driver API {version.value // 1000}.{version.value % 1000 // 10}"
        )

    def call(self, function: str, *arguments: object) -> None:
        status = getattr(self._lib, function)(*arguments)
        if status:
            name = ctypes.c_char_p()
            self._lib.cuGetErrorName(ctypes.c_int(status), ctypes.byref(name))
            raise RuntimeError(f"{function}: {name.value.decode() if name.value else status}")

    def load(self, ptx: bytes, name: str) -> ctypes.c_void_p:
        module, log = ctypes.c_void_p(), ctypes.create_string_buffer(8192)
        options = (ctypes.c_int * 2)(ERROR_LOG_BUFFER, ERROR_LOG_BYTES)
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), 8192)
        try:
            self.call(
                "cuModuleLoadDataEx", ctypes.byref(module), ctypes.c_char_p(ptx), ctypes.c_uint(2), options, values
            )
        except RuntimeError as error:
            raise RuntimeError(f"{name}: {error}: {log.value.decode(errors='replace')}") from error
        return module


class CardBuffer:
    """Device memory that is freed with its last reference."""

    def __init__(self, driver: Driver, array: NDArray[Any]) -> None:
        self._driver, self.dtype, self.shape = driver, array.dtype, array.shape
        self.handle = ctypes.c_uint64()
        driver.call("cuMemAlloc_v2", ctypes.byref(self.handle), ctypes.c_size_t(max(array.nbytes, 1)))
        contiguous = np.ascontiguousarray(array)
        driver.call(
            "cuMemcpyHtoD_v2", self.handle, contiguous.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(array.nbytes)
        )

    @property
    def address(self) -> int:
        return self.handle.value

    def read(self) -> NDArray[Any]:
        array = np.empty(self.shape, self.dtype)
        target = array.ctypes.data_as(ctypes.c_void_p)
        self._driver.call("cuMemcpyDtoH_v2", target, self.handle, ctypes.c_size_t(array.nbytes))
        return array

    def __del__(self) -> None:
        self._driver._lib.cuMemFree_v2(self.handle)


class Card:
    """The ``Device`` of the cases: launches from the committed PTX, and repeats launches for timing."""

    def __init__(self, driver: Driver, modules: list[Path]) -> None:
        self._driver = driver
        self._functions: dict[str, ctypes.c_void_p] = {}
        self.launches: list[tuple[str, tuple[int, int], int, tuple[object, ...]]] = []
        self._buffers: list[CardBuffer] = []  # launches hold addresses of buffers that are no arguments (KV pages)
        for path in modules:
            text = path.read_bytes()
            module = driver.load(text, path.name)
            for line in text.decode().splitlines():
                if ".entry " in line:
                    name = line.split(".entry ")[1].split("(")[0].strip()
                    function = ctypes.c_void_p()
                    driver.call("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(name.encode()))
                    self._functions[name] = function

    def upload(self, array: NDArray[Any]) -> CardBuffer:
        self._buffers.append(CardBuffer(self._driver, array))
        return self._buffers[-1]

    def forget(self) -> None:
        """Drops the launches so far and frees every buffer."""
        self.launches.clear()
        self._buffers.clear()

    def download(self, buffer: CardBuffer) -> NDArray[Any]:
        return buffer.read()

    def launch(self, kernel: str, grid: tuple[int, int], threads: int, *arguments: object) -> None:
        self.launches.append((kernel, grid, threads, arguments))
        self._enqueue(kernel, grid, threads, arguments)
        self._driver.call("cuCtxSynchronize")

    def _enqueue(self, kernel: str, grid: tuple[int, int], threads: int, arguments: tuple[object, ...]) -> None:
        values: list[Any] = []
        for argument in arguments:
            if isinstance(argument, CardBuffer):
                values.append(argument.handle)
            else:
                values.append(ctypes.c_uint64(0) if argument is None else argument)
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        extent = [ctypes.c_uint(n) for n in (*grid, 1, threads, 1, 1, 0)]
        self._driver.call("cuLaunchKernel", self._functions[kernel], *extent, None, pointers, None)

    def seconds(self, launch: tuple[str, tuple[int, int], int, tuple[object, ...]], repeat: int) -> float:
        """Mean time of one launch over ``repeat``, after one that warms up."""
        start, stop = ctypes.c_void_p(), ctypes.c_void_p()
        for event in (start, stop):
            self._driver.call("cuEventCreate", ctypes.byref(event), ctypes.c_uint(0))
        self._enqueue(*launch)
        self._driver.call("cuEventRecord", start, None)
        for _ in range(repeat):
            self._enqueue(*launch)
        self._driver.call("cuEventRecord", stop, None)
        self._driver.call("cuEventSynchronize", stop)
        elapsed = ctypes.c_float()
        self._driver.call("cuEventElapsedTime", ctypes.byref(elapsed), start, stop)
        return elapsed.value / 1e3 / repeat


def report(case: Case, checks: list[Check], times: dict[str, list[float]], bounds: float) -> int:
    """Prints one line per check, with the rate of its launch where the case states its work; returns the failures: what
    deviates by more than `bounds` times its bound."""
    failures = 0
    for check in checks:
        failed = not check.error <= bounds
        failures += failed
        line = f"{case.name:38s} {check.kernel:22s} err/bound {check.error:9.3g}  rel {check.relative:8.2e}"
        if (check.flops or check.traffic) and times.get(check.kernel):
            seconds = times[check.kernel].pop(0)
            line += f"  {seconds * 1e6:9.1f} us"
            if check.flops:
                line += f"  {check.flops / seconds / 1e9:8.0f} GFLOP/s"
            if check.traffic:
                line += f"  {check.traffic / seconds / 1e9:7.0f} GB/s"
        print(line + ("  FAILED" if failed else ""), flush=True)
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="sm_20", help="forms for these cards, where there are any")
    parser.add_argument("--small-only", action="store_true", help="leave out the shapes of the 35B model")
    parser.add_argument("--only", default="", help="run only cases whose name contains this")
    parser.add_argument("--repeat", type=int, default=10, help="launches per timing (0: none)")
    options = parser.parse_args()
    begin = time.monotonic()
    driver = Driver()
    print(driver.description)
    modules = {path.name: path for path in PTX.glob("*.ptx")}
    modules |= {path.name: path for path in (PTX / options.build).glob("*.ptx")}
    card = Card(driver, [modules[name] for name in sorted(modules)])
    bounds = 1.0 if options.build == "sm_20" else SPLIT_BOUNDS
    print(f"{len(card._functions)} kernels loaded in {time.monotonic() - begin:.1f} s", flush=True)
    failures = checked = 0
    for case in (*SMALL, *(() if options.small_only else REAL)):
        if options.only not in case.name:
            continue
        card.forget()
        checks = list(case.run(card, np.random.default_rng(1)))
        times: dict[str, list[float]] = {}
        if options.repeat and case in REAL:
            for launch in card.launches:
                times.setdefault(launch[0], []).append(card.seconds(launch, options.repeat))
        failures += report(case, checks, times, bounds)
        checked += len(checks)
    card.forget()
    print(f"{checked} checks, {failures} failed, {time.monotonic() - begin:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
