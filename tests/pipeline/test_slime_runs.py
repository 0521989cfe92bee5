"""slime's hooks in whole runs, each seen by what would be otherwise without it.

The hooks that make, convert, log and evaluate batches run with the functions of docs/slime.md, in test_runs.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launching import NO_DATA, ROOT, SIMULATED, SIMULATED_ENGINE, here, made_model, succeed_here
from safetensors.numpy import load_file

from pipeline.record.metrics import read_metrics


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The user's folder: functions, rows from 1 on, and settings of their own."""
    shutil.copy(ROOT / "tests" / "pipeline" / "slime_hooks.py", tmp_path / "mine.py")
    rows = [{"prompt": f"{n}+1=", "label": str(n + 1), "metadata": {"n": n}} for n in range(1, 40)]
    rows[1]["metadata"]["generate_function_path"] = "mine.by_row"  # type: ignore[index]
    rows[2]["metadata"]["custom_rm_path"] = "mine.graded_by_row"  # type: ignore[index]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "mine.yaml").write_text("depth: 5\nbonus: 0.5\n")
    return tmp_path


def noted(place: Path, name: str) -> list[list[Any]]:
    return [json.loads(line) for line in (place / f"{name}.jsonl").read_text().splitlines()]


def metric(run: Path, name: str) -> float:
    return next(row[name] for row in read_metrics(run / "metrics.jsonl") if name in row)


ONE_BATCH = ["--mode", "sync", "--num-rollout", "1", "--no-try-functions"]


@pytest.mark.slow
def test_rollouts_and_what_is_trained_of_them_are_what_the_functions_say(place: Path) -> None:
    """Named in all three ways, plain and async."""
    done = succeed_here(
        place / "run", *NO_DATA, *made_model(), *SIMULATED_ENGINE, *ONE_BATCH, "--prompt-data", "rows.jsonl",
        "--input-key", "prompt", "--trust-data-code", "--custom-config-path", "mine.yaml", "--max-turns", "3",
        "--custom-generate-function-path", "mine.two_requests",
        "--rm-type", "auto", "--custom-rm-path", "mine.py:graded", "--reward-key", "score",
        "--dynamic-sampling-filter-path", "mine:not_the_first",
        "--rollout-sample-filter-path", "mine.without_the_last",
        "--custom-reward-post-process-path", "mine.py:places",
        "--custom-advantage-function-path", "mine.for_every_token",
        "--rollout-data-postprocess-path", "mine.py:tripled",
        "--use-tis", "--custom-tis-function-path", "mine:doubled",
        "--custom-pg-loss-reducer-function-path", "mine:summed",
        "--custom-rollout-log-function-path", "mine.log_rollout",
        "--eval-prompt-data", "held=rows.jsonl@[6:8]", "--eval-interval", "1",
        "--custom-eval-rollout-log-function-path", "mine.py:log_evaluation", cwd=place,
    )  # fmt: skip
    ended = [json.loads(line) for line in (done.run_dir / "ledger.jsonl").read_text().splitlines()]
    details = {line["group"]: line["detail"] for line in ended if line["type"] == "settle" and line["detail"]}
    assert details.pop(0) == "the_first"
    (turns,) = details.values()  # the fourth row's function sends four requests
    assert "--custom-generate-function-path mine:two_requests raised PostFailed" in turns
    assert "had its 3 turns (--max-turns)" in turns
    rewards = {2: ("by row", 5.5), 3: ("trained", 100.0), 5: ("trained", 5.5), 6: ("trained", 5.5)}
    rows = [[0, n, *rewards[n], place == 3] for n in rewards for place in range(4)]
    assert sorted(noted(place, "rollouts")) == sorted(rows)
    assert noted(place, "evaluations") == [[v, "held", [5.5, 5.5], ["evaluated", "evaluated"]] for v in (0, 1)]
    # Rewards are places in the group, without the last: 0, 1, 2, for each token; then tripled, and the loss doubled.
    (made,) = noted(place, "advantages")
    assert [reward for reward, _ in made] == [0.0, 1.0, 2.0] * 4
    total = sum(reward * length for reward, length in made)
    assert noted(place, "post_processed") == [[0, total]]
    assert sum(one for (one,) in noted(place, "reduced")) == pytest.approx(-6 * total)
    assert metric(done.run_dir, "train/pg_loss") == pytest.approx(-6 * total / 16)
    assert metric(done.run_dir, "train/own_weight") == pytest.approx(2.0 * 12 / 16)


