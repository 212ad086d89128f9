"""Comparing with another engine: in turns, medians of ratios, and sentences when the other one is not there.

The other engine here is a module written by the test: it has the functions that the worker calls.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine import bench, peer
from engine.config import EngineConfig
from engine.errors import ConfigError, KernelError, OutOfMemory
from engine.peer import PEERS, Comparison, PeerProcess, Side, compare
from server.config import DEMO_CHECKPOINT

FAKE = """
import os, sys

class Parameters: pass

class Batch:
    def __init__(self, size):
        self.token, self.pos, self.n_seq_id, self.logits = [0] * size, [0] * size, [0] * size, [0] * size
        self.seq_id = [[0] for _ in range(size)]

print("noise on standard output")

def llama_backend_init(): pass
def llama_model_default_params(): return Parameters()
def llama_context_default_params(): return Parameters()
def llama_model_load_from_file(path, parameters): return os.path.exists(path)
def llama_init_from_model(model, parameters): return 1
def llama_batch_init(size, embeddings, sequences): return Batch(size)
def llama_get_memory(context): return 1
def llama_memory_clear(memory, data): pass
def llama_get_logits_ith(context, row): return [0.0]
def llama_decode(context, batch):
    if max(batch.pos[:batch.n_tokens]) > 2000:
        print("out of cells", file=sys.stderr)
        return 1
    return 0
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GGUF file (empty) and a Python path on which llama_cpp is ours."""
    (tmp_path / "llama_cpp.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    path = tmp_path / "model.gguf"
    path.touch()
    return path


def run(gguf: Path, python: str = sys.executable, name: str = "llama.cpp") -> Comparison:
    return compare(
        DEMO_CHECKPOINT,
        EngineConfig(threads=1),
        peer=name,
        python=python,
        gguf=gguf,
        context=20,
        tokens=4,
        prefill_tokens=70,
        rounds=2,
        report=lambda text: None,
        progress=lambda done, total: None,
    )


def test_both_sides_have_a_figure_of_each_round(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoProbe:
        def __init__(self, *arguments: object) -> None:
            raise OutOfMemory("not here")

    monkeypatch.setattr(bench, "BandwidthProbe", NoProbe)
    values = run(fake).as_json()
    assert values.keys() >= {"decode_ratio", "prefill_ratio", "tokens_per_s", "gb_per_s", "bandwidth_share", "tier"}
    assert values["threads"] == 1
    for side in ("ours", "theirs"):
        assert {len(values[side][kind]) for kind in ("decode", "prefill")} == {2}
        assert min(values[side]["decode"] + values[side]["prefill"]) > 0


def test_ratios_are_medians_of_rounds() -> None:
    comparison = Comparison(
        "llama.cpp", "avx2", 2, 128, 512, Side((10, 30, 20), (100, 100, 100)), Side((5, 10, 20), (50, 40, 25)), 1.0, 0.5
    )
    assert comparison.decode_ratio == 2.0
    assert comparison.prefill_ratio == 2.5
    assert "2.50" in comparison.as_text()


def test_an_unknown_peer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'nobody' is not one of llama.cpp, ik_llama.cpp"):
        run(tmp_path / "x.gguf", name="nobody")


def test_a_missing_package_is_told_with_the_command_that_builds_it(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    python.chmod(0o755)
    with pytest.raises(ConfigError, match=r"ik_llama_cpp.*GGML_NATIVE=ON.*--no-binary ik-llama-cpp-python"):
        run(tmp_path / "x.gguf", python=str(python), name="ik_llama.cpp")
    with pytest.raises(ConfigError, match="No such file"):
        run(tmp_path / "x.gguf", python=str(tmp_path / "nothing"))
    assert not (tmp_path / "x.gguf").exists()


def test_a_peer_that_fails_says_why(fake: Path) -> None:
    with PeerProcess(PEERS["llama.cpp"], sys.executable, fake, 1, 4096) as process:
        assert len(process.ask({"kind": "decode", "context": 4, "tokens": 3})) == 3
        with pytest.raises(KernelError, match=r"llama.cpp ended with exit code 1: .*out of cells; .*position 1536"):
            process.ask({"kind": "prefill", "tokens": 4000})
    with pytest.raises(KernelError, match="cannot load"):
        PeerProcess(PEERS["llama.cpp"], sys.executable, fake.with_name("other.gguf"), 1, 4096)


def test_the_worker_needs_nothing_of_ours(fake: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-S", str(Path(peer.__file__).with_name("peer_worker.py")), "llama_cpp", str(fake), "1", "64"],
        input='{"kind": "prefill", "tokens": 40}\n',
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd="/",
    )
    assert [json.loads(line).keys() for line in done.stdout.splitlines()] == [{"loaded"}, {"seconds"}]
