"""The arithmetic of the plan against known models, sampling, and a simulated gate; and the text that is printed."""

from __future__ import annotations

import json
import math
import random
import re
from collections import deque
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.graph import path
from configs.load import read_preset
from configs.plan.goodput import lognormal_lengths
from configs.plan.plan import (
    make_plan,
    predicted_staleness,
    render,
    simulated_generation_s,
    simulated_times,
    staleness_line,
)
from configs.plan.run_estimate import estimate_run, size_text
from tests.configs.config_rig import planned

QWEN3_06B, QWEN3_8B = (read_preset(f"qwen3-{size}").values["model.architecture"] for size in ("0.6b", "8b"))


def simulate_gate(batch: int, bound: int, interval: int, batches: int) -> list[int]:
    """Staleness of each trained group if generation takes no time: the gate of the design, oldest first."""
    version = trained = 0
    open_groups: deque[int] = deque()  # version under which each was admitted
    found: list[int] = []
    for step in range(batches):
        capacity = (version + bound + 1) * batch - trained - len(open_groups)
        open_groups.extend([version] * max(capacity, 0))
        found.extend(step - open_groups.popleft() for _ in range(batch))
        trained += batch
        if (step + 1) % interval == 0:
            version = step + 1
    return found


@settings(max_examples=60, deadline=None)
@given(batch=st.integers(1, 5), ahead=st.integers(0, 5), interval=st.integers(1, 4))
def test_the_predicted_mean_is_what_the_gate_does(batch: int, ahead: int, interval: int) -> None:
    argv = f"--rollout-batch-size {batch} --async-buffer-size {ahead} --update-weights-interval {interval}"
    found = predicted_staleness(planned(argv))
    trained = simulate_gate(batch, found.bound, interval, 60 * interval)
    assert max(trained) == found.bound == ahead + interval - 1
    steady = trained[20 * interval * batch : 50 * interval * batch]
    assert sum(steady) / len(steady) == pytest.approx(found.mean_high)


def test_staleness_of_known_cases() -> None:
    found = predicted_staleness(planned("--engine-slots 128"))  # 128 slots / 8 per group = half a batch
    assert (found.bound, found.mean_low, found.mean_high) == (2, 0.5, 2.0)
    assert predicted_staleness(planned("--engine-slots 128 --scale engine=8")).mean_low == 2.0
    found = predicted_staleness(planned("--engine-slots 512 --server-concurrency 64"))
    assert found.mean_low == 0.25


def test_the_line_that_a_run_prints() -> None:
    assert staleness_line(planned("--engine-slots 128")) == (
        "staleness: at most 2 versions (N + K - 1 with N = 2, K = 1); predicted mean 2 if training is the slower side, "
        "about 0.5 if generation is"
    )
    assert staleness_line(planned("--mode sync")) == (
        "staleness: 0, every token is trained by the weights version that made it"
    )
    assert "at most 1 version (" in staleness_line(planned("--mode one_step"))


def test_capped_lognormal_against_sampling() -> None:
    assert fmean(lognormal_lengths(400, 0, 3200)) == 400
    assert fmean(lognormal_lengths(400, 0, 300)) == 300
    rng = random.Random(1)
    for mean, sigma, cap in ((400, 1.0, 3200), (400, 0.5, 500), (100, 1.3, 150)):
        mu = math.log(mean) - sigma**2 / 2
        drawn = [min(rng.lognormvariate(mu, sigma), cap) for _ in range(60_000)]
        assert fmean(lognormal_lengths(mean, sigma, cap)) == pytest.approx(sum(drawn) / len(drawn), rel=0.02)


def test_time_of_a_simulated_batch() -> None:
    argv = "--engine simulated engine.simulated.length_sigma=0 --rollout-max-response-len 1000"
    # 256 rollouts x 400 tokens, 64 at a time, (8 + 0.1 x 64) ms a step; then only 16 rollouts are ever out
    for more, expected in (
        ("--engine-slots 64", 256 * 400 / 64 * 0.0144),
        ("--engine-slots 64 --scale engine=2", 256 * 400 / 128 * 0.0144),
        ("--mode sync --rollout-batch-size 2", 400 * (8 + 1.6) / 1000),
    ):
        assert simulated_generation_s(planned(argv, more)) == pytest.approx(expected)


def test_the_bound_of_a_step() -> None:
    trainer = "--train-backend simulated --simulated-step-s 2 --num-steps-per-rollout 4"
    assert simulated_times(planned()) == {}
    assert simulated_times(planned(trainer)) == {"training": 8.0}
    both = planned(trainer, "--engine simulated engine.simulated.a_ms=0 engine.simulated.c_ms=0")
    assert simulated_times(both) == {"generation": 0.0, "training": 8.0}
    assert "generation 0 s, training 8 s: no step can take less than 8 s" in render(make_plan(both))
    assert "the other side is measured during the run" in render(make_plan(planned("--engine simulated")))


