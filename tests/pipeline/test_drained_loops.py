"""A run that is drained while rollouts are in a loop: groups end before the last of their rollouts has come back."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest
from launching import SIMULATED, SMALL, here, made_model
from scripted_run import Scripted, scripted

from pipeline.hosts.stream_hub import wait_quiet
from transport import HubStats

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


class Passed:
    """Two streams between which one message goes round, always to the one that was just looked at."""

    def __init__(self, rounds: int) -> None:
        self.at, self.left = 1, 2 * rounds
        self.accepted = [0, 1]

    def look(self, stream: int) -> list[Any]:
        found = [object()] if self.left and self.at == stream else []
        if self.left and self.at != stream:
            self.at, self.left = stream, self.left - 1
            self.accepted[stream] += 1
        return found

    def hub(self, stream: int) -> Any:
        passed = self

        class Hub:
            async def account(self) -> list[Any]:
                return passed.look(stream)

            def stats(self) -> HubStats:
                return HubStats(0, 0, passed.accepted[stream], 0, 0, 0, 0, 0, 0, 0)

        return Hub()


async def test_a_message_that_goes_round_is_not_missed_by_looks_one_after_the_other() -> None:
    passed = Passed(rounds=5)
    async with asyncio.timeout(10):
        await wait_quiet([passed.hub(0), passed.hub(1)])
    assert passed.left == 0


async def test_streams_that_are_never_empty_are_waited_for() -> None:
    class Held(Passed):
        def look(self, stream: int) -> list[Any]:
            return [object()] if stream else []

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.2):
            await wait_quiet([Held(1).hub(0), Held(1).hub(1)])
            pytest.fail("a stream holds a message")
