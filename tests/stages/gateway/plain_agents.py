"""Agents of the tests: plain HTTP, in the worker processes of the agents stage."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from stages.agents.environment import Endpoint, InfrastructureError, Outcome, Task


class Asker:
    """Asks `turns` times, goes on with what it was answered, and has a helper with a question of its own."""

    def __init__(self, turns: int = 2, fault: str = "", once: str = "") -> None:
        self.turns, self.fault, self.once = turns, fault, once

    async def run(self, task: Task, endpoint: Endpoint) -> Outcome:
        messages: list[dict[str, Any]] = [{"role": m.role, "content": m.content} for m in task.messages]
        async with aiohttp.ClientSession(headers={"x-api-key": endpoint.api_key}) as http:

            async def ask(conversation: list[dict[str, Any]]) -> dict[str, Any]:
                url = f"{endpoint.base_url}/v1/chat/completions"
                async with http.post(url, json={"messages": conversation}) as answer:
                    answer.raise_for_status()
                    message: dict[str, Any] = (await answer.json())["choices"][0]["message"]
                    return message

            for turn in range(self.turns):
                messages += [await ask(messages), {"role": "user", "content": f"turn {turn}"}]
                if turn == 0:
                    await ask([{"role": "system", "content": "help"}, {"role": "user", "content": "how?"}])
                    await self._break()
        return Outcome(reward=float(task.metadata.get("worth", 1)), metrics={"asked": self.turns})

    async def _break(self) -> None:
        if self.once:
            if Path(self.once).exists():
                return
            Path(self.once).touch()
        if self.fault == "kill":
            os.kill(os.getpid(), 9)
        if self.fault == "away":
            raise InfrastructureError("the sandbox is away")
        if self.fault == "sleep":
            await asyncio.sleep(600)


class Strict:
    """Asks by Responses, for so many tokens at most each time, and raises in the end."""

    def __init__(self, limits: Sequence[int]) -> None:
        self.limits = limits

    async def run(self, task: Task, endpoint: Endpoint) -> Outcome:
        items: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
        async with aiohttp.ClientSession(headers={"x-api-key": endpoint.api_key}) as http:
            for limit in self.limits:
                body = {"input": items, "max_output_tokens": limit}
                async with http.post(f"{endpoint.base_url}/v1/responses", json=body) as answer:
                    answer.raise_for_status()
                    response = await answer.json()
                items += [*response["output"], {"role": "user", "content": "on"}]
        raise ValueError(f"the last answer is {response['status']}: {response['incomplete_details']}")
