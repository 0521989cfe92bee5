"""Environments before a run starts: each class is imported and made where it will live, and its own tasks are written.

Invariant: no environment is imported here; a process of its own does that, with the interpreter of its workers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

import msgspec

from configs.schema import Config, EnvironmentConfig
from models.disk import write_whole
from pipeline.errors import Refused, UsageError
from pipeline.hosts.machine import child_environment
from stages.agents.calls import Hosted

LIMIT_S = 120.0


def check_environments(config: Config) -> None:
    """All can be imported and made with their options. Raises Refused."""
    if config.train.loss_type == "sft_loss":
        return
    faults = []
    asked = {entry.split("=", 1)[-1].split("@[", 1)[0] for entry in _entries(config)}
    for table in config.environment:
        options = msgspec.json.encode(table.options).decode()
        try:
            (line,) = _ask(table, "check", table.class_path, options) or (msgspec.Raw(b'"it says nothing"'),)
            said = msgspec.json.decode(line, type=Hosted)
        except msgspec.ValidationError:
            faults.append(f"environment.{table.name}: {msgspec.json.decode(line)}")
            continue
        except UsageError as error:
            faults.append(str(error))
            continue
        if table.name in asked and not said.tasks:
            faults.append(
                f"--prompt-data {table.name}: the environment's class {table.class_path} makes no tasks; give it a "
                "class method tasks(split, seed), or give a file of rows"
            )
    if faults:
        raise Refused(faults)


def write_tasks(
    config: Config, table: EnvironmentConfig, split: Literal["train", "heldout"], count: int, path: Path
) -> Path:
    """Rows of an environment's own tasks. Each is the row's metadata, and its keys are the row's as well, so that
    `label_key`, `input_key` and `warm_start_label_key` may name them. Raises UsageError."""
    options = msgspec.json.encode(table.options).decode()
    lines = _ask(table, "tasks", table.class_path, options, split, str(config.run.seed), str(count))
    rows = []
    for line in lines:
        try:
            task = msgspec.json.decode(line, type=dict[str, object])
        except msgspec.ValidationError:
            raise UsageError(f"environment.{table.name}: tasks({split!r}): {msgspec.json.decode(line)}") from None
        metadata = {**task, "environment": table.name}
        rows.append(
            msgspec.json.encode({config.data.input_key: table.name, **task, config.data.metadata_key: metadata})
        )
    if not rows:
        raise UsageError(f"environment.{table.name}: tasks({split!r}) gives none; yield at least one, or give a file")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, b"".join(row + b"\n" for row in rows))
    return path


def _entries(config: Config) -> tuple[str, ...]:
    return (*config.data.prompt_data, *config.eval.eval_prompt_data, *config.warm_start.warm_start_data)


def _ask(table: EnvironmentConfig, *arguments: str) -> list[bytes]:
    """The lines of the answer. Raises UsageError."""
    environment = child_environment(1)  # another interpreter gets the project and the user's modules, and no more
    environment["PYTHONPATH"] = os.pathsep.join([environment["PYTHONPATH"], os.getcwd()])
    command = [table.python or sys.executable, "-P", "-m", "stages.agents.describe", *arguments]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, env=environment, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"environment.{table.name}: importing {table.class_path} takes longer than {LIMIT_S:g} s; let the module "
            "define things only, and load what is large in reset"
        ) from None
    if done.returncode:
        raise UsageError(
            f"environment.{table.name}: importing {table.class_path} ended its process (exit status "
            f"{done.returncode}); its error output stands above"
        )
    return done.stdout.splitlines()
