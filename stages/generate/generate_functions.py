"""Rollouts by a user's function with slime's signature: `async (args, sample, sampling_params)`.

The function sends SGLang's POST /generate to `args.sglang_router_ip` and `args.sglang_router_port`. That address is the
gateway in the process of the generate stage. It identifies the rollout, so requests and answers of the engines are
recorded and can be compared with the function's result (stages/slime/convert.py).

Invariants: an exception, an invalid result or a timeout of the function fails its rollout with that reason; a drain
ends it as aborted; user code runs in a separate thread, so it cannot block the stage's loop; a function that cannot be
imported or called ends the run with that error.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import cache, partial
from typing import Any, NoReturn

import msgspec

from configs.schema import Config
from models.import_path import raised
from models.slime_arguments import slime_arguments
from stages.base import Activity, in_daemon_thread, outcome_of, side_by_side
from stages.chat.messages import ChatFormatError
from stages.chat.tokenizer import Tokenizer, load_tokenizer
from stages.gateway.answers import Answers, OpenSession
from stages.gateway.requests import Limits
from stages.gateway.server import Gateway
from stages.gateway.sessions import Session
from stages.messages import PromptGroup, Sample
from stages.ports import Topic, wait_value
from stages.records.unfinished import AnswerJournal
from stages.sampling.rollout_requests import Requests
from stages.sampling.sampler import Sampler
from stages.slime.client import UserLoop
from stages.slime.convert import ReturnedError, given_sample, returned_evaluation, returned_rollout
from stages.slime.hooks import generate_function, rollout_function
from stages.slime.types import DataSource, sampling_parameters

log = logging.getLogger("sluice.generate")

_BY_ROW = '"generate_function_path"'


class NoChat:
    """The chat format of a gateway that accepts only tokens."""

    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()

    def start(self, *_: object, **__: object) -> NoReturn:
        raise ChatFormatError("a generate function sends input_ids to POST /generate")

    append = reply = start


def function_of(config: Config, group: PromptGroup) -> str | None:
    """The import path of the function for a group's rollouts: the row's, else the run's."""
    if _BY_ROW in group.metadata:
        named = group.row_metadata.get("generate_function_path")
        if isinstance(named, str) and named:
            return named
    return config.rollout.custom_generate_function_path


def _named(function: Callable[..., Any], *, evaluation: bool) -> dict[str, bool]:
    """The arguments that a function gets by name, if it has these parameters."""
    return {"evaluation": evaluation} if "evaluation" in inspect.signature(function).parameters else {}


def failure(error: str) -> dict[str, str]:
    """The fields of a sample that failed for this reason."""
    return {"status": "failed", "error": error}