@pytest.mark.slow
def test_a_class_grades_groups_and_a_loss_compares_them(place: Path) -> None:
    done = succeed_here(
        place / "run", *NO_DATA, *made_model(), *SIMULATED_ENGINE, *ONE_BATCH, "--prompt-data", "arithmetic",
        "--rm-type", "auto", "--group-rm", "--custom-rm-path", "mine.judged",
        "--loss-type", "custom_loss", "--custom-loss-function-path", "mine.py:first_rewarded", cwd=place,
    )  # fmt: skip
    assert noted(place, "groups") == [[[0.0, 4.0, 0.0, 0.0] * 4]]
    assert metric(done.run_dir, "train/loss") == pytest.approx(1.0)


@pytest.mark.slow
def test_functions_are_called_in_megatrons_processes(place: Path) -> None:
    """The last one makes the step so small that the weights stay; else Adam's first step moves each by 1e-4."""
    model = made_model()
    done = succeed_here(
        place / "run", *NO_DATA, *model, *SIMULATED_ENGINE, *ONE_BATCH, "--prompt-data", "arithmetic",
        "--train-backend", "megatron", "--custom-megatron-init-path", "mine.megatron_begins",
        "--custom-megatron-before-log-prob-hook-path", "mine:before_log_probs",
        "--custom-megatron-before-train-step-hook-path", "mine.py:before_step", cwd=place,
    )  # fmt: skip
    calls = noted(place, "megatron")
    assert calls[:2] == [["init", 1, 1e-4], ["log_prob ", 1]]
    assert calls.count(["step", 0, 0]) == 1
    assert {call[0] for call in calls[2:]} <= {"log_prob ", "step"}, "the policy is scored again, before or behind it"
    files = (Path(model[-1]), done.run_dir / "checkpoints" / "step-00000001" / "hf")
    before, after = (load_file(file / "model.safetensors") for file in files)
    for name, values in before.items():
        np.testing.assert_allclose(after[name], values, atol=2e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "code", "words"), [
    ("--custom-generate-function-path mine.breaks", 5,
     "--custom-generate-function-path mine:breaks raised ValueError: the shelf is empty ({}/mine.py:"),
    ("--custom-generate-function-path mine.py:gives_a_number", 5,
     "--custom-generate-function-path mine.py:gives_a_number: it returned int; return the sample"),
    ("--rollout-function-path mine.hangs --custom-generate-deadline-secs 0.2", 5,
     "--rollout-function-path mine:hangs took longer than 0.2 s (--custom-generate-deadline-secs)"),
    ("--eval-function-path mine.hangs --custom-generate-deadline-secs 0.2 --eval-prompt-data arithmetic "
     "--eval-interval 1", 0, "evaluation of version 0 is incomplete: --eval-function-path mine:hangs took longer than"),
    ("--dynamic-sampling-filter-path mine.forgets_to_return", 5,
     "--dynamic-sampling-filter-path: TypeError: it returned None; return True or False, or an object with keep"),
    ("--custom-reward-post-process-path mine.spoils", 5,
     "--custom-reward-post-process-path mine:spoils raised ValueError: the shelf is empty ({}/mine.py:"),
    ("--custom-rollout-log-function-path mine.log_later", 2,
     "--custom-rollout-log-function-path: import path 'mine:log_later' is async, but nobody would await it; write def"),
    ("--data-source-path mine.Numbers", 2,
     "--data-source-path mine:Numbers: get_samples returned int; return a list of groups, each a list of samples"),
    ("--data-source-path mine.Hangs --stall-limit-s 3 --drain-s 1", 7,
     "no groups are under way, for --data-source-path mine:Hangs is asked for prompts"),
    ("--custom-model-provider-path mine.Judge", 2,
     "--custom-model-provider-path is no flag: what the model is comes from --hf-checkpoint"),
    ("--custom-update-weight-post-write-path mine.spoils", 2,
     "--custom-update-weight-post-write-path is no flag: engines fetch versions themselves"),
])  # fmt: skip
def test_a_function_that_fails_is_named_with_its_flag(place: Path, flags: str, code: int, words: str) -> None:
    data = [] if "--data-source-path" in flags else ["--prompt-data", "arithmetic"]
    done = here(
        place / "run", *NO_DATA, *made_model(), *SIMULATED, *ONE_BATCH, *data, *flags.split(),
        "--max-filter-rounds", "1", cwd=place,
    )  # fmt: skip
    assert done.code == code, done.err
    assert words.format(place) in done.out + done.err
