"""What the documentation says can be typed: targets exist, settings are complete, links lead somewhere."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from engine.convert import cli as checkpoints
from server.cli import app
from server.config import Settings

ROOT = Path(__file__).parent.parent
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "tests/bench/NOTES.md", *PAGES)


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


def commands_of(text: str) -> Iterator[list[str]]:
    """Words of every `fermion` command in a block of code or between backquotes, continued lines joined."""
    text = text.replace("\\\n", " ")
    shown = re.findall(r"^(?:    |\$ )?(?:[A-Z_]+=\S+ )*(fermion [a-z].*)$", text, re.MULTILINE)
    shown += re.findall(r"`(fermion [a-z][^`]*)`", text)
    for command in shown:
        plain = re.sub(r"[\[\]|]", " ", command.partition(" #")[0])  # [--optional a|b] is a way to write usage
        yield shlex.split(plain)[1:]


def checkpoint_command(name: str) -> object:
    described = typer.Typer()
    described.command()(getattr(checkpoints, name))
    return typer.main.get_command(described)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_command_and_flag_exists(name: str, repository: Path) -> None:
    for words in commands_of((repository / name).read_text()):
        command = typer.main.get_command(app)
        if hasattr(checkpoints, words[0]):  # described where their code is
            command, words = checkpoint_command(words[0]), words[1:]
        for word in words:
            if word.startswith("-"):
                flags = {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
                assert word.partition("=")[0] in flags | {"--help", "-h"}, (words, word)
            elif hasattr(command, "commands"):
                assert word in command.commands, (words, word)
                command = command.commands[word]


def test_commands_are_found_where_they_stand() -> None:
    text = (
        "so:\n\n    fermion prune SRC [--keep 128] \\\n        --save-selection a.json  # why\n\nand `fermion info`.\n"
    )
    assert list(commands_of(text)) == [["prune", "SRC", "--keep", "128", "--save-selection", "a.json"], ["info"]]


def test_every_page_is_linked_from_the_readme(repository: Path) -> None:
    readme = (repository / "README.md").read_text()
    assert [page for page in PAGES if f"({page})" not in readme] == []


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
