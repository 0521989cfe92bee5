"""The gateway with simulated engines whose texts the test gives, and a chat format in tokens of the tiny checkpoints.

The log-prob of a token tells its position. Everything runs in one process and one event loop.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from models.engines.core import Completion
from models.engines.protocol import FinishReason, SamplingParams
from models.engines.simulated.responses import Writer
from models.tiny import build_tokenizer
from stages.agents.environment import Endpoint
from stages.chat.messages import ChatFormat, Message, Reply, ToolCall, ToolSchema
from stages.gateway.answers import Answers, OpenSession
from stages.gateway.requests import Limits
from stages.gateway.server import DEFAULT_LIMITS, Gateway
from stages.gateway.sessions import Session
from stages.messages import Sample
from stages.rollouts import new_sample, rollout_fault
from stages.sampling.rollout_requests import Requests
from tests.stages.engine_rig import World, core_of, simulated, started
from tests.stages.stage_rig import make_group

CHAT, RESPONSES, ANTHROPIC, TOKENS = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/generate"
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
FUNCTION = {"name": "add", "description": "Adds.", "parameters": PARAMETERS, "strict": True}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
ASK = [{"role": "user", "content": "Hi"}]
BODIES: Mapping[str, dict[str, Any]] = {  # requests that offer the tool of the call
    CHAT: {"messages": ASK, "tools": [{"type": "function", "function": FUNCTION}]},
    RESPONSES: {"input": "Hi", "tools": [{"type": "function", **FUNCTION}]},
    ANTHROPIC: {"messages": ASK, "tools": [{"name": "add", "input_schema": PARAMETERS}]},
}
BEGIN, END, VOCABULARY = 257, 258, 264
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_THOUGHT = re.compile(r"\A<think>(.*?)</think>", re.DOTALL)


class ToyChat:
    """As the checkpoints' chat template has it; `<think>` and `<tool_call>` mark thoughts and calls."""

    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = (END,)

    def __init__(self) -> None:
        self.tokenised: list[Message] = []  # all that was ever made tokens of

    def start(self, messages: Sequence[Message], tools: Sequence[ToolSchema], most: int | None = None) -> list[int]:
        offered = [BEGIN, *b"tools\n", *json.dumps(list(tools)).encode(), END] if tools else []
        return [*offered, *self._written(messages)]

    def append(
        self, ids: Sequence[int], messages: Sequence[Message], tools: Sequence[ToolSchema], most: int | None = None
    ) -> list[int]:
        return [*([] if ids[-1] == END else [END]), *self._written(messages)]

    def reply(self, ids: Sequence[int], tools: Sequence[ToolSchema]) -> Reply:
        text = bytes(i for i in ids if i < 256).decode(errors="replace")
        thought = _THOUGHT.match(text)
        text = text[thought.end() :] if thought else text
        calls = []
        for found in _CALL.findall(text):
            try:
                call = json.loads(found)
                calls.append(ToolCall(call["name"], call["arguments"]))
            except (ValueError, KeyError, TypeError):
                return Reply(Message("assistant", text), "the call is not valid JSON")
        content = _CALL.sub("", text) if calls else text
        return Reply(Message("assistant", content, thought[1] if thought else "", tuple(calls)))

    def _written(self, messages: Sequence[Message]) -> list[int]:
        self.tokenised += messages
        ids: list[int] = []
        for message in messages:
            ids += [BEGIN, *message.role.encode(), *b"\n", *written_message(message).encode(), END]
        return [*ids, BEGIN, *b"assistant\n"]


def written_message(message: Message) -> str:
    """A message as the model would write it."""
    thought = f"<think>{message.reasoning_content}</think>" if message.reasoning_content else ""
    calls = [json.dumps({"name": call.name, "arguments": call.arguments}) for call in message.tool_calls]
    return thought + message.content + "".join(f"<tool_call>{call}</tool_call>" for call in calls)


Script = Callable[[str], str]


