"""The prompts of a run, and what only they tell of its configuration."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from configs.resolve import num_rollout_for
from configs.schema import Config
from models.context import context_limit
from pipeline.preflight.names import check_graders
from pipeline.record.run_directory import RunDir
from stages.data.prompt_set import PromptSet, load_train_prompts, row_preparer
from stages.data.tokenizer import Tokenizer
from stages.graders.choose import choose_auto
from stages.prompts.prompt_sources import DrawnPrompts


def training_prompts(config: Config, tokenizer: Tokenizer, rundir: RunDir) -> PromptSet | DrawnPrompts:
    """Of the files, or of `--data-source-path`. Raises DataError."""
    if config.data.data_source_path is None or config.train.loss_type == "sft_loss":
        return load_train_prompts(config, tokenizer)
    context = context_limit(config)
    limits = (config.data.rollout_max_prompt_len, None if context is None else context - 1)
    return DrawnPrompts(
        config,
        rundir.path / "data_source",
        row_preparer(config, tokenizer),
        tokenizer.encode,
        min((limit for limit in limits if limit is not None), default=None),
    )


def with_data(config: Config, prompts: PromptSet | DrawnPrompts, tell: Callable[[str], None]) -> Config:
    """Fill in what only the data knows: the number of rollouts of an epoch, the grader. `tell`: of rows, and why that
    grader."""
    replace = msgspec.structs.replace
    for line in prompts.report.lines():
        tell(line)
    config = replace(config, rollout=replace(config.rollout, num_rollout=num_rollout_for(config, len(prompts))))
    supervised = config.train.loss_type == "sft_loss"
    if not supervised or config.warm_start.warm_start_steps:  # a warm start is not spent on data that fails after it
        check_graders(config, prompts.report.rm_types)
    if supervised:
        return config
    reward = config.reward
    chosen = reward.custom_rm_path is not None or reward.reward_component or prompts.report.rm_types
    if reward.rm_type == "auto" and not chosen and (prompts.report.labels or not config.environment):
        grader, why = choose_auto(prompts.report.labels)
        tell(f"grader {grader}: {why}")
        reward = replace(reward, rm_type=grader)
    return replace(config, reward=reward)
