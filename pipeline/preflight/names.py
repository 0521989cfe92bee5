"""What would fail in a stage's process after minutes, found in the driver before anything starts.

Names of graders and filters are looked up where they are implemented, options of Megatron-core in its source, and the
user's own functions are imported in a process of their own; neither their modules nor a framework is imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from configs.schema import Config
from configs.schema.rejection import parse_rules
from models.train.megatron.settings.options import option_faults
from pipeline.errors import Refused
from pipeline.preflight.user_functions import check_functions, functions_of, graders_of
from stages.errors import FilterNameError
from stages.graders.registry import listed_grader, outside, refusal
from stages.group.filters import parse_filters
from stages.reward.selection import Selection

AUTO = "auto"  # decided when the labels are known


def check_trainer(config: Config) -> None:
    """What the chosen framework needs is installed and knows its options. Raises UsageError."""
    if config.train.train_backend == "megatron" and (faults := option_faults(config.megatron.megatron_args)):
        raise Refused(faults)


def check_names(config: Config) -> None:
    """Filters, components and graders of the flags. Raises UsageError that tells every fault."""
    if config.train.loss_type == "sft_loss":
        return
    faults = []
    try:
        parse_filters(config.filter.dynamic_sampling_filter)
    except FilterNameError as error:
        faults.append(str(error))
    for rule in parse_rules(config.correction.rollout_rs):
        sys.stderr.write(f"rejection: {rule.meaning}\n")  # the bounds of k1 are easily read the wrong way round
    named = Selection(config.reward).configured()
    faults += _name_faults(config, named)
    if not faults:
        check_functions(functions_of(config))
    if faults:
        raise Refused(faults)


def check_graders(config: Config, names: Iterable[str]) -> None:
    """Graders named by rows of the data: they exist, can be called, and have a process if they need one.

    Raises UsageError.
    """
    named = tuple(names)
    if faults := [*_name_faults(config, named)]:
        raise Refused(faults)
    known = functions_of(config)  # those of the flags were looked at before the data
    check_functions(tuple(function for function in graders_of(named) if function not in known))


def _name_faults(config: Config, names: Iterable[str]) -> Iterator[str]:
    for name in dict.fromkeys(names):
        if name == AUTO:
            continue
        reason = refusal(name)
        if reason is not None:
            yield reason
        elif config.reward.reward_workers == 0 and _needs_process(name):
            yield (
                f"--reward-workers is 0, but the grader {name!r} may hang or take memory and runs only in a grader "
                "process; set --reward-workers to 1 or more"
            )


def _needs_process(name: str) -> bool:
    found = listed_grader(name)
    return outside(name) is None and (found is None or not found.in_stage)
