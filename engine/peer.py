"""`fermion bench peer`: our speed beside that of llama.cpp or its fork ik_llama.cpp, on a model of the same shape.

The two run in turns, round by round, since a shared host's speed moves; each round gives one ratio, and the medians
count. Only one model is loaded at a time: together they would need twice the memory. The other engine runs in a process
of its own (`engine.peer_worker`), under a Python that has its package, which may be another one than ours.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import statistics
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from engine.bench import Report, Speed, measure_decode, measure_prefill
from engine.config import EngineConfig, ModelConfig
from engine.errors import ConfigError, KernelError
from engine.gguf import Progress, write_gguf
from engine.memory import map_file
from engine.placement import choose_threads
from engine.weights import FILE_NAME

_WORKER = Path(__file__).with_name("peer_worker.py")


@dataclass(frozen=True, slots=True)
class PeerPackage:
    """An engine that can be compared with: its name, its Python package, and the module that this installs."""

    name: str
    package: str
    module: str

    def install_command(self, python: str) -> str:
        """How to get it for this processor."""
        return f'CMAKE_ARGS="-DGGML_NATIVE=ON" {python} -m pip install --no-binary {self.package} {self.package}'


PEERS: Mapping[str, PeerPackage] = {
    "llama.cpp": PeerPackage("llama.cpp", "llama-cpp-python", "llama_cpp"),
    "ik_llama.cpp": PeerPackage("ik_llama.cpp", "ik-llama-cpp-python", "ik_llama_cpp"),
}


@dataclass(frozen=True, slots=True)
class Side:
    """One engine's speeds in tokens a second, one of each a round."""

    decode: tuple[float, ...]
    prefill: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """All rounds of both. tier, threads: ours; the peer has as many threads. gb_per_s, bandwidth_share: of our decode,
    medians. Ratios are medians of our speed over the peer's of the same round."""

    peer: str
    tier: str
    threads: int
    context: int
    prefill_tokens: int
    ours: Side
    theirs: Side
    gb_per_s: float
    bandwidth_share: float | None

    @property
    def decode_ratio(self) -> float:
        """How many times as fast we decode."""
        return _median_ratio(self.ours.decode, self.theirs.decode)

    @property
    def prefill_ratio(self) -> float:
        """How many times as fast we read a prompt."""
        return _median_ratio(self.ours.prefill, self.theirs.prefill)

    def as_json(self) -> dict[str, Any]:
        """Everything, rounded; tokens_per_s is our median of decode."""
        values = asdict(self) | {
            "tokens_per_s": statistics.median(self.ours.decode),
            "decode_ratio": self.decode_ratio,
            "prefill_ratio": self.prefill_ratio,
        }
        rounded: dict[str, Any] = json.loads(json.dumps(values), parse_float=lambda text: float(f"{float(text):.4g}"))
        return rounded

    def as_text(self) -> str:
        """For people."""
        lines = [f"{'':<22}{'ours':>8}{self.peer:>14}{'ratio':>8}"]
        for name, ours, theirs, ratio in (
            (f"decode at {self.context}", self.ours.decode, self.theirs.decode, self.decode_ratio),
            (f"prefill of {self.prefill_tokens}", self.ours.prefill, self.theirs.prefill, self.prefill_ratio),
        ):
            lines.append(f"{name:<22}{statistics.median(ours):>8.1f}{statistics.median(theirs):>14.1f}{ratio:>8.2f}")
        return "\n".join([*lines, f"tokens/s, {self.tier}, {self.threads} threads, {len(self.ours.decode)} rounds"])


