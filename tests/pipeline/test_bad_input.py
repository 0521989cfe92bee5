"""Mistakes of the user and of the machine end with one sentence and exit code 2; every recipe runs as it is.

Recipes run for real, with the tiny model and few batches, in one process.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from launching import NO_DATA, SIMULATED, SMALL, Finished, finish, here, launch, made_model, start, succeed_here
from test_kill import wait_for_steps

from configs.command_line import parse
from configs.load import load_arguments, recipe_names, with_work
from models.tiny import make_tiny_checkpoint


def refused(done: Finished, *words: str) -> None:
    """One-sentence refusal that names the words; nothing of the run is left."""
    assert done.code == 2, (done.code, done.err[-2000:])
    errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert errors, done.err
    for word in words:
        assert word in " ".join(errors), (word, errors)
    assert "Traceback" not in done.err + done.out
    assert not left_running(done.run_dir)


def left_running(run_dir: Path) -> list[str]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if str(run_dir) in line and process.pid != os.getpid() and "pytest" not in line:
            found.append(line)
    return found


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--num-rolout", "3"], ["--num-rolout", "did you mean --num-rollout?"]),
        (["--rollout-batch-size", "0"], ["--rollout-batch-size", "0"]),
        (["--global-batch-size", "7"], ["global-batch-size 7", "16"]),
        (["--no-use-tis"], ["correction"]),
        (["--colocate"], ["colocate"]),
        (["--hf-checkpoint", "./no/such/model"], ["./no/such/model"]),
        (["--prompt-data", "no/such.jsonl"], ["no/such.jsonl"]),
        (["--rm-type", "gsm9k"], ["gsm9k", "gsm8k"]),
        (["--n-samples-per-prompt", "1"], ["n-samples-per-prompt"]),
        (["--rollout-top-p", "0.9"], ["top"]),
        (["--scale", "train=2"], ["train"]),
        (["--mode", "sync", "--max-staleness", "2"], ["sync"]),
        (["--config", "no-such-recipe"], ["no-such-recipe"]),
        (["--tools", "calculater"], ["calculater", "calculator"]),
    ],
    ids=lambda value: "_".join(value)[:40],
)
def test_mistakes_on_the_command_line(tmp_path: Path, flags: list[str], words: list[str]) -> None:
    refused(here(tmp_path / "run", *SMALL, *flags), *words)


def test_a_mistake_ends_the_process(tmp_path: Path) -> None:
    refused(launch(tmp_path / "run", *SMALL, "--num-rolout", "3", timeout_s=60), "did you mean --num-rollout?")


def test_a_data_file_without_one_usable_row(tmp_path: Path) -> None:
    data = tmp_path / "bad.jsonl"
    data.write_text('{"input": "x"\n[1, 2]\n{"prompt": "x"}\n')
    refused(here(tmp_path / "run", *NO_DATA, *made_model(), "--prompt-data", str(data)), "bad.jsonl", "3 rows")


def test_a_run_directory_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("[run]\n")
    refused(here(tmp_path / "run", *SMALL), "a run is already there", "--resume")
    assert (tmp_path / "run" / "config.toml").read_text() == "[run]\n"


def test_resuming_what_is_no_run(tmp_path: Path) -> None:
    process = start(None, "--resume", str(tmp_path / "nothing"))
    refused(finish(process, tmp_path / "nothing", 60), "nothing")


@pytest.mark.slow
def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused(launch(tmp_path / "run", *SMALL, *made_model(), "--engine-port", str(port)), str(port), "in use")


@pytest.mark.slow
def test_a_checkpoint_without_weights_is_named(tmp_path: Path) -> None:
    from models.tiny import make_tiny_checkpoint

    model = make_tiny_checkpoint(tmp_path / "model", tokenizer="arithmetic")
    (model / "model.safetensors").unlink()
    refused(here(tmp_path / "run", *SMALL, "--hf-checkpoint", str(model)), str(model))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 80 MiB, where this machine lets one be mounted."""
    mount = tmp_path / "disk"
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=80m", "tmpfs", str(mount)], capture_output=True, text=True
    )
    if done.returncode != 0:
        pytest.skip(f"cannot mount a small file system here: {done.stderr.strip()}")
    try:
        yield mount
    finally:
        for _ in range(20):
            if subprocess.run(["umount", str(mount)], capture_output=True).returncode == 0:
                break
            time.sleep(0.2)


@pytest.mark.slow
def test_a_full_disk_at_the_start(small_disk: Path) -> None:
    (small_disk / "ballast").write_bytes(b"x" * (40 << 20))
    refused(launch(small_disk / "run", *SMALL, timeout_s=60), "disk", "full", "--run-dir")


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [pytest.param(SIMULATED, id="simulated"), pytest.param([], id="torch", marks=pytest.mark.full)]
)
def test_a_disk_that_fills_up_in_mid_run(small_disk: Path, flags: list[str]) -> None:
    run_dir = small_disk / "run"
    flags = [*SMALL, *made_model(), *flags]
    process = start(run_dir, *flags, "--num-rollout", "2000", "--save-interval", "2", "--keep-last-n", "1")
    wait_for_steps(process, run_dir, 3)
    with contextlib.suppress(OSError), (small_disk / "ballast").open("wb") as file:  # full, which is what is wanted
        while True:
            file.write(b"x" * 65536)
    done = finish(process, run_dir, 120)
    refused(done, "space", "free")


ARITHMETIC = sorted(
    name
    for name in recipe_names()
    if load_arguments(with_work(parse(["--config", name]))[0]).config.train.hf_checkpoint[:4] == "tiny"
)
BATCHES = 3
SHORT = [
    "--no-live", "--no-use-tensorboard", "--no-use-plot", "--num-rollout", str(BATCHES),
    "--warm-start-steps", "3",
    "--warm-start-batch-size", "16", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4",
    "--rm-type", "random:0.5", "--reward-workers", "0", "--eval-interval", "none", "eval.eval_prompt_data=[]",
]  # fmt: skip
# An environment that rewards by itself rewards nothing of what an untrained model does, so every group has to count.
PACKS = ("maze", "multi_agent", "python_tool", "reasoning_gym", "search")
NEEDS = {"agent_openai": "openai", "reasoning_gym": "reasoning_gym", "search": "bm25s"}


def test_all_recipes_but_those_that_need_a_download_are_run_here() -> None:
    assert set(ARITHMETIC) == set(recipe_names()) - {"gsm8k"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=pytest.mark.full if name in (*PACKS, *NEEDS) else []) for name in ARITHMETIC]
)
def test_recipe(recipe: str, tmp_path: Path) -> None:
    if recipe in NEEDS and find_spec(NEEDS[recipe]) is None:
        pytest.skip(f"the recipe needs the package {NEEDS[recipe]}, which is not installed")
    flags = ["--config", recipe, *SHORT, *(["filter.dynamic_sampling_filter=[]"] if recipe in PACKS else [])]
    if recipe == "opd":
        teacher = make_tiny_checkpoint(tmp_path / "teacher", tokenizer="arithmetic", seed=7)
        flags += ["--frozen-engine", f"teacher={teacher}"]
    if recipe == "ppo":
        flags += ["--num-critic-only-steps", "1"]
    done = succeed_here(tmp_path / "run", *flags)
    run_dir = done.run_dir
    assert done.summary["steps"] == BATCHES
    assert len(done.audit.batches) == BATCHES
    if recipe == "opd":
        assert (run_dir / "metrics.jsonl").read_text().count("opd_reverse_kl") == BATCHES
    if recipe == "ppo":
        assert (run_dir / "metrics.jsonl").read_text().count("value_loss") >= BATCHES
