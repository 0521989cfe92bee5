"""Functions of the user are imported and asked for their signature before a run starts anything."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable

import msgspec

from configs.schema import Config
from pipeline.errors import Refused, UsageError
from pipeline.hosts.local_launcher import child_environment
from stages.graders.registry import is_import_path
from stages.reward.selection import Row, Selection

IMPORT_LIMIT_S = 120.0  # as a grader process has


def functions_of(config: Config) -> tuple[str, ...]:
    """What the flags name, as `kind=package.module:function`."""
    selection = Selection(config.reward)
    names = [*selection.configured(), *([selection.group_grader(Row())] if config.reward.group_rm else [])]
    paths = {
        "filter": config.filter.dynamic_sampling_filter_path,
        "generate": config.rollout.custom_generate_function_path,
        "rollout": config.rollout.rollout_function_path,
        "sample_filter": config.filter.rollout_sample_filter_path,
        "post_process": config.reward.custom_reward_post_process_path,
        "log": config.observe.custom_rollout_log_function_path,
        "eval_log": config.observe.custom_eval_rollout_log_function_path,
        "source": config.data.data_source_path,
    }
    return (*graders_of(names), *(f"{kind}={path}" for kind, path in paths.items() if path is not None))


def graders_of(names: Iterable[str]) -> tuple[str, ...]:
    """The user's own among graders of these names."""
    return tuple(dict.fromkeys(f"grader={name}" for name in names if is_import_path(name)))


def check_functions(functions: tuple[str, ...]) -> None:
    """Raises UsageError with all that is wrong. Imports in another process, with the environment of the stages."""
    if not functions:
        return
    command = [sys.executable, "-P", "-m", "stages.user_functions", *functions]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, env=child_environment(1), timeout=IMPORT_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"importing {', '.join(functions)} takes longer than {IMPORT_LIMIT_S:g} s; let the module define "
            "things only, and load models or data at the first call"
        ) from None
    try:
        faults = msgspec.json.decode(done.stdout, type=list[str])
    except msgspec.DecodeError:
        raise UsageError(
            f"importing {', '.join(functions)} ended its process (exit status {done.returncode}); its error output "
            "stands above"
        ) from None
    if faults:
        raise Refused(faults)
