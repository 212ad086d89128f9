"""What stands between this machine and prompts on its graphics card: the content of `fermion doctor`.

Looks at files of the system, asks nvidia-smi, and opens the card as the engine does. Changes nothing.
"""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from engine.errors import FermionError

_VENDOR = "0x10de"
_DISPLAY_CLASS = "0x03"
_DEVICES = ("nvidiactl", "nvidia0", "nvidia-uvm")
_SMI = ("nvidia-smi", "--query-gpu=name,ecc.mode.current", "--format=csv,noheader")


class Verdict(StrEnum):
    """good: nothing to do. advice: it works, but not as well as it could. broken: prompts cannot run on the card."""

    GOOD = "good"
    ADVICE = "advice"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: what was looked at, what was found, and what mends it (empty if nothing needs to)."""

    name: str
    verdict: Verdict
    found: str
    mend: str = ""

    def as_text(self) -> str:
        """One line, and one more for what to do."""
        line = f"{self.verdict:<7} {self.name}: {self.found}"
        return f"{line}\n        -> {self.mend}" if self.mend else line


def examine(
    root: Path = Path("/"),
    *,
    ask_smi: Callable[[], str] | None = None,
    open_card: Callable[[], str] | None = None,
    locked_limit: int | None = None,
) -> list[Finding]:
    """All checks in the order in which things depend on each other. The arguments are what tests replace: the file
    system's root, the output of nvidia-smi (OSError or SubprocessError if it fails), the opened card's description
    (FermionError if it cannot be opened), the limit on locked memory in bytes (-1: none)."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if locked_limit is None else locked_limit
    return [
        _bus(root),
        _module(root),
        _devices(root),
        _card(open_card or _open_card),
        _ecc(ask_smi or _ask_smi),
        _locked(limit),
    ]


def _bus(root: Path) -> Finding:
    name = "card on the bus"
    cards = [
        device.name
        for device in sorted((root / "sys/bus/pci/devices").glob("*"))
        if _text(device / "vendor") == _VENDOR and _text(device / "class").startswith(_DISPLAY_CLASS)
    ]
    if cards:
        return Finding(name, Verdict.GOOD, f"NVIDIA at {', '.join(cards)}")
    return Finding(name, Verdict.BROKEN, "no NVIDIA card", "Check its slot and both power plugs; in a container, none.")


def _module(root: Path) -> Finding:
    name = "kernel module"
    version = _text(root / "proc/driver/nvidia/version").partition("\n")[0]
    if version:
        return Finding(name, Verdict.GOOD, version.removeprefix("NVRM version:").strip())
    loaded = _text(root / "proc/modules")
    if any(line.startswith("nouveau ") for line in loaded.splitlines()):
        mend = "Blacklist nouveau (a file in /etc/modprobe.d with the line 'blacklist nouveau'), rebuild the initramfs."
        return Finding(name, Verdict.BROKEN, "nouveau has the card", mend)
    mend = "Install the driver: 390.157 for Fermi cards (docs/fermi.md has the packages). 'dmesg' tells why it failed."
    return Finding(name, Verdict.BROKEN, "nvidia is not loaded", mend)


def _devices(root: Path) -> Finding:
    name = "device files"
    missing = [f"/dev/{device}" for device in _DEVICES if not (root / "dev" / device).exists()]
    if not missing:
        return Finding(name, Verdict.GOOD, "all there")
    mend = "Run 'nvidia-modprobe -u -c 0' as root; in a container, pass them with --device (docker/fermi-run.sh does)."
    return Finding(name, Verdict.BROKEN, f"{', '.join(missing)} missing", mend)


def _card(open_card: Callable[[], str]) -> Finding:
    name = "driver, card and kernels"
    try:
        return Finding(name, Verdict.GOOD, open_card())
    except FermionError as error:
        mend = "libcuda.so.1 must be of the kernel module's version; after an update of the driver, restart."
        return Finding(name, Verdict.BROKEN, str(error), mend)


def _ecc(ask_smi: Callable[[], str]) -> Finding:
    name = "ECC"
    try:
        answer = ask_smi().strip()
    except (OSError, subprocess.SubprocessError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        return Finding(name, Verdict.ADVICE, f"nvidia-smi does not answer: {reason}", "Install it to see the setting.")
    on = [line for line in answer.splitlines() if line.rpartition(",")[2].strip() == "Enabled"]
    if not on:
        return Finding(name, Verdict.GOOD, "off, or the card has none")
    mend = "'nvidia-smi -e 0' and a restart give an eighth of a Fermi Tesla's memory back; errors then go unnoticed."
    return Finding(name, Verdict.ADVICE, f"on: {'; '.join(on)}", mend)


def _locked(limit: int) -> Finding:
    name = "locked memory"
    if limit in (-1, resource.RLIM_INFINITY):
        return Finding(name, Verdict.GOOD, "no limit")
    mend = "'ulimit -l unlimited', LimitMEMLOCK=infinity in a systemd unit, or memlock in /etc/security/limits.conf."
    return Finding(name, Verdict.ADVICE, f"limited to {limit >> 20} MiB: the checkpoint may not be lockable", mend)


def _open_card() -> str:
    from engine.gpu import describe_card

    return describe_card()


def _ask_smi() -> str:
    return subprocess.run(_SMI, check=True, capture_output=True, text=True, timeout=30).stdout


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
