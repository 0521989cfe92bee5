"""Graders, filters, teachers and judges; environments, tools and functions that make rollouts."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from configs.flags import flags_by_key
from configs.graph import loops, replicas
from configs.layers import value_at
from configs.rules.placement import table_name_faults
from configs.schema import Config, EnvironmentConfig
from configs.schema.notation import as_number, cure, repeated
from configs.sources import BUILT_IN_DATA, import_path_fault

_NAME: Final = re.compile(r"[A-Za-z][\w-]*", re.ASCII)
_URL: Final = re.compile(r"https?://[^\s/]+(/\S*)?")
_PACKS: Final = Path(__file__).resolve().parents[2] / "stages" / "agents" / "packs"


def frozen_names(config: Config) -> tuple[str, ...]:
    """Names of the frozen engines, in the order given."""
    return tuple(text.partition("=")[0] for text in config.engine.frozen_engine)


def engine_faults(config: Config) -> Iterator[str]:
    """Frozen engines, and the settings that name them."""
    names = frozen_names(config)
    for text in config.engine.frozen_engine:
        name, separator, place = text.partition("=")
        if not separator or not place or not _NAME.fullmatch(name):
            yield f"--frozen-engine {text!r} must have the form name=CHECKPOINT or name=http://host:port; write it so"
        elif name == "policy":
            yield f"--frozen-engine {text!r} takes the name of the policy that this run trains; choose another name"
    for name, count in repeated(names):
        yield f"--frozen-engine names {name!r} {count} times, but names must differ; rename all but one"
    distill, reward = config.distill, config.reward
    if distill.use_opd and config.train.loss_type != "sft_loss":
        if not names:
            yield "--use-opd has no teacher; add --frozen-engine teacher=PATH (a Hugging Face checkpoint, or a URL)"
        for teacher in distill.opd_teacher:
            if names and teacher not in names:
                yield f"--opd-teacher {teacher!r} is no frozen engine; {_choose(teacher, names)}"
    if reward.judge_engine is not None and reward.judge_engine not in names:
        yield f"--judge-engine {reward.judge_engine!r} is no frozen engine; {_choose(reward.judge_engine, names)}"


def _choose(word: str, names: tuple[str, ...]) -> str:
    return cure(word, names) if names else f"add --frozen-engine {word}=PATH"


def reward_faults(config: Config) -> Iterator[str]:
    reward = config.reward
    graders = [reward.rm_type]
    for text in reward.reward_component:
        name, separator, rest = text.partition("=")
        grader, _, weight = rest.rpartition("@")
        if not separator or not grader or not _NAME.fullmatch(name) or as_number(weight) is None:
            yield (f"--reward-component {text!r} must have the form name=GRADER@WEIGHT; write for example acc=math@0.8")
        graders.append(grader)
    for name, count in repeated(text.partition("=")[0] for text in reward.reward_component):
        yield f"--reward-component names {name!r} {count} times, but names must differ; rename all but one"
    if reward.group_rm and reward.custom_rm_path is None:
        yield "--group-rm needs a function over whole groups; give --custom-rm-path, e.g. my_project.rewards:rank"
    if "remote" in graders and reward.rm_url is None:
        yield "rm_type remote has no address; give --rm-url, for example --rm-url http://localhost:8000/score"
    if reward.rm_url is not None and not _URL.fullmatch(reward.rm_url):
        yield f"--rm-url is {reward.rm_url!r}, but must be an http address; write for example http://localhost:8000/score"
    if "judge" in graders and reward.judge_engine is None:
        yield "rm_type judge has no judge; give --judge-engine NAME and --frozen-engine NAME=PATH"
    for grader in graders:
        kind, _, judge = grader.partition(":")
        if kind == "judge" and judge and judge not in frozen_names(config):
            yield f"rm_type {grader!r} names no frozen engine; {_choose(judge, frozen_names(config))}"
    limit = config.rollout.rollout_max_response_len
    if reward.overlong_buffer_len >= limit:
        yield (
            f"--overlong-buffer-len is {reward.overlong_buffer_len:g}, but must be below --rollout-max-response-len "
            f"{limit}, for it is the last part of it; lower it"
        )


def filter_faults(config: Config) -> Iterator[str]:
    wanted, batch = config.filter.over_sampling_batch_size, config.rollout.rollout_batch_size
    if wanted is not None and wanted < batch:
        yield (
            f"--over-sampling-batch-size is {wanted}, but a batch of {batch} groups needs as many in flight anyway; "
            f"set it to at least {batch}, or leave it out"
        )

    early, n = config.filter.dynamic_sampling_early_after, config.rollout.n_samples_per_prompt
    if early is not None and not 2 <= early < n:
        yield (
            f"--dynamic-sampling-early-after is {early}, but must be at least 2 and below --n-samples-per-prompt {n}; "
            "choose such a number, or leave it out"
        )


def pack_names() -> tuple[str, ...]:
    """Built-in environments: the modules that have the class which their name stands for."""
    found = []
    for path in sorted(_PACKS.glob("[a-z]*.py")):
        name = EnvironmentConfig(name=path.stem).class_path.partition(":")[2]
        if f"\nclass {name}" in path.read_text(encoding="utf-8"):
            found.append(path.stem)
    return tuple(found)


def custom_args_faults(config: Config) -> Iterator[str]:
    """A name of `--custom-args` that is a setting would hide what the run does, unless it says the same, or is one of
    the importance weights that a function of the user's makes."""
    keys = {key.rpartition(".")[2]: key for key in flags_by_key()}
    for name, value in config.rollout.custom_args.items():
        own = name.startswith("tis_") and config.correction.custom_tis_function_path is not None
        if name in keys and not own and value != value_at(config, keys[name]):
            label = flags_by_key()[keys[name]].label
            yield f"--custom-args gives {name}, which is a setting of the run; write {label} instead"


def environment_faults(config: Config) -> Iterator[str]:
    yield from table_name_faults("environment", [table.name for table in config.environment])
    for table in config.environment:
        if table.name in BUILT_IN_DATA:
            yield f"environment.{table.name} has the name of built-in data; rename it"
        yield from _table_faults(table)


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
    if table.python is not None and shutil.which(os.path.expanduser(table.python)) is None:
        yield f"{key}.python is {table.python!r}, but that is no program; give the path of a Python interpreter"


def environment_warnings(config: Config) -> Iterator[str]:
    if config.environment and config.data.apply_chat_template:
        yield "--apply-chat-template has no effect: with [[environment]] the conversation is always in chat format"


def tool_faults(config: Config) -> Iterator[str]:
    tools, rollout = config.tools, config.rollout
    functions = {
        "--custom-generate-function-path": rollout.custom_generate_function_path,
        "--rollout-function-path": rollout.rollout_function_path,
    }
    for flag, function in functions.items():
        if function is not None and (unused := loops(config)):
            yield (
                f"{flag} {function} makes whole rollouts, so that the stage {unused[0]} would never be reached; call "
                "tools in the function, or leave one of them out"
            )
    if rollout.rollout_function_path is not None and (count := replicas(config).get("generate", 1)) > 1:
        yield (
            f"--scale generate={count} shares prompts out, but --rollout-function-path makes a batch in one call; "
            "leave generate out of --scale"
        )
    if not tools.tools:
        return
    if not tools.tool_call_open or not tools.tool_call_close:
        yield "--tool-call-open and --tool-call-close must not be empty, for they mark a tool call; give both"
    if "{result}" not in tools.tool_result_template:
        yield (
            f"--tool-result-template is {tools.tool_result_template!r}, but must contain {{result}}, which is "
            "replaced by the tool's answer; add it"
        )
