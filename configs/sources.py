"""What the configuration refers to outside itself: files, checkpoints, import paths.

Invariants: nothing is loaded or imported; a name of the Hugging Face hub is not checked, since that would need the
network.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from configs.flags import flags
from configs.load import MODELS
from configs.schema import Config
from configs.schema.notation import cure

# Made on this machine: train rows, and held-out rows for evaluation.
BUILT_IN_DATA: Final = ("arithmetic", "arithmetic-tools")
BUILT_IN_LABEL: Final = "label"  # row field of the built-in data with the answer
BUILT_IN_MODELS: Final = ("tiny", "tiny-arithmetic")  # random small checkpoints, made on this machine

_FILES: Final = ("data.chat_template_path", "reward.judge_prompt_path", "debug.memory_snapshot_path")
# Settings that name a function or class of the user's; those of _FILES name a file.
IMPORT_PATHS: Final = tuple(flag.key for flag in flags() if flag.key.endswith("_path") and flag.key not in _FILES)
# Settings that take the name of something built in, or an import path.
NAMED: Final = ("algorithm.advantage_estimator", "algorithm.policy_loss", "asynchrony.buffer_order")

_SLICE = re.compile(r"(?P<path>.+?)@\[\s*(?P<start>[+-]?\d+)?\s*:\s*(?P<stop>[+-]?\d+)?\s*\]", re.ASCII)
_NAMED = re.compile(r"(?P<name>[\w-]+)=(?P<path>.+)", re.ASCII)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_IMPORT = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


class DataSource(Struct, frozen=True):
    """`[name=]path[@[start:stop]]`, taken apart. Slices have Python's meaning."""

    path: str
    start: int | None = None
    stop: int | None = None
    name: str | None = None

    @property
    def built_in(self) -> bool:
        return self.path in BUILT_IN_DATA


def parse_source(text: str, *, named: bool = False) -> DataSource:
    """Take a data source apart. `named`: a `name=` may stand in front (evaluation)."""
    name = None
    if named and (match := _NAMED.fullmatch(text)):
        name, text = match["name"], match["path"]
    if match := _SLICE.fullmatch(text):
        start, stop = (int(match[end]) if match[end] else None for end in ("start", "stop"))
        return DataSource(match["path"], start, stop, name)
    return DataSource(text, name=name)


def source_fault(label: str, text: str, *, named: bool = False, environments: Collection[str] = ()) -> str | None:
    """Why a data source cannot be read, in one sentence, or None. `environments`: those may make tasks of their own."""
    source = parse_source(text, named=named)
    if source.built_in or source.path in environments or Path(source.path).expanduser().exists():
        return None
    if "@[" in source.path:
        return (
            f"{label} is {text!r}, but a slice must be path@[a:b] with whole numbers; write for example "
            "data.jsonl@[0:100]"
        )
    names = () if set("/.") & set(source.path) else (*BUILT_IN_DATA, *environments)
    otherwise = f"correct the path, or use the built-in {' or '.join(BUILT_IN_DATA)}"
    if names and source.path.isidentifier():
        otherwise += f", or add a table [[environment]] with the name {source.path}, which makes its tasks"
    elif _HUB_ID.fullmatch(source.path) and not Path(source.path).suffix and not Path(source.path).parent.is_dir():
        otherwise = (
            "correct the path, or write the set of the Hugging Face hub into a directory first, with "
            f"datasets.load_dataset({source.path!r}, split='train').save_to_disk(DIR), and give DIR"
        )
    hint = cure(source.path, names, otherwise)
    return f"{label} is {text!r}, but there is no file or directory {source.path!r}; {hint}"


def checkpoint_fault(label: str, name: str) -> str | None:
    """Why a checkpoint cannot be loaded, in one sentence, or None. Hub ids (`org/name`) pass."""
    if name in BUILT_IN_MODELS:
        return None
    path = Path(name).expanduser()
    if path.exists():
        if (path / "config.json").is_file():
            return None
        return (
            f"{label} is {name!r}, but a Hugging Face checkpoint is a directory with config.json; give such a directory"
        )
    if _HUB_ID.fullmatch(name) and not Path(name.split("/")[0]).is_dir():
        return None
    otherwise = "correct the path, or give a hub id such as Qwen/Qwen3-0.6B"
    hint = cure(name, () if "/" in name else BUILT_IN_MODELS, otherwise)
    if hint != otherwise or "/" in name or name.startswith(("~", ".")):
        return f"{label} is {name!r}, but there is no such directory; {hint}"
    return None


def import_path_fault(label: str, text: str, example: str) -> str | None:
    """Why an import path cannot work, in one sentence, or None. Only the top package is looked for, nothing runs."""
    module, _, name = text.partition(":")
    if module.endswith(".py") and name.isidentifier():
        return None if Path(module).is_file() else f"{label} is {text!r}, but there is no file {module}; give its path"
    if name == "py" and Path(f"{module.replace('.', '/')}.py").is_file():  # a file without a function
        return f"{label} is {module.replace('.', '/')}.py, which names no function; write {label} FILE.py:NAME"
    if not _IMPORT.fullmatch(text):
        return f"{label} is {text!r}, but an import path must be package.module:name; write for example {example}"
    top = module.partition(".")[0]
    if hidden := _hidden_by_ours(module):
        return f"{label} is {text!r}, but {top!r} is a package of Sluice, which {hidden} does not replace; rename yours"
    if top in sys.modules or (Path.cwd() / top).is_dir() or (Path.cwd() / f"{top}.py").is_file():
        return None
    if top == "slime":
        return (
            f"{label} is {text!r}, but slime's own functions are not here; see docs/slime.md for what takes their place"
        )
    try:
        found = importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        found = False
    if found:
        return None
    return f"{label} is {text!r}, but no package {top!r} is found; start in its directory, or add it to PYTHONPATH"


def _hidden_by_ours(module: str) -> str | None:
    """The user's package in the working directory that has the name of one of ours, if the module is not there."""
    here, ours, (top, *inner) = Path.cwd(), Path(__file__).resolve().parent.parent, module.split(".")
    named = [path for path in (here / top, here / f"{top}.py") if path.exists()]
    if here == ours or not named or not (ours / top / "__init__.py").is_file():
        return None
    file = ours.joinpath(top, *inner)
    return None if file.is_dir() or file.with_suffix(".py").is_file() else f"your own {named[0]}"


def model_config(name: str) -> dict[str, Any] | None:
    """config.json of a local checkpoint, or None (hub ids, built-in models, unreadable files)."""
    path = Path(name).expanduser() / "config.json"
    if name in BUILT_IN_MODELS or not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError):
        return None


def described_model(name: str) -> dict[str, Any] | None:
    """`model_config`, or the dimensions of a hub id that a preset has."""
    return model_config(name) or _published().get(name)


@cache
def _published() -> dict[str, dict[str, Any]]:
    """By hub id, what the presets say."""
    presets = [tomllib.loads(file.read_text(encoding="utf-8")) for file in sorted(MODELS.glob("*.toml"))]
    return {preset["train"]["hf_checkpoint"]: preset["model"]["architecture"] for preset in presets}


def known_model(config: Config) -> dict[str, Any] | None:
    """What is known of the policy's architecture: its own config.json, else what the run or a preset says."""
    name = config.train.hf_checkpoint
    if name in BUILT_IN_MODELS:
        return None
    return model_config(name) or config.model.architecture or described_model(name)
