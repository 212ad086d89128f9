"""Every check of the doctor on machines that are well, and on machines that lack one thing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.doctor import Finding, Verdict, examine
from engine.errors import KernelError
from server.cli import app


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """The file system of a machine with a working card."""
    device = tmp_path / "sys/bus/pci/devices/0000:06:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x030200\n")
    version = tmp_path / "proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  390.157\nGCC version: 10\n")
    (tmp_path / "proc/modules").write_text("nvidia 100 0 - Live\n")
    (tmp_path / "dev").mkdir()
    for name in ("nvidiactl", "nvidia0", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    return tmp_path


def found(root: Path, smi: str = "Tesla C2075, Disabled\n", limit: int = -1) -> dict[str, Finding]:
    findings = examine(root, ask_smi=lambda: smi, open_card=lambda: "Tesla C2075 (compute 2.0)", locked_limit=limit)
    return {finding.name: finding for finding in findings}


def test_a_machine_that_is_well_needs_nothing(machine: Path) -> None:
    findings = found(machine)
    assert {finding.verdict for finding in findings.values()} == {Verdict.GOOD}
    assert all(not finding.mend for finding in findings.values())
    assert findings["kernel module"].found.endswith("390.157")


def test_no_card(machine: Path) -> None:
    (machine / "sys/bus/pci/devices/0000:06:00.0/vendor").write_text("0x1002\n")
    assert found(machine)["card on the bus"].verdict is Verdict.BROKEN


def test_no_module_and_one_in_its_way(machine: Path) -> None:
    (machine / "proc/driver/nvidia/version").unlink()
    assert "390.157" in found(machine)["kernel module"].mend
    (machine / "proc/modules").write_text("nouveau 100 0 - Live\n")
    finding = found(machine)["kernel module"]
    assert (finding.verdict, finding.found) == (Verdict.BROKEN, "nouveau has the card")
    assert "blacklist nouveau" in finding.mend


def test_no_device_files(machine: Path) -> None:
    (machine / "dev/nvidia-uvm").unlink()
    finding = found(machine)["device files"]
    assert (finding.verdict, finding.found) == (Verdict.BROKEN, "/dev/nvidia-uvm missing")
    assert "nvidia-modprobe" in finding.mend


def test_a_card_that_cannot_be_opened_is_told_in_the_drivers_words(machine: Path) -> None:
    def fails() -> str:
        raise KernelError("cuInit failed: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH")

    finding = examine(machine, ask_smi=lambda: "", open_card=fails, locked_limit=-1)[3]
    assert finding.verdict is Verdict.BROKEN
    assert "SYSTEM_DRIVER_MISMATCH" in finding.found
    assert "restart" in finding.mend


def test_ecc_and_locked_memory_are_advice(machine: Path) -> None:
    findings = found(machine, "Tesla C2075, Enabled\n", 64 << 20)
    assert findings["ECC"].verdict is Verdict.ADVICE
    assert "nvidia-smi -e 0" in findings["ECC"].mend
    assert findings["locked memory"].found.startswith("limited to 64 MiB")

    def absent() -> str:
        raise FileNotFoundError(2, "No such file or directory", "nvidia-smi")

    findings_ = examine(machine, ask_smi=absent, open_card=lambda: "", locked_limit=-1)
    assert findings_[4].verdict is Verdict.ADVICE
    assert findings_[4].found == "nvidia-smi does not answer: No such file or directory"


def test_the_command_tells_and_fails_where_a_card_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = [Finding("kernel module", Verdict.BROKEN, "nvidia is not loaded", "Install the driver.")]
    monkeypatch.setattr("engine.doctor.examine", lambda: broken)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "broken  kernel module: nvidia is not loaded\n        -> Install the driver." in result.stdout
    assert "without a card there is nothing to mend" in result.stderr
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert json.loads(result.stdout.splitlines()[-1])[0]["verdict"] == "broken"
    monkeypatch.setattr("engine.doctor.examine", lambda: [Finding("ECC", Verdict.ADVICE, "on", "Off.")])
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 0
