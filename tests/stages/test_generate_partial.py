"""Engines that are lost in the middle of a response: what has arrived is kept, once, and the rest made elsewhere."""

from __future__ import annotations

import asyncio
import errno
import io
import logging
import os
import resource
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from models.disk import open_file
from models.engines.client import EngineClient
from models.engines.noise import sample_seed
from models.errors import EngineTimeout
from pipeline.record.kept_files import forget_responses
from stages.messages import PromptGroup, Sample, VersionRun
from stages.records import growing_records
from stages.records.once import EPISODES_DIR, groups_in
from stages.records.unfinished import ResponseJournal
from stages.rollouts import join_runs, new_sample
from stages.sampling.requests import Finish, SampleResult
from stages.topic_values import SLOW as SLOW_KEY
from tests.stages.engine_rig import (
    LENGTH,
    SLOW_MS,
    Log,
    check_continued,
    core_of,
    freeze,
    generating,
    simulated,
    started,
    written,
)
from tests.stages.stage_rig import before_calls, idle, make_config, make_group, response_ids, rewrite, until

SLOW: dict[str, Any] = {"streamed": True, "proxied": True, "engine": simulated(SLOW_MS)}


@pytest.mark.parametrize("fault", ["killed", "hung", "error in the stream"])
async def test_a_lost_engines_partial_output_is_continued_by_another(fault: str, tmp_path: Path, log: Log) -> None:
    async with started(tmp_path, engines=2, **SLOW) as world:
        first = await world.in_mid_generation(log, make_group(0, 3))
        if fault == "killed":
            world.proxies[0].kill()
        elif fault == "hung":
            world.proxies[0].stall()
            await idle()
            assert len(log) == 1
            world.lose(0)
        else:
            world.proxies[0].break_with({"error": {"message": "the scheduler died", "code": 500}})
        samples = await world.whole(3)
        await world.rig.hubs["generate"].wait_empty()
        assert world.extra("reused_tokens") == sum(s.reused_tokens for s in samples) > 0
        assert world.extra("engine_retries") == 1
    assert [s.index for s in samples] == [0, 1, 2]
    rest = [e for e in log if e.url == world.proxies[1].url]
    assert len(rest) == 3
    for sample in samples:
        check_continued(sample, first, rest)
    spans = [name.removeprefix("request ") for name in world.stage.context.spans.names if name.startswith("request ")]
    kept = sum(len(output.output_ids) for output in first.outputs)
    assert spans[0] == f"engine-0, {kept} tokens of version 0"
    made = [len(e.outputs[0].output_ids) for e in rest]
    assert sorted(spans[1:]) == sorted(f"engine-1, {n} tokens of version 0" for n in made)
    assert len({e.request.rid for e in log}) == len(log), "no request id is used twice"
    assert len({len(e.request.rid or "") for e in log}) == 1, "so that none is the beginning of another"


@pytest.mark.parametrize("lossy", [{"rollout": {"partial_rollout": False}}, {"health": {"stream_interval": 0}}])
async def test_without_partial_rollout_a_lost_turn_starts_again(
    lossy: dict[str, Any], tmp_path: Path, log: Log
) -> None:
    """As one that is not streamed: nothing has come of the first request, so it is sent again as it was."""
    async with started(tmp_path, engines=2, **lossy, **SLOW) as world:
        world.hurry(1)
        await world.ask(make_group(0, 3))
        await freeze(world.engines[0], tokens=9)
        partial = log[0].partial
        assert (partial is None) == ("health" in lossy)
        await until(lambda: partial is None or partial.tokens > 0)
        world.proxies[0].kill()
        samples = await world.whole(3)
        assert world.extra("reused_tokens") == 0
    assert [(e.request.prompts[0], e.params.n) for e in log] == [([1, 2, 3], 3)] * 2
    for sample in samples:
        assert (sample.status, sample.response_length, sample.reused_tokens) == ("completed", LENGTH, 0)
        assert response_ids(sample) == written([log[1]], [sample.index], sample)


