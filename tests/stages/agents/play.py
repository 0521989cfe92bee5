"""Agents stages at work without engines, and episodes by hand: the test writes the model's turns."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest

from configs.schema import Config, EnvironmentConfig
from stages.agents.environment import Endpoint, Environment, Outcome, Start, Step, Task, Turn
from stages.agents.stage import AgentsStage
from stages.base import GenerateOptions
from stages.chat.messages import Message, ToolCall
from stages.chat.tokenizer import Tokenizer, load_tokenizer
from stages.messages import PromptGroup, RolloutSlice, Sample, VersionRun, joined
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


def conversing(group_id: int, n_samples: int, **metadata: Any) -> PromptGroup:
    """A group of rollouts in an environment, which no grader scores."""
    group = make_group(group_id, n_samples, prompt=(), metadata=msgspec.json.encode(metadata).decode(), label=None)
    return msgspec.structs.replace(group, prompt='[{"role":"user","content":"go"}]')


def fresh(group_id: int = 0, index: int = 0, **metadata: Any) -> RolloutSlice:
    """A rollout before its first turn."""
    return RolloutSlice(conversing(group_id, 8, **metadata), (new_sample((), index),))


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


def needs(module: str) -> pytest.MarkDecorator:
    """For the tests of a pack, and of packages that not every machine has."""
    return pytest.mark.skipif(find_spec(module) is None, reason=f"{module} is not installed; see docs/packs.md")


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


# Conversations with engines that compute: models whose chat template repeats the end token, an environment that says
# what its task lays down, and an agent that goes all ways. Imported by worker processes, which load no torch.


TALK, WANDERER = "tests.stages.agents.play:Talk", "tests.stages.agents.play:Wanderer"
STOPS = (5, 11, 17)  # tokens that end a turn and that the template knows nothing of: it closes the turn itself
EOS = 19  # "\n", the end token of this vocabulary, and what the template puts behind each message
TEMPLATE = (
    "{%- for m in messages -%}"
    "{{ {'user': 'd: ', 'assistant': 'a: ', 'tool': 'r: ', 'system': 's: '}[m['role']] + m['content'] + eos_token }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ 'a: ' }}{%- endif -%}"
)


class Talk:
    """Answers turn k with the messages `answers[k]` of the task; over behind the last of them."""

    def __init__(self) -> None:
        self.taken = 0

    @classmethod
    def tasks(cls, split: str, seed: int) -> Iterator[Mapping[str, Any]]:
        for number in range(64):
            yield {"answers": [["1+1"], [""], [], ["2", "3-1"]][number % 3 :]}

    async def reset(self, task: Task) -> Start:
        self.answers = task.metadata["answers"]
        return Start((Message("user", "1+2=?"),))

    async def step(self, turn: Turn) -> Step:
        assert turn.number == self.taken
        self.taken += 1
        if self.taken > len(self.answers):
            return Step(reward=1.0, done=True)
        observed = tuple(Message("tool", text) for text in self.answers[turn.number])
        return Step(observed, reward=len(turn.text) / 10)  # rewards that differ, so that weights do

    async def close(self) -> None:
        """Nothing is held."""


class Wanderer:
    """An agent with turns, branches (also within a turn, by tokens), requests side by side, an edited reply, and a
    context that it compacts and goes on with. It rests behind the first answer."""

    def __init__(self, rest_s: float = 0.0) -> None:
        self.rest_s = rest_s

    async def run(self, task: Task, endpoint: Endpoint) -> Outcome:
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        async with aiohttp.ClientSession(endpoint.base_url, headers=headers) as http:

            async def post(path: str, body: object) -> Any:
                async with http.post(path, json=body) as answer:
                    answer.raise_for_status()
                    return await answer.json()

            async def ask(*messages: dict[str, Any]) -> dict[str, Any]:
                body = {"messages": messages, "max_tokens": 12, "return_token_ids": True}
                said.append(await post("/v1/chat/completions", body))
                reply: dict[str, Any] = said[-1]["choices"][0]["message"]
                return reply

            said: list[dict[str, Any]] = []
            question, more, other = ({"role": "user", "content": text} for text in ("1+2=?", "7", "8-9"))
            first = await ask(question)
            await asyncio.sleep(self.rest_s)
            prompt, made = said[0]["prompt_token_ids"], said[0]["choices"][0]["token_ids"]
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(ask(question, first, more))
                for _ in range(2):
                    tasks.create_task(ask(question, first, other))
                within = {"input_ids": [*prompt, *made[:-1]], "sampling_params": {"max_new_tokens": 12}}
                tasks.create_task(post("/generate", within))
                edited = {"role": "assistant", "content": f"{first['content']}0"}
                tasks.create_task(ask(question, edited, more))
            summary = {"role": "system", "content": "+".join(str(len(one)) for one in said)}
            compacted = await ask(summary, question)
            await ask(summary, question, compacted, {"role": "tool", "content": ""})
        return Outcome(reward=float(len(made)))


def with_template(checkpoint: Path) -> Path:
    """Give a tiny checkpoint with the arithmetic tokenizer the chat template."""
    path = checkpoint / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    return checkpoint
