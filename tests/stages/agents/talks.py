"""Conversations with engines that compute: models whose chat template repeats the end token, an environment that says
what its task lays down, and an agent that goes all ways. Imported by worker processes, which load no torch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp

from stages.agents.environment import Endpoint, Outcome, Start, Step, Task, Turn
from stages.chat.messages import Message

TALK, WANDERER = "tests.stages.agents.talks:Talk", "tests.stages.agents.talks:Wanderer"
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