async def test_retries_of_a_turn_are_bounded_and_the_sample_fails_in_words(
    tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.sampling.routes.FIRST_PAUSE_S", 0.0)
    async with started(tmp_path, rollout={"max_retries": 2}, **SLOW) as world:
        world.proxies[0].answer_generate_with(503)
        samples = await world.rollouts(make_group(0, 2))
        assert world.stage.activity.failures == 2
    assert len(log) == 3
    for sample in samples:
        assert sample.status == "failed"
        assert "answered 503: out of order" in (sample.error or "")


@pytest.mark.parametrize(("options", "token"), [({"vocab_size": 300}, 300), ({}, 1 << 20)], ids=["here", "engine"])
async def test_a_token_that_would_end_a_server_is_refused_and_not_sent_again(
    options: dict[str, int], token: int, tmp_path: Path, log: Log
) -> None:
    async with started(tmp_path, options=options, **SLOW) as world:
        core = core_of(world.engines[0])
        samples = await world.rollouts(make_group(0, 2, prompt=[1, token]))
        assert (core.schedule.running, core.schedule.totals.engine_steps) == (0, 0)
    assert len(log) == 1, "once refused, it is not tried elsewhere"
    for sample in samples:
        assert f" {token}, outside the vocabulary of {options.get('vocab_size', 256)} tokens" in (sample.error or "")


async def test_a_lost_request_waits_for_the_engine_to_come_back_and_wastes_no_retry(tmp_path: Path, log: Log) -> None:
    async with started(tmp_path, rollout={"max_retries": 1}, **SLOW) as world:
        first = await world.in_mid_generation(log, make_group(0, 2))
        world.proxies[0].kill()  # nobody has noticed yet: its link is ready still
        await until(lambda: world.extra("engine_retries") == 1)
        await idle()
        assert len(log) == 1, "an engine that does not answer is asked nothing"
        world.lose(0)
        await until(lambda: not world.serving())
        await world.start_engine(0, incarnation=1)
        world.hurry(-1)
        samples = (await world.answer()).samples
    for sample in samples:
        check_continued(sample, first, log[1:])


async def test_many_lost_requests_look_at_an_engines_health_together(
    tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[EngineClient] = []
    before_calls(monkeypatch, EngineClient, "health", looks.append)
    async with started(tmp_path, engines=2, **SLOW) as world:
        for group_id in range(10):
            await world.ask(make_group(group_id, 4))
        await until(lambda: len(log) == 10)
        world.proxies[0].kill()
        for _ in range(10):
            assert {s.status for s in (await world.answer()).samples} == {"completed"}
    assert len(looks) <= 12, "of 20 requests that were lost"


async def test_a_request_that_takes_too_long_goes_on_from_what_it_has(tmp_path: Path, log: Log) -> None:
    """And does so more often than --max-retries allows, for each time it has got on."""
    async with started(
        tmp_path,
        streamed=True,
        engine=simulated(25.0, length=1000),
        rollout={"request_timeout_secs": 0.4, "max_retries": 1, "rollout_max_response_len": LENGTH},
    ) as world:
        (sample,) = await world.rollouts(make_group(0, 1))
    assert len(log) >= 3, "40 tokens of 25 ms do not fit into two times 400 ms"
    assert all(isinstance(e.error, EngineTimeout) for e in log[:-1])
    assert (sample.status, sample.response_length) == ("truncated", LENGTH)
    assert response_ids(sample) == written(log, [0] * len(log), sample)
    assert sample.reused_tokens == LENGTH - len(log[-1].outputs[0].output_ids)


async def test_an_answer_at_a_crawl_ends_by_the_bound_and_its_engine_is_named(tmp_path: Path, log: Log) -> None:
    bounds = {"request_timeout_secs": 0.4, "max_retries": 1, "min_tokens_per_sec": 1000.0}
    crawling = simulated(100.0, length=1000)
    async with started(tmp_path, streamed=True, engine=crawling, rollout={**bounds}) as world:
        (sample,) = await world.rollouts(make_group(0, 1))
        slow = await world.rig.complaint(about=SLOW_KEY)
    assert len(log) == 2, "the request and one retry, whatever tokens have come"
    assert sample.status == "failed"
    assert "gave no answer within timeout_s=0.4" in (sample.error or "")
    assert slow.reason.endswith("new tokens came of a request in --request-timeout-secs 0.4")


# Records of partial responses: what is restored, by itself and by a resumed generate stage.


GROUP = make_group(0, 4)
TURN = new_sample([1, 2, 3], 0)
EVERY = 4  # tokens


def journal(home: Path, *lives: int, **sections: object) -> ResponseJournal:
    checkpoint = {"save_interval": 1, "response_journal_tokens": EVERY}
    return ResponseJournal(home, make_config(checkpoint=checkpoint, **sections), lives)


def response(*versions: int, finish: Finish = "aborted", salt: int = 0) -> SampleResult:
    """One token of each of these versions."""
    ids = tuple(100 * salt + place for place in range(len(versions)))
    runs = join_runs((), tuple(VersionRun(version, 1) for version in versions))
    return SampleResult(finish, ids, tuple(-0.01 * i for i in ids), runs, "".join(f"é{i} " for i in ids), spent_s=1.5)


async def write(written: ResponseJournal, *states: SampleResult, turn: Sample = TURN) -> None:
    for state in states:
        written.keep(GROUP, turn, state)
        await written.flush()


async def restored(
    home: Path, *lives: int, turn: Sample = TURN, group: PromptGroup = GROUP, oldest: int = 0, **sections: object
) -> SampleResult | None:
    found = await journal(home, *lives, **sections).restore(group, [turn], oldest)
    return found[0] if found else None


def kept(result: SampleResult) -> SampleResult:
    """As it is given back."""
    return replace(result, reused_tokens=len(result.token_ids))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=6),
    st.lists(st.integers(0, 12), max_size=3),
    st.integers(0, 12),
)
def test_no_version_that_was_taken_back_or_is_too_old_comes_back(
    growth: list[tuple[int, int]], resumed_from: list[int], oldest: int
) -> None:
    """A response grows, its weights too. Of what was written, the longest beginning without a wrong version counts."""
    versions: list[int] = []
    states = []
    for newer, tokens in growth:
        versions += [(versions[-1] if versions else 0) + newer] * tokens
        states.append(response(*versions))
    lives = (0, *resumed_from)
    bound = min(resumed_from, default=10**9)

    async def check() -> None:
        with TemporaryDirectory() as home:
            await write(journal(Path(home), 0), *states)
            found = await restored(Path(home), *lives, oldest=oldest)
        right = [
            state
            for state in states
            if len(state.token_ids) >= EVERY and all(oldest <= run.version <= bound for run in state.runs)
        ]
        assert found == (kept(right[-1]) if right else None)

    asyncio.run(check())


