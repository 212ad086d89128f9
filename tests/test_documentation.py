"""What the documentation says can be typed: targets exist, settings are complete, links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from server.config import Settings

DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/settings.md", "docs/api.md", "docs/prefix-cache.md")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_make_target_exists(name: str, repository: Path) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (repository / "Makefile").read_text(), re.MULTILINE))
    text = (repository / name).read_text()
    # Commands stand at the start of a line or of a piece of code, or after variables; prose does not count.
    used = set(re.findall(r"(?:^|`|[A-Z]=\S+ )make ([a-z][a-z0-9-]*)(?=[ `\n])", text, re.MULTILINE))
    assert used <= targets


def test_the_first_screen_shows_the_two_commands(repository: Path) -> None:
    first_screen = "\n".join((repository / "README.md").read_text().splitlines()[:40])
    for needed in ("make serve", "make test", "curl http://127.0.0.1:8000/v1/chat/completions"):
        assert needed in first_screen


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_to_files_lead_somewhere(name: str, repository: Path) -> None:
    path = repository / name
    for target in re.findall(r"\]\(([^)#]+)", path.read_text()):
        assert target.startswith("https://") or (path.parent / target).exists(), target


def test_every_setting_is_documented_with_its_default(repository: Path) -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", (repository / "docs/settings.md").read_text(), re.MULTILINE))
    assert set(rows) == set(Settings.model_fields)
    for name, shown in rows.items():
        default = Settings.model_fields[name].default
        if isinstance(default, str | float | int) and not isinstance(default, bool):
            expected = f"`{default:g}`" if isinstance(default, float) else f"`{default}`"
            assert shown == expected, name


def test_every_target_is_explained_or_internal(repository: Path) -> None:
    makefile = (repository / "Makefile").read_text()
    explained = set(re.findall(r"^([a-z0-9-]+):.*## \S", makefile, re.MULTILINE))
    declared = set(" ".join(re.findall(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)).split())
    assert declared - explained == {"check-machine", "test-best"}
