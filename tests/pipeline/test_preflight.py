"""What is refused before anything starts, although only a stage could use it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from launching import ROOT, here

from configs.load import load
from configs.rules.validate import checked
from configs.schema import Config
from pipeline.errors import UsageError, user_error
from pipeline.preflight.refusals import check_graders, check_names, check_trainer

MEGATRON = ("--train-backend", "megatron", "--megatron-bucket-sze", "5")
BASE = ("--prompt-data", "arithmetic", "--num-rollout", "3", "--hf-checkpoint", "tiny-arithmetic")


def config(*flags: str) -> Config:
    loaded = load([*BASE, *flags])
    return checked(loaded.config, loaded.given)[0]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rm-type", "gsm8"], "did you mean 'gsm8k'"),
        (["--reward-component", "acc=mth@1"], "is no grader"),
        (["--rm-type", "length:x"], "write length:N"),
        (["--rm-type", "math", "--reward-workers", "0"], "runs only in a grader process; set --reward-workers to 1"),
        (["--custom-rm-path", "json:loads", "--reward-workers", "0"], "'json:loads' may hang"),
        (["--dynamic-sampling-filter", "pass_rate"], "pass_rate"),
        (["--dynamic-sampling-filter", "nonzero_sd"], "nonzero_std"),
    ],
)
def test_refused_with_one_sentence(flags: list[str], words: str) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011  (the sentence is checked)
        check_names(config(*flags))
    sentence = str(caught.value) if isinstance(caught.value, UsageError) else user_error(caught.value)
    assert sentence is not None, repr(caught.value)
    assert words in sentence
    assert "\n" not in sentence


def test_rows_are_looked_at_too() -> None:
    check_graders(config(), ["math", "remote", "gsm8k", "auto", "tests.stages.graders.sample_graders:word_count"])
    with pytest.raises(UsageError, match="'mathh'"):
        check_graders(config(), ["gsm8k", "mathh"])


@pytest.mark.slow
def test_functions_of_the_user_are_imported_and_asked_for_their_signature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of their own: the driver has none of them in its memory."""
    (tmp_path / "my_code.py").write_text(
        "import os\nprint('noise')\n"
        "def score(response, label, metadata, prompt): return 1.0\n"
        "async def keep(group): return True\n"
        "def pair(response, label): return 1.0\n"
        "def keep_two(group, other): return True\n"
        "async def generate(args, sample, sampling_params): return sample\n"
        "def generate_all(args, samples): return samples\n"
    )
    for name in ("models", "stages", "configs", "queue"):  # their own, of the names of ours and of the library
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('a package of the user instead of ours')")
    (tmp_path / "my_ending.py").write_text("import os\nos._exit(3)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    check_names(config("--custom-rm-path", "my_code:score", "--dynamic-sampling-filter-path", "my_code:keep"))
    check_names(config("--custom-rm-path", "my_code.score", "--custom-generate-function-path", "my_code.generate"))
    code = "tests.stages.slime.user_code"
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    check_names(config("--data-source-path", f"{code}.Counting"))
    for name, words in (
        ("NoLoad", r"NoLoad has no load\(rollout_id\)"),
        ("ask", "is no class"),
        ("Odd", "get_samples can"),
    ):
        with pytest.raises(UsageError, match=f"--data-source-path: .*{words}"):
            check_names(config("--data-source-path", f"{code}.{name}"))
    hooks = {
        "--rollout-function-path": "whole_batch",
        "--rollout-sample-filter-path": "short_ones",
        "--custom-reward-post-process-path": "plus_index",
        "--custom-rollout-log-function-path": "log_batch",
        "--custom-rm-path": "rewarded",
        "--dynamic-sampling-filter-path": "differing_rewards",
    }
    check_names(config(*(word for flag, name in hooks.items() for word in (flag, f"{code}.{name}"))))
    with pytest.raises(UsageError) as told:
        check_names(config(*(word for flag in hooks for word in (flag, f"{code}.no_source_at_all"))))
    for flag in hooks:
        assert flag in str(told.value) or flag == "--custom-rm-path"
    assert str(told.value).count("no_source_at_all' cannot be called as function(") == len(hooks)
    with pytest.raises(UsageError, match=r"--custom-generate-function-path: .*generate_all' cannot be called"):
        check_names(config("--custom-generate-function-path", "my_code.generate_all"))
    with pytest.raises(UsageError) as caught:
        check_names(config("--custom-rm-path", "my_code:pair", "--dynamic-sampling-filter-path", "my_code:keep_two"))
    assert "'my_code:pair' cannot be called as function(response, label, metadata)" in str(caught.value)
    assert "--dynamic-sampling-filter-path: import path 'my_code:keep_two' cannot be called" in str(caught.value)
    with pytest.raises(UsageError, match=r"my_code' has no 'nothing'"):
        check_graders(config(), ["math", "my_code:nothing"])
    with pytest.raises(UsageError, match=r"ended its process \(exit status 3\)"):
        check_graders(config(), ["my_ending:score"])
    assert "my_code" not in sys.modules


def test_right_names_pass_and_rules_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    check_names(
        config(
            "--dynamic-sampling-filter", "nonzero_std", "pass_rate:0.1_0.9",
            "--reward-component", "acc=math@0.8", "fmt=format:^x@0.2",
            "--rollout-rs", "token_k1=0.5_4",
        )
    )  # fmt: skip
    assert capsys.readouterr().err == (
        "rejection: token_k1 keeps tokens with mu / old from 0.5 to 4, that is old / mu from 0.25 to 2\n"
    )


def test_options_of_the_trainers_framework_are_asked_of_it(tmp_path: Path) -> None:
    """Before the directory is filled, and by a run, not only by the function."""
    with pytest.raises(UsageError, match=r"--megatron-bucket-sze is no field .*did you mean --megatron-bucket-size"):
        check_trainer(config(*MEGATRON))
    check_trainer(config("--train-backend", "megatron", "--megatron-bucket-size", "5"))
    check_trainer(config())
    done = here(tmp_path / "run", *BASE, *MEGATRON)
    assert (done.code, "did you mean --megatron-bucket-size" in done.err) == (2, True), done.err
    assert not list((tmp_path / "run" / "logs").iterdir()), "nothing was started"
