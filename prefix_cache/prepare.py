"""The thread that has memory ready before snapshots are copied into it. The arena says what is short."""

from __future__ import annotations

import threading
from collections.abc import Callable

from .arena import Arena, UInt8Array


class Preparer:
    """Keeps an arena's next blocks ready. touch: see `Arena.prepare`; it should let other threads run."""

    def __init__(self, arena: Arena, touch: Callable[[UInt8Array], None]) -> None:
        self._arena, self._touch = arena, touch
        self._stopping = False
        self._wanted = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, if it does not run yet."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._prepare, name="prefix-cache-memory", daemon=True)
            self._thread.start()

    def look(self) -> None:
        """See whether blocks are short. Best called when the interpreter is about to be left alone: the thread needs it
        for a moment."""
        if not self._arena.is_prepared:
            self._wanted.set()

    def stop(self) -> None:
        """End the thread, within a few ms."""
        self._stopping = True
        self._wanted.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _prepare(self) -> None:
        while not self._stopping:
            self._wanted.clear()
            while not self._stopping and self._arena.prepare(self._touch):
                pass
            if not self._stopping:
                self._wanted.wait()
