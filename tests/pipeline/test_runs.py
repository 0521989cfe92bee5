"""Whole runs as a user starts them: output, files, saved batches, scaling, and no process that can unpickle."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from launching import (
    NO_DATA,
    ROOT,
    SIMULATED,
    SIMULATED_ENGINE,
    SMALL,
    Finished,
    finish,
    made_model,
    sevens,
    start,
    succeed,
    succeed_here,
)
from safetensors.torch import load_file, save_file
from scripted_run import Scripted, scripted
from test_kill import wait_for_steps

import launch as program
from models.checkpoint import latest_checkpoint
from models.convert import main as convert
from models.families.source import CheckpointTensors
from pipeline.record.metrics import read_metrics
from stages.chat.tokenizer import load_tokenizer
from stages.messages import Sample
from stages.train.saved_groups import load_batch
from tests.models.engines.forward_reference import by_one


def own_log_probs(model: Path, sample: Sample) -> np.ndarray:
    """By a forward pass over the trained ids, of all tokens behind the prompt."""
    ids, begin = sample.token_ids.tolist(), sample.prompt_length
    return by_one(model, ids[:begin], ids[begin:]).numpy()


@pytest.mark.slow
@pytest.mark.parametrize(("level", "lines"), [("debug", {"DEBUG", "INFO"}), ("error", set())])
def test_all_processes_log_from_the_level_of_the_run_on(tmp_path: Path, level: str, lines: set[str]) -> None:
    succeed(tmp_path / "run", *SMALL, *made_model(), *SIMULATED, "--log-level", level)
    found: dict[str, set[str]] = {}
    for path in (tmp_path / "run" / "logs").iterdir():
        text = re.sub(r"^.* INFO root: \S+ starts: .*$", "", path.read_text(), flags=re.MULTILINE)
        found[path.stem] = set(re.findall(r"^\S+ \S+,\d+ (DEBUG|INFO|WARNING) ", text, re.MULTILINE))
    assert {"engine-0", "generate-0", "train-0"} <= found.keys()
    assert set.union(*found.values()) == lines, found
    assert ("DEBUG" in found["generate-0"]) is (level == "debug")
    assert bool(found["engine-0"]) is (level == "debug")


@pytest.mark.full
def test_each_rank_of_a_trainer_group_leaves_its_profile(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    window = ["--use-pytorch-profiler", "--profile-step-start", "1", "--profile-step-end", "2"]
    flags = [*SMALL, *made_model(), *SIMULATED_ENGINE, *window, "--num-rollout", "2", "--actor-num-gpus-per-node", "2"]
    succeed(run_dir, *flags)
    for rank in (0, 1):
        trace = json.loads(gzip.decompress((run_dir / "profile" / f"rank-{rank}.json.gz").read_bytes()))
        assert any(event.get("name") == "aten::mm" for event in trace["traceEvents"])


def check_speed(rows: list[dict[str, float]]) -> None:
    """What a run measures of its own speed is in the rows."""
    measured = {name for row in rows for name in row}
    assert SPEED - measured == set()
    steps = [row for row in rows if "perf/mfu" in row]
    assert len(steps) == 4
    for row in steps:
        assert row["perf/mfu"] == pytest.approx(row["perf/train_tflops_per_gpu"] / 0.5)
        assert 0 < row["perf/train_tflops_per_gpu"] < 1
        assert 0 <= row["rollout/queue_time"] <= row["rollout/e2e_time"] < row["wall_s"] + 60
        assert 0 < row["rollout/time_to_first_token"] < row["rollout/e2e_time"]
        assert 0 <= row["rollout/prefix_cache_hit_rate"] < 1
        assert row["rollout/prefill_tokens"] >= 4, "such as 7+8="
        assert row["rollout/rollout_log_probs"] < 0
        assert row["rollout/aborted_ratio"] == 0
    assert "perf/tokens_per_gpu_per_s" not in measured, "there is no GPU"


SPEED = {
    *(f"perf/{name}" for name in ("tokens_per_s", "train_tokens_per_gpu_per_s", "save_time", "update_stall_time")),
    *(f"stage/{stage}/{state}" for stage in ("train", "generate") for state in ("busy", "starved", "blocked")),
}


# Steps take a second, so that each stage has reported its shares before the last one.
SLOW = """
import random, time

