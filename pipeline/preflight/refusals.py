"""All that a run refuses before it starts anything, reported together: by the run, by `--dry-run`, beside the faults of
the configuration.

Names of graders and filters are looked up where they are implemented, options of Megatron-core in its source. A user's
functions are imported, and asked for their signature, in a process of their own; this one imports neither their modules
nor a framework.

Invariant: nothing is written and no engine is asked. What only the network can answer (a checkpoint of the hub, engines
that run already) is left to the run.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import msgspec

from configs.schema import Config
from configs.schema.rejection import parse_rules
from configs.sources import parse_source, source_fault
from models.train.megatron.settings.options import option_faults
from pipeline.errors import Refused, UsageError, user_error
from pipeline.hosts.machine import child_environment
from pipeline.preflight.environments import check_environments
from pipeline.preflight.sglang import NoSglang, prepare_sglang
from stages.data.prompt_set import PromptSet
from stages.errors import FilterNameError
from stages.graders.registry import is_import_path, listed_grader, outside, refusal
from stages.group.filters import parse_filters
from stages.reward.selection import Row, Selection

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


def check_rows(config: Config) -> None:
    """The rows of the prompt files as they stand, without a tokenizer: lengths are not known. Raises DataError."""
    data, evaluation = config.data, config.eval
    held_out = msgspec.structs.replace(
        data,
        input_key=evaluation.eval_input_key or data.input_key,
        label_key=evaluation.eval_label_key or data.label_key,
    )
    supervised = config.train.loss_type == "sft_loss"
    own = () if data.data_source_path is not None else data.prompt_data
    for keys, texts, named in ((data, own, False), (held_out, evaluation.eval_prompt_data, True)):
        sources = [text.partition("=")[2] if parse_source(text, named=named).name else text for text in texts]
        files = [text for text in sources if not parse_source(text).built_in and source_fault("", text) is None]
        if files:
            rows = msgspec.structs.replace(keys, rollout_max_prompt_len=None)
            labels = supervised and not named
            found = PromptSet(files, rows, lambda _: (0,), lambda *_: "a chat", tokenize_labels=labels)
            check_graders(config, found.report.rm_types)


_ALWAYS: Final[Sequence[Callable[[Config], object]]] = (check_names, check_trainer, check_environments, prepare_sglang)


def refuse(config: Config) -> None:
    """What stands before a run. Raises Refused; where something is wrong, the data is looked at as well."""
    if faults := _faults(config, _ALWAYS):
        raise Refused([*faults, *_faults(config, (check_rows,))])


def refusals(config: Config) -> list[str]:
    """For a plan, or beside other faults: one sentence each. An environment of SGLang may be missing then."""

    def sglang(config: Config) -> None:
        try:
            prepare_sglang(config)
        except NoSglang as error:
            sys.stderr.write(f"warning: a run is refused here: {error}\n")

    return _faults(config, (check_names, check_trainer, check_environments, sglang, check_rows))


def _faults(config: Config, checks: Sequence[Callable[[Config], object]]) -> list[str]:
    faults: list[str] = []
    for check in checks:
        try:
            check(config)
        except Exception as error:
            sentence = str(error) if isinstance(error, UsageError) else user_error(error)
            if sentence is None:
                raise
            faults.extend(getattr(error, "faults", (sentence,)))
    return faults