def compare(
    directory: Path,
    config: EngineConfig,
    *,
    peer: str,
    python: str,
    gguf: Path,
    context: int,
    tokens: int,
    prefill_tokens: int,
    rounds: int,
    report: Report,
    progress: Progress,
) -> Comparison:
    """Measure both in turns. gguf: the peer's model; written first, in the shape of `directory`, if it is not there.

    Raises ConfigError for an unknown peer or one whose package `python` has not; KernelError if it fails.
    """
    if peer not in PEERS:
        raise ConfigError(f"peer {peer!r} is not one of {', '.join(PEERS)}")
    package = PEERS[peer]
    check_installed(package, python)
    if not gguf.exists():
        write_gguf(gguf, ModelConfig.load(directory), seed=0, progress=progress)
    threads = choose_threads(config.threads)[0]
    room = max(context + tokens, prefill_tokens) + 64
    ours: list[tuple[Speed, Speed]] = []
    theirs: list[tuple[float, float]] = []
    for number in range(rounds):
        with PeerProcess(package, python, gguf, threads, room) as process:
            process.ask({"kind": "decode", "context": 16, "tokens": 4})  # touches the memory
            steps = process.ask({"kind": "decode", "context": context, "tokens": tokens})
            whole = process.ask({"kind": "prefill", "tokens": prefill_tokens})
        theirs.append((1.0 / statistics.median(steps), prefill_tokens / whole[0]))
        _make_room(gguf)
        _warm(directory / FILE_NAME, config)
        decode = measure_decode(directory, config, context=context, tokens=tokens, rounds=1, report=_quiet)
        ours.append((decode, measure_prefill(directory, config, tokens=prefill_tokens, rounds=1, report=_quiet)))
        report(
            f"round {number + 1} of {rounds}: decode {decode.tokens_per_s:.1f} and {theirs[-1][0]:.1f} tokens/s, "
            f"prefill {ours[-1][1].tokens_per_s:.1f} and {theirs[-1][1]:.1f}"
        )
    shares = [decode.bandwidth_share for decode, _ in ours if decode.bandwidth_share is not None]
    return Comparison(
        peer=peer,
        tier=ours[0][0].tier,
        threads=threads,
        context=context,
        prefill_tokens=prefill_tokens,
        ours=Side(tuple(d.tokens_per_s for d, _ in ours), tuple(p.tokens_per_s for _, p in ours)),
        theirs=Side(tuple(d for d, _ in theirs), tuple(p for _, p in theirs)),
        gb_per_s=statistics.median(decode.gb_per_s for decode, _ in ours),
        bandwidth_share=statistics.median(shares) if shares else None,
    )


def check_installed(package: PeerPackage, python: str) -> None:
    """ConfigError, with the command that installs it, if `python` cannot import the peer."""
    try:
        done = subprocess.run(
            [python, "-c", f"import {package.module}"], capture_output=True, text=True, timeout=120, check=False
        )
    except OSError as error:
        raise ConfigError(f"{python}: {error.strerror}") from error
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(
            f"{python} cannot import {package.module} ({reason}); {package.name} is not part of this package. To build "
            f"it for this processor: {package.install_command(python)}"
        )


class PeerProcess:
    """A loaded peer; closed at the end of a `with`. KernelError if it stops answering."""

    def __init__(self, package: PeerPackage, python: str, gguf: Path, threads: int, context: int) -> None:
        self._name = package.name
        command = [python, str(_WORKER), package.module, str(gguf), str(threads), str(context)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
        )
        self._log: list[str] = []
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        try:
            self._answer()
        except KernelError:
            self.close()
            raise

    def ask(self, request: Mapping[str, object]) -> Sequence[float]:
        """Seconds, as `engine.peer_worker` answers."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer that does not come says why
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        seconds: list[float] = self._answer()["seconds"]
        return seconds

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let the process end, and wait for it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._reader.join()
        self._process.stdout.close()

    def _read_log(self) -> None:
        """Keep the end of what the engine tells about itself, and its pipe empty."""
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                self._log = [*self._log[-9:], line.strip()]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._reader.join(5)
            last = "; ".join(line for line in self._log[-3:]) or "no message"
            raise KernelError(f"{self._name} ended with exit code {code}: {last}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _make_room(path: Path) -> None:
    """Let the system forget a file: both models do not fit in the memory of a small machine."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _warm(path: Path, config: EngineConfig) -> None:
    """Bring a file back into memory as the engine would have it; the peer's model may have pushed it out."""
    map_file(path, config)[:: mmap.PAGESIZE].sum()


def _median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def _quiet(text: str) -> None:
    pass