def coin(response, label, metadata):
    time.sleep(0.06)
    return float(random.random() < 0.5)
"""


@pytest.mark.slow
def test_an_async_run_leaves_everything_behind(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run_dir = tmp_path / "run"
    flags = ["--eval-prompt-data", "held=arithmetic@[0:6]", "--eval-interval", "2", "--use-tensorboard", "--use-plot"]
    flags += ["--save-interval", "2", "--save-hf", str(tmp_path / "out" / "{step}"), "--peak-tflops", "0.5"]
    (tmp_path / "slow.py").write_text(SLOW)
    flags += ["--custom-rm-path", f"{tmp_path}/slow.py:coin", "--rm-type", "auto"]
    done = succeed(run_dir, *SMALL, *flags)
    summary = done.summary
    assert summary["mode"] == "async"
    assert summary["steps"] == 4
    assert summary["weight_versions"]["last"] == 4
    assert summary["eval"]["first"] is not None
    assert summary["eval"]["sets"]["held"]["evaluations"] == 3, "versions 0, 2 and 4"
    rows = list(read_metrics(run_dir / "metrics.jsonl"))
    assert [int(r["step"]) for r in rows if "perf/step_time" in r] == [1, 2, 3, 4]
    proven = [r["train/policy_proof_max_diff"] for r in rows if "train/policy_proof_max_diff" in r]
    assert len(proven) >= 3
    assert max(proven) < 1e-5
    check_speed(rows)
    evaluated = [r for r in rows if "eval/held" in r]
    assert [int(r["eval/version"]) for r in evaluated] == [0, 2, 4]
    assert all(r["eval/complete"] == 1 and r["eval/held-mixed_versions"] == 0 for r in evaluated)
    assert (run_dir / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    trace = json.loads((run_dir / "trace.json").read_text())
    assert {"generate", "group", "train"} <= {e["name"] for e in trace["traceEvents"]}
    assert list((run_dir / "tensorboard").iterdir())
    assert "Next:" in done.out
    assert not (run_dir / "logs" / "reward-0.log").exists(), "it shares a process with generate"
    for name in ("generate-0", "train-0", "evaluate-0"):
        log = (run_dir / "logs" / f"{name}.log").read_text()
        assert re.search(rf"^\S+ \S+ controller \d+ starts {name}, start 1$", log, re.MULTILINE)
        assert re.search(rf"{name} starts: pid \d+ on \S+, sluice \d", log)
        assert f"{name} ends: its work is done" in log
    assert str(run_dir) in done.out
    # A model that moved, by gradients of what the engine made while its weights moved.
    newest = latest_checkpoint(run_dir / "checkpoints")
    before, after = (
        load_file(place / "model.safetensors") for place in (run_dir / "assets/tiny-arithmetic", newest / "hf")
    )
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name].to(before[name].dtype)) for name in before)
    model = AutoModelForCausalLM.from_pretrained(newest / "hf")
    tokenizer = AutoTokenizer.from_pretrained(newest / "hf")
    ids = tokenizer("12+34=", return_tensors="pt", add_special_tokens=False).input_ids
    assert model.generate(ids, max_new_tokens=4, do_sample=False).shape[1] > ids.shape[1]
    assert sorted(one.name for one in (tmp_path / "out").iterdir()) == ["2", "4"]
    kept = [(place / "model.safetensors").read_bytes() for place in (tmp_path / "out" / "4", newest / "hf")]
    assert kept[0] == kept[1]


@pytest.mark.slow
def test_sync_trains_the_same_batches_on_every_runner(tmp_path: Path) -> None:
    flags = [*SMALL, *made_model(), "--mode", "sync", "--deterministic", "--dynamic-sampling-filter", "nonzero_std"]
    done = succeed(tmp_path / "processes", *flags, "--num-rollout", "5")
    apart = succeed_here(tmp_path / "tasks", *flags, "--num-rollout", "5", "--scale", "generate=3", "--chain", "none")
    assert done.summary["staleness"]["max"] == apart.summary["staleness"]["max"] == 0
    assert done.audit.batches == apart.audit.batches
    assert len(done.audit.batches) == 5
    other = succeed_here(tmp_path / "seed", *flags, "--num-rollout", "1", "--seed", "9")
    assert other.audit.batches[1] != done.audit.batches[1], "the hash must see the tokens"


@pytest.mark.slow
def test_tool_tokens_are_masked_and_nothing_is_tokenised_twice(tmp_path: Path) -> None:
    """The engine's ids are the trained ids: a forward pass gives the engine's log-prob at every sampled token."""
    batches = str(tmp_path / "{rollout_id}")
    done = succeed_here(
        tmp_path / "run", *NO_DATA, "--prompt-data", "arithmetic-tools", "--save-debug-rollout-data", batches,
        "--warm-start-data", "arithmetic-tools", "--warm-start-label-key", "demonstration", "--warm-start-steps", "60",
        "--warm-start-batch-size", "64",
        "--tools", "calculator", "--tool-call-open", "[", "--tool-call-close", "]",
        "--tool-result-template", "{result}", "--rollout-max-response-len", "32", "--rm-type", "gsm8k_flex",
    )  # fmt: skip
    tokenizer = load_tokenizer(str(done.run_dir / "assets" / "tiny-arithmetic"))
    samples = [s for step in range(4) for group in load_batch(batches, step) for s in group.samples]
    two_turns = [s for s in samples if s.turns >= 2 and 0 in s.loss_mask[s.prompt_length :]]
    assert len(two_turns) >= len(samples) // 2, "the warm-started model calls the calculator"
    checked = 0
    for sample in two_turns:
        begin = sample.prompt_length
        ids, mask, log_probs = sample.token_ids[begin:], sample.loss_mask[begin:], sample.log_probs[begin:]
        assert len(ids) == sum(run.n_tokens for run in sample.version_runs[1:])
        assert (log_probs[mask == 0] == 0.0).all()
        assert (log_probs[mask == 1] < 0.0).all()
        written = tokenizer.decode(ids[mask == 0].tolist(), False)
        call = sample.response.split("]")[0].split("[")[-1]
        if set(call) <= set("0123456789*+-") and "error" not in written and sample.turns == 2:
            assert written == str(eval(call)), (sample.response, written)  # digits and operators only
        if set(sample.model_versions) == {0}:
            own = own_log_probs(done.run_dir / "warm_start" / "model", sample)
            assert abs(own - log_probs)[mask == 1].max() < 1e-4
            checked += 1
    assert checked >= 5
    assert done.summary["groups"]["failed"] == 0


@pytest.mark.slow
def test_engines_in_float8_sample_with_what_its_numbers_are_worth(tmp_path: Path) -> None:
    """And the trainer, which has the weights as they were, gets their log-probs and goes on from its own."""
    model, float8, worth = Path(made_model()[1]), tmp_path / "float8", tmp_path / "worth"
    assert convert(["to-float8", "--hf", str(model), "--out", str(float8)]) == 0
    shutil.copytree(model, worth)
    with CheckpointTensors(float8) as tensors:
        save_file({name: tensors.whole(name) for name in tensors.files}, worth / "model.safetensors")
    batches = str(tmp_path / "{rollout_id}")
    done = succeed_here(
        tmp_path / "run", *SMALL, *made_model(), "--engine-checkpoint", str(float8),
        "--save-debug-rollout-data", batches, "--save-interval", "4",
    )  # fmt: skip
    apart = []
    for sample in (sample for group in load_batch(batches, 0) for sample in group.samples):
        assert set(sample.model_versions) == {0}
        made = sample.log_probs[sample.prompt_length :]
        assert abs(own_log_probs(worth, sample) - made).max() < 1e-4
        apart.append(abs(own_log_probs(model, sample) - made).max())
    assert max(apart) > 0.01
    rows = [row for row in read_metrics(done.run_dir / "metrics.jsonl") if "train/policy_proof_max_diff" in row]
    assert 0.01 < rows[-1]["train/policy_proof_max_diff"] < 6
    saved = latest_checkpoint(done.run_dir / "checkpoints") / "hf"
    assert "quantization_config" not in json.loads((saved / "config.json").read_text())
    assert {tensor.dtype for tensor in load_file(saved / "model.safetensors").values()} == {torch.float32}


@pytest.mark.slow
def test_real_question_data_with_the_gsm8k_grader(tmp_path: Path) -> None:
    rows = [
        {"question": f"Ann has {i} apples and buys {i + 1} more. How many?", "answer": f"{i}+{i + 1}\n#### {2 * i + 1}"}
        for i in range(40)
    ]
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{broken\n" + json.dumps({"q": 1}) + "\n")
    done = succeed_here(
        tmp_path / "run", "--mode", "async", "--prompt-data", str(data), "--hf-checkpoint", "tiny",
        "--input-key", "question", "--label-key", "answer", *SIMULATED, "--num-rollout", "3",
        "--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "16", "--no-live",
        "--eval-prompt-data", f"held={data}@[0:5]", "--eval-interval", "3",
    )  # fmt: skip
    assert "grader gsm8k" in done.err
    assert f"{data}:41" in done.err, "a malformed line is reported with file and line"
    assert "40 of 42 rows usable" in done.err
    assert done.summary["groups"]["trained"] == 12


def weights(done: Finished) -> bytes:
    checkpoint = latest_checkpoint(done.run_dir / "checkpoints")
    return b"".join(file.read_bytes() for file in sorted((checkpoint / "hf").glob("*.safetensors")))


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", [pytest.param(("sync",), marks=pytest.mark.full), ("async", "--dynamic-sampling-filter", "nonzero_std")]
)
def test_saved_batches_train_the_same_model_to_the_bit(tmp_path: Path, mode: tuple[str, ...]) -> None:
    flags = [*SMALL, *made_model(), "--lr", "1e-3", "--mode", *mode]
    template = str(tmp_path / "batches" / "{rollout_id}.msgpack")
    tables = {name: str(tmp_path / name / "{rollout_id}.parquet") for name in ("made", "read")}
    saves = ["--save-debug-rollout-data", template, "--save-debug-train-data", tables["made"]]
    saved = succeed_here(tmp_path / "saves", *flags, *saves)
    loads = ["--load-debug-rollout-data", template, "--debug-train-only"]
    loaded = succeed_here(tmp_path / "loads", *flags, *loads, "--save-debug-train-data", tables["read"])
    for batch in range(4):
        made, read = (pq.read_table(table.format(rollout_id=batch)) for table in tables.values())
        numbers = ["group_id", "rollout_id"]  # ids are dense where no group was dropped
        assert made.drop_columns(numbers) == read.drop_columns(numbers)
        assert made.num_rows == 16
    assert weights(saved) == weights(loaded)
    assert loaded.summary["engine"]["count"] == 0
    if mode == ("sync",):
        assert saved.audit.batches == loaded.audit.batches, "the ids, too, are the same where no group was dropped"
    other = succeed_here(tmp_path / "other", *flags, *loads, "--lr", "2e-3")
    assert weights(other) != weights(saved)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("--loss-type", "sft_loss"), ("--warm-start-steps", "3", "--mode", "sync")])
def test_weights_are_copied_for_each_checkpoint_of_the_run_and_not_for_its_warm_start(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    copies = ["--save-interval", "1", "--save-hf", str(tmp_path / "out" / "{rollout_id}")]
    done = succeed_here(tmp_path / "run", *SMALL, *made_model(), *flags, "--num-rollout", "2", *copies)
    assert {place.name for place in (tmp_path / "out").iterdir()} == {"0", "1"}
    assert weights(done) == (tmp_path / "out" / "1" / "model.safetensors").read_bytes()
    assert weights(done) != (tmp_path / "out" / "0" / "model.safetensors").read_bytes()


OF_ROLLOUTS = """
def seen(log_probs):
    with open("seen.txt", "a") as file:
        file.write(f"{any(log_probs)}\\n")


