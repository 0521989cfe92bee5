"""Refusals before anything starts: faults that only a stage could find, the environment of SGLang; built-in models."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import msgspec
import psutil
import pytest
from launching import (
    NO_DATA,
    ROOT,
    SIMULATED,
    SMALL,
    Finished,
    finish,
    here,
    importable,
    launch,
    made_model,
    start,
    succeed_here,
)  # fmt: skip
from test_kill import wait_for_steps

import launch as program
from configs.command_line import parse
from configs.load import load, load_arguments, recipe_names, with_work
from configs.rules.validate import checked, checked_flags
from configs.schema import Config
from models.engines.launch.environment import Installed, probe
from models.errors import UserFault
from models.tiny import TinyRecipe, make_tiny_checkpoint
from pipeline.errors import Refused, UsageError, check_repeatable
from pipeline.hosts.machine import shared_gpu_faults
from pipeline.preflight.data import prepare, with_data
from pipeline.preflight.machine import check_weights
from pipeline.preflight.refusals import (
    check_graders,
    check_names,
    check_trainer,
    prepare_sglang,
    refusals,
    refuse,
    sglang_parts,
    sglang_warnings,
)
from stages.data.rows import LoadReport, SourceCount
from stages.user_functions import KINDS, faults
from tests.copies import Copy
from tests.models.engines.launch.fake_environment import FakeEnvironment
from tests.stages.stage_rig import make_config

BASE = ("--prompt-data", "arithmetic", "--num-rollout", "3", "--hf-checkpoint", "tiny-arithmetic")


def config(*flags: str) -> Config:
    loaded = load([*BASE, *flags])
    return checked(loaded.config, loaded.given)[0]


@pytest.mark.slow
def test_functions_of_the_user_are_imported_and_inspected_for_their_signature(
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
    generate = ("--custom-generate-function-path", "my_code.generate")
    check_names(
        config("--custom-rm-path", "my_code:score", "--dynamic-sampling-filter-path", "my_code:keep", *generate)
    )
    code = "tests.stages.slime.user_code"
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    hooks = {
        "--rollout-function-path": "whole_batch",
        "--rollout-sample-filter-path": "short_ones",
        "--custom-reward-post-process-path": "plus_index",
        "--custom-rollout-log-function-path": "log_batch",
        "--custom-rm-path": "rewarded",
        "--dynamic-sampling-filter-path": "differing_rewards",
    }
    named = [word for flag, name in hooks.items() for word in (flag, f"{code}.{name}")]
    check_names(config(*named, "--data-source-path", f"{code}.Counting"))
    named = [word for flag in hooks for word in (flag, f"{code}.no_source_at_all")]
    with pytest.raises(UsageError) as reported:
        check_names(config(*named, "--data-source-path", f"{code}.NoLoad"))
    assert re.search(r"--data-source-path: .*NoLoad has no load\(rollout_id\)", str(reported.value))
    for flag in hooks:
        assert flag in str(reported.value) or flag == "--custom-rm-path"
    assert str(reported.value).count("no_source_at_all' cannot be called as function(") == len(hooks)
    (tmp_path / "my_faults.py").write_text(FAULTY)
    wrong = ["--custom-rm-path", "my_code:pair", "--dynamic-sampling-filter-path", "my_code:keep_two"]
    wrong += ["--custom-generate-function-path", "my_code.generate_all", "--advantage-estimator", "my_faults:adv"]
    for tried, more in ((True, []), (False, ["--no-try-functions"])):
        with pytest.raises(UsageError) as caught:
            check_names(config(*wrong, *more))
        assert "'my_code:pair' cannot be called as function(response, label, metadata)" in str(caught.value)
        assert "--dynamic-sampling-filter-path: import path 'my_code:keep_two' cannot be called" in str(caught.value)
        assert re.search(r"--custom-generate-function-path: .*generate_all' cannot be called", str(caught.value))
        assert ("--advantage-estimator: my_faults:adv failed on a made-up group" in str(caught.value)) == tried
    with pytest.raises(UsageError, match=r"my_code' has no 'nothing'"):
        check_graders(config(), ["math", "my_code:nothing"])
    with pytest.raises(UsageError, match=r"ended its process \(exit status 3\)"):
        check_graders(config(), ["my_ending:score"])
    assert not {"my_code", "my_faults"} & set(sys.modules)


FAULTY = """
import numpy as np

