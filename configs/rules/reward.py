"""Rewards, filters, teachers and judges: parts that exist and fit together."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Final

from configs.schema import Config
from configs.schema.did_you_mean import cure

_NAME: Final = re.compile(r"[A-Za-z][\w-]*", re.ASCII)
_URL: Final = re.compile(r"https?://[^\s/]+(/\S*)?")


def frozen_names(config: Config) -> tuple[str, ...]:
    """Names of the frozen engines, in the order given."""
    return tuple(text.partition("=")[0] for text in config.engine.frozen_engine)


def engine_faults(config: Config) -> Iterator[str]:
    """Frozen engines, and those who ask them."""
    names = frozen_names(config)
    for text in config.engine.frozen_engine:
        name, separator, place = text.partition("=")
        if not separator or not place or not _NAME.fullmatch(name):
            yield f"--frozen-engine {text!r} must have the form name=CHECKPOINT or name=http://host:port; write it so"
        elif name == "policy":
            yield f"--frozen-engine {text!r} takes the name of the policy that this run trains; choose another name"
    for name, count in Counter(names).items():
        if count > 1:
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
        if not separator or not grader or not _NAME.fullmatch(name) or not _is_number(weight):
            yield (f"--reward-component {text!r} must have the form name=GRADER@WEIGHT; write for example acc=math@0.8")
        graders.append(grader)
    for name, count in Counter(text.partition("=")[0] for text in reward.reward_component).items():
        if count > 1:
            yield f"--reward-component names {name!r} {count} times, but names must differ; rename all but one"
    if reward.reward_component and reward.custom_rm_path is not None:
        yield (
            "--reward-component and --custom-rm-path both say how to grade; leave one out, or make your function a "
            f"component: own={reward.custom_rm_path}@1.0"
        )
    if reward.group_rm and reward.custom_rm_path is None:
        yield "--group-rm needs a function over whole groups; give --custom-rm-path, e.g. my_project.rewards:rank"
    if reward.reward_component:
        for label, used in (("--group-rm", reward.group_rm), ("--reward-key", reward.reward_key is not None)):
            if used:
                yield f"{label} and --reward-component both say what a response earns; leave one of them out"
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
    if reward.custom_reward_post_process_path is not None and config.algorithm.advantage_estimator in (
        "ppo",
        "reinforce_plus_plus",
        "on_policy_distillation",
    ):
        yield (
            "--custom-reward-post-process-path replaces a group's normalisation, which --advantage-estimator "
            f"{config.algorithm.advantage_estimator} does not have; choose a group estimator such as grpo"
        )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def filter_faults(config: Config) -> Iterator[str]:
    filters = config.filter
    wanted, batch = filters.over_sampling_batch_size, config.rollout.rollout_batch_size
    if wanted is not None and wanted < batch:
        yield (
            f"--over-sampling-batch-size is {wanted}, but a batch of {batch} groups needs as many in flight anyway; "
            f"set it to at least {batch}, or leave it out"
        )
    if wanted is not None and config.run.deterministic:
        yield (
            "--deterministic with --over-sampling-batch-size: which groups are trained then depends on the order in "
            "which they finish; leave one of them out"
        )
    if "nonzero_std" in filters.dynamic_sampling_filter and "nonzero_std_fallback" in filters.dynamic_sampling_filter:
        yield (
            "--dynamic-sampling-filter nonzero_std drops what nonzero_std_fallback would keep for a batch that is "
            "short; leave one of them out"
        )
