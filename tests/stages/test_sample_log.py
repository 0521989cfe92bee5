"""samples.jsonl: what is in a line, how large the file becomes, and what killed and resumed writers do to it."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from stages.chat.tokenizer import Tokenizer, load_tokenizer
from stages.messages import Int32Array, RolloutSlice, TurnReward, wire
from stages.sample_log import SAMPLES_FILE, SampleLog, drop_after, mask_runs
from tests.stages.group_rig import open_desk
from tests.stages.stage_rig import make_config, make_group, make_sample, make_slice


def a_log(path: Path, **observe: Any) -> SampleLog:
    return SampleLog(make_config(observe=observe), path)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / SAMPLES_FILE).read_text().splitlines()]


def characters(place: Path) -> Tokenizer:
    """A tokenizer of single characters in the form of a checkpoint's."""
    backend = tokenizers.Tokenizer(WordLevel({c: i for i, c in enumerate("0123456789+=[] ?")}, "?"))
    backend.pre_tokenizer, backend.decoder = Split(Regex("."), "isolated"), Fuse()
    backend.save(str(place / "tokenizer.json"))
    return load_tokenizer(str(place))


async def test_a_line_says_what_the_model_wrote_and_what_it_was_told(tmp_path: Path) -> None:
    tokenizer = characters(tmp_path)
    parts = [tokenizer.encode(text) for text in ("12+34=", "[12+34]", "46", "46 ")]
    ids = [i for part in parts for i in part]
    n = [len(part) for part in parts]
    sample = make_sample(
        1,
        prompt=parts[0],
        runs=[(3, n[1] - 1), (4, 1), (-1, n[2]), (4, n[3])],
        mask=[1] * n[1] + [0] * n[2] + [0] * n[3],
        response="[12+34]4646 ",
        reward=0.5,
        is_correct=True,
        turn_rewards=(TurnReward(n[0] + n[1], 0.25),),
    )
    sample = msgspec.structs.replace(sample, token_ids=wire(ids, Int32Array))
    log = SampleLog(make_config(train={"hf_checkpoint": str(tmp_path)}), tmp_path)
    await log.trained(1, [RolloutSlice(make_group(7, 2, prompt=parts[0]), (sample,))])
    (row,) = rows(tmp_path)
    assert row["turns"] == [
        {"role": "model", "tokens": n[1], "text": "[12+34]", "reward": 0.25},
        {"role": "observation", "tokens": n[2], "text": "46"},
        {"role": "model", "tokens": n[3], "text": "46 "},
    ]
    assert (row["group"], row["index"], row["step"], row["outcome"]) == (7, 1, 1, "trained")
    assert (row["reward"], row["is_correct"], row["status"]) == (0.5, True, "completed")
    assert row["ids"] == ids
    assert (row["prompt_tokens"], row["response_tokens"]) == (n[0], sum(n[1:]))
    assert row["loss_mask"] == [[0, n[0]], [1, n[1]], [0, n[2] + n[3]]]
    assert row["versions"] == [[-1, n[0]], [3, n[1] - 1], [4, 1], [-1, n[2]], [4, n[3]]]


@given(st.lists(st.integers(0, 1), max_size=40))
def test_runs_of_a_mask_give_the_mask_again(mask: list[int]) -> None:
    runs = mask_runs(np.array(mask, dtype=np.uint8))
    assert [value for value, n in runs for _ in range(n)] == mask
    assert all(a[0] != b[0] for a, b in pairwise(runs))


async def test_every_nth_batch_and_the_first_are_written_as_far_as_asked(tmp_path: Path) -> None:
    log = a_log(tmp_path, samples_interval=3, samples_groups=2)
    for step in range(1, 8):
        await log.trained(step, [make_slice(10 * step + k) for k in (2, 0, 1)])
    assert [(row["step"], row["group"]) for row in rows(tmp_path)[::2]] == [
        (1, 10), (1, 11), (3, 30), (3, 31), (6, 60), (6, 61),
    ]  # fmt: skip
    await a_log(tmp_path / "off", samples_interval=0).trained(1, [make_slice(1)])
    assert not (tmp_path / "off").exists()