def adv(rewards, *, normalize_std): return np.zeros(7)
def loss(tokens, groups, config): raise KeyError("my loss is broken")
def policy_loss(tokens, config): return 1 / 0
def tis(log_weight, tokens): return log_weight[:2]
def post(rewards, samples): return [1.0]
def unknown(response, label, metadata): return undefined_name
def asks(response, label, metadata): raise ConnectionRefusedError("no service here")
async def reads(response, label, metadata): return metadata["answer"]
def hangs(response, label, metadata):
    import time
    time.sleep(60)
def keep(group): return {}["a"]
async def keep_later(group): return group.samples[9]
def mark(args, groups): raise ValueError("no such group")
def good(response, label, metadata): return float(response == label)
def slime_tis(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths):
    return pg_loss * args.tis_clip, loss_masks, {"ones": pg_loss * 0}
def half_tis(args, *, pg_loss, loss_masks, **rest): return pg_loss[:4], loss_masks, {}
def slime_adv(args, data): data["advantages"] = data["returns"] = [mask * args.gamma for mask in data["loss_masks"]]
def no_adv(args, data): data["advantages"] = []
def post_data(args, rollout_id, data): data["advantages"] = [2 * one for one in data["advantages"]]
def no_post(args, rollout_id, data): data["loss_masks"] = []
def train_data(args, samples): return {"tokens": [], "response_lengths": [], "loss_masks": [], "rewards": []}
def no_data(args, samples): return {}
def first(args, rollout_id, buffer, num_samples): return buffer[:num_samples]
def beyond(groups, step): return 7
def slime_reducer(totals, lengths, masks, calculate_per_token_loss): return lambda loss: loss.sum() / sum(totals)
def no_reducer(totals, lengths, masks, calculate_per_token_loss): return 1.0
def slime_loss(args, batch, logits, sum_of_sample_mean): return logits.sum(), {}
def good_group(responses, label, metadata): return [1.0 for _ in responses]
def good_adv(rewards, *, normalize_std): return rewards - rewards.mean()
def good_loss(tokens, groups, config): return -tokens.log_probs * groups.reward[tokens.sequence]
"""


@pytest.mark.parametrize(
    ("functions", "words"),
    [
        (["advantage=my_faults:adv"], "--advantage-estimator: .*adv failed on a made-up group .*shape .7. for 4"),
        (["loss=my_faults:loss"], "--custom-loss-function-path: .*'my loss is broken' .{here}:5 in loss.; mend it, or"),
        (["policy_loss=my_faults:policy_loss"], "--policy-loss: .*ZeroDivisionError: .*{here}:6 in policy_loss"),
        (["tis=my_faults:tis"], r"--custom-tis-function-path: .*returned .2.: return one weight for each of the 8"),
        (["tis=my_faults:half_tis"], r"--custom-tis-function-path, pg_loss: shape .4.; return a number for each of 8"),
        (["advantages=my_faults:no_adv"], r"--custom-advantage-function-path: .* shapes ..; set one tensor .* 2 seq"),
        (["advantages=my_faults:mark"], r"--custom-advantage-function-path: .*ValueError: no such group"),
        (["reducer=my_faults:no_reducer"], "--custom-pg-loss-reducer-function-path: .*TypeError: 'float' object is"),
        (["loss=my_faults:slime_loss"], "--custom-loss-function-path: .*logits of a micro-batch never exist at once"),
        (["tis=my_faults:slime_tis", "advantages=my_faults:slime_adv", "reducer=my_faults:slime_reducer"], ""),
        (["data_post_process=my_faults:no_post"], r"--rollout-data-postprocess-path: .*loss_masks.. has shapes .."),
        (["convert=my_faults:no_data"], "--custom-convert-samples-to-train-data-path: .*KeyError: 'tokens'"),
        (["buffer_order=my_faults:beyond"], "--buffer-order: .*returned 7; it must return the index of one of the 1"),
        (["data_post_process=my_faults:post_data", "convert=my_faults:train_data", "buffer_order=my_faults:first"], ""),
        (["post_process=my_faults:post"], r"--custom-reward-post-process-path: .*gave .1.0. for 4 rollouts"),
        (["grader=my_faults:unknown"], "NameError: name 'undefined_name' is not defined .{here}:9 in unknown"),
        (["loss=my_faults:good_loss", "grader=my_faults:good", "group_grader=my_faults:good_group",
          "advantage=my_faults:good_adv"], ""),
    ],
)  # fmt: skip
def test_functions_of_the_user_are_tried_before_anything_starts(
    functions: list[str], words: str, tmp_path: Path
) -> None:
    (tmp_path / "my_faults.py").write_text(FAULTY)
    with importable(tmp_path):
        found, warnings = faults(functions, Config())
        assert faults(functions) == ([], []), "--no-try-functions"
    if functions[0].startswith(("convert", "buffer_order")):  # they may rightly fail on made-up groups
        found, warnings = warnings, found
    assert not warnings
    assert len(found) == bool(words)
    assert not words or re.search(words.replace("{here}", str(tmp_path / "my_faults.py")), found[0]), found


ASYNC = """
async def filter(args, samples): return False
async def sample_filter(args, groups): ...
async def all_samples(args, samples, data_source): ...
async def data_post_process(args, rollout_id, rollout_data): ...
async def buffer_order(args, rollout_id, buffer, num_samples): return buffer
async def log(rollout_id, args, samples, rollout_extra_metrics, rollout_time): ...
async def eval_log(rollout_id, args, data, extra_metrics): ...
async def megatron_init(args): ...
async def tis(args, **given): ...
class source:
    def __init__(self, args): ...
    async def get_samples(self, n): return []
    def save(self, rollout_id): ...
    def load(self, rollout_id=None): ...
    def __len__(self): return 1
