"""What hangs is told while it hangs: on the terminal, in summary.json, and with an end.

The hanging things are real: a stage, a tool and a reward service that give no answer, engines that take no weights or
answer no request.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from launching import SIMULATED, SMALL, Finished, here, made_model, succeed_here

from configs.schema.rollout import EngineConfig, SimulatedEngineConfig
from pipeline.observe.stalls import MOST_KEPT, Stall, StallWatch
from tests.hostile_engine import SpoiltEngine, never, serving
from tests.served_app import served_app

QUICK = ["--stall-notice-s", "0.4"]


def told(done: Finished) -> list[str]:
    return [line for line in done.out.splitlines() if line.startswith("nothing was trained for ")]


def stalls(done: Finished) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = done.summary["stalls"]
    return found


# ------------------------------------------------------------------ the clock


def test_a_stall_is_told_again_and_again_and_kept_with_what_was_said_last() -> None:
    watch = StallWatch(60, 1000, started_s=100.0)

    def look(now_s: float, done: int, moved: int = 0) -> str | None:
        return watch.look(now_s, done, moved, lambda quiet_s: f"b waits for a ({quiet_s:g})")

    assert look(100, 0) is None
    assert look(159, 0) is None
    assert look(161, 0) == "nothing was trained for 61 s: b waits for a (61)"
    assert look(162, 0) is None
    assert look(221, 0) == "nothing was trained for 121 s: b waits for a (121)"
    assert look(400, 0) == "nothing was trained for 300 s: b waits for a (300)", "once, however late"
    assert look(401, 0) is None
    assert look(410, 1) == "it goes on, after 310 s"
    assert look(460, 2) is None, "a wait that was not told has no end to tell"
    assert look(521, 2) == "nothing was trained for 61 s: b waits for a (61)"
    assert watch.stalls(530) == (Stall(0.0, 310.0, "b waits for a (300)"), Stall(360.0, 70.0, "b waits for a (61)"))


def test_the_limit_counts_from_the_last_movement_of_anything() -> None:
    watch = StallWatch(60, 100, started_s=0.0)
    for now_s in range(0, 500, 50):
        watch.look(now_s, 0, now_s, lambda quiet_s: "waits")
    assert watch.over is None, "something moved between the stages"
    watch.look(551, 0, 450, lambda quiet_s: "b waits for a")
    assert watch.over == "nothing has moved for --stall-limit-s 100: b waits for a"


def test_of_many_stalls_the_longest_are_kept() -> None:
    watch = StallWatch(1, 1000, started_s=0.0)
    now_s = 0.0
    for number in range(MOST_KEPT + 20):
        watch.look(now_s, number, 0, lambda quiet_s: "")
        now_s += 2 + (number == 3)
        watch.look(now_s, number, 0, lambda quiet_s: "")
    kept = watch.stalls(now_s)
    assert len(kept) == MOST_KEPT
    assert max(stall.seconds for stall in kept) == 3


# ------------------------------------------------------------------ things that hang

STAGE = """
import asyncio
from stages.base import LoopStage

class Stuck(LoopStage):
    @classmethod
    def wants(cls, config, options, message):
        return True

    async def process(self, message):
        await asyncio.sleep(3600)
