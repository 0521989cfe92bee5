"""The import table of docs/design.md, file sizes, and what must not appear in the source."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("transport", "models", "configs", "stages", "pipeline", "bench", "tests")
ALLOWED = {
    "transport": {"transport"},
    "models": {"models", "configs"},
    "configs": {"configs"},
    "stages": {"stages", "models", "configs"},
    "pipeline": {"pipeline", "stages", "models", "configs", "transport"},
    "bench": {"bench", "pipeline", "stages", "models", "configs", "transport"},
}
FORBIDDEN = {
    "transport": {"torch", "transformers", "ray"},
    "models": {"zmq"},
    "configs": {"torch", "zmq", "ray", "numpy", "transformers"},
    "stages": {"zmq", "ray"},
    "pipeline": set[str](),
    "bench": set[str](),
}
SOURCES = sorted(p for package in ALLOWED for p in (ROOT / package).rglob("*.py"))


def imports(tree: Iterable[ast.AST]) -> set[str]:
    """Modules imported anywhere, as dotted names."""
    found: set[str] = set()
    for node in tree:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_size_and_words(path: Path) -> None:
    """One test for each file, which is parsed once."""
    text = path.read_text()
    tree = list(ast.walk(ast.parse(text)))
    check_imports(path, imports(tree))
    check_size(path, text, tree)
    check_words(path, text)


def check_imports(path: Path, modules: set[str]) -> None:
    package = path.relative_to(ROOT).parts[0]
    assert "launch" not in modules, f"{path} imports launch.py"
    for module in modules:
        top = module.split(".")[0]
        if top in PACKAGES:
            assert top in ALLOWED[package], f"{package} must not import {module}"
            if package in ("models", "stages") and top == "configs":
                assert module.startswith("configs.schema"), f"{package} may import only configs.schema, not {module}"
        assert top not in FORBIDDEN[package], f"{package} must not import {module}"


def check_size(path: Path, text: str, tree: Iterable[ast.AST]) -> None:
    """Files and functions fit a reader."""
    assert text.count("\n") <= 400, f"{path} has {text.count(chr(10))} lines, at most 400"
    assert path.name not in ("utils.py", "helpers.py", "common.py", "misc.py")
    for node in tree:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= 70, f"{path.name}: {node.name} has {length} lines, at most 70"


def check_words(path: Path, text: str) -> None:
    pickles = r"^\s*(import|from)\s+(pickle|cloudpickle)\b"
    for pattern in (pickles, r"recv_pyobj|send_pyobj", r"asyncio\.(create_task|ensure_future)\("):
        assert not re.search(pattern, text, re.MULTILINE), f"{path} contains {pattern}"


@pytest.mark.parametrize(
    ("command", "absent"),
    [
        ("import launch; launch.main(['--help'])", ("torch", "zmq", "ray", "numpy", "rich")),
        (
            "import stages.generate.stage, stages.reward.stage, stages.group.stage, stages.tools.stage; "
            "import stages.evaluate.stage",
            ("torch", "zmq", "transformers"),
        ),
        ("import transport", ("torch", "stages", "models")),
        ("import pipeline.hosts.worker", ("torch", "transformers")),
    ],
)
def test_light_processes_stay_light(command: str, absent: tuple[str, ...]) -> None:
    check = f"bad = [m for m in {absent!r} if m in sys.modules]; sys.exit(f'loaded: {{bad}}' if bad else 0)"
    script = f"import sys; {command}; {check}"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