"""


def test_an_async_function_is_refused_where_nobody_awaits_it(tmp_path: Path) -> None:
    """It would do nothing, and a filter keep everything."""
    (tmp_path / "my_late.py").write_text(ASYNC)
    names = re.findall(r"^(?:async def|class) (\w+)", ASYNC, re.MULTILINE)
    with importable(tmp_path):
        found, warnings = faults([f"{name}=my_late:{name}" for name in names], Config())
    assert warnings == []
    assert len(found) == len(names) == 10
    for name, fault in zip(names, found, strict=True):
        assert fault.startswith(f"{KINDS[name].flag}: import path 'my_late:{name}")
        assert fault.endswith("is async, but nobody would await it; write def, not async def")


def test_functions_are_tried_with_the_settings_of_the_run() -> None:
    dpo = ["loss=models.algorithms.dpo:dpo"]
    [refused], _ = faults(dpo, Config())
    assert "add --use-kl-loss and --kl-loss-coef above 0" in refused
    assert faults(dpo, config("--use-kl-loss", "--kl-loss-coef", "0.1")) == ([], [])


def test_what_may_work_in_the_run_is_a_warning_with_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that does not run yet, rows and responses that no made-up group has."""
    monkeypatch.setattr("stages.user_functions.TRY_S", 1)
    (tmp_path / "my_faults.py").write_text(FAULTY)
    names = ["grader=my_faults:asks", "grader=my_faults:reads", "grader=my_faults:hangs", "filter=my_faults:keep"]
    names += ["filter=my_faults:keep_later", "sample_filter=my_faults:mark"]
    with importable(tmp_path):
        found, warnings = faults(names, Config())
    assert found == []
    assert [re.sub(r" failed on .*?: (.*) \(.*:(\d+) in .*", r" | \1 | \2", line) for line in warnings] == [
        "my_faults:asks | ConnectionRefusedError: no service here | 10",
        "my_faults:reads | KeyError: 'answer' | 11",
        "my_faults:hangs | TimeoutError: it took longer than 1 s | 14",
        "--dynamic-sampling-filter-path: my_faults:keep | KeyError: 'a' | 15",
        "--dynamic-sampling-filter-path: my_faults:keep_later | IndexError: tuple index out of range | 16",
        "--rollout-sample-filter-path: my_faults:mark | ValueError: no such group | 17",
    ]


def test_a_plan_refuses_the_model_that_the_ranks_would(tmp_path: Path) -> None:
    """The rules know its type; what of its config.json Megatron-core is not built for, the functions that build it."""
    model = make_tiny_checkpoint(tmp_path / "model", TinyRecipe(tokenizer="arithmetic"))
    named = ["--hf-checkpoint", str(model), "--engine", "simulated", "--train-backend"]
    check_weights(config(*named, "megatron"))
    described = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(described | {"attention_bias": True}))
    with pytest.raises(UsageError, match=rf"--hf-checkpoint {model}: attention_bias=True of 'qwen\w*'"):
        check_weights(config(*named, "megatron"))
    check_weights(config(*named, "fsdp"))


