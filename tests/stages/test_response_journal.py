"""Responses on the disk: what another process goes on from is a beginning of what was made, by weights that count."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pipeline.record.episodes import forget_responses
from stages.messages import PromptGroup, Sample, VersionRun
from stages.records.once import groups_in
from stages.records.responses import ResponseJournal
from stages.rollouts import join_runs, new_sample
from stages.sampling.requests import Finish, SampleResult
from tests.stages.stage_rig import make_config, make_group

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
    found = await restored(tmp_path, 0, 3)
    assert found is not None
    assert found.runs == (VersionRun(7, 5),)
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


async def test_another_prompt_seed_or_setting_is_not_restored(tmp_path: Path) -> None:
    await write(journal(tmp_path, 0), response(*[0] * 5))
    assert await restored(tmp_path, 0, 0, group=replace(GROUP, seed=1)) is None
    assert await restored(tmp_path, 0, 0, group=replace(GROUP, prompt="!")) is None
    assert await restored(tmp_path, 0, 0, rollout={"rollout_max_response_len": 99}) is None
    assert await restored(tmp_path, 0, 0, rollout={"num_rollout": 99}) is not None


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


async def test_records_hold_what_is_new(tmp_path: Path) -> None:
    """So a file grows with the tokens, and not with their square."""
    written, sizes = journal(tmp_path, 0), [0]
    for n in range(100, 1001, 100):
        await write(written, response(*[0] * n))
        sizes.append(pieces(tmp_path).stat().st_size)
    first, last = sizes[1] - sizes[0], sizes[-1] - sizes[-2]
    assert last < 1.5 * first


async def test_a_damaged_or_cut_file_counts_up_to_there_and_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    states = [response(*[0] * n) for n in (5, 9, 13)]
    await write(journal(tmp_path, 0), *states)
    path = pieces(tmp_path)
    whole = path.read_bytes()
    allowed: Sequence[SampleResult | None] = [None, *map(kept, states)]
    for place in range(0, len(whole), 11):
        for damaged in (whole[:place], whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]):
            path.write_bytes(damaged)
            caplog.clear()
            found = await restored(tmp_path, 0, 0)
            assert found in allowed[:-1], place
            assert "cannot be read" in caplog.text or len(damaged) in (0, *_ends(whole)), place


def _ends(whole: bytes) -> Iterator[int]:
    place = 0
    while place < len(whole):
        place += 16 + int.from_bytes(whole[place : place + 8], "little")
        yield place


@contextmanager
def full(path: Path) -> Iterator[None]:
    """No file may grow beyond what `path` has and some bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 40, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


async def test_a_full_disk_is_told_once_and_what_is_written_later_counts(
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
