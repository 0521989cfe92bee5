"""Agents stages at work without engines, and episodes by hand: the test writes the model's turns."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from configs.schema import Config, EnvironmentConfig
from stages.agents.environment import Environment, Start, Step, Task, Turn
from stages.agents.stage import AgentsStage
from stages.base import GenerateOptions
from stages.chat.messages import Message, ToolCall
from stages.chat.tokenizer import Tokenizer, load_tokenizer
from stages.messages import RolloutSlice, Sample, VersionRun, joined, without_prompt
from stages.rollouts import join_runs, new_sample
from tests.stages.stage_rig import Rig, make_config, make_context, make_group, open_rig, running, take

WORLD = "tests.stages.agents.worlds:World"


def world(path: str = WORLD, name: str = "world", **fields: Any) -> EnvironmentConfig:
    return msgspec.convert({"name": name, "path": path, "memory_gb": 0, "retries": 2, **fields}, EnvironmentConfig)


class Play:
    """Sends rollouts to the stages, and takes them back."""

    def __init__(self, rig: Rig, tokenizer: Tokenizer, stages: list[AgentsStage], outlets: list[Any], back: Any):
        self.rig, self.tokenizer, self.stages, self._outlets, self._back = rig, tokenizer, stages, outlets, back
        self._sent = 0

    async def send(self, slice_: RolloutSlice, replica: int = 0) -> None:
        self._sent += 1
        await self._outlets[replica].send(slice_, f"{slice_.key}-{self._sent}")

    async def receive(self) -> RolloutSlice:
        slice_ = await take(self._back)
        assert isinstance(slice_, RolloutSlice)
        return slice_

    async def begin(self, group_id: int = 0, index: int = 0, *, replica: int = 0, **metadata: Any) -> RolloutSlice:
        """An episode with its first prompt."""
        await self.send(fresh(group_id, index, **metadata), replica)
        return await self.receive()

    def written(self, slice_: RolloutSlice, text: str, status: Any = "completed") -> RolloutSlice:
        """A model's turn behind it."""
        (sample,) = slice_.samples
        return msgspec.structs.replace(slice_, samples=(write(sample, self.tokenizer.encode(text), text, status),))

    async def turn(self, slice_: RolloutSlice, text: str = "7\n", *, replica: int = 0, **fields: Any) -> RolloutSlice:
        """One turn of the model, and the answer to it."""
        await self.send(self.written(slice_, text, **fields), replica)
        return await self.receive()


def fresh(group_id: int = 0, index: int = 0, **metadata: Any) -> RolloutSlice:
    """A rollout before its first turn."""
    group = make_group(group_id, 8, metadata=msgspec.json.encode(metadata).decode(), label=None)
    group = msgspec.structs.replace(without_prompt(group), prompt='[{"role":"user","content":"go"}]')
    return RolloutSlice(group, (new_sample((), index),))


def write(sample: Sample, ids: list[int], text: str, status: Any) -> Sample:
    return msgspec.structs.replace(
        sample,
        status=status,
        response=sample.response + text,
        token_ids=joined(sample.token_ids, ids),
        loss_mask=joined(sample.loss_mask, np.ones(len(ids))),
        log_probs=joined(sample.log_probs, np.full(len(ids), -0.5)),
        version_runs=join_runs(sample.version_runs, (VersionRun(0, len(ids)),)),
        turns=sample.turns + 1,
    )


@asynccontextmanager
async def playing(
    checkpoint: Path,
    /,
    *tables: EnvironmentConfig,
    replicas: int = 1,
    run_dir: Path = Path("run"),
    lives: tuple[int, ...] = (),
    **sections: Any,
) -> AsyncIterator[Play]:
    config = make_config(train={"hf_checkpoint": str(checkpoint)}, **sections)
    config: Config = msgspec.structs.replace(config, environment=tables or (world(),))
    tokenizer = load_tokenizer(str(checkpoint))
    async with open_rig() as rig, AsyncExitStack() as stack:
        await rig.stream("generate.return", RolloutSlice)
        stages, outlets, built_in = [], [], GenerateOptions(lives=lives)
        for index in range(replicas):
            stage = AgentsStage(make_context(config, run_dir, replica=f"agents-{index}", built_in=built_in))
            inlet = f"agents-{index}"  # one each, so that the test says who gets what
            ports = await rig.join(
                {"in": (inlet, RolloutSlice)}, {"out": ("generate.return", RolloutSlice)}, replica=inlet
            )
            await stack.enter_async_context(running(stage, ports))
            stages.append(stage)
            outlets.append(await rig.outlet(inlet))
        yield Play(rig, tokenizer, stages, outlets, await rig.inlet("generate.return"))


class Episode:
    """One episode of an environment, and its turns so far."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.turns = 0

    @staticmethod
    def task(question: str = "", *, seed: int = 0, metadata: Mapping[str, object] | None = None) -> Task:
        messages = (Message("user", question),) if question else ()
        return Task(messages, metadata=metadata or {}, seed=seed)

    async def start(self, question: str = "", *, seed: int = 0, metadata: Mapping[str, object] | None = None) -> Start:
        return await self.environment.reset(self.task(question, seed=seed, metadata=metadata))

    async def say(self, text: str, *calls: ToolCall, malformed: str = "", truncated: bool = False) -> Step:
        message = Message("assistant", text, tool_calls=calls)
        turn = Turn(self.turns, message, text, truncated, malformed)
        self.turns += 1
        return await self.environment.step(turn)

    async def call(self, name: str, arguments: Mapping[str, object] | str) -> str:
        """The observation of one call."""
        step = await self.say("", ToolCall(name, arguments, id=f"call-{self.turns}"))
        assert not step.done
        (message,) = step.messages
        assert message.role == "tool"
        assert message.tool_call_id == f"call-{self.turns - 1}"
        return message.content