class ScriptedWriter(Writer):
    """Answers each prompt with a text; `answered` has the tokens of prompts and answers, `planned` what was asked."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.answered: list[tuple[list[int], list[int]]] = []
        self.planned: list[tuple[list[int], SamplingParams, int, tuple[str, ...]]] = []

    def plan(self, completion: Completion) -> tuple[int, bool]:
        prompt = completion.prompt.tolist()
        rule = msgspec.structs.replace(completion.rule, sampling_seed=None)  # each request draws its own
        self.planned.append((prompt, rule, completion.max_new, tuple(completion.stop_strings)))
        text = self.script(text_of(prompt))
        stops = [text.find(stop) + len(stop) for stop in completion.stop_strings if stop in text]
        ids = [*text.encode(), END] if not stops else [*text[: min(stops)].encode()]
        completion.output_ids = ids
        count = min(len(ids), completion.max_new)
        return count, count == len(ids)

    def extend(self, completion: Completion, count: int) -> None:
        del completion.output_ids[count:]
        completion.log_probs = [log_prob(completion.prompt_tokens + place) for place in range(count)]

    def write(self, completion: Completion, count: int, reason: FinishReason) -> None:
        self.extend(completion, count)
        self.answered.append((completion.prompt.tolist(), list(completion.output_ids)))


def log_prob(position: int) -> float:
    """Of the token at a position of its context; exact in 32 bits."""
    return -(position + 1) / 1024


def text_of(ids: list[int]) -> str:
    """Bytes as text, markup as brackets."""
    return bytes({257: 0x5B, 258: 0x5D}.get(i, i) for i in ids if i < 259).decode(errors="replace")


@dataclass
class Rig:
    world: World
    gateway: Gateway
    writer: ScriptedWriter
    place: OpenSession
    endpoint: Endpoint
    http: aiohttp.ClientSession
    events: list[tuple[str, Any]] = field(default_factory=list)  # of the last stream

    async def post(self, path: str, body: object, *, key: str | None = None, **headers: str) -> tuple[int, Any]:
        """Status and JSON of the answer; of a stream its events, [name, data] each. `body`: bytes, or what is JSON."""
        if "x_api_key" not in headers:
            headers["Authorization"] = f"Bearer {self.endpoint.api_key if key is None else key}"
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(self.endpoint.base_url + path, data=data, headers=headers) as response:
            content = await response.read()
            if response.content_type == "text/event-stream":
                return response.status, events_of(content)
            return response.status, json.loads(content)

    async def ask(self, path: str, body: object, **headers: str) -> Any:
        """The same of a request that is answered."""
        status, answer = await self.post(path, body, **headers)
        assert status == 200, answer
        return answer

    async def get(self, path: str) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {self.endpoint.api_key}"}
        async with self.http.get(self.endpoint.base_url + path, headers=headers) as response:
            return response.status, await response.json()

    @contextmanager
    def another_session(self) -> Iterator[tuple[OpenSession, str]]:
        """A second session, open within the block, and its key."""
        place = OpenSession(make_group(1), new_sample((1,), 0), Session(self.place.session._chat))
        with self.gateway.session(place) as key:
            yield place, key

    def samples(self) -> tuple[Sample, ...]:
        """What was recorded, after a look whether it is what the engine was given and made."""
        parts = self.place.session.samples()
        assert not parts or rollout_fault(parts) is None
        for prompt, made in self.writer.answered:
            end = len(prompt) + len(made)
            found = [part for part in parts if part.token_ids[:end].tolist() == [*prompt, *made]]
            assert found, "the engine's tokens stand behind those that it was given"
            for part in found:
                assert part.loss_mask[len(prompt) : end].all()
                assert part.log_probs[len(prompt) : end].tolist() == [log_prob(i) for i in range(len(prompt), end)]
        return parts


def events_of(content: bytes) -> list[tuple[str, Any]]:
    """Server-sent events: their names and data."""
    found = []
    for block in content.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if "data" in fields:
            data = fields["data"]
            found.append((fields.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return found


@asynccontextmanager
async def scripted(
    tmp_path: Path, script: Script, *, step_ms: float = 0.01, **sections: Any
) -> AsyncIterator[tuple[World, ScriptedWriter]]:
    """Engines that write what the script says, with a version 0."""
    (tmp_path / "bare").mkdir()
    build_tokenizer("bytes").save_pretrained(tmp_path / "bare")
    engine = simulated(step_ms)
    engine = msgspec.structs.replace(engine, simulated=msgspec.structs.replace(engine.simulated, vocab_size=VOCABULARY))
    rollout = {"rollout_max_response_len": 2048, "max_turns": 1000, **sections.pop("rollout", {})}
    async with started(tmp_path, engine=engine, rollout=rollout, **sections) as world:
        writer = ScriptedWriter(script)
        core_of(world.engines[0]).schedule._writer = writer
        yield world, writer


@asynccontextmanager
async def opened(
    tmp_path: Path,
    script: Script,
    *,
    chat: ChatFormat | None = None,
    limits: Limits = DEFAULT_LIMITS,
    max_context: int = 4096,
    client_sampling: bool = False,
    **sections: Any,
) -> AsyncIterator[Rig]:
    """A gateway with one open session, and a version 0 in its engine."""
    chat = chat or ToyChat()
    async with scripted(tmp_path, script, **sections) as (world, writer), aiohttp.ClientSession() as http:
        requests = Requests(world.stage.config, max_context)
        options: dict[str, Any] = {"vocab_size": VOCABULARY, "client_sampling": client_sampling}
        answering = Answers(
            world.stage.sampler, requests, chat, encode=lambda text, most: list(text.encode()), **options
        )
        place = OpenSession(make_group(0, 4), new_sample((1,), 2), Session(chat, 2))
        async with Gateway(answering, limits=limits) as gateway:
            with gateway.session(place) as key:
                yield Rig(world, gateway, writer, place, Endpoint(gateway.url, key, gateway.model), http)
