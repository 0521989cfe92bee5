"""The plan of kills: the same for the same seed, and all moments are in it."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

from tests.chaos.kills import FATAL, MOMENTS, RESUME, RUNNING, WARM, Kill, Seen, draw
from tests.chaos.suite import cases


def test_the_same_seed_draws_the_same_plan() -> None:
    def plans(seed: int) -> list[object]:
        return list(zip(range(20), cases(seed, 100), strict=False))

    assert plans(7) == plans(7)
    assert plans(7) != plans(8)


def test_all_moments_come_and_a_resume_follows_what_ended_the_run() -> None:
    seen: set[str] = set()
    for seed in range(60):
        plan = draw(random.Random(seed), steps=20, warm_steps=4, kills=6)
        assert len(plan) == 6
        seen |= {kill.moment for kill in plan}
        for before, kill in itertools.pairwise(plan):
            if kill.moment == RESUME:
                assert before.victim in FATAL
    assert seen == set(MOMENTS)


def test_a_moment_is_recognised_by_the_files_of_the_run(tmp_path: Path) -> None:
    seen = Seen(tmp_path, keep_last_n=1)
    running, warm = (seen.reached(Kill("train-0", moment, 2, 0.0)) for moment in (RUNNING, WARM))
    pruned, saved = (seen.reached(Kill("train-0", moment, 2, 0.0)) for moment in ("prune", "save"))
    (tmp_path / "checkpoints/.step-00000002.draft").mkdir(parents=True)
    (tmp_path / "warm_start/logs").mkdir(parents=True)
    assert not any(reached() for reached in (running, warm, pruned, saved))
    for name in ("ledger.jsonl", "warm_start/ledger.jsonl"):
        (tmp_path / name).write_text('{"type":"step","step":1,"crc":"00000000"}\n' * 2)
    assert [reached() for reached in (running, warm, saved, pruned)] == [True, True, True, False]
    for step in (1, 2):
        (tmp_path / f"checkpoints/step-0000000{step}").mkdir()
    assert pruned()