async def test_groups_that_were_not_trained_are_few_in_each_interval(tmp_path: Path) -> None:
    log = a_log(tmp_path, samples_interval=10, samples_groups=2)
    for step in (0, 0, 4, 9, 10, 11, 12):
        await log.ended(step, make_slice(step), "filtered", "zero_std")
    assert [row["step"] for row in rows(tmp_path)[::2]] == [0, 0, 10, 11]
    assert {(row["outcome"], row["detail"]) for row in rows(tmp_path)} == {("filtered", "zero_std")}
    await log.ended(30, make_slice(1, purpose="eval"), "failed", "")
    assert all(row["outcome"] == "filtered" for row in rows(tmp_path)), "an evaluation has results of its own"


async def test_the_file_stays_below_its_limit_and_goes_on_to_the_end(tmp_path: Path) -> None:
    log = a_log(tmp_path, samples_interval=1, samples_groups=1, samples_max_mb=0.05)
    for step in range(1, 2001):
        await log.trained(step, [make_slice(step)])
    steps = [row["step"] for row in rows(tmp_path)][::2]
    assert (tmp_path / SAMPLES_FILE).stat().st_size <= 0.05e6 + 1000
    assert steps[:3] == [1, 2, 3], "all of them while there is room"
    assert len([step for step in steps if step > 1000]) >= 2, "and some at the end"


async def test_a_torn_line_is_cut_off_by_the_next_writer(tmp_path: Path) -> None:
    await a_log(tmp_path).trained(1, [make_slice(1)])
    whole = (tmp_path / SAMPLES_FILE).read_bytes()
    for torn in (b'{"step": 2, "outc', b"x" * 200_000):
        (tmp_path / SAMPLES_FILE).write_bytes(whole + torn)
        await a_log(tmp_path).ended(2, make_slice(2), "stale", "")
        assert [row["group"] for row in rows(tmp_path)] == [1, 1, 2, 2]


async def test_a_resumed_run_drops_what_never_happened(tmp_path: Path) -> None:
    log = a_log(tmp_path, samples_interval=1)
    for step in (1, 2, 3):
        await log.trained(step, [make_slice(step)])
    await log.ended(3, make_slice(9), "stale", "")
    with (tmp_path / SAMPLES_FILE).open("ab") as file:
        file.write(b'{"step": 1, torn')
    drop_after(tmp_path, 2)
    assert [row["step"] for row in rows(tmp_path)] == [1, 1, 2, 2]
    drop_after(tmp_path, 0)
    assert rows(tmp_path) == []


async def test_writers_beside_each_other_leave_whole_lines(tmp_path: Path) -> None:
    logs = [a_log(tmp_path, samples_interval=1) for _ in range(4)]
    async with asyncio.TaskGroup() as tasks:
        for place, log in enumerate(logs):
            for step in range(1, 26):
                tasks.create_task(log.trained(step, [make_slice(100 * place + step)]))
    assert len(rows(tmp_path)) == 4 * 25 * 2


async def test_a_full_disk_and_a_missing_directory_cost_samples_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await a_log(tmp_path / "nowhere").trained(1, [make_slice(1)])
    (tmp_path / SAMPLES_FILE).symlink_to("/dev/full")
    await a_log(tmp_path).trained(1, [make_slice(1)])


async def test_the_group_stage_writes_what_it_filters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    config = make_config(filter={"dynamic_sampling_filter": ("nonzero_std",)})
    async with open_desk(config) as at:
        await at.send(make_slice(3, make_sample(0, reward=1.0), make_sample(1, reward=1.0)))
        await at.end()
    assert [(row["group"], row["outcome"]) for row in rows(tmp_path / "run")] == [(3, "filtered")] * 2
