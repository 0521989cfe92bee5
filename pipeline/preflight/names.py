"""What would fail in a stage's process after minutes, found in the driver before anything starts.

Names of graders and filters are looked up where they are implemented, options of Megatron-core in its source; neither
a user's module nor a framework is imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from configs.schema import Config
from configs.schema.rejection import parse_rules
from models.train.megatron.options import option_faults
from pipeline.errors import UsageError
from stages.graders.registry import listed_grader, refusal
from stages.graders.selection import Selection, outside
from stages.group.filter_chain import parse_filters

AUTO = "auto"  # decided when the labels are known


def check_trainer(config: Config) -> None:
    """What the chosen framework needs is installed and knows its options. Raises UsageError."""
    if config.train.train_backend == "megatron" and (faults := option_faults(config.megatron.megatron_args)):
        raise UsageError("; ".join(faults))


def check_names(config: Config) -> None:
    """Filters, components and graders of the flags. Raises UsageError, UnknownGraderError or FilterNameError."""
    if config.train.loss_type == "sft_loss":
        return
    parse_filters(config.filter.dynamic_sampling_filter)
    for rule in parse_rules(config.correction.rollout_rs):
        sys.stderr.write(f"rejection: {rule.meaning}\n")  # the bounds of k1 are easily read the wrong way round
    check_graders(config, Selection(config.reward).configured())


def check_graders(config: Config, names: Iterable[str]) -> None:
    """Graders named by flags or by rows of the data: they exist, and there is a process for those that need one."""
    for name in dict.fromkeys(names):
        if name == AUTO:
            continue
        reason = refusal(name)
        if reason is not None:
            raise UsageError(reason)
        if config.reward.reward_workers == 0 and _needs_process(name):
            raise UsageError(
                f"--reward-workers is 0, but the grader {name!r} may hang or take memory and runs only in a grader "
                "process; set --reward-workers to 1 or more"
            )


def _needs_process(name: str) -> bool:
    found = listed_grader(name)
    return outside(name) is None and (found is None or not found.in_stage)
