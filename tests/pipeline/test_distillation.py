"""Runs with teachers: whose log-probs arrive in front of the group stage, and what a killed teacher costs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import NO_DATA, SIMULATED_TRAINER, finish, here, launch, made_model, start, succeed_here
from safetensors.torch import load_file, save_file
from test_kill import kill, wait_for_steps
from test_preflight import refused

from models.tiny import TinyRecipe, make_tiny_checkpoint
from pipeline.record.metrics import read_metrics
from stages.messages import Sample
from stages.train.saved_groups import read_file

pytestmark = pytest.mark.slow

# The simulated trainer publishes the weights that it began with: a teacher of the same checkpoint stays the policy.
SAME_POLICY = [*NO_DATA, *SIMULATED_TRAINER, "--use-opd"]
SAVED = "{rollout_id}.msgpack"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A directory to start from: a checkpoint of the same tokenizer, rows with teachers."""
    make_tiny_checkpoint(tmp_path / "other", TinyRecipe(tokenizer="arithmetic", seed=5))
    rows = [
        {"input": f"{i}+{i}=", "label": str(2 * i), "metadata": {"teacher": name} if name else {}}
        for i, name in enumerate(["same", "other", None] * 8, start=10)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def trained_with(home: Path) -> Iterator[tuple[str | None, Sample]]:
    """Samples as they were trained, with the teacher that their row names."""
    for path in home.glob("*.msgpack"):
        for group in read_file(path):
            for sample in group.samples:
                yield group.group.row_metadata.get("teacher"), sample


def largest_gap(sample: Sample) -> float:
    """Of the policy's and the teacher's log-probs; the teacher has one for every token."""
    assert len(sample.teacher_log_probs) == len(sample.log_probs) > 0
    return float(abs(sample.log_probs - sample.teacher_log_probs).max())


def test_each_row_is_scored_by_its_own_teacher(home: Path) -> None:
    done = succeed_here(
        home / "run", *SAME_POLICY, "--prompt-data", "rows.jsonl", "--scale", "teacher=2",
        "--frozen-engine", "same=tiny-arithmetic", "other=other", "--num-rollout", "6",
        "--eval-prompt-data", "held=rows.jsonl@[0:4]", "--eval-interval", "3",
        "--save-debug-rollout-data", str(home / SAVED), cwd=home,
    )  # fmt: skip
    trained = list(trained_with(home))
    assert len(trained) == 6 * 4 * 4
    for teacher, sample in trained:
        assert sample.status in ("completed", "truncated")
        if teacher == "other":
            assert largest_gap(sample) > 1e-2
        else:  # also the rows that name none: the first teacher is theirs
            assert largest_gap(sample) < 1e-4, "a teacher that is the policy has a reverse KL of zero"
    assert {teacher for teacher, _ in trained} == {"same", "other", None}
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
        f"t={made_model()[1]}", "--num-rollout", "20", "--save-debug-rollout-data", str(home / SAVED), cwd=home,
    )  # fmt: skip
    for steps in (3, 9):
        wait_for_steps(process, run_dir, steps)
        kill(run_dir, "frozen-t")
    done = finish(process, run_dir).check()
    assert done.summary["groups"]["trained"] == 20 * 4
    assert done.summary["groups"]["failed"] == 0
    assert done.summary["restarts"] == {"frozen-t": 2}
    assert all(largest_gap(sample) < 1e-4 for _, sample in trained_with(home))


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