async def test_what_has_ended_is_whole_and_what_was_begun_anew_does_not_mix(tmp_path: Path) -> None:
    done = response(*[0] * 9, finish="stop", salt=2)
    await write(journal(tmp_path, 0), response(*[0] * 5), response(*[0] * 7, salt=2), done, response(*[0] * 12))
    assert await restored(tmp_path, 0, 0) == kept(done), "nothing that goes on is better than what has ended"


async def test_another_replica_of_this_life_goes_on_but_never_the_same(tmp_path: Path) -> None:
    written = journal(tmp_path, 0, 3)
    await write(written, response(7, 7, 7, 7, 7))
    assert await written.restore(GROUP, [TURN], 0) == ()
    assert (await restored(tmp_path, 0, 3)).runs == (VersionRun(7, 5),)
    assert await restored(tmp_path, 0, 3, 6) is None, "version 7 of that life never happened"


@pytest.mark.parametrize(
    "turn",
    [
        new_sample([1, 2, 4], 0),
        new_sample([1, 2, 3], 1),
        replace(TURN, turns=1),
        replace(TURN, replaced=1),
        replace(TURN, sequence=1),
    ],
    ids=["tokens", "rollout", "turn", "begun anew", "sequence"],
)
async def test_another_turn_is_not_restored(turn: Sample, tmp_path: Path) -> None:
    await write(journal(tmp_path, 0), response(*[0] * 5))
    assert await restored(tmp_path, 0, 0, turn=turn) is None
    assert await restored(tmp_path, 0, 0) is not None


async def test_short_failed_and_evaluated_responses_are_not_written(tmp_path: Path) -> None:
    written = journal(tmp_path, 0)
    await write(written, response(0, 0, 0), replace(response(*[0] * 5), finish="failed", error=ValueError()))
    await write(written, replace(response(*[0] * 5), reason="the run is stopping"))
    written.keep(replace(GROUP, purpose="eval"), TURN, response(*[0] * 5))
    await written.flush()
    await write(journal(tmp_path), response(*[0] * 5))
    await write(journal(tmp_path / "of another host", 0), response(*[0] * 5))
    assert not list(tmp_path.iterdir())


def pieces(home: Path) -> Path:
    [path] = groups_in(home)["0"].iterdir()
    return path


