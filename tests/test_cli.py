"""The command line from outside: help, exit codes, one line per error, and no needless imports."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from served import chat, served

from server.config import Settings, flag

FERMION = Path(sys.executable).with_name("fermion")


def fermion(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [FERMION, *arguments],
        env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_help_lists_every_command() -> None:
    result = fermion("--help")
    assert result.returncode == 0
    for command in ("serve", "chat", "info", "bench", "convert", "calibrate", "prune", "evaluate"):
        assert re.search(rf"^\W*{command}\s+\S", result.stdout, re.MULTILINE), command


def test_help_is_quick_because_it_imports_nothing_heavy() -> None:
    result = subprocess.run(
        [sys.executable, "-X", "importtime", FERMION, "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "typer" in imported
    assert not imported & {"numpy", "pydantic", "pydantic_settings", "httpx2", "uvicorn", "starlette", "tokenizers"}


def test_every_setting_is_a_flag_of_serve() -> None:
    text = fermion("serve", "--help").stdout
    for name in set(Settings.model_fields) - {"model"}:
        assert flag(name) in text, name


@pytest.mark.parametrize("command", ["chat", "info", "bench", "cache", "convert", "calibrate", "prune", "evaluate"])
def test_each_command_explains_itself(command: str) -> None:
    result = fermion(command, "--help")
    assert result.returncode == 0
    assert f"Usage: fermion {command}" in result.stdout


@pytest.mark.parametrize("command", ["serve", "info", "bench decode"])
def test_impossible_settings_are_refused_with_both_numbers(command: str) -> None:
    result = fermion(*command.split(), "--threads", "1024")
    assert result.returncode == 2
    assert re.search(r"error: threads is 1024, this process may use \d+ processors", result.stderr)


@pytest.mark.parametrize("command", ["serve", "info"])
def test_a_context_beyond_the_models_is_refused(command: str) -> None:
    result = fermion(command, "--threads", "1", "--context-length", "99999999")
    assert result.returncode == 2
    assert re.search(r"error: context_length is 99999999 tokens, this model has at most \d+", result.stderr)


def test_version() -> None:
    assert fermion("--version").stdout == f"fermion {version('fermion')}\n"


def test_the_package_can_be_run_as_a_module() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "server", "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.startswith("fermion ")


def test_an_unknown_flag_exits_with_2() -> None:
    assert fermion("serve", "--prot", "1").returncode == 2


def test_a_bad_value_exits_with_2_and_one_line() -> None:
    result = fermion("serve", "--port", "99999")
    assert result.returncode == 2
    assert result.stderr == "error: --port 99999: input should be less than or equal to 65535\n"


def test_a_bad_variable_exits_with_2_and_names_it() -> None:
    result = fermion("serve", FERMION_SIMD_TIER="avx9")
    assert result.returncode == 2
    assert result.stderr.startswith("error: FERMION_SIMD_TIER 'avx9': input should be 'auto'")


def test_an_unknown_key_exits_with_2_and_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "f.toml"
    path.write_text("prot = 1\n")
    result = fermion("serve", "--config", str(path))
    assert result.returncode == 2
    assert result.stderr == f"error: settings file {path}: unknown key 'prot'. Did you mean port?\n"


def test_a_directory_without_a_model_exits_with_2(tmp_path: Path) -> None:
    result = fermion("serve", str(tmp_path), "--port", "0")
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {tmp_path}")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("command", ["serve", "info", "chat"])
def test_what_is_no_directory_is_not_looked_for_on_a_hub(command: str, tmp_path: Path) -> None:
    result = fermion(command, "Qwen/Qwen3.6-35B-A3B")
    assert result.returncode == 2
    assert result.stderr.startswith("error: Qwen/Qwen3.6-35B-A3B is not there; expected a checkpoint directory")
    assert "nothing is downloaded" in result.stderr
    (tmp_path / "model.gguf").touch()
    assert "is a file; expected" in fermion(command, str(tmp_path / "model.gguf")).stderr


@pytest.mark.parametrize("end", [signal.SIGHUP, signal.SIGINT])
def test_interrupts_and_closed_terminals_end_the_server_in_order(end: signal.Signals) -> None:
    with served([FERMION, "serve", "--no-cache"], end=end) as url:
        assert chat(url, "Hello!")["choices"]


def test_a_server_and_a_model_exclude_each_other(tmp_path: Path) -> None:
    result = fermion("chat", str(tmp_path), "--url", "http://127.0.0.1:1/v1")
    assert result.returncode == 2
    assert "exclude each other" in result.stderr


def test_an_unreachable_server_exits_with_1() -> None:
    result = fermion("chat", "--url", "http://127.0.0.1:1/v1")
    assert result.returncode == 1
    assert result.stderr.startswith("error: no server answers at http://127.0.0.1:1/v1/")


def test_cache_commands(tmp_path: Path) -> None:
    folder = tmp_path / "prefix" / ("ab" * 32)
    folder.mkdir(parents=True)
    (folder / "one.snap").write_bytes(b"x" * 1000)
    place = ("--cache-dir", str(tmp_path / "prefix"))
    assert fermion("cache", "size", *place).stdout == "1000\n"
    listing = fermion("cache", "list", *place).stdout
    assert listing.startswith(f"{tmp_path / 'prefix'}: 1 model\nabababababababab       1 snapshots")
    not_one = fermion("cache", "list", "--cache-dir", str(folder / "one.snap"))
    assert (not_one.returncode, not_one.stderr.endswith("one.snap: Not a directory\n")) == (2, True)
    (listed,) = json.loads(fermion("cache", "list", "--json", *place).stdout)["folders"]
    assert (listed["fingerprint"], listed["nbytes"]) == ("ab" * 32, 1000)
    named = {"FERMION_CACHE_DIR": str(tmp_path / "prefix")}
    assert fermion("cache", "size", **named).stdout == "1000\n"
    assert fermion("cache", "clear", *place).stdout == "freed 0.0 MiB\n"
    assert fermion("cache", "size", *place).stdout == "0\n"
    assert not folder.exists()
    (folder / "odd.kv").mkdir(parents=True)
    (folder / "two.snap").touch()
    assert fermion("cache", "clear", *place).returncode == 0
    assert [path.name for path in folder.iterdir()] == ["odd.kv"]
