"""A taskset of verifiers, with a harness that runs in the worker: one question, and a reward for long answers.

Imported by an interpreter that has verifiers, by its bare name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["Asking", "Letters"]


class Letter(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):  # type: ignore[misc,name-defined]
    @vf.reward  # type: ignore[untyped-decorator]
    async def long(self, trace: Any) -> float:
        return float(len(trace.last_reply) > 1)


class Letters(vf.Taskset[Letter, vf.TasksetConfig]):  # type: ignore[misc]
    def load(self) -> Iterator[Letter]:
        for index in range(12):
            yield Letter(vf.TaskData(prompt=f"say {index}"), self.config.task)


class Asking(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    NEEDS_CONTAINER = EXECUTES_CODE = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any, **rest: Any
    ) -> Any:
        messages: Any = [{"role": "user", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