async def test_a_damaged_or_cut_file_counts_up_to_there_and_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    states = [response(*[0] * n) for n in (5, 9, 13)]
    await write(journal(tmp_path, 0), *states)
    path = pieces(tmp_path)
    whole = path.read_bytes()
    allowed: Sequence[SampleResult | None] = [None, *map(kept, states)]
    for place in range(0, len(whole), 11):
        for damaged in (whole[:place], whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]):
            rewrite(path, damaged)
            caplog.clear()
            found = await restored(tmp_path, 0, 0)
            assert found in allowed[:-1], place
            assert "cannot be read" in caplog.text or len(damaged) in (0, *_ends(whole)), place


def _ends(whole: bytes) -> Iterator[int]:
    place = 0
    while place < len(whole):
        place += 16 + int.from_bytes(whole[place : place + 8], "little")
        yield place


def in_place_of_a_file(path: Path, kind: str) -> None:
    """What is no file, or one that cannot be read."""
    path.unlink(missing_ok=True)
    if kind == "directory":
        path.mkdir()
    elif kind == "named pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")


class _Broken(io.BytesIO):
    """A file whose disk fails."""

    def fileno(self) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("kind", ["directory", "named pipe", "endless", "bad sector"])
async def test_an_unreadable_file_is_passed_over_and_named_once(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    await write(journal(tmp_path, 0), response(0, 0, 0, 0, 0))
    good = pieces(tmp_path)
    bad = good.with_name("responses-0-000000000000.log")
    if kind == "bad sector":
        shutil.copyfile(good, bad)
        real = open_file
        monkeypatch.setattr(growing_records, "open_file", lambda path: _Broken() if path == bad else real(path))
    else:
        in_place_of_a_file(bad, kind)
    good.with_name("responses-old.log").write_bytes(b"of nobody")
    reader = journal(tmp_path, 0, 0)
    async with asyncio.timeout(120):
        for _ in range(2):
            [found] = await reader.restore(GROUP, [TURN], 0)
            assert found == kept(response(0, 0, 0, 0, 0))
    [line] = [record.getMessage() for record in caplog.records if str(bad) in record.getMessage()]
    reason = {"named pipe": "it is a named pipe", "directory": "it is a directory", "endless": "it is a device"}
    assert reason.get(kind, "Input/output error") in line
    shutil.rmtree(good.parent)
    in_place_of_a_file(good.parent, "named pipe")
    assert await restored(tmp_path, 0, 0) is None, "no directory of a group either"


async def test_a_run_directory_that_was_moved_restores_its_responses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def model(run_dir: Path) -> dict[str, object]:
        return {"train": {"hf_checkpoint": str(run_dir / "assets" / "tiny")}}

    here, there = tmp_path / "run", tmp_path / "moved" / "run"
    (here / EPISODES_DIR).mkdir(parents=True)
    there.parent.mkdir()
    await write(journal(here / EPISODES_DIR, 0, **model(here)), response(0, 0, 0, 0, 0))
    here.rename(there)
    assert await restored(there / EPISODES_DIR, 0, 0, **model(there)) == kept(response(0, 0, 0, 0, 0))
    caplog.set_level(logging.INFO, "sluice.records")
    assert await restored(there / EPISODES_DIR, 0, 0, **model(here)) is None, "that is another model now"
    assert "responses of group 0 are not continued: prompt or settings differ" in caplog.text


@contextmanager
def full(path: Path) -> Iterator[None]:
    """No file may grow beyond what `path` has and some bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 40, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


async def test_a_full_disk_is_reported_once_and_what_is_written_later_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written, states = journal(tmp_path, 0), [response(*[0] * n) for n in (5, 9, 13, 17)]
    await write(written, states[0])
    with caplog.at_level(logging.WARNING), full(pieces(tmp_path)):
        await write(written, *states[1:3])
    assert caplog.text.count("responses are not recorded") == 1
    assert await restored(tmp_path, 0, 0) == kept(states[0])
    await write(written, states[3])
    assert await restored(tmp_path, 0, 0) == kept(states[3])


async def test_responses_go_when_their_group_ends(tmp_path: Path) -> None:
    await write(journal(tmp_path, 0), response(*[0] * 5))
    forget_responses(tmp_path, [1, 2])
    assert list(groups_in(tmp_path)) == ["0"]
    (groups_in(tmp_path)["0"] / "turns-0-a.log").touch()
    forget_responses(tmp_path, [0])
    assert [path.name for path in groups_in(tmp_path)["0"].iterdir()] == ["turns-0-a.log"]


STAGE_GROUP = make_group(0, 3)
STREAM_EVERY = 8
ROLLOUT = {"rollout_max_response_len": LENGTH}
KEEPS: dict[str, Any] = {
    "checkpoint": {"save_interval": 1, "response_journal_tokens": STREAM_EVERY},
    "rollout": ROLLOUT,
}


def resumed(home: Path, life: int = 1) -> Path:
    """The directory of the next start of the run, with what is left of the rollouts."""
    after = home / f"life-{life}"
    after.mkdir()
    before = home if life == 1 else home / f"life-{life - 1}"
    (before / EPISODES_DIR).rename(after / EPISODES_DIR)
    return after


async def begin(tmp_path: Path, log: Log, *, streamed: bool) -> None:
    """All members have more than one record; the stage is gone."""
    (tmp_path / EPISODES_DIR).mkdir()
    lives = {"options": {"lives": (0,)}}
    async with started(tmp_path, engine=simulated(2 * SLOW_MS), streamed=streamed, **lives, **KEEPS) as world:
        await world.ask(STAGE_GROUP)
        await until(lambda: log and log[0].partial is not None and log[0].partial.tokens >= 3 * (2 * STREAM_EVERY + 1))
        await freeze(world.engines[0], tokens=3)
        await world.stage.journal.flush()
        for task in world.tasks:
            task.cancel()
        await until(lambda: log[0].error is not None)


@pytest.mark.parametrize("streamed", [False, True], ids=["every so many tokens", "sglang"])
async def test_a_resumed_run_asks_for_the_rest(streamed: bool, tmp_path: Path, log: Log) -> None:
    await begin(tmp_path, log, streamed=streamed)
    first = log[0]
    assert first.params.stream_interval == (None if streamed else STREAM_EVERY)
    log.clear()
    lives = {"options": {"lives": (0, 0)}}
    async with started(resumed(tmp_path), streamed=streamed, **lives, **KEEPS) as world:
        samples = await world.rollouts(STAGE_GROUP)
        assert world.stage.journal.restored_tokens == sum(sample.reused_tokens for sample in samples)
        await world.stage.journal.flush()
        rest = list(log)
        log.clear()
    assert len(groups_in(tmp_path / "life-1" / EPISODES_DIR)) == 1
    for sample in samples:
        kept = first.outputs[sample.index].output_ids[: sample.reused_tokens]
        assert len(kept) >= 2 * STREAM_EVERY
        assert response_ids(sample)[: len(kept)] == kept
        assert (len(response_ids(sample)), sample.resumed, sample.status) == (LENGTH, 1, "truncated")
        assert sample.model_versions == (0,)
        assert sample.fault() is None
        [asked] = [exchange for exchange in rest if exchange.request.prompts[0] == [1, 2, 3, *kept]]
        assert asked.params.sampling_seed == sample_seed(first.params.sampling_seed or 0, sample.index)
        assert asked.params.max_new_tokens == LENGTH - len(kept)
    async with started(resumed(tmp_path, 2), streamed=streamed, options={"lives": (0, 0, 0)}, **KEEPS) as world:
        again = await world.rollouts(STAGE_GROUP)
    assert [response_ids(sample) for sample in again] == [response_ids(sample) for sample in samples]
    assert log == [], "they had ended, and no engine was asked"


async def test_what_is_too_old_to_be_trained_is_made_anew(tmp_path: Path, log: Log) -> None:
    await begin(tmp_path, log, streamed=False)
    for case, (version, bound, partial, reused) in {
        "fresh enough": (2, 2, True, True),
        "too old": (3, 2, True, False),
        "synchronous": (1, 0, True, False),
        "without partial rollouts": (0, 2, False, False),
    }.items():
        shutil.copytree(tmp_path / EPISODES_DIR, tmp_path / case / EPISODES_DIR)
        changes = {"asynchrony": {"max_staleness": bound}, "rollout": {**ROLLOUT, "partial_rollout": partial}}
        async with generating(tmp_path / case, options={"lives": (0, version)}, **KEEPS | changes) as world:
            world.weights.publish(version)
            await world.weights.landed(version)
            await until(lambda world=world, version=version: world.stage.sampler.directory.published == version)  # type: ignore[misc]
            samples = await world.rollouts(STAGE_GROUP)
        assert [sample.reused_tokens > 0 for sample in samples] == [reused] * 3, case
        assert {min(sample.model_versions) for sample in samples} == {0 if reused else version}, case
