"""Options and command lines: what is refused and in which words, and what reaches the program's parser."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from configs.schema import Config, EngineConfig, HealthConfig, RouterConfig, RunConfig, SglangConfig, ToolsConfig
from configs.schema.rollout import AsyncConfig, RolloutConfig
from configs.schema.run import ObserveConfig
from models.engines.launch.command import Launch, router_launch, server_launch
from models.engines.launch.environment import Installed, probe
from models.engines.launch.options import ROUTER_RESERVED, SERVER_RESERVED, rendered, router_faults, server_faults
from models.engines.protocol import EXPECTED_SGLANG
from models.errors import EnvironmentMissing, LaunchRefused
from tests.models.engines.launch.fake_environment import SERVER_ARGS
from tests.sglang_server import needs_sglang


def test_what_the_program_takes_is_not_refused(cpu: Installed) -> None:
    taken = [{"mem-fraction-static": "8e-1"}, {"max_total_tokens": "64k", "dtype": "float32"}]
    taken += [{"max_total_tokens": 4096}, {"disable_radix_cache": "false"}, {"ep": 2}]
    taken += [{"lora_paths": ["a=b", "c"]}, {"lora_paths": "a=b"}, {"preferred_sampling_params": '{"top_k": 5}'}]
    for args in taken:
        assert server_faults(args, cpu) == [], args


NONE = "is no option of SGLang 0.5.23; did you mean"
FRACTION = "--sglang-mem-fraction-static"


@pytest.mark.parametrize(("args", "sentence"), [
    ({"mem_fraction_statc": 0.8}, f"--sglang-mem-fraction-statc {NONE} {FRACTION}?"),
    ({"lora": "x"}, f"--sglang-lora {NONE} --sglang-lora-paths?"),
    ({"quux_of_mars": 1}, "--sglang-quux-of-mars is no option of SGLang 0.5.23; see the help of that program"),
    ({"mem_fraction_static": "most"}, f"{FRACTION} is 'most', but must be a number; give for example 0.5"),
    ({"max_total_tokens": "64kk"}, "max-total-tokens is '64kk', but must be a whole number, or one with k"),
    ({"dtype": "float23"}, "is 'float23', but must be one of auto, bfloat16, float32; did you mean float32?"),
    ({"dtype": True}, "--sglang-dtype has no value, but must be one of auto, bfloat16, float32; give one"),
    ({"dtype": ["auto", "float32"]}, "but it takes one value, one of auto"),
    ({"disable_radix_cache": "yes"}, "disable-radix-cache is 'yes', but it takes no value; write it alone"),
    ({"cuda_graph_bs_decode": [1, "x"]}, "holds 'x', but its values must be a whole number; correct it"),
    ({"preferred_sampling_params": "{top"}, "is '{top', but must be JSON; give for example {}"),
    ({"no_enable_tf32_matmul": True}, "a flag; write sglang.sglang_args.enable_tf32_matmul=false"),
    ({"ep": 2, "ep-size": 4}, "--sglang-ep-size and --sglang-ep are the same option of SGLang 0.5.23; leave one"),
    ({"model": "x"}, "--sglang-model cannot be passed on: Sluice serves the checkpoint that it trains; use"),
    ({"tensor_parallel_size": 2}, "cannot be passed on: it follows from --rollout-num-gpus-per-engine"),
    ({"skip_tokenizer_init": True}, "samples carry their text, and stop strings need it; leave it out"),
    ({"enable_return_routed_experts": True}, "ends the server at its start where there is no GPU; leave it out"),
])  # fmt: skip
def test_each_refusal_of_the_server_in_its_words(cpu: Installed, args: dict[str, Any], sentence: str) -> None:
    (fault,) = server_faults(args, cpu)
    assert sentence in fault


def test_data_parallel_attention_inside_an_engine_is_passed_on(cpu: Installed) -> None:
    """Its parts are updated together; copies of a whole engine would not be."""
    assert server_faults({"enable_dp_attention": True, "dp_size": 8}, cpu) == []
    (fault,) = server_faults({"enable_dp_attention": False, "dp_size": 8}, cpu)
    assert "a replica is an engine here" in fault


def test_all_faults_come_at_once(cpu: Installed) -> None:
    assert len(server_faults({"a": 1, "dtype": "b", "port": 3, "tp-size": 2, "mem-fraction-static": ""}, cpu)) == 5


@pytest.mark.parametrize(("args", "sentence"), [
    ({"policy": "random"}, "--router-policy cannot be passed on: use --router-policy"),
    ({"retry_max_retries": 3}, "the generate stage alone repeats a request, from its partial output"),
    ({"cache_treshold": 0.5}, "is no option of sglang-router 0.3.2; did you mean --router-cache-threshold?"),
    ({"cache_threshold": "x"}, "--router-cache-threshold is 'x', but must be a number; give for example 0.3"),
])  # fmt: skip
def test_each_refusal_of_the_router_in_its_words(cpu: Installed, args: dict[str, Any], sentence: str) -> None:
    (fault,) = router_faults(args, cpu)
    assert sentence in fault


def test_a_repeated_option_is_written_once_for_each_value(cpu: Installed) -> None:
    args = {"prefill": ["http://a:1 9000", "http://b:1"]}
    assert router_faults(args, cpu) == []
    assert rendered(args, cpu.options["router"]) == ["--prefill", "http://a:1", "9000", "--prefill", "http://b:1"]


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    """The one whose options `cpu` has."""
    made, names = argparse.ArgumentParser(exit_on_error=False), dict[str, Any]()
    exec(SERVER_ARGS, names)
    names["ServerArgs"].add_cli_args(made)
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


@settings(max_examples=20)
@given(args=st.fixed_dictionaries({}, optional=VALUES))
def test_what_passes_the_check_arrives_as_it_was_meant(
    cpu: Installed, parser: argparse.ArgumentParser, args: dict[str, Any]
) -> None:
    """Through a real parser: negative numbers, JSON, lists and switches included."""
    assert server_faults(args, cpu) == []
    model = ["--model-path", "m"]
    parsed = vars(parser.parse_args([*model, *rendered(args, cpu.options["server"])]))
    assert parsed == vars(parser.parse_args(model)) | args


# The command lines: what a CPU and a GPU get, what follows from which flag, and that the user's own options win.


SGLANG = Config(engine=EngineConfig(engine="sglang"))


@pytest.fixture
def gpu(cpu: Installed) -> Installed:
    return replace(cpu, cuda=True)


def server(config: Config, installed: Installed, **keywords: Any) -> Launch:
    settings = {"model_path": "/model", "port": 31000, "max_context": 512, "seed": 7, **keywords}
    return server_launch(config, installed, **settings)


def values(launch: Launch) -> Mapping[str, str]:
    """Option -> value; a flag has an empty one. Fails if an option is there twice."""
    found: dict[str, str] = {}
    name = ""
    for text in launch.argv[3:]:
        if text.startswith("--"):
            name, _, value = text[2:].partition("=")
            assert name not in found, f"{name} is given twice"
            found[name] = value
        else:
            found[name] = f"{found[name]} {text}".strip()
    return found


def test_a_server_on_gpus(gpu: Installed) -> None:
    config = replace(SGLANG, sglang=SglangConfig(rollout_num_gpus_per_engine=4, sglang_args={"pp_size": "2"}))
    launch = server(config, gpu)
    given = values(launch)
    assert given["tp-size"] == given["pp-size"] == "2"
    for absent in ("device", "attention-backend", "dtype", "mem-fraction-static", "disable-overlap-schedule"):
        assert absent not in given, absent
    assert launch.env["PYTHONPATH"] == ""  # nothing of ours, and no stand-in for the kernels
    assert "SGLANG_USE_CPU_ENGINE" not in launch.env


def sglang(**engine: Any) -> Config:
    return replace(SGLANG, engine=EngineConfig(engine="sglang", **engine))


NO_STREAMS = replace(SGLANG, health=HealthConfig(stream_interval=0))


@pytest.mark.parametrize(("config", "on", "present", "absent"), [
    (NO_STREAMS, "cpu", "", "stream-interval incremental-streaming-output"),
    (sglang(pause_generation_mode="retract"), "cpu", "sleep-on-idle", "disable-overlap-schedule"),
    (sglang(prefix_cache=False), "cpu", "disable-radix-cache", ""),
    (replace(SGLANG, asynchrony=AsyncConfig(colocate=True)), "cpu", "", "enable-memory-saver"),
    (replace(SGLANG, asynchrony=AsyncConfig(colocate=True)), "gpu", "enable-memory-saver", ""),
    (replace(SGLANG, run=RunConfig(deterministic=True)), "gpu", "enable-deterministic-inference", ""),
])  # fmt: skip
def test_options_follow_from_flags(
    cpu: Installed, gpu: Installed, config: Config, on: str, present: str, absent: str
) -> None:
    given = values(server(config, cpu if on == "cpu" else gpu))
    assert set(present.split()) <= given.keys()
    assert not set(absent.split()) & given.keys()


@pytest.mark.parametrize(("level", "of_server", "of_router"), [
    ("debug", "debug", "debug"),
    ("info", "info", "warn"),
    ("warning", "warning", "warn"),
    ("error", "error", "error"),
])  # fmt: skip
def test_servers_of_others_log_at_the_level_of_the_run(
    cpu: Installed, level: str, of_server: str, of_router: str
) -> None:
    config = replace(SGLANG, observe=msgspec.convert({"log_level": level}, ObserveConfig))
    assert values(server(config, cpu))["log-level"] == of_server
    assert values(router_launch(config, cpu, port=1, metrics_port=2))["log-level"] == of_router


def test_an_option_that_this_version_lacks_is_not_given(cpu: Installed) -> None:
    kept = tuple(o for o in cpu.options["server"] if "cuda-graph-backend" not in o.names[0])
    old = replace(cpu, options=cpu.options | {"server": kept})
    given = values(server(SGLANG, old))
    assert "disable-cuda-graph" in given
    assert "cuda-graph-backend-decode" not in given


def test_the_users_own_options_win(cpu: Installed) -> None:
    args = {"mem_fraction_static": 0.1, "dtype": "bfloat16", "max-total-tokens": "32k", "lora_paths": ["a", "b"]}
    args |= {"sleep_on_idle": False, "json-model-override-args": '{"x": 1}'}
    given = values(server(replace(SGLANG, sglang=SglangConfig(sglang_args=args)), cpu))
    assert (given["mem-fraction-static"], given["dtype"], given["max-total-tokens"]) == ("0.1", "bfloat16", "32k")
    assert (given["lora-paths"], given["json-model-override-args"]) == ("a b", '{"x": 1}')
    assert "sleep-on-idle" not in given


@pytest.mark.parametrize(
    ("slots", "context", "tokens"),
    [(256, 512, 131072), (1, 512, 16384), (256, None, 262144), (256, 40960, 262144), (1, 1_000_000, 1_000_000)],
)
def test_the_cache_of_a_cpu_is_bounded_but_holds_one_request(
    cpu: Installed, slots: int, context: int | None, tokens: int
) -> None:
    assert values(server(sglang(engine_slots=slots), cpu, max_context=context))["max-total-tokens"] == str(tokens)


def test_gpus_without_a_gpu_and_odd_splits_are_refused(cpu: Installed, gpu: Installed) -> None:
    two = replace(SGLANG, sglang=SglangConfig(rollout_num_gpus_per_engine=2))
    with pytest.raises(EnvironmentMissing, match=r"-num-gpus-per-engine is 2, but .* sees no GPU; set it to 1"):
        server(two, cpu)
    odd = replace(SGLANG, sglang=SglangConfig(rollout_num_gpus_per_engine=4, sglang_args={"pp_size": 3}))
    with pytest.raises(LaunchRefused, match="--sglang-pp-size is 3, but must divide --rollout-num-gpus-per-engine 4"):
        server(odd, gpu)


def test_a_proxy_of_the_machine_does_not_get_loopback_requests(cpu: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "internal")
    hosts = server(SGLANG, cpu).env["no_proxy"].split(",")
    assert hosts[:3] == ["internal", "127.0.0.1", "localhost"]


def test_the_router(cpu: Installed) -> None:
    launch = router_launch(SGLANG, cpu, port=42000, metrics_port=42001)
    assert launch.argv[:3] == (cpu.python, "-m", "sglang_router.launch_router")
    assert launch.url == "http://127.0.0.1:42000"
    assert values(launch) == {
        "host": "127.0.0.1", "port": "42000", "prometheus-host": "127.0.0.1", "prometheus-port": "42001",
        "policy": "round_robin", "disable-retries": "", "log-level": "warn", "cb-failure-threshold": "3",
        "health-check-interval-secs": "5", "health-check-timeout-secs": "10", "health-failure-threshold": "3",
        "request-timeout-secs": "660",  # the deadline of a request, and a minute
    }  # fmt: skip
    config = replace(SGLANG, rollout=RolloutConfig(request_timeout_secs=1799.5))
    assert routed(config, cpu)["request-timeout-secs"] == "1860"


def routed(config: Config, installed: Installed) -> Mapping[str, str]:
    """The options of the router of a run."""
    return values(router_launch(config, installed, port=1, metrics_port=2))


def test_sessions_are_the_routers_manual_policy(cpu: Installed) -> None:
    config = replace(SGLANG, tools=ToolsConfig(tools=("calculator",)))  # turns of a rollout stay together
    given = routed(config, cpu)
    assert (given["policy"], given["assignment-mode"]) == ("manual", "min_load")
    chosen = replace(config, router=RouterConfig(router_policy="random", router_args={"log_level": "debug"}))
    given = routed(chosen, cpu)
    assert (given["policy"], given["log-level"]) == ("random", "debug")
    assert "assignment-mode" not in given


def test_engines_of_others_are_not_evicted_for_a_slow_health(cpu: Installed) -> None:
    given = routed(replace(SGLANG, sglang=SglangConfig(rollout_external_engine_addrs=("http://h:1",))), cpu)
    assert "disable-health-check" in given
    assert "health-check-interval-secs" not in given


def test_routers_that_cannot_be_started(cpu: Installed) -> None:
    def start(**router: Any) -> None:
        routed(replace(SGLANG, router=RouterConfig(**router)), cpu)

    with pytest.raises(EnvironmentMissing, match=r"smg is not installed in .*; install smg==1\.13\.0 there"):
        start(router="smg")
    with pytest.raises(LaunchRefused, match="least_loaded is the generate stage's own; choose another one"):
        start(router_policy="least_loaded")
    for absent in ({"router": "none"}, {"router_address": "http://h:1"}):
        with pytest.raises(LaunchRefused, match="there is none to start"):
            start(**absent)
    with pytest.raises(EnvironmentMissing, match="run `make sglang-env`, or add --router none"):
        routed(SGLANG, replace(cpu, router=None, options={"server": cpu.options["server"]}))


# What we assume about the argument lists of the installed SGLang 0.5.23 and sglang-router 0.3.2.


# Several command lines in one process, for the imports take most of the time.
PARSE = """
import argparse, importlib, json, sys
module, owner, keywords, lines = json.loads(sys.argv[1])
parser = argparse.ArgumentParser(allow_abbrev=False)
getattr(importlib.import_module(module), owner).add_cli_args(parser, **keywords)
values = [vars(parser.parse_args(line)) for line in lines]
sys.stderr.write("\\n" + json.dumps(values, default=str))
"""
NO_ROUTER_OF_THIS_VERSION = {"tenant-api-key", "remove-unhealthy-workers"}  # smg has them


@pytest.fixture(scope="module")
def installed() -> Installed:
    return probe(needs_sglang())  # answers are kept under all that they depend on, this project's code included


def parsed(launches: Sequence[Launch], module: str, owner: str, **keywords: bool) -> list[dict[str, object]]:
    """The values that the program's own parser reads from command lines. Fails if it refuses one."""
    call = json.dumps([module, owner, keywords, [launch.argv[3:] for launch in launches]])
    command, env = [launches[0].argv[0], "-c", PARSE, call], {**os.environ, **launches[0].env}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    values: list[dict[str, object]] = json.loads(done.stderr.splitlines()[-1])
    return values


