"""Options that are passed on to SGLang and its router, and what is checked about engines without asking them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from configs.command_line import parse
from configs.graph import engine_count, replicas
from configs.layers import ConfigError
from configs.load import dump_toml, load, read_recipe
from configs.rules.validate import checked
from configs.schema import Config

BASE = ("--prompt-data", "arithmetic", "--num-rollout", "3", "--hf-checkpoint", "tiny-arithmetic")
SGLANG = (*BASE, "--engine", "sglang")
ADDRESSES = ("--rollout-external-engine-addrs", "http://127.0.0.1:31000", "http://127.0.0.1:31001")


def check(*argv: str) -> tuple[str, ...]:
    """The warnings."""
    loaded = load(argv)
    return checked(loaded.config, loaded.given)[1]


def faults_of(*argv: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        check(*argv)
    return caught.value.faults


def values(*argv: str) -> dict[str, Any]:
    return dict(parse(argv).layer.values)


def test_unknown_options_with_a_prefix_are_passed_on() -> None:
    given = values(
        *("--sglang-mem-fraction-static", "0.8", "--sglang-disable-radix-cache", "--sglang-lora-paths", "a=1", "b=2"),
        *("--sglang-schedule-conservativeness=-0.5", "--router-cache-threshold", "0.3", "--router-dp-aware"),
        *("train.lr=1e-3", "--seed", "1"),
    )
    assert given == {
        "sglang.sglang_args": {
            "mem_fraction_static": "0.8",
            "disable_radix_cache": True,
            "lora_paths": ["a=1", "b=2"],
            "schedule_conservativeness": "-0.5",
        },
        "router.router_args": {"cache_threshold": "0.3", "dp_aware": True},
        "train.lr": 1e-3,
        "run.seed": 1,
    }


def test_flags_of_our_own_win() -> None:
    given = values(
        "--sglang-python", "py", "--router", "smg", "--router-policy", "random", "--router-address", "http://h:1"
    )
    assert given == {
        "sglang.sglang_python": "py",
        "router.router": "smg",
        "router.router_policy": "random",
        "router.router_address": "http://h:1",
    }
    assert values("--sglang-server-concurrency", "64") == {"rollout.server_concurrency": 64}


def test_all_ways_of_writing_an_option_meet(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[sglang.sglang_args]\ndtype = "auto"\nmax_total_tokens = 4096\n')
    config = load(["--config", str(recipe), "sglang.sglang_args.page_size=16", "--sglang-dtype", "float32"]).config
    assert config.sglang.sglang_args == {"dtype": "float32", "max_total_tokens": 4096, "page_size": 16}


def test_options_survive_the_run_directory(tmp_path: Path) -> None:
    """A resumed run reads them from its config.toml."""
    argv = ["--sglang-lora-paths", "a", "b", "--sglang-disable-radix-cache", "--router-prefill", "http://p:1", "9000"]
    config = load([*SGLANG, *argv]).config
    file = tmp_path / "again.toml"
    file.write_text(dump_toml(config))
    assert read_recipe(str(file)).values["sglang.sglang_args"] == config.sglang.sglang_args
    assert config.router.router_args == {"prefill": ["http://p:1 9000"]}


def test_a_repeated_option_counts_once_but_prefill_and_decode_add_up() -> None:
    argv = ["--router-prefill", "http://p:1", "9000", "--router-prefill", "http://q:1", "--router-decode", "http://d:1"]
    assert values(*argv)["router.router_args"] == {
        "prefill": ["http://p:1 9000", "http://q:1"],
        "decode": ["http://d:1"],
    }
    assert values("--sglang-dtype", "auto", "--sglang-dtype", "half")["sglang.sglang_args"] == {"dtype": "half"}


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--sglang-pyton", "x"], "--sglang-pyton is no flag; did you mean --sglang-python?"),
        (["--router-polcy", "random"], "--router-polcy is no flag; did you mean --router-policy?"),
        (["--router-adress", "http://h:1"], "--router-adress is no flag; did you mean --router-address?"),
        (["--sgalng-python", "x"], "--sgalng-python is no flag; did you mean --sglang-python?"),
        (
            ["--no-sglang-enable-metrics"],
            "--no-sglang-enable-metrics turns an option off, but only what is given is passed on; leave it out, or "
            "write sglang.sglang_args.enable_metrics=false",
        ),
        (["--router-no-enable-igw"], "or write router.router_args.enable_igw=false"),
        (
            ["--sglang_page_size", "1"],
            "--sglang_page_size is no flag, for names are written with dashes; write --sglang-pa",
        ),
        (["--sglang-", "3"], "--sglang- is no flag"),
    ],
)
def test_slips_near_a_flag_of_our_own_are_refused(argv: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse([*argv, "--seed", "1"])
    (fault,) = caught.value.faults
    assert sentence in fault


@pytest.mark.parametrize(
    ("argv", "count"),
    [
        (BASE, 1),
        ((*BASE, "--scale", "engine=3"), 3),
        ((*SGLANG, "--scale", "engine=3"), 3),
        ((*SGLANG, "--rollout-num-gpus", "8"), 8),
        ((*SGLANG, "--rollout-num-gpus", "8", "--rollout-num-gpus-per-engine", "4"), 2),
        ((*SGLANG, *ADDRESSES), 2),
        ((*BASE, "--rollout-num-gpus", "8"), 1),  # without effect, and a warning says so
        ((*BASE, "--loss-type", "sft_loss"), 0),
    ],
)
def test_how_many_engines(argv: tuple[str, ...], count: int) -> None:
    config = load(argv).config
    assert engine_count(config) == count
    assert replicas(config).get("engine", 0) == count
    assert engine_count(Config()) == 1


def test_right_combinations_pass() -> None:
    assert check(*SGLANG) == ()
    assert check(*SGLANG, "--router", "none", "--router-policy", "session") == ()
    assert check(*SGLANG, "--router", "none", "--router-policy", "least_loaded") == ()
    assert check(*SGLANG, *ADDRESSES, "--router-address", "http://[::1]:30000/") == ()
    assert check(*BASE, "--router", "sglang") == ()  # a router in front of the embedded engine
    assert check(*BASE, "--router-policy", "least_loaded") == ()
    assert check(*SGLANG, "--update-weight-transport", "distributed", "--rollout-num-gpus", "4") == ()
    assert check(*BASE, "--update-weight-transport", "delta", "--update-weight-delta-dir", "/shared") == ()
    assert check(*BASE, "--group-deadline-secs", "5", "--sample-deadline-secs", "9") == ()


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (
            ["--rollout-num-gpus", "7", "--rollout-num-gpus-per-engine", "2"],
            "--rollout-num-gpus is 7, but must be divisible by --rollout-num-gpus-per-engine 2, for an engine takes "
            "whole GPUs; set it to 6",
        ),
        (["--rollout-num-gpus", "1", "--rollout-num-gpus-per-engine", "2"], "set it to 2"),
        (["--rollout-num-gpus", "4", "--scale", "engine=3"], "gives 4 engines of 1 GPUs, but --scale says engine=3"),
        (
            ["--rollout-external-engine-addrs", "127.0.0.1:31000"],
            "holds '127.0.0.1:31000', but an address must have the",
        ),
        (["--rollout-external-engine-addrs", "http://h"], "holds 'http://h', but an address must have the form"),
        (["--rollout-external-engine-addrs", "http://h:99999"], "holds 'http://h:99999', but an address must have"),
        (
            ["--rollout-external-engine-addrs", "http://h:1/", "http://h:1"],
            "holds 'http://h:1' 2 times, but each is one",
        ),
        (
            [*ADDRESSES, "--engine", "embedded"],
            "--engine is embedded, whose engines are started with the run; add --engine",
        ),
        ([*ADDRESSES, "--rollout-num-gpus", "2"], "no engine is started; leave one of them out"),
        ([*ADDRESSES, "--scale", "engine=3"], "--scale engine=3 contradicts the 2 addresses"),
        (
            [*ADDRESSES, "--mode", "sync", "--colocate"],
            "but engines that run already keep theirs; leave out --colocate",
        ),
        (
            ["--router-address", "h:1"],
            "--router-address holds 'h:1', but an address must have the form http://host:port",
        ),
        (["--router-address", "http://h:1", "--router", "none"], "--router is none, but --router-address names one"),
        (
            ["--router-policy", "least_loaded"],
            "but a router (sglang) stands in front of the engines; add --router none",
        ),
        (
            ["--engine", "simulated", "--update-weight-transport", "tensor"],
            "but the simulated engine takes weights by disk and delta only; choose one of these, or --engine sglang",
        ),
        (
            ["--engine", "embedded", "--update-weight-transport", "distributed"],
            "but the embedded engine takes weights by",
        ),
        (
            ["--update-weight-delta-dir", "/d"],
            "--update-weight-delta-dir is /d, but only --update-weight-transport delta reads it",
        ),
        (
            ["--group-deadline-secs", "9", "--sample-deadline-secs", "9"],
            "--group-deadline-secs is 9, but must be less than --sample-deadline-secs 9, which would end each rollout",
        ),
    ],
)
def test_each_refusal_in_its_words(argv: list[str], sentence: str) -> None:
    (fault,) = faults_of(*SGLANG, *argv)
    assert sentence in fault


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ((*BASE, "--sglang-dtype", "half"), "--sglang-dtype has no effect: --engine is embedded"),
        ((*SGLANG, *ADDRESSES, "--sglang-dtype", "half"), "--sglang-dtype has no effect: the engines run already"),
        ((*BASE, "--rollout-num-gpus", "2"), "have no effect with --engine embedded; use --scale engine=N"),
        ((*BASE, "--router-dp-aware"), "--router-dp-aware has no effect: this run has no router"),
        (
            (*SGLANG, "--router-address", "http://h:1", "--router-dp-aware"),
            "--router-dp-aware has no effect: the router runs already",
        ),
        (
            (*SGLANG, "--router-address", "http://h:1", "--router-policy", "random"),
            "--router-address has its own policy",
        ),
        (
            (*SGLANG, "--rollout-external-engine-addrs", "http://10.0.0.1:1"),
            "goes through this machine's memory, which http://10.0.0.1:1 cannot read if it is another machine",
        ),
        ((*SGLANG, "--update-weight-rolling", "2"), "--update-weight-rolling 2 lets all 1 engines stand still at once"),
    ],
)
def test_each_warning_in_its_words(argv: tuple[str, ...], sentence: str) -> None:
    (warning,) = check(*argv)
    assert sentence in warning


def test_colocated_engines_are_no_second_rank_of_a_gpu() -> None:
    argv = (*SGLANG, "--mode", "sync", "--colocate", "--update-weight-transport", "distributed")
    assert any("cannot join two processes on one GPU; with --colocate use tensor" in text for text in check(*argv))
