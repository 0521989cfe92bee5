"""What a run needs before it starts: the built-in tiny models and data, where the user named them, and the grader.

Built-in names (nothing is downloaded): checkpoints `tiny` (byte-level tokenizer) and `tiny-arithmetic` (characters);
data `arithmetic` (two-digit sums) and `arithmetic-tools` (products with a calculator), and the name of an environment
that makes tasks of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from configs.graph import is_address
from configs.schema import Config
from models.arithmetic import ArithmeticFiles, write_arithmetic
from pipeline.errors import UsageError
from pipeline.preflight.environments import write_tasks
from stages.data.tokenizer import locate
from stages.errors import TokenizerError

BUILT_IN_MODELS: dict[str, Literal["bytes", "arithmetic"]] = {"tiny": "bytes", "tiny-arithmetic": "arithmetic"}
BUILT_IN_DATA: dict[str, Literal["add", "tools"]] = {"arithmetic": "add", "arithmetic-tools": "tools"}
TRAIN_ROWS, HELDOUT_ROWS = 8000, 256
# Standard deviation of the first weights. 0.02 is for models eight times as wide: sums are learned in 240 supervised
# steps from 0.06, in 350 to 600 from 0.02.
_SPREAD = {"bytes": 0.02, "arithmetic": 0.06}


def prepare(config: Config, directory: Path) -> Config:
    """Make what is built in, under `directory`, and return the configuration with paths in the place of names."""
    replace = msgspec.structs.replace
    train, data, evaluation, warm = config.train, config.data, config.eval, config.warm_start
    train = replace(train, hf_checkpoint=_model(train.hf_checkpoint, directory, config.run.seed))
    if train.ref_load is not None:
        train = replace(train, ref_load=_model(train.ref_load, directory, config.run.seed))
    critic = config.critic
    if critic.critic_load is not None:
        critic = replace(critic, critic_load=_model(critic.critic_load, directory, config.run.seed))
    frozen = tuple(_frozen(entry, directory, config.run.seed) for entry in config.engine.frozen_engine)
    engine = replace(config.engine, frozen_engine=frozen)
    files = {name: _data(config, name, directory) for name in _named(config)}
    data = replace(data, prompt_data=tuple(_path(e, files, heldout=False) for e in data.prompt_data))
    evaluation = replace(
        evaluation, eval_prompt_data=tuple(_path(e, files, heldout=True) for e in evaluation.eval_prompt_data)
    )
    warm = replace(warm, warm_start_data=tuple(_path(e, files, heldout=False) for e in warm.warm_start_data))
    return replace(config, train=train, critic=critic, engine=engine, data=data, eval=evaluation, warm_start=warm)


def _frozen(entry: str, directory: Path, seed: int) -> str:
    """`name=CHECKPOINT` with the checkpoint as a path; an address stays."""
    name, _, place = entry.partition("=")
    if is_address(place):
        return entry
    try:
        return f"{name}={_model(place, directory, seed)}"
    except TokenizerError as error:
        words = str(error).replace("hf_checkpoint is ", "the checkpoint is ")
        raise UsageError(f"--frozen-engine {entry}: {words}") from error


def _named(config: Config) -> set[str]:
    entries = (*config.data.prompt_data, *config.eval.eval_prompt_data, *config.warm_start.warm_start_data)
    known = {*BUILT_IN_DATA, *(table.name for table in config.environment)}
    return {name for entry in entries if (name := _bare(entry)) in known}


def _bare(entry: str) -> str:
    """`name=path@[slice]` -> path."""
    return entry.split("=", 1)[-1].split("@[", 1)[0]


def _path(entry: str, files: dict[str, ArithmeticFiles], *, heldout: bool) -> str:
    bare = _bare(entry)
    if bare not in files:
        return entry
    file = files[bare].heldout if heldout else files[bare].train
    name, separator, rest = entry.partition("=")
    if not separator:
        name, rest = (("heldout" if bare in BUILT_IN_DATA else bare) if heldout else "train"), entry
    path = rest.replace(bare, str(file), 1)
    return f"{name}={path}" if heldout else path


def _data(config: Config, name: str, directory: Path) -> ArithmeticFiles:
    for table in config.environment:
        if table.name == name:
            home = directory / "data"
            files = ArithmeticFiles(home / f"{name}-train.jsonl", home / f"{name}-heldout.jsonl")
            write_tasks(config, table, "train", TRAIN_ROWS, files.train)
            if name in map(_bare, config.eval.eval_prompt_data):
                write_tasks(config, table, "heldout", HELDOUT_ROWS, files.heldout)
            return files
    return write_arithmetic(
        directory / "data", kind=BUILT_IN_DATA[name], train=TRAIN_ROWS, heldout=HELDOUT_ROWS, seed=0
    )


def _model(name: str, directory: Path, seed: int) -> str:
    if name not in BUILT_IN_MODELS:
        return str(locate(name))
    from models.tiny import TinyCheckpointError, make_tiny_checkpoint  # transformers, only where a model is made

    path, kind = directory / name, BUILT_IN_MODELS[name]
    try:
        make_tiny_checkpoint(path, tokenizer=kind, seed=seed, initializer_range=_SPREAD[kind])
    except TinyCheckpointError as error:  # of a run that another version began
        raise UsageError(f"--hf-checkpoint {name}: {error}, or start a new run") from error
    return str(path)