def stages(*names: tuple[str, str]) -> str:
    tables = [{"name": name, "path": "json:JSONDecoder", "after": after} for name, after in names]
    return f"'stage={json.dumps(tables)}'"


def test_a_circle_of_custom_stages_is_left_out_and_ends() -> None:
    config = planned(stages(("a", "generate"), ("b", "a"), ("a", "b"), ("x", "y"), ("y", "x")))
    assert {"x", "y"}.isdisjoint(path(config))


def test_the_plan_as_text() -> None:
    judge = f"{stages(('judge', 'reward'))} stage.judge.replicas=2"
    argv = f"--tools calculator --scale engine=2 reward=2 --reward-workers 3 {judge}"
    plan = make_plan(planned(argv, "--eval-interval 5 --eval-prompt-data arithmetic"))
    text = render(plan)
    for words in (
        "prompts -> generate -> reward x2 -> judge x2 -> group -> train",
        "generate -> agents -> generate", "evaluate -> generate ... group -> evaluate",
        "group, train, evaluate -> prompts", "generate <-> engine x2",
        "= 256 rollouts = global_batch_size 256 x num_steps_per_rollout 1", "2,560 rollouts and 10 steps in all",
        "process and 3 grader processes each",
    ):  # fmt: skip
        assert words in text
    # controller, generate, 2 reward + 2 x 3 graders, 2 judge, group, train, tools, evaluate, 2 engines, engines stage
    assert plan.processes == 1 + 1 + 2 + 6 + 2 + 1 + 1 + 1 + 1 + 2 + 1
    assert make_plan(planned(argv, "--runner inprocess")).processes == 1 + 6
    assert all(len(line) <= 200 for line in text.splitlines())


def test_the_plan_says_what_its_goodput_rests_on_and_when_another_n_would_pay() -> None:
    """`bench.plan` gives this job, on 4 + 4 H100, 0.27, 0.38 and 0.67 with bounds 1, 2 and 8."""
    argv = "--model qwen3-4b --rollout-num-gpus 4 --actor-num-gpus-per-node 4 --rollout-batch-size 32 "
    argv += "--n-samples-per-prompt 8 --rollout-max-response-len 4096 --rollout-max-prompt-len 300"
    text = render(make_plan(planned(argv, "--async-buffer-size 2")))
    shares = {int(n): float(share) for share, n in re.findall(r"(0\.\d\d) at (\d)", text)}
    assert [shares[n] for n in (1, 2, 8)] == pytest.approx([0.27, 0.38, 0.67], abs=0.05)
    assert "responses of 998 tokens (a quarter of --rollout-max-response-len 4096, lognormal with sigma 0.8 and" in text
    assert "a larger N would add much: --async-buffer-size auto" in text
    assert "would add much" not in render(make_plan(planned(argv, "--async-buffer-size auto")))
    assert "would add much" not in render(make_plan(planned(argv, "--async-buffer-size 8")))
    # 8192 tokens on average, e^0.64 / 2 = 0.95 times that in the cache, less for the cut: some 63 in 428,749 tokens.
    full = render(make_plan(planned("--model llama3.1-70b --rollout-max-response-len 32768 --engine-slots 256")))
    assert 4 * 55 < int(re.findall(r"assumed: (\d+) slots", full)[0]) < 4 * 70
    assert "(those of the simulated engine)" in render(make_plan(planned("--engine simulated")))


def test_the_plan_of_supervised_training_has_no_engine() -> None:
    plan = make_plan(planned("--loss-type sft_loss"))
    assert "  prompts -> train\n" in render(plan)
    assert plan.processes == 2


def test_memory_in_the_plan(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_06B), encoding="utf-8")
    text = render(make_plan(planned("--hf-checkpoint", str(tmp_path), "--engine-slots 8")))
    assert "596,049,920 parameters" in text
    assert "trainer            8.882 GiB" in text
    both = sum(map(float, re.findall(r"(?:trainer|passes) +([\d.]+) GiB", text)))
    assert f"both               {both:.4g} GiB   of a GPU of 74.51 GiB, beside about 4 GiB of the runtime" in text
    alone = render(make_plan(planned("--hf-checkpoint", str(tmp_path), "--train-device cpu")))
    assert "of a GPU of" not in alone
    assert "memory: not estimated" in render(make_plan(planned()))


def test_a_hub_id_that_a_preset_has_is_estimated() -> None:
    plan = make_plan(planned("--hf-checkpoint Qwen/Qwen3-0.6B --frozen-engine t=Qwen/Qwen3-8B --use-opd"))
    assert "596,049,920 parameters" in render(plan)
    assert plan.frozen[0].nbytes is not None
    text = render(make_plan(planned("--hf-checkpoint some/model-of-its-own")))
    assert "memory: not estimated, for some/model-of-its-own is no checkpoint of a preset" in text


