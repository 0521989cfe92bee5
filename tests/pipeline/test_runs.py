"""Whole runs as a user starts them: what they print, what they leave behind, what must hold in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launching import NO_DATA, SIMULATED, SMALL, here, made_model, succeed, succeed_here

from models.disk import latest_checkpoint
from pipeline.observe.metrics import read_metrics

pytestmark = pytest.mark.slow

# A custom stage as a user writes it, outside the package: it writes down every slice that passes.
TAP = """
import json
from stages.base import MapStage


class Tap(MapStage):
    async def process(self, message):
        with open(self.context.run_dir / "tap.jsonl", "a") as file:
            for s in message.samples:
                row = {"group": message.group.group_id, "index": s.index, "ids": s.token_ids[s.prompt_length:].tolist(),
                       "mask": s.loss_mask[s.prompt_length:].tolist(), "text": s.response,
                       "log_probs": s.log_probs[s.prompt_length:].tolist(),
                       "runs": [[r.version, r.n_tokens] for r in s.version_runs[1:]], "turns": s.turns,
                       "prompt": s.token_ids[:s.prompt_length].tolist(), "purpose": message.group.purpose,
                       "pinned": message.group.pinned_version, "reward": s.reward}
                file.write(json.dumps(row) + "\\n")
        return message
"""
TAP_RECIPE = '[[stage]]\nname = "tap"\npath = "tap:Tap"\nafter = "reward"\nreplicas = 1\nconcurrency = 4\n'


@pytest.fixture
def tap(tmp_path: Path) -> Path:
    """A directory to start from, with the stage and its recipe, and packages that have the names of ours."""
    for name in ("models", "stages", "configs", "pipeline", "queue"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('a package of the user instead of ours')")
    (tmp_path / "tap.py").write_text(TAP)
    (tmp_path / "tap.toml").write_text(TAP_RECIPE)
    return tmp_path


def tapped(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "tap.jsonl").read_text().splitlines()]


def test_an_async_run_leaves_everything_behind(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    evaluates = ["--eval-prompt-data", "held=arithmetic@[0:6]", "--eval-interval", "2"]
    done = succeed(run_dir, *SMALL, *evaluates, "--use-tensorboard", "--use-plot")
    summary = done.summary
    assert summary["mode"] == "async"
    assert summary["steps"] == 4
    assert summary["weight_versions"]["last"] == 4
    assert summary["eval"]["first"] is not None
    assert summary["eval"]["sets"]["held"]["evaluations"] == 3, "versions 0, 2 and 4"
    rows = list(read_metrics(run_dir / "metrics.jsonl"))
    assert [int(r["step"]) for r in rows if "perf/step_time" in r] == [1, 2, 3, 4]
    evaluated = [r for r in rows if "eval/held" in r]
    assert [int(r["eval/version"]) for r in evaluated] == [0, 2, 4]
    assert all(r["eval/complete"] == 1 and r["eval/held-mixed_versions"] == 0 for r in evaluated)
    assert (run_dir / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    trace = json.loads((run_dir / "trace.json").read_text())
    assert {"generate", "group", "train"} <= {e["name"] for e in trace["traceEvents"]}
    assert list((run_dir / "tensorboard").iterdir())
    assert "Next:" in done.out
    assert str(run_dir) in done.out
    assert not list(Path("/dev/shm").glob(f"sluice-{'*'}{run_dir.name}*"))
    check_model_generates(run_dir)


def check_model_generates(run_dir: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    checkpoint = latest_checkpoint(run_dir / "checkpoints")
    assert checkpoint is not None
    model = AutoModelForCausalLM.from_pretrained(checkpoint / "hf")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint / "hf")
    ids = tokenizer("12+34=", return_tensors="pt", add_special_tokens=False).input_ids
    assert model.generate(ids, max_new_tokens=4, do_sample=False).shape[1] > ids.shape[1]


def test_sync_trains_the_same_batches_on_every_runner(tmp_path: Path) -> None:
    flags = [*SMALL, *made_model(), "--mode", "sync", "--deterministic", "--dynamic-sampling-filter", "nonzero_std"]
    batches = []
    for runner, replicas in ((succeed, 1), (succeed_here, 1), (succeed_here, 3)):
        scale = ("--scale", f"generate={replicas}", "--num-rollout", "5")
        done = runner(tmp_path / f"{runner.__name__}-{replicas}", *flags, *scale)
        assert done.summary["staleness"]["max"] == 0
        batches.append(done.audit.batches)
        assert len(done.audit.batches) == 5
    assert batches[0] == batches[1] == batches[2]
    other = succeed_here(tmp_path / "seed", *flags, "--num-rollout", "1", "--seed", "9")
    assert other.audit.batches[1] != batches[0][1], "the hash must see the tokens"


def test_tool_tokens_are_masked_and_nothing_is_tokenised_twice(tap: Path) -> None:
    done = succeed_here(
        tap / "run", *NO_DATA, "--config", str(tap / "tap.toml"), "--prompt-data", "arithmetic-tools",
        "--warm-start-data", "arithmetic-tools", "--warm-start-label-key", "demonstration", "--warm-start-steps", "60",
        "--warm-start-batch-size", "64",
        "--tools", "calculator", "--tool-call-open", "[", "--tool-call-close", "]",
        "--tool-result-template", "{result}",
        "--rollout-max-response-len", "32", "--rm-type", "gsm8k_flex", cwd=tap,
    )  # fmt: skip
    from stages.chat.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(tap / "run" / "assets" / "tiny-arithmetic"))
    rows = tapped(tap / "run")
    two_turns = [r for r in rows if r["turns"] >= 2 and 0 in r["mask"]]
    assert len(two_turns) >= len(rows) // 2, "the warm-started model calls the calculator"
    for row in two_turns:
        assert len(row["ids"]) == len(row["mask"]) == len(row["log_probs"]) == sum(n for _, n in row["runs"])
        assert all(lp == 0.0 for lp, m in zip(row["log_probs"], row["mask"], strict=True) if m == 0)
        assert all(lp < 0.0 for lp, m in zip(row["log_probs"], row["mask"], strict=True) if m == 1)
        written = tokenizer.decode([i for i, m in zip(row["ids"], row["mask"], strict=True) if m == 0], False)
        call = row["text"].split("]")[0].split("[")[-1]
        if set(call) <= set("0123456789*+-") and "error" not in written and row["turns"] == 2:
            assert written == str(eval(call)), (row["text"], written)  # digits and operators only
    assert done.summary["groups"]["failed"] == 0
    check_log_probs_of_first_version(tap / "run", two_turns)


def check_log_probs_of_first_version(run_dir: Path, rows: list[dict[str, Any]]) -> None:
    """The engine's ids are the trained ids: a forward over them gives the engine's log-prob at every sampled token."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(run_dir / "warm_start" / "model").eval()
    checked = 0
    for row in rows:
        if any(version > 0 for version, _ in row["runs"]):
            continue
        ids = torch.tensor([row["prompt"] + row["ids"]])
        with torch.no_grad():
            log_probs = model(ids).logits.float().log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
        own = log_probs[len(row["prompt"]) - 1 :].tolist()
        for mine, engine, mask in zip(own, row["log_probs"], row["mask"], strict=True):
            assert not mask or abs(mine - engine) < 1e-4
        checked += 1
    assert checked >= 5


