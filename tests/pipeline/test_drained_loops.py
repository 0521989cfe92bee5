"""A run that is drained while rollouts are in a loop: groups end before the last of their rollouts has come back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from launching import SIMULATED, SMALL, here, made_model
from scripted_run import Scripted, scripted

from pipeline.controller import wait_empty

LATE = """
import asyncio
from stages.base import LoopStage

class Late(LoopStage):
    @classmethod
    def wants(cls, config, options, message):
        return message.samples[0].turns == 1

    async def process(self, message):
        await asyncio.sleep(1.5 if message.samples[0].index else 0.0)  # one of a group is back before the others
        return message
"""
RECIPE = '[[stage]]\nname = "late"\npath = "late:Late"\nloop = "generate"\nconcurrency = 64\n'


@pytest.mark.slow
def test_what_is_in_a_loop_comes_to_rest_before_streams_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "late.py").write_text(LATE)
    (tmp_path / "late.toml").write_text(RECIPE)
    flags = [*SMALL, *made_model(), *SIMULATED, "--config", str(tmp_path / "late.toml"), "--num-rollout", "4000"]

    async def script(run: Scripted) -> None:
        await run.until((run.run_dir / "ledger.jsonl").exists)
        await run.steps(1)
        loop = [run.controller.hubs[name] for name in ("late", "generate.return")]
        await run.until(lambda: len(loop[0].held()) > 4)

    scripted(monkeypatch, tmp_path / "run", script, lambda run_dir: here(run_dir, *flags, cwd=tmp_path).code)


class Emptied:
    """A stream that is empty from its second look on, when the other stream gets the message."""

    def __init__(self) -> None:
        self.looks = 0
        self.following: Emptied | None = None

    def held(self) -> list[Any]:
        self.looks += 1
        if self.looks > 5 and self.following is not None:
            self.following.looks, self.following = 0, None
        return [object()] if self.looks <= 5 else []


async def test_streams_of_a_loop_are_empty_at_the_same_moment() -> None:
    last, first = Emptied(), Emptied()
    last.looks, first.following = 100, last
    hubs: Any = [first, last]
    async with asyncio.timeout(10):
        await wait_empty(hubs)
    assert first.looks > 5
    assert last.looks > 5
