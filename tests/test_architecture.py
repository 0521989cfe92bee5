"""The import table of docs/design.md, file sizes, and what must not appear in the source."""

from __future__ import annotations

import ast
import gc
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from functools import cache
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


@cache
def nodes(path: Path) -> list[ast.AST]:
    gc.disable()  # all of it stays: to look for garbage among it takes longer than to read it
    try:
        return list(ast.walk(ast.parse(path.read_text())))
    finally:
        gc.enable()


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_size_and_words(package: str) -> None:
    for path in SOURCES:
        if path.is_relative_to(ROOT / package):
            text = path.read_text()
            check_imports(path, imports(nodes(path)))
            check_size(path, text, nodes(path))
            check_words(path, text)


def check_imports(path: Path, modules: set[str]) -> None:
    package = path.relative_to(ROOT).parts[0]
    if path.parent != ROOT / "pipeline" / "api" / "sluice":  # the same as launch.py, for Python
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
    assert text.count("\n") <= 350, f"{path} has {text.count(chr(10))} lines, at most 350"
    assert path.name not in ("utils.py", "helpers.py", "common.py", "misc.py")
    for node in tree:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= 70, f"{path.name}: {node.name} has {length} lines, at most 70"


# What reads or makes objects that run code when they are read, by whatever name.
UNSAFE = (
    r"^\s*(import|from)\s+(pickle|_pickle|cloudpickle|dill|joblib|marshal|shelve|yaml)\b",
    r"recv_pyobj|send_pyobj|allow_pickle|weights_only=False|trust_remote_code=True",
    r"torch\.load\(|np\.load\(|numpy\.load\(|Unpickler",
    r"_object_list\(|_gather_object\(|gather_object\(|broadcast_object",  # torch pickles what these carry
    r"multiprocessing\.(Queue|Pipe|Manager|Pool|Process)|ProcessPoolExecutor|from multiprocessing import",
)


# Its objects are of empty classes, whatever a file names: tests/models/train/megatron/test_foreign_index.py.
INERT = ROOT / "models" / "train" / "megatron" / "foreign_index.py"


def check_words(path: Path, text: str) -> None:
    unsafe = UNSAFE[:-1] if path.is_relative_to(ROOT / "bench") else UNSAFE  # it measures what others carry messages by
    if path == INERT:
        text = text.replace("import pickle", "", 1).replace("pickle.Unpickler", "", 1)
    for pattern in (*unsafe, r"asyncio\.(create_task|ensure_future)\("):
        assert not re.search(pattern, text, re.MULTILINE), f"{path} contains {pattern}"


# Imported one behind the other in one process; behind each, these must be absent.
LIGHT = {
    "command line": [
        ("import launch, pipeline.supervise.auto_resume", "torch zmq ray numpy asyncio pipeline.run"),
        ("launch.main(['--help'])", "torch zmq ray numpy rich"),
    ],
    "transport and stages": [
        ("import transport", "torch stages models"),
        ("import stages.group.stage, stages.reward.stage, stages.train.batch", "aiohttp"),
    ],
    "processes": [
        (
            "import models.engines.client, models.engines.protocol, models.errors, models.engines.noise",
            "torch transformers safetensors tokenizers zmq",
        ),
        (
            "import stages.generate.stage, stages.reward.stage, stages.group.stage, stages.agents.stage; "
            "import stages.evaluate",
            "torch zmq transformers",
        ),
        (
            "import pipeline.record.metrics, pipeline.facts.trace, pipeline.observe.summary, pipeline.record.view; "
            "import pipeline.observe.table, pipeline.observe.plot",
            "torch tensorboard matplotlib tensorflow zmq",
        ),
        ("import pipeline.hosts.worker", "torch transformers"),
        (
            "from pipeline.record.metrics import *; import tempfile; "
            "Metrics(Path(tempfile.mkdtemp()), tensorboard=True).close()",
            "torch tensorflow",
        ),
        ("import stages.train.stage, stages.train.weights, models.train.build", "torch"),
        (
            "import models.algorithms.aggregation, models.weights.layout, models.weights.shared_memory_reader; "
            "import models.engines.serve, models.engines.simulated.engine, models.tiny, pathlib, tempfile; "
            "from models.algorithms.advantages import advantages; advantages('grpo', [1, 0], [0, 1]); "
            "models.tiny.make_tiny_checkpoint(pathlib.Path(tempfile.mkdtemp()))",
            "torch",
        ),
    ],
}


@pytest.mark.parametrize("process", LIGHT)
def test_light_processes_stay_light(process: str) -> None:
    lines = ["import sys"]
    for command, absent in LIGHT[process]:
        lines += [command, f"bad = [m for m in {absent.split()!r} if m in sys.modules]"]
        lines.append(f"if bad: sys.exit(f'{{bad}} loaded by ' + {command!r})")
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr[-2000:]