@pytest.mark.slow
@pytest.mark.xdist_group("options of sglang")
def test_reserved_options_exist(installed: Installed) -> None:
    """Else nobody would be told why an option of another name is not his to pass on."""
    assert installed.sglang == EXPECTED_SGLANG == "0.5.23"
    assert installed.router == "0.3.2"
    assert len(installed.options["server"]) > 500
    assert len(installed.options["router"]) > 90
    for name in SERVER_RESERVED:
        assert installed.option("server", name) is not None, name
    for name in set(ROUTER_RESERVED) - NO_ROUTER_OF_THIS_VERSION:
        assert installed.option("router", name) is not None, name


@pytest.mark.slow
@pytest.mark.xdist_group("options of sglang")
def test_the_server_reads_its_command_lines_as_they_are_meant(installed: Installed) -> None:
    """One for a CPU, and one for GPUs, which is not run here: only that the parser takes it."""
    args = {"schedule_conservativeness": 0.3, "cuda_graph_bs_decode": [1, 2], "preferred_sampling_params": {"top_k": 5}}
    args |= {"schedule_policy": "lpm", "enable_tf32_matmul": False, "skip_server_warmup": True}
    args |= {"max_total_tokens": "16Ki"}
    assert server_faults(args, installed) == []
    on_cpu = replace(SGLANG, sglang=SglangConfig(sglang_args=args))
    on_gpus = replace(
        sglang(engine_dtype="bfloat16", prefix_cache=False),
        sglang=SglangConfig(rollout_num_gpus_per_engine=8, sglang_args={"pp_size": 2}),
        asynchrony=AsyncConfig(colocate=True),
        run=RunConfig(deterministic=True),
    )
    launches = [server(on_cpu, installed), server(on_gpus, replace(installed, cuda=True), max_context=None)]
    of_cpu, of_gpu = parsed(launches, "sglang.srt.server_args", "ServerArgs")
    expected = args | dict(
        model_path="/model", port=31000, host="127.0.0.1", random_seed=7, context_length=512, tp_size=1,
        max_running_requests=256, stream_interval=32, incremental_streaming_output=True, enable_metrics=True,
        device="cpu", attention_backend="torch_native", cuda_graph_backend_decode="disabled", dtype="float32",
        sleep_on_idle=True, disable_overlap_schedule=True, skip_tokenizer_init=False, weight_version="default",
        max_total_tokens=16384,
    )  # fmt: skip
    assert {name: of_cpu[name] for name in expected} == expected
    assert (of_gpu["tp_size"], of_gpu["pp_size"], of_gpu["dtype"]) == (4, 2, "bfloat16")
    for name in ("enable_memory_saver", "enable_deterministic_inference", "disable_radix_cache"):
        assert of_gpu[name] is True, name
    assert of_gpu["disable_overlap_schedule"] is False


@pytest.mark.slow
@pytest.mark.xdist_group("options of sglang")
def test_the_router_reads_its_command_line_as_it_is_meant(installed: Installed) -> None:
    args = {"max_idle_secs": 60, "log_level": "info"}
    assert router_faults(args, installed) == []
    config = replace(SGLANG, router=RouterConfig(router_policy="session", router_args=args))
    launch = router_launch(config, installed, port=42000, metrics_port=42001)
    (values,) = parsed([launch], "sglang_router.router_args", "RouterArgs", use_router_prefix=False)
    expected = args | dict(
        host="127.0.0.1", port=42000, prometheus_host="127.0.0.1", prometheus_port=42001, policy="manual",
        assignment_mode="min_load", disable_retries=True, request_timeout_secs=660, worker_startup_check_interval=1,
        cb_failure_threshold=3, cb_success_threshold=1, cb_timeout_duration_secs=5, health_check_interval_secs=5,
        health_check_timeout_secs=10, health_failure_threshold=3, health_success_threshold=1,
    )  # fmt: skip
    assert {name: values[name] for name in expected} == expected
