"""A card whose streams run as late and as far ahead of each other as their events allow."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.cuda_driver import Argument, Array, CudaCard


class ReorderedCard(CudaCard):
    """Keeps what is enqueued until somebody waits for it, then runs it one by one: of the streams that no event holds
    up, the one that comes first in `order`. A dependency that only the emulation's order of calls kept then changes
    the results. Streams are "first", "second" and "copies"."""

    def __init__(self, ptx: Path, order: Sequence[str]) -> None:
        super().__init__(ptx)
        self._queues: dict[str, deque[Callable[[], bool]]] = {stream: deque() for stream in order}
        self._passed: set[object] = set()

    def read_later(self, array: Array, address: int, *, beside: bool = False) -> None:
        later = super().read_later
        self._enqueue(_side(beside), lambda: later(array, address))

    def launch(
        self, kernel: str, grid: tuple[int, int], threads: int, *arguments: Argument, beside: bool = False
    ) -> None:
        launch = super().launch
        self._enqueue(_side(beside), lambda: launch(kernel, grid, threads, *arguments))

    def clear(self, address: int, nbytes: int) -> None:
        clear = super().clear
        self._enqueue("first", lambda: clear(address, nbytes))

    def copy(self, pieces: Sequence[tuple[int, Array]], after: object) -> object:
        copy = super().copy
        if after is not None:
            self._hold("copies", after)
        self._enqueue("copies", lambda: copy(pieces, None))
        return self._event("copies")

    def branch(self) -> None:
        self._hold("second", self._event("first"))

    def merge(self) -> None:
        self._hold("first", self._event("second"))

    def mark(self) -> object:
        return self._event("first")

    def wait(self, copied: object) -> None:
        self._hold("first", copied)

    def finish(self, mark: object) -> None:
        while mark not in self._passed:
            self._step()

    def write(self, address: int, array: Array) -> None:
        self.finish(self._event("first"))
        super().write(address, array)

    def read(self, array: Array, address: int) -> None:
        self.read_later(array, address)
        self.finish(self._event("first"))

    def synchronize(self) -> None:
        while any(self._queues.values()):
            self._step()
        super().synchronize()

    def _enqueue(self, stream: str, work: Callable[[], object]) -> None:
        def run() -> bool:
            work()
            return True

        self._queues[stream].append(run)

    def _event(self, stream: str) -> object:
        event = object()
        self._enqueue(stream, lambda: self._passed.add(event))
        return event

    def _hold(self, stream: str, event: object) -> None:
        self._queues[stream].append(lambda: event in self._passed)

    def _step(self) -> None:
        """Run what stands first in the first stream that can go on."""
        for queue in self._queues.values():
            if queue and queue[0]():
                queue.popleft()
                return
        raise AssertionError("every stream waits for another")


def _side(beside: bool) -> str:
    return "second" if beside else "first"
