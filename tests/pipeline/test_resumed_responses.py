"""A controller that is killed in the middle of long responses: what they had is trained, with its versions."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from launching import SIMULATED, SMALL, finish, made_model, start

from stages.messages import PromptGroup
from stages.records.growing_records import RESPONSES, GrowingRecords, Key, Piece
from stages.records.once import EPISODES_DIR, groups_in
from stages.records.unfinished import RESPONSE_KIND
from stages.sampling.requests import SampleResult
from stages.train.saved_groups import load_batch
from tests.chaos.oracle import Expected, judge
from tests.pipeline.test_kill import steps_done, wait_until
from tests.stages.stage_rig import make_config, make_group

STEPS, GROUPS, BOUND, EVERY = 5, 4, 2, 16


def pieces(run_dir: Path, group: PromptGroup) -> dict[Key, list[Piece[SampleResult]]]:
    """What a first life has left of a group, by response."""
    records = GrowingRecords(run_dir / EPISODES_DIR, RESPONSE_KIND, make_config(), (0, 0))
    found: dict[Key, list[Piece[SampleResult]]] = {}
    for _, kept in records.pieces(group, this_life=False):
        for piece in kept:
            found.setdefault(piece.key, []).append(piece)
    return found


def left(run_dir: Path) -> dict[tuple[int, int], tuple[list[int], list[int]]]:
    """Tokens and versions by group and rollout."""
    found = {}
    for name in groups_in(run_dir / EPISODES_DIR):
        for turn, kept in pieces(run_dir, make_group(int(name))).items():
            ids = [token for piece in kept for token in piece.body.token_ids]
            versions = [run.version for run in kept[-1].body.runs for _ in range(run.n_tokens)]
            assert len(ids) == len(versions)
            found[int(name), turn[0]] = ids, versions
    return found


def still(run_dir: Path) -> dict[tuple[int, int], tuple[list[int], list[int]]]:
    """The same, once the controller's processes, which end with it, write no more."""
    now = None
    while now != (now := left(run_dir)):
        time.sleep(1.0)
    return now


@pytest.mark.slow
def test_tokens_of_before_the_kill_are_trained_with_their_versions(tmp_path: Path) -> None:
    run_dir, batches = tmp_path / "run", str(tmp_path / "batch-{rollout_id}.msgpack")
    flags = [
        *SMALL, *made_model(), *SIMULATED, "--num-rollout", str(STEPS), "--save-interval", "1",
        "--rollout-batch-size", str(GROUPS), "--n-samples-per-prompt", "2", "--async-buffer-size", str(BOUND),
        "--rollout-max-response-len", "200", "--rollout-max-context-len", "256", "engine.simulated.length_mean=150",
        "engine.simulated.a_ms=25", "--response-journal-tokens", str(EVERY), "--save-debug-rollout-data", batches,
    ]  # fmt: skip
    process = start(run_dir, *flags)
    wait_until(process, lambda: steps_done(run_dir) >= 2 and len(left(run_dir)) >= GROUPS, "responses are written")
    process.kill()
    process.communicate()
    before = still(run_dir)
    assert all(len(ids) >= EVERY for ids, _ in before.values())
    finish(start(None, "--resume", str(run_dir)), run_dir).check()
    assert judge(run_dir, Expected(STEPS, GROUPS, BOUND)) == []
    saved = 0
    for number in range(STEPS):
        for slice_ in load_batch(batches, number):
            for sample in slice_.samples:
                if not sample.reused_tokens:
                    continue
                ids, versions = before[slice_.group.group_id, sample.index]
                start_, end = sample.prompt_length, sample.prompt_length + sample.reused_tokens
                assert sample.token_ids[start_:end].tolist() == ids[: sample.reused_tokens]
                assert sample.versions[start_:end].tolist() == versions[: sample.reused_tokens]
                saved += sample.reused_tokens
    assert saved >= GROUPS * EVERY
    assert not list((run_dir / EPISODES_DIR).glob(f"*/{RESPONSES}-0-*")), "their groups have ended in each checkpoint"
