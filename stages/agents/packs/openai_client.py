"""Pack: conversations through the plain `openai` client, an example of an agent.

    [[environment]]
    name = "openai_client"

Needs `pip install openai`. The policy answers each user message of a row in turn, so a row with several user messages
is a conversation of several turns. Rollouts are graded by the text of their last turn.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

from openai import AsyncOpenAI

from stages.agents.environment import Endpoint, Outcome, Task


class OpenaiClient:
    """One conversation. `api`: `chat` or `responses`."""

    def __init__(self, api: Literal["chat", "responses"] = "chat", timeout_s: float = 600.0) -> None:
        """`timeout_s`: limit of the wait for an answer."""
        if api not in ("chat", "responses"):
            raise ValueError(f"api is {api!r}, but must be chat or responses")
        self._api, self._timeout_s = api, timeout_s

    async def run(self, task: Task, endpoint: Endpoint) -> Outcome:
        """Waits for each answer."""
        client = client_of(endpoint, self._timeout_s)
        conversation: list[Any] = []
        for message in task.messages:
            conversation.append({"role": message.role, "content": message.content})
            if message.role != "user":
                continue
            if self._api == "chat":
                answer = await client.chat.completions.create(model=endpoint.model, messages=conversation)
                conversation.append(answer.choices[0].message)
            else:
                conversation += (await client.responses.create(model=endpoint.model, input=conversation)).output
        return Outcome()


def client_of(endpoint: Endpoint, timeout_s: float = 600.0) -> Any:
    """A client for an endpoint. Connections are shared by all episodes of this process."""
    return _shared().with_options(base_url=f"{endpoint.base_url}/v1", api_key=endpoint.api_key, timeout=timeout_s)


@functools.cache
def _shared() -> AsyncOpenAI:
    return AsyncOpenAI(base_url="http://127.0.0.1", api_key="none")
