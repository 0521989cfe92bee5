"""Modes as data, batch arithmetic, and everything else that is derived."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.layers import PRESETS, ConfigError
from configs.resolve import Batch, batch_arithmetic, num_rollout_for, resolve
from configs.schema import AsyncConfig, Config, RunConfig
from tests.configs.config_rig import faults_of, one_says, resolved

Numbers = tuple[int | None, int | None, int | None, int | None]


@pytest.mark.parametrize(("given_numbers", "expected"), [
    ((None, None, None, None), (32, 8, 256, 1)), ((16, 4, None, None), (16, 4, 64, 1)),
    ((16, 4, 64, None), (16, 4, 64, 1)), ((16, 4, 16, None), (16, 4, 16, 4)), ((16, 4, None, 4), (16, 4, 16, 4)),
    ((None, 4, 64, 2), (32, 4, 64, 2)), ((16, None, 64, 2), (16, 8, 64, 2)), ((None, None, 128, 4), (64, 8, 128, 4)),
    ((None, None, 128, None), (32, 8, 128, 2)), ((None, None, None, 2), (32, 8, 128, 2)),
    ((16, 4, 32, 2), (16, 4, 32, 2)), ((1, 1, 1, 1), (1, 1, 1, 1)),
])  # fmt: skip
def test_batch_arithmetic(given_numbers: Numbers, expected: tuple[int, int, int, int]) -> None:
    assert batch_arithmetic(*given_numbers) == Batch(*expected)


@pytest.mark.parametrize(("numbers", "words"), [
    ((32, 8, 128, 3), "= 256 rollouts, but global_batch_size 128 x num_steps_per_rollout 3 = 384, and both"),
    ((32, 8, 100, 2), "and both must be equal; set --global-batch-size 128"),
    ((32, 8, 100, None), "which --global-batch-size 100 does not divide into whole optimizer steps"),
    ((32, 8, 100, None), "set --global-batch-size 128"),
    ((32, 8, 512, None), "set --global-batch-size 256"),
    ((32, 8, None, 3), "which --num-steps-per-rollout 3 does not divide into equal steps; set"),
    ((3, 4, None, 4), "--global-batch-size is 3, but must be a multiple of n_samples_per_prompt 4"),
    ((4, 8, 4, None), "a step trains whole groups; set --global-batch-size 8"),
    ((None, 8, 9, 3), "global_batch_size x num_steps_per_rollout = 27 rollouts, which --n-samples-per-prompt 8"),
    ((5, None, 9, 3), "--n-samples-per-prompt cannot be derived; set --global-batch-size to a multiple of 5"),
])  # fmt: skip
def test_impossible_batches(numbers: Numbers, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        batch_arithmetic(*numbers)


@given(
    groups=st.integers(1, 40), samples=st.integers(1, 16), steps=st.integers(1, 12), shown=st.sets(st.integers(0, 3))
)
def test_any_three_numbers_give_the_fourth(groups: int, samples: int, steps: int, shown: set[int]) -> None:
    groups *= steps
    whole = (groups, samples, groups * samples // steps, steps)
    for hidden in range(4):
        numbers = [number if index != hidden else None for index, number in enumerate(whole)]
        assert batch_arithmetic(*numbers) == Batch(*whole)
    numbers = [number if index in shown else None for index, number in enumerate(whole)]
    try:
        batch = batch_arithmetic(*numbers)
    except ConfigError:
        return
    found = msgspec.structs.astuple(batch)
    assert found[0] * found[1] == found[2] * found[3]
    assert [number for index, number in enumerate(found) if index in shown] == [whole[index] for index in sorted(shown)]


@given(
    groups=st.integers(1, 64), samples=st.integers(1, 16), size=st.integers(1, 600), steps=st.none() | st.integers(1, 9)
)
def test_the_cure_cures(groups: int, samples: int, size: int, steps: int | None) -> None:
    """A proposed --global-batch-size or --num-steps-per-rollout is accepted when it is followed."""
    try:
        batch_arithmetic(groups, samples, size, steps)
    except ConfigError as error:
        if found := re.search(r"set --global-batch-size (\d+)(, or leave it and --num-steps)?", error.faults[0]):
            if steps is None:
                batch_arithmetic(groups, samples, int(found[1]), None)
        elif steps is not None and "set --num-steps-per-rollout 1" in error.faults[0]:
            batch_arithmetic(groups, samples, None, 1)


@pytest.mark.parametrize(("argv", "words"), [
    ("--mode sync --max-staleness 2", "trained before the next begins); leave --max-staleness out, or choose"),
    ("--mode sync --async-buffer-size 2", "--async-buffer-size is 2, but --mode sync means 0"),
    ("--mode one_step --update-weights-interval 2", "but --mode one_step means 1"),
    ("--mode one_step asynchrony.max_staleness=0", "asynchrony.max_staleness is 0, but --mode one_step"),
])  # fmt: skip
def test_a_mode_and_a_flag_that_contradict_it(argv: str, words: str) -> None:
    one_says(words, faults_of(argv))


def test_a_configuration_made_in_python_needs_no_record_of_what_was_written() -> None:
    sync = resolve(Config(run=RunConfig(mode="sync")))
    assert (sync.asynchrony.async_buffer_size, sync.asynchrony.max_staleness) == (0, 0)
    with pytest.raises(ConfigError, match="means 0"):
        resolve(Config(run=RunConfig(mode="sync"), asynchrony=AsyncConfig(max_staleness=3)))


def test_presets_hold_only_the_gate() -> None:
    gate = {f"asynchrony.{name}" for name in ("async_buffer_size", "update_weights_interval", "max_staleness")}
    assert {key for _, means in PRESETS.values() for key in means} == gate


def test_values_that_follow_from_others() -> None:
    config = resolved("--eps-clip 0.3 --label-key answer --rollout-max-context-len 100")
    assert config.algorithm.eps_clip_high == 0.3
    assert (config.eval.eval_input_key, config.eval.eval_label_key) == ("input", "answer")
    assert (config.eval.eval_max_response_len, config.data.rollout_max_prompt_len) == (512, 99)
    assert config.train.ref_load == config.train.hf_checkpoint
    assert (config.filter.dynamic_sampling_filter, config.reward.rm_type) == ((), "auto")
    assert config.observe.live is not None
    assert config.eval.eval_interval is None
    assert resolved("--eps-clip-high 0.28").algorithm.eps_clip_high == 0.28
    assert resolved("--num-rollout 0 --eval-prompt-data arithmetic").eval.eval_interval == 1
    built_in = resolved("--prompt-data arithmetic")
    assert built_in.data.label_key == built_in.eval.eval_label_key == "label"
    assert resolved("--prompt-data arithmetic mine.jsonl").data.label_key is None
    assert resolved("--prompt-data a b").warm_start.warm_start_data == ("a", "b")


@pytest.mark.parametrize(("argv", "share"), [
    ("--mode async", 0.3),
    ("--mode async --train-device cuda --engine-device cuda:0 --scale engine=2", 0.15),
    ("--mode async --train-device cuda:1 --engine-device cuda", 0.8),
    ("--mode async --train-device cpu", 0.8),
    ("--mode sync --colocate", 0.8),
    ("--mode async --engine-memory-fraction 0.5", 0.5),
])  # fmt: skip
def test_the_cache_of_an_engine_leaves_a_trainer_its_part_of_the_gpu(argv: str, share: float) -> None:
    assert resolved(argv).engine.engine_memory_fraction == pytest.approx(share)


def test_a_new_run_gets_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seen = set()
    for _ in range(3):
        path = Path(str(resolved().run.run_dir))
        assert path.parent == Path("runs")
        assert not path.exists()
        path.mkdir(parents=True)
        seen.add(path)
    assert len(seen) == 3
    assert resolved("--run-dir mine").run.run_dir == "mine"


@given(
    mode=st.sampled_from(["async", "one_step", "sync"]),
    groups=st.integers(1, 64),
    samples=st.integers(2, 16),
    bypass=st.booleans(),
)
def test_resolving_twice_changes_nothing(mode: str, groups: int, samples: int, bypass: bool) -> None:
    argv = ["--mode", mode, "--rollout-batch-size", str(groups), "--n-samples-per-prompt", str(samples)]
    once = resolved(*argv, *(["--use-rollout-logprobs"] if bypass else []))
    assert resolve(once) == once


def test_the_length_of_a_run_in_epochs() -> None:
    config = resolved("--num-epoch 3 --rollout-batch-size 10")
    assert (num_rollout_for(config, 25), num_rollout_for(config, 10)) == (6, 3)
    assert num_rollout_for(resolved("--num-rollout 7"), 1) == 7
    assert num_rollout_for(resolved("--num-rollout 0"), 0) == 0
    with pytest.raises(ConfigError, match="--rollout-batch-size is 10, but an epoch has only 9 prompts"):
        num_rollout_for(config, 9)
    with pytest.raises(ConfigError, match="set it, or --num-epoch"):
        num_rollout_for(resolved(), 9)