def test_right_names_pass_and_rules_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    check_trainer(config("--train-backend", "megatron", "--megatron-bucket-size", "5"))
    check_trainer(config())
    check_graders(config(), ["math", "remote", "gsm8k", "auto", "tests.stages.graders.sample_graders:word_count"])
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


SGLANG = {"engine": "sglang"}
OUTSIDE = {"rollout_external_engine_addrs": ["http://h:1"]}


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeEnvironment:
    made = FakeEnvironment(tmp_path / "env").install_all()
    monkeypatch.setenv("SLUICE_SGLANG_PYTHON", str(made.python))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return made


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (Config(), ()),
        (make_config(engine=SGLANG), ("server", "router")),
        (make_config(engine=SGLANG, router={"router": "smg"}), ("server", "smg")),
        (make_config(engine=SGLANG, router={"router": "none"}), ("server",)),
        (make_config(engine=SGLANG, router={"router_address": "http://h:1"}), ("server",)),
        (make_config(router={"router": "sglang"}), ("router",)),
        (make_config(engine=SGLANG, sglang=OUTSIDE), ("router",)),
        (make_config(engine={**SGLANG, "frozen_engine": ["t=/model"]}, sglang=OUTSIDE), ("server", "router")),
        (make_config(engine=SGLANG, train={"loss_type": "sft_loss"}), ()),
    ],
)
def test_only_what_the_run_starts_is_requested(config: Config, expected: tuple[str, ...]) -> None:
    assert sglang_parts(config) == expected