def first(groups, step):
    seen(groups[0].samples[0].log_probs)
    return 0


def train_data(args, samples):
    seen(samples[0].rollout_log_probs)
    return {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "loss_masks": [sample.loss_mask for sample in samples],
        "rewards": [sample.reward for sample in samples],
    }
"""


@pytest.mark.slow
def test_what_is_for_rollouts_sees_no_label_of_the_warm_start(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OF_ROLLOUTS)
    flags = [*SMALL, *made_model(), *SIMULATED_ENGINE, "--num-rollout", "2", "--warm-start-steps", "3"]
    ours = ["--buffer-order", "mine:first", "--custom-convert-samples-to-train-data-path", "mine:train_data"]
    done = succeed_here(tmp_path / "run", *flags, *ours, "--curriculum", "pass_rate", cwd=tmp_path)
    assert done.summary["groups"]["trained"] == 8
    assert set((tmp_path / "seen.txt").read_text().split()) == {"True"}


@pytest.mark.slow
def test_rollouts_alone_leave_the_weights_as_they_are(tmp_path: Path) -> None:
    flags = [*SMALL, *made_model(), "--mode", "sync", "--debug-rollout-only"]
    template = str(tmp_path / "{rollout_id}.msgpack")
    done = succeed_here(tmp_path / "run", *flags, "--save-debug-rollout-data", template)
    start = b"".join(file.read_bytes() for file in sorted(Path(made_model()[1]).glob("*.safetensors")))
    assert weights(done) == start
    assert done.summary["groups"]["trained"] == 16
    assert len(load_batch(template, 3)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("chain", ["generate+reward+group", "none"])
def test_a_group_ends_early_in_whichever_processes_the_stages_are(tmp_path: Path, chain: str) -> None:
    """Answers without the character are short, so that most groups have begun with equal rewards."""
    lengths = {"length_mean": 40, "length_sigma": 1.5, "length_cap": 1000, "a_ms": 4}
    flags = [*SMALL, *made_model(), *SIMULATED, "--chain", chain, "--rm-type", "contains:7"]
    flags += ["--n-samples-per-prompt", "8"]
    flags += ["--rollout-max-response-len", "1000", "--dynamic-sampling-filter", "nonzero_std"]
    flags += [f"engine.simulated.{name}={value}" for name, value in lengths.items()]
    done = succeed(tmp_path / "run", *flags, "--dynamic-sampling-early-after", "2")
    dropped = [name for row in read_metrics(done.run_dir / "metrics.jsonl") for name in row if name.endswith("_early")]
    assert dropped
    assert done.summary["restarts"] == {}, "a replica that may not tell the others ends"


@pytest.mark.full
def test_a_retiring_replica_that_dies_is_not_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def script(run: Scripted) -> None:
        await run.until((run.run_dir / "ledger.jsonl").exists)
        await run.steps(1)
        run.runner.scale("generate", 2)
        await run.until(lambda: run.answered("generate-1") > 0)
        run.kill("generate-1", signal.SIGSTOP)  # with work in its care
        run.runner.scale("generate", 1)
        run.kill("generate-1", signal.SIGKILL)
        await run.until(lambda: run.generating() == ["generate-0"])

    flags = [*SMALL, *made_model(), *SIMULATED, "--scale", "engine=2", "--num-rollout", "4000"]  # the script ends it
    flags += ["--chain", "reward+group"]
    done = scripted(
        monkeypatch, tmp_path / "run", script, lambda place: program.main(["--run-dir", str(place), *flags])
    )
    assert done.controller.recorder.restarts == {}


# Python runs it at its start, before any module has taken hold of what is replaced here.
POISON = """
import os, pickle, sys, traceback

