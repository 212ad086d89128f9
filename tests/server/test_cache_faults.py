"""Everything that can happen to the prefix cache's directory under a real server: answers stay right, service stays up.

Answers are asked for exactly and with log-probabilities, and compared with those of a server without a cache. The quick
tests are a slice of the exhaustive ones (`make test-exhaustive`): 200 kills, every field of every header, every MiB.
"""

from __future__ import annotations

import errno
import http.client
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from served import wait_until_ready
from test_cache_serving import DOCUMENT, RULES, Client, cached, serving, wait_for

from prefix_cache import format as layout
from prefix_cache.files import Files

# Settings that leave the system's own disk alone and make writes early: a small memory is short of room at once.
SETTINGS = {"cache_ram": "24M", "cache_disk": "512M"}
EXACT: dict[str, Any] = {"cache_exact": True, "logprobs": True, "top_logprobs": 3, "max_tokens": 4}


def question(number: int) -> list[tuple[str, str]]:
    """Conversation `number` of a family that shares beginnings of several lengths."""
    paragraph = DOCUMENT[(number % 5) * 700 :][:1200]
    return [("system", RULES), ("user", f"{paragraph}\n\nWhat of line {number}?")]


class Oracle:
    """What a server without a cache answers; asked once per conversation."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._known: dict[int, Any] = {}

    def choices(self, number: int) -> Any:
        if number not in self._known:
            fields = {**EXACT, "cache": {"read": False, "write": False}}
            self._known[number] = self._client.chat(*question(number), **fields)["choices"]
        return self._known[number]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracle]:
    with serving(tmp_path_factory.mktemp("none"), no_cache=True) as client:
        yield Oracle(client)


def ask(client: Client, oracle: Oracle, number: int) -> Any:
    """Ask conversation `number`; the answer must be right."""
    answer = client.chat(*question(number), **EXACT)
    assert answer["choices"] == oracle.choices(number)
    return answer


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, oracle: Oracle) -> Path:
    """A directory with the snapshots of conversation 0, as a server leaves it when it ends."""
    directory = tmp_path_factory.mktemp("written")
    with serving(directory, **SETTINGS) as client:
        ask(client, oracle, 0)
    assert len(files_of(directory)) >= 3
    return directory


def files_of(directory: Path) -> list[Path]:
    """The files that hold snapshots and pages, largest first."""
    found = [path for path in directory.rglob("*") if path.suffix in (".kv", ".snap")]
    return sorted(found, key=lambda path: (-path.stat().st_size, path.name))


def copied(written: Path, place: Path) -> Path:
    return Path(shutil.copytree(written, place))


# ---- damage ----


def fields_of(layout_: struct.Struct, start: int) -> list[int]:
    """Where the fields of a record begin."""
    sizes = [struct.calcsize("<" + code) for code in _codes(layout_.format)]
    return [start + sum(sizes[:index]) for index in range(len(sizes))]


def _codes(text: str) -> list[str]:
    codes, digits = [], ""
    for character in text.lstrip("<"):
        if character.isdigit():
            digits += character
        elif character in "sx":
            codes, digits = [*codes, digits + character], ""
        else:
            codes, digits = [*codes, *[character] * int(digits or 1)], ""
    return codes


def places(path: Path) -> list[int]:
    """One byte in every field of the header, in what follows it, and in every MiB of the payload."""
    data = path.read_bytes()
    is_pack = path.suffix == ".kv"
    body = layout.body_length(data, layout.PACK_MAGIC if is_pack else layout.SNAPSHOT_MAGIC, len(data))
    record = layout._PACK if is_pack else layout._SNAPSHOT
    found = [*fields_of(layout._PREFIX, 0), *fields_of(record, layout.PREFIX_BYTES)]
    if is_pack:
        found += fields_of(layout._PACK_PAGE, layout.PREFIX_BYTES + record.size)
    end = layout.PREFIX_BYTES + body
    found += [end - 1, end]  # the last of the checksums or keys, the first of the stored ids
    found += range(layout.ALIGN, len(data), 1 << 20)
    return sorted({*found, len(data) - 1})


def test_every_field_is_a_place(written: Path) -> None:
    for path in files_of(written):
        offsets = places(path)
        assert len(offsets) >= 20
        assert max(offsets) == path.stat().st_size - 1


def check_flip(written: Path, place: Path, name: str, at: int, oracle: Oracle) -> None:
    directory = copied(written, place)
    path = next(path for path in files_of(directory) if path.name == name)
    data = bytearray(path.read_bytes())
    data[at] ^= 0x20
    path.write_bytes(data)
    with serving(directory, **SETTINGS) as client:
        report = ask(client, oracle, 0)["fermion"]["cache"]
        damage = client.metric("fermion_cache_disk_corrupt_total") + client.metric(
            "fermion_cache_disk_old_version_removed_total"
        )
        # Either the damage was seen, or another snapshot was chosen, or the byte is one that nothing depends on.
        if report["recomputed"] > 64:
            assert damage >= 1
        if report["hit_position"] == 0:
            assert report["miss_reason"] is not None
        ask(client, oracle, 1)
        assert cached(ask(client, oracle, 0)) > 0
    shutil.rmtree(directory)


@pytest.mark.parametrize("suffix", [".kv", ".snap"])
def test_a_flipped_bit(written: Path, tmp_path: Path, oracle: Oracle, suffix: str) -> None:
    path = next(path for path in files_of(written) if path.suffix == suffix)
    offsets = places(path)
    for at in (offsets[1], offsets[len(offsets) // 2], offsets[-1]):
        check_flip(written, tmp_path / "copy", path.name, at, oracle)


@pytest.mark.exhaustive
def test_every_field_and_every_mebibyte_flipped(written: Path, tmp_path: Path, oracle: Oracle) -> None:
    for path in files_of(written):
        for at in places(path):
            check_flip(written, tmp_path / "copy", path.name, at, oracle)


@pytest.mark.parametrize("keep", [0, 40, 4096, -1])
def test_files_cut_off(written: Path, tmp_path: Path, oracle: Oracle, keep: int) -> None:
    directory = copied(written, tmp_path / "copy")
    for path in files_of(directory):
        path.write_bytes(path.read_bytes()[:keep])
    with serving(directory, **SETTINGS) as client:
        report = ask(client, oracle, 0)["fermion"]["cache"]
        assert (report["hit_position"], report["miss_reason"]) == (0, "cold")
        assert client.metric("fermion_cache_disk_corrupt_total") >= 1
        assert cached(ask(client, oracle, 0)) > 0


def test_files_cut_off_under_the_running_server(written: Path, tmp_path: Path, oracle: Oracle) -> None:
    directory = copied(written, tmp_path / "copy")
    with serving(directory, **SETTINGS) as client:
        for path in files_of(directory):
            os.truncate(path, path.stat().st_size // 2)
        report = ask(client, oracle, 0)["fermion"]["cache"]
        assert (report["hit_position"], report["miss_reason"]) == (0, "corrupt")
        assert cached(ask(client, oracle, 0)) > 0


def test_files_of_an_older_format(written: Path, tmp_path: Path, oracle: Oracle) -> None:
    directory = copied(written, tmp_path / "copy")
    for path in files_of(directory):
        data = bytearray(path.read_bytes())
        data[8:12] = (layout.FORMAT_VERSION - 1).to_bytes(4, "little")
        path.write_bytes(data)
    old = {path.name for path in files_of(directory)}
    with serving(directory, **SETTINGS) as client:
        assert client.metric("fermion_cache_disk_old_version_removed_total") == len(old)
        report = ask(client, oracle, 0)["fermion"]["cache"]
        assert (report["hit_position"], report["miss_reason"]) == (0, "cold")
    assert not old & {path.name for path in files_of(directory)}


# ---- a disk that fails ----


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, method: str, code: int) -> Iterator[list[int]]:
    """While the block runs, `method` of the file layer fails; the list grows with every failure."""
    seen: list[int] = []

    def fail(*arguments: object) -> None:
        seen.append(code)
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(Files, method, fail)
        yield seen


@pytest.mark.parametrize(
    ("method", "code"),
    [
        ("write_all", errno.ENOSPC),
        ("write_all", errno.EIO),
        ("create", errno.EROFS),
        ("rename", errno.EACCES),
        ("free_bytes", errno.EIO),
    ],
)
def test_a_disk_that_takes_nothing(
    tmp_path: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, method: str, code: int
) -> None:
    with serving(tmp_path, **SETTINGS) as client:
        with failing(monkeypatch, method, code) as seen:
            for number in range(4):
                ask(client, oracle, number)
            wait_for(lambda: seen)
            assert cached(ask(client, oracle, 0)) > 0
        assert client.metric("fermion_cache_disk_errors_total") >= 1
        assert client.metric("fermion_cache_disk_writable") == 0
        # Nothing is tried again, and memory still serves.
        ask(client, oracle, 5)
        assert cached(ask(client, oracle, 5)) > 0
    assert files_of(tmp_path) == []


@pytest.mark.parametrize("method", ["open_read", "read", "read_into"])
def test_a_disk_that_gives_nothing(
    written: Path, tmp_path: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    directory = copied(written, tmp_path / "copy")
    with serving(directory, **SETTINGS) as client:
        with failing(monkeypatch, method, errno.EIO) as seen:
            report = ask(client, oracle, 0)["fermion"]["cache"]
            assert (report["hit_position"], report["miss_reason"]) == (0, "disk_error")
            assert len(seen) == 1
        assert client.metric("fermion_cache_disk_readable") == 0
        assert cached(ask(client, oracle, 0)) > 0


@pytest.mark.parametrize(("method", "code"), [("make_directory", errno.EROFS), ("try_lock", errno.EACCES)])
def test_a_directory_that_cannot_be_written(
    written: Path, tmp_path: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, method: str, code: int
) -> None:
    directory = copied(written, tmp_path / "copy")
    before = {path.name: path.read_bytes() for path in files_of(directory)}
    with failing(monkeypatch, method, code) as seen, serving(directory, **SETTINGS) as client:
        assert seen
        report = ask(client, oracle, 0)["fermion"]["cache"]
        # Where only writing fails, what is there is still read.
        assert (report["hit_position"] > 0) == (method == "try_lock")
        ask(client, oracle, 1)
        assert client.metric("fermion_cache_disk_writable") == 0
    assert {path.name: path.read_bytes() for path in files_of(directory)} == before


def test_two_servers_on_one_directory(written: Path, tmp_path: Path, oracle: Oracle) -> None:
    directory = copied(written, tmp_path / "copy")
    with serving(directory, **SETTINGS) as first, serving(directory, **SETTINGS) as second:
        assert first.metric("fermion_cache_disk_writable") + second.metric("fermion_cache_disk_writable") == 1
        for number in range(3):
            assert (cached(ask(second, oracle, number)) > 0) or number
            ask(first, oracle, number)
        # The writer drops everything under the reader's feet.
        first.call("DELETE", "/v1/cache")
        for number in range(3):
            ask(second, oracle, number)
        ask(first, oracle, 0)


# ---- kills ----


class Victim:
    """A server in a process of its own that can be killed."""

    def __init__(self, directory: Path) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the process
        settings = {name.upper(): str(value) for name, value in SETTINGS.items()}
        environment = {**os.environ, **{f"FERMION_{name}": value for name, value in settings.items()}}
        environment |= {"FERMION_CACHE_DIR": str(directory), "FERMION_PORT": "0", "FERMION_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "server", "serve"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self.client = Client(wait_until_ready(self._process, self._log.fileno(), time.monotonic() + 120))

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._log.close()


def under_load(
    client: Client, rng: random.Random, conversations: int, answers: list[tuple[int, Any]]
) -> Callable[[], None]:
    """Start clients that ask until the server is gone; the result waits for them."""

    def run(seed: int) -> None:
        own = random.Random(seed)
        while True:
            number = own.randrange(conversations)
            try:
                answers.append((number, client.chat(*question(number), **EXACT)))
            except (http.client.HTTPException, OSError, ValueError):
                return  # also when the answer was cut off in its middle

    threads = [threading.Thread(target=run, args=(rng.random(),), daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()

    def wait() -> None:
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()

    return wait


def _has(answers: list[tuple[int, Any]], count: int) -> bool:
    return len(answers) >= count


def check_kills(directory: Path, oracle: Oracle, count: int, conversations: int) -> None:
    """Kill a server under load `count` times. What clients were told before is right, and so is what comes after."""
    rng = random.Random(count)
    right = 0
    tiers: set[str | None] = set()
    for kill in range(count):
        victim = Victim(directory)
        answers: list[tuple[int, Any]] = []
        try:
            # Whatever the last one left behind is whole.
            assert victim.client.metric("fermion_cache_disk_corrupt_total") == 0
            wait = under_load(victim.client, rng, conversations, answers)
            wait_for(partial(_has, answers, rng.randint(1, 6)))
            if kill == 0:
                # Snapshots are a second old before they are written; later kills come at any moment.
                wait_for(lambda: any(path.suffix == ".snap" for path in files_of(directory)))
            time.sleep(rng.uniform(0.0, 0.3))
        finally:
            victim.kill()
        wait()
        for number, answer in answers:
            assert answer["choices"] == oracle.choices(number)
            tiers.add(answer["fermion"]["cache"]["tier"])
            right += 1
    assert right >= count
    with serving(directory, **SETTINGS) as client:
        assert client.metric("fermion_cache_disk_corrupt_total") == 0
        for number in range(conversations):
            report = ask(client, oracle, number)["fermion"]["cache"]
            tiers.add(report["tier"])
    assert "disk" in tiers, "nothing survived the kills"


@pytest.mark.slow
def test_killed_under_load(tmp_path: Path, oracle: Oracle) -> None:
    check_kills(tmp_path, oracle, 2, conversations=4)


@pytest.mark.exhaustive
def test_killed_under_load_200_times(tmp_path: Path, oracle: Oracle) -> None:
    check_kills(tmp_path, oracle, 200, conversations=40)


def test_answers_are_compared_in_all_bits(oracle: Oracle) -> None:
    """The comparison of these tests can fail: another question has another answer, to the last digit."""
    first, second = oracle.choices(0), oracle.choices(1)
    assert first != second
    assert len(json.dumps(first)) > 500
    assert first[0]["logprobs"]["content"]
