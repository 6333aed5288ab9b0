"""Who may import whom. The rule is the design's; the imports are read from the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "pwbench"


def _modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = _modules()


def _imports(module: str) -> set[str]:
    """Absolute names of what a module imports anywhere in it, function bodies included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{module} imports relatively"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in MODULES else node.module)
    return found


def _own(module: str) -> set[str]:
    return {name for name in _imports(module) if name == "pwbench" or name.startswith("pwbench.")}


def _top(name: str) -> str:
    return ".".join(name.split(".")[:2])


def test_the_operator_knows_nobody() -> None:
    assert _own("pwbench.operator") <= {"pwbench.errors"}
    assert _own("pwbench.errors") == set()


@pytest.mark.parametrize("module", ["pwbench.reference", "pwbench.grouping"])
def test_the_oracles_know_only_the_operator(module: str) -> None:
    assert _own(module) <= {"pwbench.operator", "pwbench.errors"}


@pytest.mark.parametrize("module", [name for name in MODULES if _top(name) == "pwbench.capture"])
def test_captures_know_the_operator_and_the_oracles_only(module: str) -> None:
    # The oracles, because `verify` recomputes the model's output and `inspect` counts unions; the
    # device, because a capture says which machine made it.
    allowed = ["operator", "errors", "files", "capture", "reference", "grouping", "counters", "device"]
    assert {_top(name) for name in _own(module)} <= {"pwbench", *(f"pwbench.{name}" for name in allowed)}


@pytest.mark.parametrize("module", [name for name in MODULES if _top(name) == "pwbench.variants"])
def test_variants_know_the_kernels_but_no_tool_around_them(module: str) -> None:
    around = [
        "reference",
        "capture",
        "replay",
        "plan",
        "timing",
        "results",
        "report",
        "gate",
        "cli",
        "device",
    ]
    assert not {_top(name) for name in _own(module)} & {f"pwbench.{name}" for name in around}


@pytest.mark.parametrize("module", [name for name in MODULES if _top(name) != "pwbench.cli"])
def test_only_the_command_line_knows_click_rich_and_itself(module: str) -> None:
    outside = {name.split(".")[0] for name in _imports(module)}
    assert not outside & {"click", "rich"}
    assert "pwbench.cli" not in {_top(name) for name in _own(module)}


def test_every_variant_is_one_module_named_as_it_is() -> None:
    from pwbench import variants

    modules = {
        name.removeprefix("pwbench.variants.").replace("_", "-")
        for name in MODULES
        if name.startswith("pwbench.variants.") and not name.startswith("pwbench.variants._")
    }
    assert modules == set(variants.names())


def test_no_file_is_longer_than_a_reader_s_patience() -> None:
    lines = {name: len(path.read_text().splitlines()) for name, path in MODULES.items()}
    assert not {name: count for name, count in lines.items() if count > 450}


def test_every_module_says_what_it_is() -> None:
    assert not [name for name, path in MODULES.items() if not ast.get_docstring(ast.parse(path.read_text()))]


def test_optional_libraries_are_imported_only_when_they_are_needed() -> None:
    code = (
        "import sys, pwbench.replay, pwbench.report, pwbench.doctor, pwbench.probes\n"
        "from pwbench import variants; variants.names()\n"
        "sys.exit(sorted({'cupy', 'flashinfer', 'transformers', 'triton'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