def note(kind):
    with open(os.environ["POISON_NOTES"], "a") as notes:
        notes.write(f"{kind} {' '.join(sys.orig_argv[1:])}\\n")

def refuse(*args, **kwargs):
    traceback.print_stack()
    note("refused")
    raise RuntimeError("something was unpickled")

class Unpickler(pickle.Unpickler):
    load = refuse

pickle.load = pickle.loads = pickle._load = pickle._loads = refuse
pickle.Unpickler = pickle._Unpickler = Unpickler
note("poisoned")
"""


@pytest.mark.full
def test_nothing_is_unpickled_in_any_process_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(POISON)
    notes = tmp_path / "notes"
    env = {"PYTHONPATH": str(tmp_path), "POISON_NOTES": str(notes)}
    flags = [*SMALL, *made_model(), "--no-preload", "--num-rollout", "2", "--save-interval", "2"]
    succeed(tmp_path / "run", *flags, **env)
    resume = ["--resume", str(tmp_path / "run"), "--runner", "local", "--num-rollout", "6"]
    finish(start(None, *resume, **env), tmp_path / "run").check()
    messages = notes.read_text()
    assert all(name in messages for name in ("launch.py", "models.engines.serve", "train-0", "generate-0", "engines-0"))
    assert [line for line in messages.splitlines() if line.startswith("refused")] == []


# A synchronous run whose trainer and engines share their devices in turns.


@pytest.mark.full
def test_engines_give_their_memory_back_for_every_batch(tmp_path: Path) -> None:
    """Two engines, four batches, an evaluation in between that still needs the older weights."""
    done = succeed(
        tmp_path / "run", *SMALL, *made_model(), "--mode", "sync", "--colocate", "--scale", "engine=2",
        "--eval-prompt-data", "sums=arithmetic@[0:8]", "--eval-interval", "2",
    )  # fmt: skip
    assert "colocate" not in done.err
    assert done.summary["groups"]["trained"] == 16
    assert done.summary["staleness"]["max"] == 0
    trace = json.loads((done.run_dir / "trace.json").read_text())
    spans = [one for one in trace["traceEvents"] if one.get("ph") == "b"]
    released = [one for one in spans if one["name"] == "release_memory"]
    assert len(released) == 2 * (4 + 1), "each engine gives its memory back before each batch, and when the run ends"
    computed = [one for one in spans if one["name"] == "train"]
    assert min(one["ts"] for one in computed) > min(one["ts"] for one in released)


RANKS = ["--mode", "sync", "--deterministic", "--train-backend", "fsdp", "--actor-num-gpus-per-node", "2"]


@pytest.mark.full
def test_ranks_that_give_their_memory_back_train_as_those_that_keep_it(tmp_path: Path) -> None:
    flags = [*SMALL, *made_model(), *RANKS, "--num-rollout", "4"]
    keeps = succeed(tmp_path / "keeps", *flags)
    gives = succeed(tmp_path / "gives", *flags, "--colocate", "--save-interval", "3")
    assert gives.audit.batches == keeps.audit.batches
    assert len(gives.audit.batches) == 4
    saved = sorted(path.name for path in gives.run_dir.glob("checkpoints/step-*"))
    assert saved == ["step-00000003", "step-00000004"]


@pytest.mark.full
def test_ranks_whose_memory_is_given_away_are_saved_when_the_run_is_stopped(tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = [*SMALL, *made_model(), *RANKS, "--colocate", "--num-rollout", "1000", "--save-interval", "1000"]
    process = start(run, *flags)
    wait_for_steps(process, run, 2)
    process.send_signal(signal.SIGINT)
    finish(process, run).check(130)
    (saved,) = run.glob("checkpoints/step-*")
    assert 2 <= int(saved.name.removeprefix("step-")) < 1000


# A whole run whose rollouts are made by a function in slime's style, in processes of their own.


def write_code(directory: Path, page: str) -> None:
    """The files of a page, `# my_project/name.py` at the top of each, in a package of their own."""
    found = re.findall(r"```python\n# my_project/(\w+)\.py\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    assert found
    (directory / "my_project").mkdir()
    for name, code in found:
        (directory / "my_project" / f"{name}.py").write_text(code)


@pytest.mark.slow
def test_the_example_of_the_documentation_trains_exactly_what_the_engine_made(tmp_path: Path) -> None:
    write_code(tmp_path, "custom_generate.md")
    done = succeed_here(
        tmp_path / "run", *NO_DATA, "--prompt-data", "arithmetic", "--rollout-max-response-len", "24",
        "--custom-generate-function-path", "my_project.calculator.generate",
        "--save-debug-rollout-data", str(tmp_path / "{rollout_id}"), cwd=tmp_path,
    )  # fmt: skip
    assert done.summary["groups"]["failed"] == 0
    samples = [sample for group in load_batch(str(tmp_path / "{rollout_id}"), 0) for sample in group.samples]
    assert len(samples) == 16
    for sample in samples:
        assert set(sample.model_versions) == {0}, "the first batch is of the weights of the start"
        made, begin = sample.versions >= 0, sample.prompt_length
        away = own_log_probs(done.run_dir / "assets" / "tiny-arithmetic", sample) - sample.log_probs[begin:]
        assert abs(away[made[begin:]]).max() < 1e-4
        assert (sample.loss_mask == made).all()
    assert any(sample.turns > 1 for sample in samples), "some rollouts went on behind an answer of the calculator"


# Whole runs with user code from the page docs/slime.md.


@pytest.mark.slow
def test_a_data_source_gives_each_prompt_once_also_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_code(tmp_path, "slime.md")
    batches = str(tmp_path / "{rollout_id}")
    done = succeed_here(
        tmp_path / "run", *NO_DATA, *made_model(), *SIMULATED, "--data-source-path", "my_project.sums.Sums",
        "--save-debug-rollout-data", batches, cwd=tmp_path,
    )  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert program.main(["--resume", str(done.run_dir), "--num-rollout", "8"]) == 0
    rows = [group.group for step in range(8) for group in load_batch(batches, step)]
    numbers = [json.loads(row.metadata)["n"] for row in rows]
    assert len(set(numbers)) == len(numbers) == 32
    assert max(numbers) < 8 * 4 + 3 * 4, "nothing was passed over: what was asked ahead comes first"
    for row, n in zip(rows, numbers, strict=True):
        a, b = divmod(n, 90)
        assert (row.prompt, row.label) == (f"{a + 10}+{b + 10}=", str(a + b + 20))


@pytest.mark.slow
def test_the_functions_of_the_page_make_convert_log_and_evaluate_the_batches_of_a_run(tmp_path: Path) -> None:
    write_code(tmp_path, "slime.md")
    done = succeed_here(
        tmp_path / "run", *NO_DATA, *made_model(), *SIMULATED, "--prompt-data", "arithmetic", "--num-rollout", "3",
        "--rollout-function-path", "my_project.batches.generate_rollout",
        "--custom-rollout-log-function-path", "my_project.tracker.log_batch",
        "--rollout-all-samples-process-path", "my_project.hooks.keep_all",
        "--buffer-filter-path", "my_project/hooks.py:best_first",
        "--custom-convert-samples-to-train-data-path", "my_project.hooks.train_data",
        "--eval-function-path", "my_project.evaluation.evaluate", "--eval-prompt-data", "arithmetic",
        "--eval-interval", "2", cwd=tmp_path,
    )  # fmt: skip
    groups = done.summary["groups"]
    assert (groups["trained"], groups["failed"]) == (12, 0)
    rows = [json.loads(line) for line in (done.run_dir / "metrics.jsonl").read_text().splitlines()]
    counted = [row["rollout_function/groups"] for row in rows if "rollout_function/groups" in row]
    assert len(counted) == 3
    assert all(1 <= number <= 4 for number in counted)
    assert [row["eval_function/version"] for row in rows if row.get("eval/complete")] == [0.0, 2.0, 3.0]
    assert all(0.0 <= row["eval/heldout"] <= 1.0 for row in rows if row.get("eval/complete"))
    assert len((tmp_path / "all.jsonl").read_text().splitlines()) >= 12 * 4, "filtered groups are there too"
    assert [line.partition(":")[0] for line in (tmp_path / "best.txt").read_text().splitlines()] == ["0", "1", "2"]


# The same run learns the same on every training backend: one process, FSDP2 on two, tensor parallel on two.


BACKENDS = {
    "torch": [],
    "fsdp": ["--actor-num-gpus-per-node", "2"],
    "megatron": ["--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2"],
}


@pytest.mark.full
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_learns_the_same(backend: str, tmp_path: Path) -> None:
    """Seeds move the reward of the last tenth of this run between 0.92 and 0.96; at the start it is 0.05."""
    flags = [*SMALL, *made_model(), "--train-backend", backend, *BACKENDS[backend], *sevens(tmp_path)]
    done = succeed(tmp_path / "run", *flags, cwd=tmp_path)
    reward = done.summary["reward"]
    assert reward["first"] < 0.15, reward
    assert reward["last"] == pytest.approx(0.94, abs=0.06), reward
    assert done.summary["groups"]["trained"] == 40 * 8
    assert done.summary["restarts"] == {}
