"""The CPU image, without Docker: its one script makes an installation that serves, from nothing but the checkout."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from served import chat, served


def test_the_image_installs_with_the_script_alone(repository: Path) -> None:
    text = (repository / "docker" / "cpu.Dockerfile").read_text()
    runs = re.findall(r"^RUN (.+?)(?<!\\)$", text, re.MULTILINE | re.DOTALL)
    others = [run for run in runs if not run.startswith("apt-get update")]
    assert others == ["/source/docker/cpu-install.sh /opt/fermion"]


def test_the_build_context_holds_what_the_script_copies(repository: Path) -> None:
    script = (repository / "docker" / "cpu-install.sh").read_text()
    parts = re.search(r"for part in (.+?); do", script)
    assert parts is not None
    allowed = {line[1:] for line in (repository / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert set(parts[1].split()) <= allowed
    assert {"requirements/base.txt", "docker/cpu-install.sh"} <= allowed


@pytest.mark.slow
@pytest.mark.skipif("FERMION_SIMD_TIER" in os.environ, reason="installing does not depend on the tier")
def test_an_installation_serves_outside_the_checkout(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = tmp_path / "fermion"
    subprocess.run([repository / "docker" / "cpu-install.sh", prefix], check=True, timeout=600)
    monkeypatch.chdir(tmp_path)
    with served([prefix / "bin" / "fermion", "serve"]) as url:
        assert chat(url, "Hello!", max_tokens=8)["choices"][0]["message"]["content"]


def test_the_script_never_overwrites(repository: Path, tmp_path: Path) -> None:
    result = subprocess.run(
        [repository / "docker" / "cpu-install.sh", tmp_path], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 2
    assert "exists already" in result.stderr