def test_what_is_installed(environment: FakeEnvironment) -> None:
    installed = prepare_sglang(make_config(engine=SGLANG))
    assert installed.python == str(environment.python)
    assert (installed.sglang, installed.torch, installed.router) == ("0.5.23", "2.13.0", "0.3.2")
    assert installed.options["server"]
    assert prepare_sglang(make_config(router={"router": "sglang"})).options["router"]


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"sglang": {"sglang_args": {"bogus": 1}}}, ["--sglang-bogus is no option of SGLang 0"]),
        ({"sglang": {"rollout_num_gpus_per_engine": 2}}, ["sees no GPU; set it to 1"]),
        ({"router": {"router": "smg"}}, ["smg is not installed"]),
        (
            {
                "sglang": {"sglang_args": {"mem_fraction_statc": "0.8", "port": 1}},
                "router": {"router_args": {"assignment_mode": "minload"}},
            },
            [
                "did you mean --sglang-mem-fraction-static?",
                "--sglang-port cannot be passed on: use --engine-port",
                "is 'minload', but must be one of min_group, min_load, random; did you mean min_load?",
            ],
        ),
    ],
)
def test_each_fault_is_one_sentence_and_all_are_reported_together(
    environment: FakeEnvironment, sections: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises((UsageError, UserFault)) as caught:
        prepare_sglang(make_config(engine=SGLANG, **sections))
    found = caught.value.faults if isinstance(caught.value, Refused) else [str(caught.value)]
    for fault, one in zip(found, words, strict=True):
        assert one in fault
        assert "\n" not in fault


def test_a_plan_for_gpus_may_be_made_where_there_are_none(environment: FakeEnvironment) -> None:
    planned, left_out = config("--engine", "sglang", "--rollout-num-gpus-per-engine", "2"), list[str]()
    assert refusals(planned, (), left_out) == []
    assert "sees no GPU" in "".join(left_out)
    with pytest.raises(Refused, match="sees no GPU"):
        refuse(planned)


def test_a_missing_environment_is_a_usage_error(tmp_path: Path, environment: FakeEnvironment) -> None:
    empty = FakeEnvironment(tmp_path / "empty")
    with pytest.raises(UsageError, match=r"SGLang is not installed in the environment of .*; run `make sglang-env`"):
        prepare_sglang(make_config(engine=SGLANG, sglang={"sglang_python": str(empty.python)}))


def test_a_plan_of_engines_on_gpus_can_be_made_where_there_are_none(environment: FakeEnvironment) -> None:
    """A run is refused there, and what else is wrong is said in either case."""
    engines = {"rollout_num_gpus_per_engine": 2}
    config, left_out = make_config(engine=SGLANG, sglang=engines), list[str]()
    assert refusals(config, (), left_out) == []
    (line,) = left_out
    assert "--rollout-num-gpus-per-engine is 2, but" in line
    with pytest.raises(Refused, match=r"sees no GPU; set it to 1, .*, or start the run where there are GPUs"):
        refuse(config)
    wrong = make_config(engine=SGLANG, sglang=engines, router={"router_args": {"assignment_mode": "minload"}})
    assert "did you mean min_load?" in refusals(wrong, (), left_out)[0]


CUDA = Installed(python="python", python_version="3.11", cuda=True)


@pytest.mark.parametrize(
    ("gpus", "flags", "shared"),
    [
        ("0", "", "0"),
        ("4,5", "--scale engine=2", "4"),
        ("4,5", "--eval-engines 1 --eval-prompt-data held=arithmetic --eval-interval 2", "4"),
        ("0,1", "", None),
        ("0,1", "--train-device cuda:1", None),
        ("0,1,2", "--train-backend fsdp --actor-num-gpus-per-node 2 --scale engine=2", "0, 1"),
        ("0", "--train-device cpu", None),
        ("0", "--sglang-mem-fraction-static 0.4", None),
        ("0", "--mode sync --colocate", None),
        ("", "", None),
    ],
)
def test_sglang_on_the_trainers_gpu_is_refused_unless_its_memory_or_its_time_is_divided(
    gpus: str, flags: str, shared: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    config = checked_flags([*SMALL, "--hf-checkpoint", "tiny-arithmetic", "--engine", "sglang", *flags.split()])
    found = list(shared_gpu_faults(config))
    assert len(found) == (shared is not None)
    assert shared is None or found[0].startswith(f"--engine sglang is on GPU {shared}, which the trainer has as well")


def test_sglang_that_sees_no_gpu_shares_none(environment: FakeEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert prepare_sglang(make_config(engine=SGLANG)).cuda is False
    on_a_gpu = msgspec.structs.replace(probe(environment.python, ("server", "router")), cuda=True)
    monkeypatch.setattr("pipeline.preflight.refusals.probe", lambda python, wanted: on_a_gpu)
    with pytest.raises(Refused, match=r"divide it with --sglang-mem-fraction-static 0\.4, take turns .* --colocate"):
        prepare_sglang(make_config(engine=SGLANG))


@pytest.mark.parametrize(
    ("mode", "arguments", "external", "cuda", "reported"),
    [
        ("in_place", {}, (), True, True),
        ("in_place", {"disable_overlap_schedule": False}, (), True, True),
        ("in_place", {"disable-overlap-schedule": True}, (), True, False),
        ("retract", {}, (), True, False),
        ("in_place", {}, ("http://h:1",), True, False),
        ("in_place", {}, (), False, False),  # where it is switched off
    ],
)
def test_updates_in_place_under_overlap_scheduling_are_warned_of(
    mode: Any, arguments: dict[str, Any], external: tuple[str, ...], cuda: bool, reported: bool
) -> None:
    engines = {"sglang_args": arguments, "rollout_external_engine_addrs": external}
    config = make_config(engine={**SGLANG, "pause_generation_mode": mode}, sglang=engines)
    lines = [*sglang_warnings(config, msgspec.structs.replace(CUDA, cuda=cuda))]
    assert bool(lines) == reported
    assert all("use --pause-generation-mode retract, or --sglang-disable-overlap-schedule" in line for line in lines)


def test_a_warning_is_reported_before_the_start_and_once(
    environment: FakeEnvironment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pipeline.preflight.refusals.probe", lambda python, wanted: CUDA)
    monkeypatch.setattr("pipeline.preflight.refusals._sglang_faults", lambda *_: ())
    config = make_config(engine={**SGLANG, "pause_generation_mode": "in_place"})
    prepare_sglang(config)
    assert capsys.readouterr().err.startswith("warning: --pause-generation-mode is in_place, and SGLang's overlap")
    prepare_sglang(config, warn=False)
    assert capsys.readouterr().err == ""


def test_the_model_of_a_run_that_another_version_began_is_refused_with_the_cure(tmp_path: Path) -> None:
    config = make_config(train={"hf_checkpoint": "tiny-arithmetic"})
    model = Path(prepare(config, tmp_path).train.hf_checkpoint)
    assert json.loads((model / "config.json").read_text())["initializer_range"] == 0.06
    assert prepare(config, tmp_path).train.hf_checkpoint == str(model), "the same again is reused"
    (model / "tiny.json").write_text('{"architecture": "qwen3", "format_version": 1}')
    with pytest.raises(UsageError, match=r"--hf-checkpoint tiny-arithmetic: .* another version .* or start a new run"):
        prepare(config, tmp_path)


# Mistakes of the user and of the machine end with one sentence and exit code 2; every recipe runs as it is.


def refused(done: Finished, *words: str) -> None:
    """One-sentence refusal that names the words; nothing of the run is left."""
    assert done.code == 2, (done.code, done.err[-2000:])
    errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert errors, done.err
    for word in words:
        assert word in " ".join(errors), (word, errors)
    assert "Traceback" not in done.err + done.out
    lines = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    assert [line for line in lines if str(done.run_dir) in line and "pytest" not in line] == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--no-use-tis", ["correction"]),
        ("--tools calculater", ["calculater", "calculator"]),
        ("--rm-type gsm8", ["did you mean 'gsm8k'"]),
        ("--rm-type length:x", ["write length:N"]),
        ("--rm-type math --reward-workers 0", ["runs only in a grader process; set --reward-workers to 1"]),
        ("--reward-component acc=mth@1", ["is no grader"]),
        ("--custom-rm-path json:loads --reward-workers 0", ["'json:loads' may hang"]),
        ("--dynamic-sampling-filter pass_rate", ["pass_rate"]),
        ("--train-backend megatron --megatron-bucket-sze 5", ["did you mean --megatron-bucket-size"]),
    ],
)
def test_mistakes_on_the_command_line(tmp_path: Path, flags: str, words: list[str]) -> None:
    refused(here(tmp_path / "run", *SMALL, *flags.split()), *words)


def test_a_data_file_without_one_usable_row(tmp_path: Path) -> None:
    data = tmp_path / "bad.jsonl"
    data.write_text('{"input": "x"\n[1, 2]\n{"prompt": "x"}\n')
    refused(here(tmp_path / "run", *NO_DATA, *made_model(), "--prompt-data", str(data)), "bad.jsonl", "3 rows")


def test_a_run_is_refused_at_its_start_for_what_it_would_meet_late(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    late = ["--save-interval", "1", "--save-hf", str(tmp_path / "file" / "{step}")]
    refused(here(tmp_path / "run", *SMALL, *late), "--save-hf", "nothing can be written", "choose another place")
    other = str(make_tiny_checkpoint(tmp_path / "other", TinyRecipe(tokenizer="bytes")))
    late = ["--use-kl-loss", "--kl-loss-coef", "0.1", "--ref-load", other]
    refused(here(tmp_path / "second", *SMALL, *late), "--ref-load", other, "policy's tokenizer")


def test_a_run_directory_is_never_written_over_and_what_is_none_not_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("[run]\n")
    refused(here(tmp_path / "run", *SMALL), "a run is already there", "--resume")
    assert (tmp_path / "run" / "config.toml").read_text() == "[run]\n"
    nothing = tmp_path / "nothing"
    refused(Finished(program.main(["--resume", str(nothing)]), *capsys.readouterr(), nothing), "nothing")


@pytest.mark.slow
def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = launch(tmp_path / "run", *SMALL, *made_model(), *SIMULATED, "--engine-port", str(port))
    refused(done, str(port), "in use")
    assert "RuntimeWarning" not in done.err


@pytest.mark.slow
def test_a_checkpoint_without_weights_is_named(tmp_path: Path) -> None:
    model = make_tiny_checkpoint(tmp_path / "model", TinyRecipe(tokenizer="arithmetic"))
    (model / "model.safetensors").unlink()
    refused(here(tmp_path / "run", *SMALL, "--hf-checkpoint", str(model)), str(model))


@pytest.mark.slow
def test_a_full_disk_at_the_start(small_disk: Path) -> None:
    (small_disk / "ballast").write_bytes(b"x" * (40 << 20))
    gc.disable()  # which may close what the refused start left open
    try:
        refused(here(small_disk / "run", *SMALL), "MiB free, and a run needs 64", "--run-dir")
        assert [
            path for path in map(os.path.realpath, Path("/proc/self/fd").iterdir()) if str(small_disk) in path
        ] == []
    finally:
        gc.enable()


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


@pytest.mark.slow
@pytest.mark.parametrize("ends", [False, True])
def test_a_run_outlives_who_reads_its_output(tmp_path: Path, ends: bool) -> None:
    """`ends`: at once, as `| head -0` does; else the output goes to a file on a full disk."""
    reader, output = os.pipe() if ends else (os.open(os.devnull, os.O_RDONLY), os.open("/dev/full", os.O_WRONLY))
    os.close(reader)
    words = ["launch", "--run-dir", str(tmp_path / "run"), *SMALL, *made_model(), *SIMULATED]
    process = Copy(words, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    os.close(output)
    done = Finished(process.wait(120), "", "", tmp_path / "run").check()
    assert done.summary["groups"]["trained"] == 16
    assert "step 4/4" in (tmp_path / "run" / "run.log").read_text()


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
PACKS = ("guess_number", "maze", "multi_agent", "python_tool", "reasoning_gym", "search")
# They set another algorithm alone, which golden numbers and a step of each combination show, or are like quickstart;
# runs with teachers are in tests/pipeline/test_distillation.py.
ALGORITHMS = (
    "async_tis", "cispo", "dapo", "dr_grpo", "grpo", "grpo_sync", "gspo", "opd", "reinforce_pp", "rloo", "toy",
)  # fmt: skip
NEEDS = {"agent_openai": "openai", "reasoning_gym": "reasoning_gym", "search": "bm25s"}
FULL = (*PACKS, *ALGORITHMS, *NEEDS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=pytest.mark.full if name in FULL else []) for name in ARITHMETIC]
)
def test_recipe(recipe: str, tmp_path: Path) -> None:
    if recipe in NEEDS and find_spec(NEEDS[recipe]) is None:
        pytest.skip(f"the recipe needs the package {NEEDS[recipe]}, which is not installed")
    flags = ["--config", recipe, *SHORT, *(["filter.dynamic_sampling_filter=[]"] if recipe in PACKS else [])]
    if recipe == "opd":
        teacher = make_tiny_checkpoint(tmp_path / "teacher", TinyRecipe(tokenizer="arithmetic", seed=7))
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


@pytest.mark.parametrize(
    ("settings", "grader", "said"),
    [
        ({}, "gsm8k", ["1 of 3 usable rows have no label", "grader gsm8k"]),
        ({"train": {"loss_type": "sft_loss"}}, "auto", ["1 of 3 usable rows have no label"]),
        (
            {"environment": [{"name": "world"}]},
            "gsm8k",
            ["grader gsm8k, of rollouts to which their environment gives no reward"],
        ),
    ],
)
def test_only_rollouts_get_a_grader(settings: dict[str, Any], grader: str, said: list[str]) -> None:
    """Rows of an environment need no labels: it gives the rewards, or some of them."""

    class Rows:
        report = LoadReport([SourceCount("rows.jsonl", 3, 3)], unlabelled=1, labels=["#### 7", "so it is 8 #### 8"])

        def __len__(self) -> int:
            return 3

    lines: list[str] = []
    found = with_data(make_config(**settings, rollout={"num_rollout": 3}), cast(Any, Rows()), lines.append)
    assert found.reward.rm_type == grader
    assert [line.split(":")[0] for line in lines[1:]] == said


def test_what_another_start_would_repeat_ends_the_run_with_the_cure(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^there is no space left for .*; free some, or choose another --run-dir$"):
        check_repeatable("reward-0", 28, "killed", tmp_path)
    with pytest.raises(UsageError, match=r"^reward-0: no module named x$"):
        check_repeatable("reward-0", 2, "no module named x", tmp_path)
    for code in (1, 3, -9):
        check_repeatable("reward-0", code, "", tmp_path)


def test_a_run_that_names_a_gpu_which_is_not_there_does_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.preflight.refusals.visible_gpus", lambda: ("0",))
    with pytest.raises(Refused, match=r"--train-device is cuda:1, but a run has 1 GPUs"):
        refuse(config("--train-device", "cuda:1"))
    refuse(config("--train-device", "cuda:0"))
