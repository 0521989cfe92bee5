"""All that a run refuses before it starts anything, told at once: by the run itself, by `--dry-run`, and beside the
faults of the configuration.

Invariant: nothing is written and no engine is asked; what only the network can tell (a checkpoint of the hub, engines
that run already) is left to the run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from configs.schema import Config
from configs.sources import parse_source, source_fault
from pipeline.errors import Refused, UsageError, user_error
from pipeline.preflight.environments import check_environments
from pipeline.preflight.names import check_graders, check_names, check_trainer
from pipeline.preflight.sglang import NoSglang, prepare_sglang
from stages.data.prompt_set import PromptSet


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
