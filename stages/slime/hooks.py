"""Functions with slime's signatures: checks of their signature, and the samples that they get of finished rollouts.

Filters, post-processing of rewards, logs and graders get rollouts as slime's samples, one for each sequence. Invariant:
changes that a function makes to these samples are ignored, except `remove_sample` in filters.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from configs.schema import Config
from models.import_path import ImportPathError, has_args, import_function, import_path
from models.slime_arguments import SlimeArguments, slime_arguments
from stages.base import in_daemon_thread
from stages.messages import RolloutSlice
from stages.slime import types as slime
from stages.slime.convert import given_sample, put_back


def generate_function(path: str) -> Callable[..., Any]:
    """The generate function at an import path, with a checked signature. Raises ImportPathError."""
    function = import_function(path, "args", "sample", "sampling_params", optional=("evaluation",))
    if not inspect.iscoroutinefunction(inspect.unwrap(function)):
        raise ImportPathError(
            f"import path {path!r} is no async function; write async def generate(args, sample, sampling_params)"
        )
    return function


def plain(path: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which is called without `await`. Raises ImportPathError."""
    if inspect.iscoroutinefunction(function):
        raise ImportPathError(f"import path {path!r} is async, but nobody would await it; write def, not async def")
    return function


def taking(*parameters: str, optional: tuple[str, ...] = ()) -> Callable[[str], Callable[..., Any]]:
    """Imports functions that take these parameters. What it returns raises ImportPathError."""
    return lambda path: import_function(path, *parameters, optional=optional)


rollout_function = taking("args", "rollout_id", "data_source", optional=("evaluation",))
sample_filter = taking("args", "groups")  # sets `remove_sample`
all_samples = taking("args", "samples", "data_source")  # for groups that are filtered too
rollout_log = taking("rollout_id", "args", "samples", "rollout_extra_metrics", "rollout_time")
eval_log = taking("rollout_id", "args", "data", "extra_metrics")


def data_source(path: str) -> type[Any]:
    """The data source class at an import path, with checked methods. Raises ImportPathError."""
    source = import_path(path)
    if not isinstance(source, type):
        raise ImportPathError(f"import path {path!r} is no class; name the class of a data source")
    methods = {"get_samples": ["n"], "save": ["rollout_id"], "load": ["rollout_id"], "__len__": []}
    for name, parameters in methods.items():
        method = getattr(source, name, None)
        if method is None:
            raise ImportPathError(
                f"import path {path!r}: {source.__name__} has no {name}({', '.join(parameters)}); a data source has "
                "get_samples(n), save(rollout_id), load(rollout_id) and __len__()"
            )
        _callable_with(f"{path}.{name}", plain(f"{path}.{name}", method), "self", *parameters)
    _callable_with(path, source, "args")
    return source


def _callable_with(name: str, function: Callable[..., Any], *parameters: str) -> None:
    try:
        inspect.signature(function).bind(*parameters)
    except TypeError as error:
        raise ImportPathError(f"{name} cannot be called with ({', '.join(parameters)}): {error}") from None


log = logging.getLogger("sluice.slime")


def shown(slice_: RolloutSlice) -> list[slime.Sample]:
    """The sequences of a group as slime's samples, in order."""
    samples = []
    for sample in slice_.samples:
        begin = sample.prompt_length
        given = replace(
            given_sample(slice_.group, sample),
            tokens=sample.token_ids.tolist(),
            response=sample.response,
            response_length=sample.response_length,
            reward=sample.reward,
            loss_mask=sample.loss_mask[begin:].tolist(),
            weight_versions=[str(version) for version in dict.fromkeys(sample.model_versions)],
            rollout_log_probs=sample.log_probs[begin:].tolist(),
            remove_sample=sample.remove_sample,
            status=slime.Status(sample.status),
        )
        put_back(given, sample.left)
        samples.append(given)
    return samples


def group_filter(path: str, config: Config | None) -> Callable[[RolloutSlice], tuple[bool, str | None]]:
    """`(args, samples) -> keep, or an object with keep and reason`. Raises ImportPathError."""
    function = plain(path, import_function(path, "args", "samples"))
    args = SlimeArguments() if config is None else slime_arguments(config)

    def judge(slice_: RolloutSlice) -> tuple[bool, str | None]:
        answer = function(args, shown(slice_))
        if answer is None:
            raise TypeError("it returned None; return True or False, or an object with keep")
        return bool(getattr(answer, "keep", answer)), getattr(answer, "reason", None)

    return judge


def removed(function: Callable[..., Any], args: object, slice_: RolloutSlice) -> RolloutSlice:
    """The group, with `remove_sample` as the function set it."""
    samples = shown(slice_)
    function(args, [samples])
    marked = (
        msgspec.structs.replace(sample, remove_sample=bool(filtered.remove_sample))
        for sample, filtered in zip(slice_.samples, samples, strict=True)
    )
    return msgspec.structs.replace(slice_, samples=tuple(marked))


async def logged(flag: str, function: Callable[..., Any], *given: object) -> None:
    """Call a log function in a thread. Its exceptions are logged as warnings, because a log must not end a run."""
    try:
        await asyncio.wrap_future(in_daemon_thread(partial(function, *given), "log-function"))
    except Exception as error:
        log.warning("%s raised %s: %s", flag, type(error).__name__, error, exc_info=True)


def eval_data(given: Mapping[str, Sequence[RolloutSlice]]) -> dict[str, dict[str, list[Any]]]:
    """The data for an evaluation's log function, by data set."""
    data: dict[str, dict[str, list[Any]]] = {}
    for name, slices in given.items():
        samples = [sample for slice_ in slices for sample in shown(slice_)]
        data[name] = {
            "rewards": [sample.reward for sample in samples],
            "truncated": [sample.status == slime.Status.TRUNCATED for sample in samples],
            "samples": samples,
        }
    return data


def slime_function(path: str) -> bool:
    """Whether an import path names a function with slime's signature. Raises ImportPathError."""
    return has_args(import_path(path))