@pytest.mark.parametrize(("argv", "words"), [
    ("--model qwen3-8b", "8 in all, 4 of the trainer and 4 of engines: 1 node of 8"),
    ("--model qwen3-8b --rollout-num-gpus 6", "10 in all, 4 of the trainer and 6 of engines: 2 nodes of 8"),
    ("--model llama3.1-70b --mode sync --colocate --runner ray",
     "32 in all, on which trainer and engines take turns: 4 nodes of 8"),
    ("--model llama3.1-70b", "48 in all, 32 of the trainer and 16 of engines: 6 nodes of 8"),
    ("--hf-checkpoint Qwen/Qwen3-0.6B --scale engine=3", "4 in all, 1 of the trainer and 3 of engines"),
    ("--hf-checkpoint Qwen/Qwen3-0.6B --engine-device cpu", "1 in all, 1 of the trainer and 0 of engines"),
    ("--model qwen3-8b --engine simulated", "4 in all, 4 of the trainer and 0 of engines: 1 node of 8"),
    ("--hf-checkpoint Qwen/Qwen3-0.6B --train-device cpu --engine-device cpu", None),
])  # fmt: skip
def test_the_plan_counts_all_gpus(argv: str, words: str | None) -> None:
    assert (f"GPUs               {words or ''}" in render(make_plan(planned(argv)))) is (words is not None)


def test_a_colocated_run_is_planned_with_both() -> None:
    argv = "--hf-checkpoint Qwen/Qwen3-0.6B --mode sync --colocate --engine-slots 8 --rollout-max-context-len 2048"
    argv += " --gradient-checkpointing"
    plan: Any = make_plan(planned(argv))
    trainer, engine = plan.estimate.trainer, plan.estimate.engine
    text = render(plan)
    assert f"trainer and engine {size_text(trainer.total + engine.total)}   on the same GPU, in turns: " in text
    assert f"{size_text(max(trainer.total, engine.total))} at one time" in text
    assert f"{size_text(trainer.weights + trainer.optimizer)} of the trainer on the host" in text
    assert "1 in all, on which trainer and engines take turns: 1 node of 8" in text
    assert "the larger of both" not in text
    wide = render(make_plan(planned(argv, "--max-tokens-per-gpu 2000000")))
    assert "warning: the larger of both and about 4 GiB of the runtime do not fit into 80 GB" in wide
    assert "trainer and engine " not in render(make_plan(planned("--hf-checkpoint Qwen/Qwen3-0.6B")))


def test_frozen_engines_are_planned_and_counted() -> None:
    one = make_plan(planned("--use-opd --frozen-engine t=tiny"))
    two = make_plan(planned("--use-opd --frozen-engine t=tiny judge=http://localhost:3000"))
    none, apart = make_plan(planned()), make_plan(planned("--chain none"))
    assert (one.processes, two.processes) == (none.processes + 1, none.processes + 1), "the engine"
    assert apart.processes == none.processes + 2, "reward and group have a process each"
    assert make_plan(planned("--use-opd --frozen-engine t=tiny --chain none")).processes == apart.processes + 2
    assert [(engine.name, engine.started) for engine in two.frozen] == [("t", True), ("judge", False)]
    text = render(two)
    assert "reward -> teacher -> group -> train" in text
    assert "teacher <-> frozen engines" in text
    assert "frozen-t     x1   process with an HTTP server, weights of tiny" in text
    assert "frozen-judge x1   not started here, asked at http://localhost:3000" in text


@pytest.mark.parametrize(("argv", "words"), [
    ("--engine sglang", "router       x1   sglang-router in a process of its own"),
    ("--engine sglang --router smg", "router       x1   smg in a process of its own"),
    ("--router-address http://localhost:3000", "router       x1   sglang-router, not started here, asked at http://localhost"),
    ("", ""),
])  # fmt: skip
def test_the_router_is_named(argv: str, words: str) -> None:
    text = render(make_plan(planned(argv)))
    assert words in text
    assert ("router" in text) is bool(words)


def test_the_memory_of_a_frozen_engine_is_that_of_its_own_model(tmp_path: Path) -> None:
    for name, shape in (("policy", QWEN3_06B), ("teacher", QWEN3_8B)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(shape))
    flags = ["--hf-checkpoint", str(tmp_path / "policy"), "--engine-slots 8 --rollout-max-context-len 2048"]
    config = planned(*flags, "--use-opd --frozen-engine", f"t={tmp_path / 'teacher'}", "far=http://localhost:1")
    plan: Any = make_plan(config)
    expected: Any = estimate_run(config, QWEN3_8B)
    assert [engine.nbytes for engine in plan.frozen] == [expected.engine.total, None]
    assert expected.engine.total > 5 * plan.estimate.engine.total
    assert "  frozen-t           " in render(plan)