def test_real_question_data_with_the_gsm8k_grader(tmp_path: Path) -> None:
    rows = [
        {"question": f"Ann has {i} apples and buys {i + 1} more. How many?", "answer": f"{i}+{i + 1}\n#### {2 * i + 1}"}
        for i in range(40)
    ]
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{broken\n" + json.dumps({"q": 1}) + "\n")
    done = succeed_here(
        tmp_path / "run", "--mode", "async", "--prompt-data", str(data), "--hf-checkpoint", "tiny",
        "--input-key", "question", "--label-key",
        "answer", "--num-rollout", "3", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4",
        "--rollout-max-response-len", "16", "--no-live", "--eval-prompt-data", f"held={data}@[0:5]",
        "--eval-interval", "3",
    )  # fmt: skip
    assert "grader gsm8k" in done.err
    assert f"{data}:41" in done.err, "a malformed line is reported with file and line"
    assert "40 of 42 rows usable" in done.err
    assert done.summary["groups"]["trained"] == 12
    strict = here(tmp_path / "strict", "--prompt-data", str(data), "--hf-checkpoint", "tiny",
        "--input-key", "question", "--label-key", "answer",
                    "--num-rollout", "1", "--strict-data", "--no-live")  # fmt: skip
    assert strict.code == 2
    assert f"{data}:41" in strict.err
    assert "Traceback" not in strict.err


def test_weights_swapped_in_mid_generation_leave_both_versions_in_a_sample(tap: Path) -> None:
    """Long answers, a fast trainer: tokens of one sample carry several versions, and their runs add up.

    That each token is its version's own: test_identity_runs.py, test_sglang_runs.py."""
    succeed(
        tap / "run", *SMALL, *made_model(), *SIMULATED, "--config", str(tap / "tap.toml"),
        "--rollout-max-response-len", "160", "engine.simulated.length_mean=150", "--num-rollout", "10",
        "--pause-generation-mode", "retract", "--async-buffer-size", "3", cwd=tap,
    )  # fmt: skip
    rows = tapped(tap / "run")
    mixed = [r for r in rows if len(r["runs"]) > 1]
    assert mixed, "no sample saw a weight update"
    for row in mixed:
        versions = [version for version, _ in row["runs"]]
        assert versions == sorted(set(versions))
        assert sum(n for _, n in row["runs"]) == len(row["ids"])
