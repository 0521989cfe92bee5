"""Runs with teachers: whose log-probs arrive in front of the group stage, and what a killed teacher costs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from launching import NO_DATA, finish, here, launch, made_model, start, succeed_here
from safetensors.torch import load_file, save_file
from test_kill import kill, wait_for_steps
from test_preflight import refused

from models.tiny import make_tiny_checkpoint
from pipeline.record.metrics import read_metrics

pytestmark = pytest.mark.slow

# A custom stage that writes down what the teacher stage left.
PEEK = """
import json
from stages.base import MapStage


class Peek(MapStage):
    async def process(self, message):
        with open(self.context.run_dir / "peek.jsonl", "a") as file:
            for s in message.samples:
                row = {"purpose": message.group.purpose, "teacher": message.group.row_metadata.get("teacher"),
                       "status": s.status, "mask": s.loss_mask.tolist(), "policy": s.log_probs.tolist(),
                       "scores": s.teacher_log_probs.tolist()}
                file.write(json.dumps(row) + "\\n")
        return message
"""
PEEK_RECIPE = '[[stage]]\nname = "peek"\npath = "peek:Peek"\nafter = "teacher"\n'

# The simulated trainer publishes the weights that it began with: a teacher of the same checkpoint stays the policy.
SAME_POLICY = [
    *NO_DATA, "--use-opd", "--train-backend", "simulated", "--simulated-step-s", "0.05", "--config", "peek.toml",
]  # fmt: skip


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A directory to start from: the stage, its recipe, a checkpoint of the same tokenizer, rows with teachers."""
    (tmp_path / "peek.py").write_text(PEEK)
    (tmp_path / "peek.toml").write_text(PEEK_RECIPE)
    make_tiny_checkpoint(tmp_path / "other", tokenizer="arithmetic", seed=5)
    rows = [
        {"input": f"{i}+{i}=", "label": str(2 * i), "metadata": {"teacher": name} if name else {}}
        for i, name in enumerate(["same", "other", None] * 8, start=10)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def peeked(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "peek.jsonl").read_text().splitlines()]


def largest_gap(row: dict[str, Any]) -> float:
    """Of the policy's and the teacher's log-probs; the teacher has one for every token."""
    assert len(row["scores"]) == len(row["policy"]) == len(row["mask"]) > 0
    return max(abs(mine - theirs) for mine, theirs in zip(row["policy"], row["scores"], strict=True))


def test_each_row_is_scored_by_its_own_teacher(home: Path) -> None:
    done = succeed_here(
        home / "run", *SAME_POLICY, "--prompt-data", "rows.jsonl", "--scale", "teacher=2",
        "--frozen-engine", "same=tiny-arithmetic", "other=other", "--num-rollout", "6",
        "--eval-prompt-data", "held=rows.jsonl@[0:4]", "--eval-interval", "3", cwd=home,
    )  # fmt: skip
    rows = peeked(home / "run")
    trained = [row for row in rows if row["purpose"] == "train"]
    assert len(trained) >= 6 * 4 * 4
    for row in trained:
        assert row["status"] in ("completed", "truncated")
        if row["teacher"] == "other":
            assert largest_gap(row) > 1e-2
        else:  # also the rows that name none: the first teacher is theirs
            assert largest_gap(row) < 1e-4, "a teacher that is the policy has a reverse KL of zero"
    assert {row["teacher"] for row in trained} == {"same", "other", None}
    assert all(not row["scores"] for row in rows if row["purpose"] == "eval")
    assert done.summary["groups"]["failed"] == 0
    assert done.summary["eval"]["last"] is not None, "frozen engines do not stand in the way of an evaluation"
    assert done.summary["weight_versions"]["last"] == 6, "nor do they hold the gate"


def reverse_kls(run_dir: Path) -> list[float]:
    return [row["train/opd_reverse_kl"] for row in read_metrics(run_dir / "metrics.jsonl")]


ALONE = [*NO_DATA, "--prompt-data", "arithmetic", "--use-opd", "--advantage-estimator", "on_policy_distillation"]


def test_the_first_reverse_kl_to_oneself_is_zero(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    succeed_here(run_dir, *ALONE, "--num-rollout", "2", "--frozen-engine", "t=tiny-arithmetic")
    assert abs(reverse_kls(run_dir)[0]) < 1e-4


def test_the_policy_learns_from_its_teacher_alone(home: Path) -> None:
    """Rewards are coin flips; the teacher is another random model, made decisive by larger logits."""
    tensors = load_file(home / "other" / "model.safetensors")
    tensors["model.norm.weight"] *= 5
    save_file(tensors, home / "other" / "model.safetensors", metadata={"format": "pt"})
    succeed_here(
        home / "run", *ALONE, "--mode", "sync", "--frozen-engine", "t=other", "--lr", "3e-3",
        "--num-rollout", "20", "--rollout-batch-size", "8", "--n-samples-per-prompt", "8", cwd=home,
    )  # fmt: skip
    found = reverse_kls(home / "run")
    assert sum(found[:5]) / 5 > 0.9
    assert sum(found[-5:]) / 5 < 0.7


@pytest.mark.full
def test_a_killed_teacher_costs_no_sample(home: Path) -> None:
    run_dir = home / "run"
    process = start(
        run_dir, *SAME_POLICY, *made_model(), "--prompt-data", "arithmetic", "--frozen-engine",
        f"t={made_model()[1]}", "--num-rollout", "20", cwd=home,
    )  # fmt: skip
    for steps in (3, 9):
        wait_for_steps(process, run_dir, steps)
        kill(run_dir, "frozen-t")
    done = finish(process, run_dir).check()
    assert done.summary["groups"]["trained"] == 20 * 4
    assert done.summary["groups"]["failed"] == 0
    assert done.summary["restarts"] == {"frozen-t": 2}
    assert all(largest_gap(row) < 1e-4 for row in peeked(run_dir))


def test_teachers_that_cannot_teach_are_refused_at_the_start(home: Path) -> None:
    flags = [*SAME_POLICY, *made_model(), "--prompt-data", "arithmetic", "--frozen-engine"]
    refused(
        here(home / "a", *flags, "t=tiny", cwd=home), "--frozen-engine t=", "choose a teacher with the same tokenizer"
    )
    refused(here(home / "b", *flags, "t=http://127.0.0.1:9", cwd=home), "t=http://127.0.0.1:9: no healthy engine")


@pytest.mark.full
def test_a_teacher_whose_process_cannot_start_is_named(home: Path) -> None:
    flags = [*SAME_POLICY, *made_model(), "--prompt-data", "arithmetic", "--frozen-engine"]
    shutil.copytree(home / "other", home / "foreign")
    config = json.loads((home / "foreign" / "config.json").read_text())
    (home / "foreign" / "config.json").write_text(json.dumps({**config, "architectures": ["Gpt9ForCausalLM"]}))
    refused(launch(home / "c", *flags, "t=foreign", cwd=home), "frozen-t: ", "Gpt9ForCausalLM")