# What stands in one place alone: an expression, and the files that may have it.
SEAMS = {
    "engines are controlled by the engines stage alone": (
        r"import stages\.engines|from stages\.engines\.(?!colocation)",
        "stages/(?!engines/)",
    ),
    "processes are numbers inside pipeline/hosts alone": (r"os\.kill|killpg|getpgid|/proc/", "pipeline/(?!hosts/)"),
    "the nearest known name is found in one place": (r"difflib", r"(?!configs/schema/notation\.py)"),
    "no import path is taken apart but in one place": (r"importlib\.import_module", "pipeline/|transport/"),
    "text is run in the sandbox alone": (r"(?<![.\w])(eval|exec)\(", "(?!stages/sandbox/)"),
    "what goes between stages has types": (
        r"dict\[str, (Any|object)\]",
        "transport/|stages/[a-z_]+\\.py|stages/(engines|sampling|generate|group|prompts|train|evaluate|reward)/",
    ),
    "words that a reader would have to learn": (
        r"class _?(Fleet|Charge|Birth|Look|Account|Pulse|Flight|Landing|Crew)\b|raise_in_main|passed_on",
        "(?!bench/)",
    ),
}


@pytest.mark.parametrize("rule", SEAMS)
def test_what_stands_in_one_place(rule: str) -> None:
    pattern, where = SEAMS[rule]
    files = [path for path in SOURCES if re.match(where, str(path.relative_to(ROOT)))]
    assert files
    assert [str(path) for path in files if re.search(pattern, path.read_text())] == []


# Called by a framework, or by whoever writes an environment.
CALLED_BY_OTHERS = {
    "_get_save_and_finalize_callbacks", "add_samples", "append_response_tokens", "CallsOnce", "connection_made",
    "convert_tokens_to_ids", "effective_response_length", "find_class", "from_dict", "get_reward_value", "handleError",
    "load_common", "math_dapo_compute_score", "record_event", "reducer_override", "_repr_html_", "Snapshots",
    "update_from_meta_info", "wait_event", "wait_stream",
}  # fmt: skip
BY_PATH = ("stages/agents/packs/", "models/engines/launch/shims/")


def test_nothing_is_there_for_its_tests_alone() -> None:
    """A rule that only tests call proves nothing of a run."""
    files = {str(path.relative_to(ROOT)): path for path in [*SOURCES, ROOT / "launch.py"]}
    said = Counter(word for path in files.values() for word in re.findall(r"\w+", path.read_text()))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    alone = {
        node.name
        for name, path in files.items()
        if not name.startswith(BY_PATH)
        for node in nodes(path)
        if isinstance(node, kinds) and said[node.name] == 1 and not node.name.startswith("__")
    }
    assert alone - CALLED_BY_OTHERS == set(), "call it in the source, or delete it"


def import_graph() -> dict[str, set[str]]:
    """Module -> the project's modules that it imports, anywhere in the file."""
    modules = {str(path.relative_to(ROOT).with_suffix("")).replace("/", "."): path for path in SOURCES}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        found: set[str] = set()
        for node in nodes(path):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inside = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= inside & modules.keys() or {node.module}
        graph[name] = {target for target in found if target in modules} - {name}
    return graph


def room(module: str) -> str:
    """The folder that a module lives in; a file directly in a top folder is a room of its own."""
    parts = module.split(".")
    folder = ROOT.joinpath(*parts)
    if not folder.is_dir():
        parts = parts[:-1] if len(parts) > 2 else parts
    return "/".join(parts)


def two_way_ties(graph: dict[str, set[str]]) -> list[str]:
    """Pairs of rooms that import each other. A folder and what lies inside it are no pair."""
    edges = {(room(a), room(b)) for a, targets in graph.items() for b in targets}
    apart = {(a, b) for a, b in edges if not (f"{a}/").startswith(f"{b}/") and not (f"{b}/").startswith(f"{a}/")}
    return sorted(f"{a} <-> {b}" for a, b in apart if a < b and (b, a) in apart)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Sets of modules that reach each other: what is left after modules that import nothing left are taken away."""
    left = {name: set(targets) for name, targets in graph.items()}
    for one_way in (False, True):  # leaves first, then modules that nobody left imports
        while True:
            if one_way:
                imported = set().union(*left.values()) if left else set()
                gone = {name for name in left if name not in imported}
            else:
                gone = {name for name, targets in left.items() if not targets}
            if not gone:
                break
            left = {name: targets - gone for name, targets in left.items() if name not in gone}
    return [sorted(left)] if left else []


def test_arrows_between_folders_run_one_way_and_no_files_import_each_other() -> None:
    graph = import_graph()
    assert two_way_ties(graph) == [], "move what both need below both"
    assert circles(graph) == []


def test_ties_and_circles_would_be_seen() -> None:
    graph = {"stages.a.x": {"stages.b.y"}, "stages.b.z": {"stages.a.w"}, "stages.a.w": set(), "stages.b.y": set()}
    assert two_way_ties(graph) == ["stages/a <-> stages/b"]
    assert circles(graph) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def test_a_folder_is_small_enough_to_read() -> None:
    folders = Counter(path.parent for path in SOURCES if path.name != "__init__.py")
    assert {str(folder): files for folder, files in folders.items() if files > 16} == {}


@pytest.mark.parametrize("folder", ["stages", "pipeline", "models", "models/train", "transport", "configs"])
def test_readme_names_each_folder(folder: str) -> None:
    readme = (ROOT / "README.md").read_text()
    layout = readme[readme.index("## How the project is laid out") :]
    inside = [path.name for path in (ROOT / folder).iterdir() if any(path.glob("*.py"))]
    assert [name for name in inside if not re.search(rf"\b{name}\b", layout)] == []
