"""`python -m stages.user_functions try grader=my_code:score filter=my_code:keep`: can a run call these functions?

Runs in a separate process, because a user's module may take memory, print, or end the process. Writes the JSON lists of
faults and of warnings as the only line of its standard output.

With `try` each function is called once on a made-up group, with the settings of the run: the standard input has a JSON
list with its `Config`, as hexadecimal msgpack. With `import` none is called. What works on tensors or rewards
alone must not fail. Graders, filters and post-processing may rightly fail on made-up texts, or for want of a service:
an exception is then a warning, unless it can come of nothing but the code.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, NoReturn

import msgspec
import numpy as np

from configs.schema import Config
from models.import_path import ImportPathError, add_working_directory, import_path, raised
from models.slime_arguments import SlimeArguments, slime_arguments
from stages.base import Stage
from stages.errors import UntrainableGroup
from stages.graders.grade import GradeRequest, UnknownGraderError
from stages.graders.registry import ARGS, custom_grader, is_import_path
from stages.group.filters import import_filter
from stages.messages import Float32Array as Floats
from stages.messages import Int32Array as Ids
from stages.messages import PromptGroup, RolloutSlice, Sample, UInt8Array, VersionRun, wire
from stages.reward.components import Row, Selection
from stages.slime import hooks
from stages.tools.registry import BUILT_IN, import_tool
from stages.tools.tool import UnknownToolError

TRY_S: Final = 20  # for one call

_STEP: Final = ("args", "rollout_id", "step_id", "model", "optimizer", "opt_param_scheduler")


_AWAITED: Final = ("grader", "group_grader", "tool", "stage", "filter", "generate", "rollout", "eval")  # may be async
_NAMED: Final = ("advantage", "policy_loss", "buffer_order")  # their flags take names as well


def functions_of(config: Config) -> tuple[str, ...]:
    """Functions of the flags, as `kind=package.module:function`."""
    selection, settings = Selection(config.reward), vars(slime_arguments(config))
    names = [*selection.configured(), *([selection.group_grader(Row())] if config.reward.group_rm else [])]
    values = {name: settings[kind.flag[2:].replace("-", "_")] for name, kind in KINDS.items() if kind.flag}
    paths = {kind: value for kind, value in values.items() if value and (kind not in _NAMED or ":" in value)}
    tools = (f"tool={tool}" for tool in config.tools.tools if tool not in BUILT_IN)
    stages = (f"stage={stage.path}" for stage in config.stage)
    return (*graders_of(names, config), *(f"{kind}={path}" for kind, path in paths.items()), *tools, *stages)


def graders_of(names: Iterable[str], config: Config) -> tuple[str, ...]:
    """Graders of the user among these names."""
    kind = "group_grader" if config.reward.group_rm else "grader"
    return tuple(dict.fromkeys(f"{kind}={name}" for name in names if is_import_path(name)))


def made_up() -> RolloutSlice:
    """A graded group of four rollouts, two of them right."""
    group = PromptGroup(0, 0, 0, "1 + 1 =", wire([], Ids), "2", 4, 0)
    samples = (
        Sample(
            index, "completed", "2" if index % 2 else "3", wire([1, 2, 3], Ids), 1, wire([0, 1, 1], UInt8Array),
            wire([0.0, -0.5, -0.25], Floats), (VersionRun(-1, 1), VersionRun(0, 2)), turns=1, reward=index % 2 * 1.0,
        )
        for index in range(4)
    )  # fmt: skip
    return RolloutSlice(group, tuple(samples))


def _grade(path: str, config: Config, responses: tuple[str, ...] = ()) -> None:
    request = GradeRequest(path, "" if responses else "2", "2", responses=responses, n_tokens=2, prompt="1 + 1 =")
    vars(ARGS).update(vars(slime_arguments(config)))
    grade = custom_grader(path)(request)
    if grade.error is not None:
        raise TypeError(grade.error)


def _filter(path: str, config: Config) -> None:
    if inspect.iscoroutine(decision := import_filter(path)(made_up())):
        asyncio.run(decision)


def _sample_filter(path: str, config: Config) -> None:
    hooks.removed(hooks.sample_filter(path), SlimeArguments(), made_up())


def _post_process(path: str, config: Config) -> None:
    from stages.train.batch import post_processed

    slice_ = made_up()
    post_processed(config, import_path(path), path, slice_, [(sample,) for sample in slice_.samples])


def _convert(path: str, config: Config) -> None:
    from stages.train.batch import for_trainer

    reward = msgspec.structs.replace(config.reward, custom_convert_samples_to_train_data_path=path)
    for_trainer(msgspec.structs.replace(config, reward=reward), made_up())


def _buffer_order(path: str, config: Config) -> None:
    from stages.train.held_groups import GroupBuffer

    class Held:
        message = made_up()

    asynchrony = msgspec.structs.replace(config.asynchrony, buffer_order=path)
    buffer = GroupBuffer(msgspec.structs.replace(config, asynchrony=asynchrony))
    buffer.push(Held())  # type: ignore[arg-type]
    buffer.pop(0, 1)


def _advantage(path: str, config: Config) -> None:
    from models.algorithms.advantages import advantages

    advantages(path, [0.0, 1.0, 0.0, 1.0], range(4))


def _rollout_data(kind: str, path: str, config: Config) -> None:
    from models.train.step.examples import Example
    from models.train.step.rollout_data import custom_advantages, post_process, rollout_data

    ids, numbers = np.array([1, 2, 3], np.int32), np.array([-0.5, -0.25], np.float32)
    examples = [Example(ids, 1, np.arange(1, 3), numbers, numbers * 0 + one, 1.0, reward=one) for one in (0.0, 1.0)]
    for example in examples:
        example.ref_log_probs = numbers
        example.values = numbers if config.algorithm.advantage_estimator == "ppo" else None
    args, data = slime_arguments(config), rollout_data(examples, student="rollout_log_probs", kl_coef=1.0)
    if kind == "advantages":
        custom_advantages(path, args, data, examples)
    else:
        post_process(path, args, 0, data, examples)


def _on_tokens(kind: str, path: str, config: Config) -> None:
    import torch

    from models.algorithms.correction import custom_weights
    from models.algorithms.losses import policy_loss_of
    from models.algorithms.objective import GroupColumns, group_loss_of, group_objective
    from models.algorithms.slime_hooks import Hooks, Responses
    from models.algorithms.tokens import PolicyTokens

    new = torch.linspace(-2.0, -0.5, 8, requires_grad=True)
    old, each, rows = new.detach(), torch.ones(8), torch.arange(4)
    mask, sequence = each.bool(), rows.repeat_interleave(2)
    tokens = PolicyTokens(new, old, old - 0.1, each, mask, sequence, 4, old, each, each.long())
    match kind:
        case "policy_loss":
            policy_loss_of(path)(tokens, config.algorithm)
        case "tis" | "reducer" if kind == "reducer" or hooks.slime_function(path):
            args, function = slime_arguments(config), import_path(path)
            hook = Hooks(args, function, function, responses=Responses(torch.arange(8), [2] * 4, [3] * 4, each))
            hook.weighted(new, tokens, old) if kind == "tis" else hook.reduced(new, each)
        case "tis":
            custom_weights(path, old * 0.1, tokens)
        case _:
            columns = GroupColumns(rows // 2, rows, rows % 2 * 1.0, 2, 4)
            group_objective(tokens, columns, config.algorithm, group_loss_of(path))


def _stage(path: str) -> None:
    found = import_path(path)
    if isinstance(found, type) and not issubclass(found, Stage):
        raise ImportPathError(f"import path {path!r} is no stage; derive {found.__name__} from stages.base.MapStage")


class Kind(NamedTuple):
    """Functions of one flag: how one is imported and tried, and whether any exception of the trial is a fault."""

    load: Callable[[str], Any]
    flag: str = ""
    attempt: Callable[[str, Config], None] | None = None  # none calls it
    strict: bool = False


KINDS: Final[dict[str, Kind]] = {
    "grader": Kind(custom_grader, attempt=_grade),
    "group_grader": Kind(custom_grader, attempt=partial(_grade, responses=("2", "3"))),
    "tool": Kind(import_tool),
    "stage": Kind(_stage),
    "filter": Kind(import_filter, "--dynamic-sampling-filter-path", _filter),
    "generate": Kind(hooks.generate_function, "--custom-generate-function-path"),
    "rollout": Kind(hooks.rollout_function, "--rollout-function-path"),
    "all_samples": Kind(hooks.all_samples, "--rollout-all-samples-process-path"),
    "data_post_process": Kind(
        hooks.taking("args", "rollout_id", "rollout_data"),
        "--rollout-data-postprocess-path",
        partial(_rollout_data, "post"),
        True,
    ),
    "megatron_init": Kind(hooks.taking("args"), "--custom-megatron-init-path"),
    "before_log_prob": Kind(
        hooks.taking("args", "model", "store_prefix"), "--custom-megatron-before-log-prob-hook-path"
    ),
    "before_step": Kind(hooks.taking(*_STEP), "--custom-megatron-before-train-step-hook-path"),
    "convert": Kind(hooks.taking("args", "samples"), "--custom-convert-samples-to-train-data-path", _convert),
    "buffer_order": Kind(import_path, "--buffer-order", _buffer_order),
    "eval": Kind(hooks.rollout_function, "--eval-function-path"),
    "sample_filter": Kind(hooks.sample_filter, "--rollout-sample-filter-path", _sample_filter),
    "post_process": Kind(hooks.taking("rewards", "samples"), "--custom-reward-post-process-path", _post_process),
    "log": Kind(hooks.rollout_log, "--custom-rollout-log-function-path"),
    "eval_log": Kind(hooks.eval_log, "--custom-eval-rollout-log-function-path"),
    "source": Kind(hooks.data_source, "--data-source-path"),
    "advantage": Kind(import_path, "--advantage-estimator", _advantage, True),
    "policy_loss": Kind(import_path, "--policy-loss", partial(_on_tokens, "policy_loss"), True),
    "loss": Kind(import_path, "--custom-loss-function-path", partial(_on_tokens, "loss"), True),
    "tis": Kind(import_path, "--custom-tis-function-path", partial(_on_tokens, "tis"), True),
    "advantages": Kind(import_path, "--custom-advantage-function-path", partial(_rollout_data, "advantages"), True),
    "reducer": Kind(import_path, "--custom-pg-loss-reducer-function-path", partial(_on_tokens, "reducer"), True),
}


def _too_long(*_: object) -> NoReturn:
    raise TimeoutError(f"it took longer than {TRY_S} s")


def tried(kind: Kind, path: str, config: Config) -> tuple[str, bool] | None:
    """Call a function on a made-up group. What it raised, if anything, and whether that refuses the run."""
    if kind.attempt is None:
        return None
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(TRY_S)
    try:
        kind.attempt(path, config)
        return None
    except Exception as error:
        rejected = isinstance(error, UntrainableGroup) and error.__cause__ is None
        broken = isinstance(error.__cause__ or error, NameError | ImportError)
        sentence = f"{path} failed on a made-up group of 4 rollouts for the prompt '1 + 1 =': {raised(error)}"
    finally:
        signal.alarm(0)
    refused = kind.strict or rejected or broken
    return f"{sentence}; mend it, or start with --no-try-functions" if refused else sentence, refused


def faults(functions: Sequence[str], tries: Config | None = None) -> tuple[list[str], list[str]]:
    """Faults and warnings, one sentence for each `kind=package.module:function` that cannot be imported, or called
    with the settings `tries`."""
    problems, warnings = list[str](), list[str]()
    for name, _, path in (function.partition("=") for function in functions):
        kind = KINDS[name]
        option = f"{kind.flag}: " if kind.flag else "[[stage]]: " if name == "stage" else ""
        try:
            function = kind.load(path)
            if name not in _AWAITED:
                hooks.plain(path, function)
            if tries is not None and (found := tried(kind, path, tries)):
                (problems if found[1] else warnings).append(f"{option}{found[0]}")
        except (ImportPathError, UnknownGraderError, UnknownToolError) as error:
            problems.append(f"{option}{error}")
        except SystemExit as error:
            problems.append(f"{name} {path!r}: its module ended the process ({error}); import must only define things")
    return problems, warnings


def main(arguments: Sequence[str]) -> int:
    """Write faults and warnings; what the user's modules print goes to the error output."""
    add_working_directory()
    tries = None
    if arguments[0] == "try":
        (given,) = json.load(sys.stdin)
        tries = msgspec.msgpack.decode(bytes.fromhex(given), type=Config)
    answers = os.dup(1)
    os.dup2(2, 1)
    with contextlib.redirect_stdout(sys.stderr):
        found = faults(arguments[1:], tries)
    os.write(answers, json.dumps(found).encode() + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
