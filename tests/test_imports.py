"""The architecture, enforced: who may import whom, and what modules may be called."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("server", "engine", "prefix_cache")

# What of the engine the server may see. The command line alone starts tools.
SERVER_SEES = {"engine.config", "engine.core", "engine.engine", "engine.errors", "engine.image", "engine.tokenizer"}
COMMANDS = {
    "engine.doctor",
    "engine.bench",
    "engine.convert.cli",
    "engine.convert.synthetic",
    "engine.inventory",
    "engine.peer",
    "engine.reuse",
    "engine.vision_bench",
}
# The native extension is bound once for text and once for pictures; the converter and the benchmarks bind
# functions of their own.
NATIVE = ("engine.cpu", "engine.memory", "engine.vision", "engine.convert", "engine.probe", "engine.vision_bench")
TRAINING = "engine.demo.recipe"


def modules() -> dict[str, Path]:
    found: dict[str, Path] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = list(path.relative_to(ROOT).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(name: str, path: Path) -> Iterator[str]:
    """Dotted names that a module imports, at any depth in its code. `from a import b` gives a.b if that is a module."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield full if full in MODULES or base in PACKAGES else base


IMPORTS = [(name, target) for name, path in MODULES.items() for target in set(imports(name, path))]
OURS = [(name, target) for name, target in IMPORTS if target.split(".")[0] in PACKAGES]


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def root(name: str) -> str:
    return name.split(".")[0]


def test_every_package_is_looked_at() -> None:
    assert {root(name) for name in MODULES} == set(PACKAGES)
    assert ("server.cli", "server.config") in OURS


def test_imports_go_one_way() -> None:
    allowed = {"server": {"server", "engine"}, "engine": {"engine", "prefix_cache"}, "prefix_cache": {"prefix_cache"}}
    assert [edge for edge in OURS if root(edge[1]) not in allowed[root(edge[0])]] == []


def test_the_server_sees_only_the_engines_surface() -> None:
    assert [
        (name, target)
        for name, target in OURS
        if is_within(name, "server")
        and is_within(target, "engine")
        and target not in SERVER_SEES | (COMMANDS if name == "server.cli" else set())
    ] == []


def test_the_vocabulary_imports_nothing_of_ours() -> None:
    assert [edge for edge in OURS if edge[0] in ("engine.core", "engine.errors")] == []


def test_the_native_extension_has_one_door() -> None:
    assert [
        (name, target)
        for name, target in IMPORTS
        if is_within(target, "engine._simd") and not any(is_within(name, door) for door in NATIVE)
    ] == []


def test_the_driver_has_one_door() -> None:
    users = {name for name, target in IMPORTS if is_within(target, "engine.cuda_driver")}
    assert users == {"engine.gpu", "engine.gpu_vision"}
    assert {name for name, target in IMPORTS if is_within(target, "ctypes")} <= {"engine.cuda_driver", *users}


def test_only_the_command_line_imports_the_converter() -> None:
    assert [
        (name, target)
        for name, target in OURS
        if is_within(target, "engine.convert") and not is_within(name, "engine.convert") and name != "server.cli"
    ] == []


def test_only_the_converter_uses_the_recipe() -> None:
    """It calibrates on the recipe's data generator."""
    allowed = (TRAINING, "engine.convert")
    assert [
        (name, target)
        for name, target in OURS
        if is_within(target, TRAINING) and not any(is_within(name, package) for package in allowed)
    ] == []


def test_the_product_never_needs_training_packages() -> None:
    """Neither directly nor through the parts of the recipe that it uses."""
    product = {name for name in MODULES if not is_within(name, TRAINING)}
    while more := {target for name, target in OURS if name in product and target in MODULES} - product:
        product |= more
    assert [edge for edge in IMPORTS if edge[0] in product and root(edge[1]) in {"torch", "transformers"}] == []


def test_the_cache_needs_only_the_standard_library_and_numpy() -> None:
    allowed = sys.stdlib_module_names | {"numpy", "prefix_cache"}
    assert [edge for edge in IMPORTS if is_within(edge[0], "prefix_cache") and root(edge[1]) not in allowed] == []


def test_no_module_has_a_standard_library_name() -> None:
    stems = {name: name.rpartition(".")[2] for name in MODULES}
    assert [name for name, stem in stems.items() if stem in sys.stdlib_module_names and stem != "__main__"] == []


def test_a_module_is_named_for_its_concept() -> None:
    vague = {"utils", "util", "common", "helpers", "misc"}
    assert [name for name in MODULES if vague & set(name.split("."))] == []
