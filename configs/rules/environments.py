"""Environments and agents: tables that are complete, packs that exist, options that do not exclude each other."""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from configs.schema import Config, EnvironmentConfig
from configs.schema.did_you_mean import cure
from configs.sources import BUILT_IN_DATA, import_path_fault

_NAME: Final = re.compile(r"[a-z][a-z0-9_-]*", re.ASCII)
_PACKS: Final = Path(__file__).resolve().parents[2] / "stages" / "agents" / "packs"


def pack_names() -> tuple[str, ...]:
    """Built-in environments: the modules that have the class which their name stands for."""
    found = []
    for path in sorted(_PACKS.glob("[a-z]*.py")):
        name = EnvironmentConfig(name=path.stem).class_path.partition(":")[2]
        if f"\nclass {name}" in path.read_text(encoding="utf-8"):
            found.append(path.stem)
    return tuple(found)


def environment_faults(config: Config) -> Iterator[str]:
    for name, count in Counter(table.name for table in config.environment).items():
        if count > 1:
            yield f"environment.{name} is there {count} times, but names must differ; rename all but one"
        if not _NAME.fullmatch(name):
            yield f"environment name {name!r} must be small letters, digits, - and _, with a letter first; rename it"
        elif name in BUILT_IN_DATA:
            yield f"environment.{name} has the name of built-in data; rename it"
    for table in config.environment:
        yield from _table_faults(table)
    if config.environment and config.tools.tools:
        yield (
            f"--tools {' '.join(config.tools.tools)} and [[environment]] both answer the model's turns; leave --tools "
            "out, and let the environment offer its tools"
        )


def _table_faults(table: EnvironmentConfig) -> Iterator[str]:
    key = f"environment.{table.name}"
    if table.path:
        if fault := import_path_fault(f"{key}.path", table.path, "my_project.games:Game"):
            yield fault
    elif table.name not in pack_names():
        otherwise = f"set path to the import path of its class; packs: {', '.join(pack_names()) or 'none'}"
        yield f"{key} has no path, and there is no built-in pack {table.name!r}; " + cure(
            table.name, pack_names(), otherwise
        )
    if table.python is not None:
        found = shutil.which(os.path.expanduser(table.python))
        if found is None:
            yield f"{key}.python is {table.python!r}, but that is no program; give the path of a Python interpreter"


def warnings(config: Config) -> Iterator[str]:
    if config.environment and config.data.apply_chat_template:
        yield "--apply-chat-template has no effect: with [[environment]] the conversation is always in chat format"
