"""The images, without Docker: their one script makes an installation that serves, from nothing but the checkout."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from served import chat, served


@pytest.mark.parametrize("image", ["cpu", "fermi"])
def test_the_image_installs_with_the_script_alone(repository: Path, image: str) -> None:
    text = (repository / "docker" / f"{image}.Dockerfile").read_text()
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


def fermi_run(repository: Path, libraries: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"DOCKER": "echo", "LIBRARIES": str(libraries), "PORT": "9000"}
    command = [repository / "docker" / "fermi-run.sh", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_the_card_comes_into_the_container_with_its_drivers_libraries(repository: Path, tmp_path: Path) -> None:
    for name in ("libcuda.so.390.157", "libnvidia-ptxjitcompiler.so.390.157", "libnvidia-fatbinaryloader.so.390.157"):
        (tmp_path / name).touch()
    for name in ("libcuda", "libnvidia-ptxjitcompiler"):
        (tmp_path / f"{name}.so.1").symlink_to(f"{name}.so.390.157")
    result = fermi_run(repository, tmp_path, str(tmp_path), "--context-length", "8192")
    assert result.returncode == 0, result.stderr
    words = result.stdout.split()
    assert f"{tmp_path}/libcuda.so.390.157:/driver/libcuda.so.1:ro" in words
    assert f"{tmp_path}/libnvidia-ptxjitcompiler.so.390.157:/driver/libnvidia-ptxjitcompiler.so.1:ro" in words
    assert sum("fatbinaryloader" in word for word in words) == 1
    assert "memlock=-1" in words
    assert "127.0.0.1:9000:8000" in words
    assert words[-5:] == ["fermion:fermi", "serve", "/model", "--context-length", "8192"]
    assert fermi_run(repository, tmp_path).stdout.split()[-1] == "fermion:fermi"


def test_without_a_driver_the_script_says_so(repository: Path, tmp_path: Path) -> None:
    result = fermi_run(repository, tmp_path)
    assert result.returncode == 2
    assert "libcuda.so.1 is not on this machine" in result.stderr