class GenerateFunctions:
    """The functions of one replica of the generate stage."""

    def __init__(self, sampler: Sampler, requests: Requests, activity: Activity, answers: AnswerJournal) -> None:
        self.config, self.activity, self._answers = requests.config, activity, answers
        self._sampler, self._requests = sampler, requests
        self._function: Callable[[str], Callable[..., Any]] = cache(generate_function)
        self.loop, self._stack = UserLoop(), AsyncExitStack()
        self._gateway: Gateway | None = None
        self._tokenizer: Tokenizer | None = None
        self._opening = asyncio.Lock()
        self._drain = asyncio.Event()
        self.args = slime_arguments(self.config)

    async def close(self) -> None:
        await self._stack.aclose()
        await asyncio.to_thread(self.loop.close)

    async def follow(self, topic: Topic) -> None:
        """Waits for a drain; may be cancelled."""
        await wait_value(topic, "drain")
        self._drain.set()

    async def take(self, path: str, group: PromptGroup, samples: Sequence[Sample], ended: Callable[..., None]) -> None:
        """Make the rollouts. `ended` gets the sequences of each rollout at its end; returns after the last."""

        async def make_rollout(sample: Sample) -> None:
            parts = await self._rollout(path, group, sample)
            self.activity.failures += parts[-1].status == "failed"
            ended(*parts)

        await side_by_side(map(make_rollout, samples))

    async def _rollout(self, path: str, group: PromptGroup, sample: Sample) -> tuple[Sample, ...]:
        function, replace = self._function(path), msgspec.structs.replace
        by_row = path != self.config.rollout.custom_generate_function_path
        named_by = f"{'generate_function_path' if by_row else '--custom-generate-function-path'} {path}"
        gateway = await self.open_gateway()
        session = Session(NoChat(), sample.index)
        named = _named(function, evaluation=group.purpose == "eval")
        budget = self._requests.budget(group, sample, each_turn=True)
        params = sampling_parameters(self._requests.params(group, sample, budget, 1))
        given = given_sample(group, sample)
        record = await self._answers.open(group, sample.index)
        with gateway.session(OpenSession(group, sample, session, record)) as key:
            args = self.args.with_router(gateway.url, key)
            returned, ending = await self.outcome(named_by, self.loop.call(function(args, given, params, **named)))
        if ending:
            return (replace(sample, **ending),)
        try:
            reward_key = self.config.reward.reward_key
            return returned_rollout(returned, session.samples(), sample, reward_key, group.row_metadata)
        except ReturnedError as error:
            return (replace(sample, status="failed", error=f"{named_by}: {error}"),)

    def start(self, function: Callable[..., Any], *given: object, evaluation: bool) -> Any:
        """Start a call of a function for whole batches, sync or async; returns an awaitable."""
        named = _named(function, evaluation=evaluation)
        if inspect.iscoroutinefunction(function):
            return self.loop.call(function(*given, **named))
        return asyncio.wrap_future(in_daemon_thread(partial(function, *given, **named), "rollout-function"))

    async def evaluate(self, path: str, group: PromptGroup, sample: Sample) -> Sample:
        """One call of the evaluation's own function. The sample carries what it returned, and the versions that made
        the tokens of its requests."""
        replace, session, gateway = msgspec.structs.replace, Session(NoChat()), await self.open_gateway()
        with gateway.session(OpenSession(group, sample, session, whole_batch=True)) as key:
            args = self.args.with_router(gateway.url, key)
            call = self.start(rollout_function(path), args, group.pinned_version, DataSource(), evaluation=True)
            returned, ending = await self.outcome(f"--eval-function-path {path}", call)
        if ending:
            return replace(sample, **ending)
        try:
            found = returned_evaluation(returned)
        except ReturnedError as error:
            return replace(sample, status="failed", error=f"--eval-function-path {path}: {error}")
        versions = sorted({version for part in session.recorded for version in part.model_versions})
        left = msgspec.json.encode(replace(found, versions=tuple(versions))).decode()
        return replace(sample, status="completed", reward=0.0, left=left)

    async def outcome(self, name: str, work: Any) -> tuple[Any, dict[str, str]]:
        """What a function returned and {}, or None and the fields with which its samples end: failed with the reason if
        it raised or took too long, aborted by a drain. Waits for the function; unblocked by a drain or its deadline."""
        limit_s = self.config.rollout.custom_generate_deadline_secs
        async with asyncio.TaskGroup() as tasks:
            calling = tasks.create_task(outcome_of(work))
            draining = tasks.create_task(self._drain.wait())
            await asyncio.wait((calling, draining), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            done, drained = calling.done(), draining.done()
            calling.cancel()
            draining.cancel()
        if not done and drained:
            return None, {"status": "aborted"}
        if not done:
            return None, failure(f"{name} took longer than {limit_s:g} s (--custom-generate-deadline-secs)")
        returned = calling.result()
        if isinstance(returned, Exception):
            log.warning("%s failed: %r", name, returned, exc_info=returned)
            return None, failure(f"{name} raised {raised(returned)}")
        return returned, {}

    def _encode(self, text: str, most: int | None = None) -> Sequence[int]:
        """Tokens of a text, for functions that send texts instead of ids."""
        self._tokenizer = self._tokenizer or load_tokenizer(self.config.train.hf_checkpoint)
        return self._tokenizer.encode(text, most=most)

    async def open_gateway(self) -> Gateway:
        """The gateway. The first rollout of a function starts it."""
        async with self._opening:
            if self._gateway is None:
                answers = Answers(
                    self._sampler,
                    self._requests,
                    NoChat(),
                    encode=self._encode,
                    vocab_size=self._sampler.directory.vocab_size,
                    client_sampling=True,
                )
                limits = Limits(in_flight=self.config.rollout.server_concurrency)
                self._gateway = await self._stack.enter_async_context(Gateway(answers, limits=limits))
            return self._gateway