"""


@pytest.mark.slow  # the limit leaves a busy machine the time to start the trainer
@pytest.mark.parametrize("place", ['after = "reward"', 'loop = "generate"'])
def test_a_stage_that_hangs_is_named_and_the_run_ends_by_the_limit(tmp_path: Path, place: str) -> None:
    (tmp_path / "stuck.py").write_text(STAGE)
    (tmp_path / "stuck.toml").write_text(f'[[stage]]\nname = "stuck"\npath = "stuck:Stuck"\n{place}\n')
    flags = [*QUICK, "--stall-limit-s", "8", "--drain-s", "0.3", "--config", str(tmp_path / "stuck.toml")]
    done = here(tmp_path / "run", *SMALL, *made_model(), *SIMULATED, *flags, cwd=tmp_path)
    assert done.code == 1
    [reason] = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert "nothing has moved for --stall-limit-s 8: train waits for groups, it has 0 of 4" in reason
    assert "stuck-0 has had group " in reason
    assert f"continue with --resume {tmp_path / 'run'}" in reason
    assert any("groups are under way" in line and "in stuck)" in line for line in told(done)), done.out
    assert "stuck-0 has had group" in stalls(done)[-1]["waits"]
    assert stalls(done)[-1]["seconds"] > 8


@contextlib.contextmanager
def deaf_service() -> Iterator[tuple[str, threading.Event]]:
    """A reward service that accepts requests and answers none until the event is set."""
    answers, up = threading.Event(), threading.Event()
    urls: list[str] = []
    loops: list[asyncio.AbstractEventLoop] = []

    async def grade(request: web.Request) -> web.Response:
        while not answers.is_set():  # noqa: ASYNC110  (it is set in another thread)
            await asyncio.sleep(0.05)
        return web.json_response(0.5)

    async def main() -> None:
        app, stop = web.Application(), asyncio.Event()
        loops.append(asyncio.get_running_loop())
        app.router.add_post("/", grade)
        async with served_app(app, handler_cancellation=True, shutdown_timeout=0.1) as url:
            urls.append(f"{url}/")
            up.set()
            with contextlib.suppress(asyncio.CancelledError):
                await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert up.wait(60)
    yield urls[0], answers


@pytest.mark.slow
def test_a_reward_service_that_hangs_is_told_with_the_settings_that_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with deaf_service() as (url, answers):
        asked = StallWatch.look

        def look(watch: StallWatch, *arguments: Any) -> str | None:
            said = asked(watch, *arguments)
            if said is not None and "reward-0 has had group" in said:
                answers.set()
            return said

        monkeypatch.setattr(StallWatch, "look", look)
        flags = [*QUICK, "--rm-type", "remote", "--rm-url", url]
        done = succeed_here(tmp_path / "run", *SMALL, *made_model(), *SIMULATED, *flags)
    lines = [line for line in told(done) if "reward-0 has had group" in line]
    assert "(--reward-deadline-s 10, outside --rm-timeout-s 120, --rm-retries 10)" in lines[0]
    assert "in reward)" in lines[0]
    assert any(line.startswith("it goes on, after ") for line in done.out.splitlines())
    assert any("reward-0 has had group" in stall["waits"] for stall in stalls(done))
    assert "stalls" in done.out.split("completed: ")[1]


# ------------------------------------------------------------------ engines


def engine(**spoil: Any) -> SpoiltEngine:
    simulated = SimulatedEngineConfig(vocab_size=32, length_mean=6.0, update_s=0.01)
    config = EngineConfig(engine="simulated", simulated=simulated)
    return SpoiltEngine(config, made_model()[1], {f"/{path}": handler for path, handler in spoil.items()})


def external(*engines: SpoiltEngine) -> list[str]:
    addresses = [one.url for one in engines]
    return ["--engine", "sglang", "--router", "none", "--rollout-external-engine-addrs", *addresses]


@pytest.mark.slow
def test_an_engine_that_answers_no_request_is_named(tmp_path: Path) -> None:
    with serving(engine(generate=never)) as deaf:
        flags = [*QUICK, "--stall-limit-s", "3", "--drain-s", "0.3", *external(deaf)]
        done = here(tmp_path / "run", *SMALL, *made_model(), *SIMULATED, *flags)
    assert done.code == 1
    assert "generate-0 has had group " in done.err
    assert "(--request-timeout-secs 600, --max-retries 3)" in done.err
    assert "engine-0 has not answered a request for " in done.err


@pytest.mark.slow
@pytest.mark.parametrize("refuses", [True, False])
def test_weights_that_an_engine_does_not_take_are_told_while_it_is_tried(tmp_path: Path, refuses: bool) -> None:
    """The first version is taken. Then it refuses, again and again, or does not answer the update."""

    async def update(request: web.Request, body: bytes) -> web.StreamResponse | None:
        if b'"0.0"' in body:
            return None
        if not refuses:
            return await never(request, body)
        return web.json_response({"success": False, "message": "no room"}, status=400)

    with serving(engine(update_weights_from_disk=update)) as stubborn:
        flags = [*QUICK, "--stall-limit-s", "4", "--drain-s", "0.3", "--update-weight-max-failures", "100"]
        done = here(tmp_path / "run", *SMALL, *made_model(), *SIMULATED, *flags, *external(stubborn))
    assert done.code == 1
    assert "for no prompt may enter: the engines carry version 0" in done.err
    assert f"engine-0 has version 0 and {'lacks' if refuses else 'takes'} version " in done.err
    assert not refuses or "failed: engine" in done.err


TOOL = """
import time

async def ponder(question: str) -> str:
    "Thinks about it."
    time.sleep(3600)
"""


@pytest.mark.slow
def test_a_tool_that_blocks_is_told_and_ends_by_its_deadline(tmp_path: Path) -> None:
    (tmp_path / "my_tools.py").write_text(TOOL)
    flags = [
        "--tools", "my_tools:ponder", "--tool-deadline-s", "2", "--tool-call-open", "2", "--tool-call-close", "2",
        "--num-rollout", "1", "--max-turns", "3", "--rollout-max-response-len", "120",
    ]  # fmt: skip
    done = succeed_here(tmp_path / "run", *SMALL, *made_model(), *QUICK, *flags, cwd=tmp_path)
    lines = [line for line in told(done) if "agents-0 has had group" in line]
    assert lines
    assert "(--tool-deadline-s 2)" in lines[0]
