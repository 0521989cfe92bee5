"""Options that are passed on: what is refused and in which words, and what reaches the program's parser."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.engines.launch.environment import Installed, Option
from models.engines.launch.options import rendered, router_faults, server_faults

OPTIONS = (
    Option(names=("model-path", "model"), kind="value"),
    Option(names=("tp-size", "tensor-parallel-size"), kind="value", takes="int", default="1"),
    Option(names=("mem-fraction-static",), kind="value", takes="float"),
    Option(names=("max-total-tokens",), kind="value", takes="size"),
    Option(names=("dtype",), kind="value", choices=("auto", "bfloat16", "float32"), default="auto"),
    Option(names=("preferred-sampling-params",), kind="value", takes="json"),
    Option(names=("enable-return-routed-experts",), kind="flag"),
    Option(names=("disable-radix-cache",), kind="flag"),
    Option(names=("enable-tf32-matmul",), kind="switch"),
    Option(names=("lora-paths",), kind="list"),
    Option(names=("cuda-graph-bs-decode",), kind="list", takes="int"),
    Option(names=("skip-tokenizer-init",), kind="flag"),
    Option(names=("ep-size", "expert-parallel-size", "ep"), kind="value", takes="int"),
)
ROUTER = (
    Option(names=("policy",), kind="value", choices=("manual", "random")),
    Option(names=("retry-max-retries",), kind="value", takes="int"),
    Option(names=("cache-threshold",), kind="value", takes="float", default="0.3"),
    Option(names=("prefill",), kind="append"),
)
CPU = Installed(
    python="python",
    python_version="3.11",
    sglang="0.5.23",
    router="0.3.2",
    server_options=OPTIONS,
    router_options=ROUTER,
)


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"mem_fraction_static": 0.8},
        {"mem-fraction-static": "8e-1"},
        {"max_total_tokens": "64k", "dtype": "float32"},
        {"max_total_tokens": 4096},
        {"disable_radix_cache": True, "enable_tf32_matmul": False},
        {"disable_radix_cache": "false"},
        {"lora_paths": ["a=b", "c"]},
        {"lora_paths": "a=b"},
        {"cuda_graph_bs_decode": [1, 2, 4]},
        {"preferred_sampling_params": {"top_k": 5}},
        {"preferred_sampling_params": '{"top_k": 5}'},
        {"ep": 2},
    ],
)
def test_what_the_program_takes_is_not_refused(args: dict[str, Any]) -> None:
    assert server_faults(args, CPU) == []


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (
            {"mem_fraction_statc": 0.8},
            "--sglang-mem-fraction-statc is no option of SGLang 0.5.23; did you mean --sglang-mem-fraction-static?",
        ),
        ({"lora": "x"}, "--sglang-lora is no option of SGLang 0.5.23; did you mean --sglang-lora-paths?"),
        ({"quux_of_mars": 1}, "--sglang-quux-of-mars is no option of SGLang 0.5.23; see the help of that program"),
        (
            {"mem_fraction_static": "most"},
            "--sglang-mem-fraction-static is 'most', but must be a number; give for example 0.5",
        ),
        (
            {"max_total_tokens": "64kk"},
            "--sglang-max-total-tokens is '64kk', but must be a whole number, or one with k",
        ),
        ({"dtype": "float23"}, "is 'float23', but must be one of auto, bfloat16, float32; did you mean float32?"),
        ({"dtype": True}, "--sglang-dtype has no value, but must be one of auto, bfloat16, float32; give one"),
        ({"dtype": ["auto", "float32"]}, "but it takes one value, one of auto"),
        (
            {"disable_radix_cache": "yes"},
            "--sglang-disable-radix-cache is 'yes', but it takes no value; write it alone",
        ),
        ({"cuda_graph_bs_decode": [1, "x"]}, "holds 'x', but its values must be a whole number; correct that one"),
        ({"preferred_sampling_params": "{top"}, "is '{top', but must be JSON; give for example {}"),
        (
            {"no_enable_tf32_matmul": True},
            "is the negative of an option, which is not passed on as a flag; write "
            "sglang.sglang_args.enable_tf32_matmul=false",
        ),
        ({"ep": 2, "ep-size": 4}, "--sglang-ep-size and --sglang-ep are the same option of SGLang 0.5.23; leave one"),
        (
            {"model": "x"},
            "--sglang-model cannot be passed on: Sluice serves the checkpoint that it trains; use --hf-ch",
        ),
        ({"tensor_parallel_size": 2}, "cannot be passed on: it follows from --rollout-num-gpus-per-engine"),
        ({"skip_tokenizer_init": True}, "samples carry their text, and stop strings need it; leave it out"),
        ({"enable_return_routed_experts": True}, "ends the server at its start where there is no GPU; leave it out"),
    ],
)
def test_each_refusal_of_the_server_in_its_words(args: dict[str, Any], sentence: str) -> None:
    (fault,) = server_faults(args, CPU)
    assert sentence in fault


def test_a_gpu_can_return_routed_experts() -> None:
    gpu = Installed(python="python", python_version="3.11", sglang="0.5.23", cuda=True, server_options=OPTIONS)
    assert server_faults({"enable_return_routed_experts": True}, gpu) == []


def test_all_faults_come_at_once() -> None:
    assert len(server_faults({"a": 1, "dtype": "b", "port": 3, "tp-size": 2, "mem-fraction-static": ""}, CPU)) == 5


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ({"policy": "random"}, "--router-policy cannot be passed on: use --router-policy"),
        ({"retry_max_retries": 3}, "the generate stage alone repeats a request, from its partial output"),
        ({"cache_treshold": 0.5}, "is no option of sglang-router 0.3.2; did you mean --router-cache-threshold?"),
        ({"cache_threshold": "x"}, "--router-cache-threshold is 'x', but must be a number; give for example 0.3"),
    ],
)
def test_each_refusal_of_the_router_in_its_words(args: dict[str, Any], sentence: str) -> None:
    (fault,) = router_faults(args, CPU)
    assert sentence in fault


def test_a_repeated_option_is_written_once_for_each_value() -> None:
    args = {"prefill": ["http://a:1 9000", "http://b:1"]}
    assert router_faults(args, CPU) == []
    assert rendered(args, ROUTER) == ["--prefill", "http://a:1", "9000", "--prefill", "http://b:1"]


def test_the_later_spelling_counts() -> None:
    """A recipe may write underscores and the command line dashes."""
    assert rendered({"max_total_tokens": 1, "max-total-tokens": 2}, OPTIONS) == ["--max-total-tokens", "2"]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(exit_on_error=False)
    kinds: dict[str, Any] = {"int": int, "float": float, "size": str, "json": json.loads, "text": str}
    for option in OPTIONS:
        names = [f"--{name}" for name in option.names]
        match option.kind:
            case "flag":
                made.add_argument(*names, action="store_true")
            case "switch":
                made.add_argument(*names, action=argparse.BooleanOptionalAction)
            case "list":
                made.add_argument(*names, nargs="+", type=kinds[option.takes])
            case _:
                made.add_argument(*names, type=kinds[option.takes], choices=option.choices or None)
    return made


WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=9)
VALUES = {
    "mem_fraction_static": st.floats(-10, 10),
    "dtype": st.sampled_from(["auto", "bfloat16", "float32"]),
    "preferred_sampling_params": st.dictionaries(WORDS, st.one_of(st.integers(), WORDS, st.booleans()), max_size=3),
    "disable_radix_cache": st.booleans(),
    "enable_tf32_matmul": st.booleans(),
    "cuda_graph_bs_decode": st.lists(st.integers(0, 999), min_size=1, max_size=4),
    "ep_size": st.integers(-9, 9),
}


@given(st.fixed_dictionaries({}, optional=VALUES))
def test_what_passes_the_check_arrives_as_it_was_meant(args: dict[str, Any]) -> None:
    """Through a real parser: negative numbers, JSON, lists and switches included."""
    assert server_faults(args, CPU) == []
    parsed = vars(parser().parse_args(rendered(args, OPTIONS)))
    for name, value in args.items():
        assert parsed[name] == value, name
    untouched = {"disable_radix_cache": False}
    for name in parsed.keys() - args.keys():
        assert parsed[name] == untouched.get(name, False if name.startswith(("enable_r", "skip")) else None)
