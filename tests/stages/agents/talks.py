"""A conversation with engines that compute: models whose chat template repeats the end token, and an environment that
says what its task lays down. Imported by worker processes, which load no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stages.agents.environment import Start, Step, Task, Turn
from stages.agents.messages import Message

TALK = "tests.stages.agents.talks:Talk"
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


def with_template(checkpoint: Path) -> Path:
    """Give a tiny checkpoint with the arithmetic tokenizer the chat template."""
    path = checkpoint / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    return checkpoint
