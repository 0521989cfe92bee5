"""Rollouts made by a user's own function, with slime's signature: `async (args, sample, sampling_params)`.

The function sends SGLang's POST /generate to `args.sglang_router_ip` and `args.sglang_router_port`. That address is the
gateway in the generate stage's own process, and stands for one rollout, so that requests to engines and their answers
are recorded beside what the function returns (stages/slime/convert.py).

Invariants: what a function raises, returns wrongly or takes too long for fails its rollout, with the reason; a drain
ends it as aborted; it runs in a thread of its own, so that it cannot stop the stage's loop; a function that cannot be
imported or called ends the run with that sentence.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import msgspec

from configs.schema import Config
from stages.base import Activity
from stages.chat.errors import ChatFormatError
from stages.chat.messages import Message, ToolSchema
from stages.chat.tokenizer import Tokenizer, load_tokenizer
from stages.gateway.answers import Answers, OpenSession
from stages.gateway.server import Gateway, Limits
from stages.gateway.sessions import Session
from stages.messages import PromptGroup, Sample
from stages.ports import Topic
from stages.sampling.rollout_requests import Requests
from stages.sampling.sampler import Sampler
from stages.slime.client import UserLoop
from stages.slime.convert import ReturnedError, given_sample, returned_rollout
from stages.slime.hooks import generate_function
from stages.slime.types import sampling_parameters, slime_arguments

log = logging.getLogger("sluice.generate")

_BY_ROW = '"generate_function_path"'


class NoChat:
    """The chat format of a gateway whose requests are tokens."""

    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()

    def start(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        raise ChatFormatError("a generate function sends input_ids to POST /generate")

    def append(self, ids: Sequence[int], messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        return self.start(messages, tools)

    def reply(self, ids: Sequence[int], tools: Sequence[ToolSchema]) -> Any:
        raise ChatFormatError("a generate function sends input_ids to POST /generate")


def function_of(config: Config, group: PromptGroup) -> str | None:
    """The import path of the function that makes a group's rollouts: the row's own, else the run's."""
    if _BY_ROW in group.metadata:
        named = group.row_metadata.get("generate_function_path")
        if isinstance(named, str) and named:
            return named
    return config.rollout.custom_generate_function_path


class GenerateFunctions:
    """The functions of one replica of the generate stage."""

    def __init__(
        self, config: Config, sampler: Sampler, requests: Requests, activity: Activity, vocab_size: int | None
    ) -> None:
        self.config, self.activity = config, activity
        self._sampler, self._requests, self._vocab_size = sampler, requests, vocab_size
        self._functions: dict[str, Callable[..., Any]] = {}
        self.loop, self._stack = UserLoop(), AsyncExitStack()
        self._gateway: Gateway | None = None
        self._tokenizer: Tokenizer | None = None
        self._opening = asyncio.Lock()
        self._drain = asyncio.Event()
        self.args = slime_arguments(config)

    async def close(self) -> None:
        await self._stack.aclose()
        await asyncio.to_thread(self.loop.close)

    async def follow(self, topic: Topic) -> None:
        """Waits for the drain; runs until cancelled."""
        revision = 0
        while True:
            revision = await topic.wait(revision, "drain")
            if topic.get("drain") is not None:
                self._drain.set()

    async def take(self, path: str, group: PromptGroup, samples: Sequence[Sample], ended: Callable[..., None]) -> None:
        """Make each rollout. `ended` gets the sequences of each when it has ended; waits for the last rollout."""

        async def one(sample: Sample) -> None:
            parts = await self._rollout(path, group, sample)
            self.activity.failures += parts[-1].status == "failed"
            ended(*parts)

        async with asyncio.TaskGroup() as tasks:
            for sample in samples:
                tasks.create_task(one(sample))

    async def _rollout(self, path: str, group: PromptGroup, sample: Sample) -> tuple[Sample, ...]:
        if path not in self._functions:
            self._functions[path] = generate_function(path)
        function, replace = self._functions[path], msgspec.structs.replace
        gateway = await self.open_gateway()
        session = Session(NoChat(), sample.index)
        evaluation = group.purpose == "eval"
        named = {"evaluation": evaluation} if "evaluation" in inspect.signature(function).parameters else {}
        params = sampling_parameters(self.config, group)
        given = given_sample(self.config, group, sample)
        with gateway.session(OpenSession(group, sample, session)) as key:
            args = self.args.asking(gateway.url, key)
            try:
                returned = await self.until_drained(self.loop.call(function(args, given, params, **named)))
            except Drained:
                return (replace(sample, status="aborted"),)
            except TimeoutError:
                limit_s = self.config.rollout.custom_generate_deadline_secs
                return (replace(sample, status="failed", error=f"{path} took longer than {limit_s:g} s"),)
            except Exception as error:
                log.warning("%s failed on group %d: %r", path, group.group_id, error, exc_info=True)
                return (replace(sample, status="failed", error=f"{path} raised {type(error).__name__}: {error}"),)
        try:
            return returned_rollout(returned, session.samples(), sample, reward_key=self.config.reward.reward_key)
        except ReturnedError as error:
            return (replace(sample, status="failed", error=f"{path}: {error}"),)

    async def until_drained(self, work: Any) -> Any:
        """Waits for the function; unblocked by a drain, or by its deadline. Raises Drained, TimeoutError, and what the
        function raises."""
        async with asyncio.TaskGroup() as tasks:
            calling = tasks.create_task(_outcome(work))
            draining = tasks.create_task(self._drain.wait())
            await asyncio.wait(
                (calling, draining),
                timeout=self.config.rollout.custom_generate_deadline_secs,
                return_when=asyncio.FIRST_COMPLETED,
            )
            done, drained = calling.done(), draining.done()
            calling.cancel()
            draining.cancel()
        if not done:
            raise Drained if drained else TimeoutError
        returned = calling.result()
        if isinstance(returned, Exception):
            raise returned
        return returned

    def _encode(self, text: str) -> Sequence[int]:
        """The tokens of a text that a function sent instead of ids."""
        self._tokenizer = self._tokenizer or load_tokenizer(self.config.train.hf_checkpoint)
        return self._tokenizer.encode(text)

    async def open_gateway(self) -> Gateway:
        """The gateway, which listens from the first rollout of a function on."""
        async with self._opening:
            if self._gateway is None:
                answers = Answers(
                    self._sampler,
                    self._requests,
                    NoChat(),
                    encode=self._encode,
                    vocab_size=self._vocab_size,
                    client_sampling=True,
                )
                limits = Limits(in_flight=self.config.rollout.server_concurrency)
                self._gateway = await self._stack.enter_async_context(Gateway(answers, limits=limits))
            return self._gateway


class Drained(Exception):
    """The run is ending."""


async def _outcome(work: Any) -> Any:
    """What comes of it, for callers whom an error would tear apart."""
    try:
        return await work
    except Exception as error:
        return error
