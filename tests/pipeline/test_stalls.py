"""Stalls are reported while they last, on the terminal and in summary.json, and end the run; no stream causes one.

The parts that hang are real: a stage, a tool and a reward service that give no answer, engines that take no weights or
answer no request. Streams hold everything that the gate admits, in messages and in bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from launching import SIMULATED, SIMULATED_TRAINER, SMALL, Finished, here, made_model, succeed_here

from configs.schema import Config
from configs.schema.rollout import EngineConfig, SimulatedEngineConfig
from pipeline.graph import message_bytes, stream_spec
from pipeline.observe.stalls import MOST_KEPT, Stall, StallWatch
from stages.messages import NO_IDS, Extra, PromptGroup, RolloutSlice
from stages.rollouts import new_sample
from stages.staleness_gate import StalenessGate
from tests.hostile_engine import SpoiltEngine, never, serving
from tests.served_app import served_app
from transport import Node, StreamSpec
from transport.codec import Codec, total

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
    assert look(410, 1) == "there is progress again, after 310 s"
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
    assert any(line.startswith("there is progress again, after ") for line in done.out.splitlines())
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
        done = here(tmp_path / "run", *SMALL, *made_model(), *SIMULATED_TRAINER, *flags)
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
        done = here(tmp_path / "run", *SMALL, *made_model(), *SIMULATED_TRAINER, *flags, *external(stubborn))
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


class Part(msgspec.Struct, frozen=True, array_like=True):
    body: bytes


def config_of(batch: int, members: int, context: int | None) -> Config:
    replace, config = msgspec.structs.replace, Config()
    rollout = replace(
        config.rollout,
        rollout_batch_size=batch,
        n_samples_per_prompt=members,
        rollout_max_context_len=context,
        num_rollout=10,
    )
    return replace(config, rollout=rollout)


@given(
    batch=st.integers(1, 4096), members=st.integers(1, 64), staleness=st.integers(0, 8), context=st.integers(1, 1 << 20)
)
def test_a_hub_holds_all_that_the_gate_lets_out(batch: int, members: int, staleness: int, context: int) -> None:
    config = config_of(batch, members, context)
    gate = StalenessGate(batch, staleness)
    spec = stream_spec(config, gate, "group", "inproc://x")
    rollouts = gate.most_open * members
    assert spec.capacity_items >= 2 * rollouts
    assert spec.capacity_bytes >= rollouts * context * 13, "ids, mask, log-probs and a teacher's of every token"
    assert spec.max_message_bytes >= members * context * 13, "a group may travel whole"


def test_a_group_with_images_and_choices_of_experts_fits_into_a_message() -> None:
    """Extras count for the limit of a message (tests/transport/conformance_departures.py)."""
    context, group = 4096, PromptGroup(0, 0, 0, "?", NO_IDS, None, n_samples=16, seed=0)
    sample = new_sample(range(context), 0)
    extras = {
        "routed_experts": np.zeros((context, 48, 8), dtype="<i4").view(Extra),
        "image": np.zeros((1024, 1024, 3), dtype="u1").view(Extra),
    }
    samples = tuple(msgspec.structs.replace(sample, index=index, extras=extras) for index in range(group.n_samples))
    frames = Codec(RolloutSlice).encode(RolloutSlice(group, samples))
    assert 64 << 20 < total(frames) < message_bytes(group.n_samples, context)


def test_without_a_context_a_message_has_the_usual_limit() -> None:
    assert message_bytes(8, None) == 64 << 20


async def held_until_all_came(spec: StreamSpec, parts: int, size: int) -> int:
    """A stage that joins: it keeps what it has until the last part is there. Returns how many parts came."""
    async with Node("limits", "controller") as node:
        hub = await node.hub(spec, lambda letter: None)
        outlet = await node.outlet(hub.address, spec.name, Part, replica="sender")
        inlet = await node.inlet(
            hub.address, spec.name, Part, window_items=10 * parts, window_bytes=1 << 40, replica="joiner"
        )
        leases = []

        async def send() -> None:
            for part in range(parts):
                await outlet.send(Part(bytes(size)), f"{part}")

        async with asyncio.TaskGroup() as tasks:
            sender = tasks.create_task(send())
            try:
                async with asyncio.timeout(3.0):
                    while len(leases) < parts:
                        lease = await inlet.receive()
                        assert lease is not None
                        leases.append(lease)
            except TimeoutError:
                sender.cancel()
        for lease in leases:
            lease.done()
        return len(leases)


async def test_a_batch_above_a_bound_in_bytes_does_not_stall() -> None:
    """A bound below a batch stops the run for good; the streams of a run have none."""
    parts, size = 40, 1000
    bounded = StreamSpec("group", "inproc://bounded", capacity_bytes=parts * size // 2)
    assert await held_until_all_came(bounded, parts, size) < parts, "what the bound would do"
    spec = stream_spec(config_of(4, 10, 64), StalenessGate(4, 0), "group", "inproc://whole")
    assert await held_until_all_came(spec, parts, size) == parts
