"""The command lines: what a CPU and a GPU get, what follows from which flag, and that the user's own options win."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from configs.schema import Config, EngineConfig, HealthConfig, RouterConfig, RunConfig, SglangConfig, ToolsConfig
from configs.schema.rollout import AsyncConfig, RolloutConfig
from models.engines.launch.command import Launch, router_launch, server_launch
from models.engines.launch.environment import Installed
from models.errors import EnvironmentMissing, LaunchRefused

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


@pytest.mark.parametrize(
    ("config", "on", "present", "absent"),
    [
        (NO_STREAMS, "cpu", "", "stream-interval incremental-streaming-output"),
        (sglang(pause_generation_mode="retract"), "cpu", "sleep-on-idle", "disable-overlap-schedule"),
        (sglang(prefix_cache=False), "cpu", "disable-radix-cache", ""),
        (replace(SGLANG, asynchrony=AsyncConfig(colocate=True)), "cpu", "", "enable-memory-saver"),
        (replace(SGLANG, asynchrony=AsyncConfig(colocate=True)), "gpu", "enable-memory-saver", ""),
        (replace(SGLANG, run=RunConfig(deterministic=True)), "gpu", "enable-deterministic-inference", ""),
    ],
)
def test_options_follow_from_flags(
    cpu: Installed, gpu: Installed, config: Config, on: str, present: str, absent: str
) -> None:
    given = values(server(config, cpu if on == "cpu" else gpu))
    assert set(present.split()) <= given.keys()
    assert not set(absent.split()) & given.keys()


def test_an_option_that_this_version_lacks_is_not_given(cpu: Installed) -> None:
    old = replace(cpu, server_options=tuple(o for o in cpu.server_options if "cuda-graph-backend" not in o.names[0]))
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
    with pytest.raises(LaunchRefused, match=r"--rollout-num-gpus-per-engine is 2, but .* sees no GPU; set it to 1"):
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
    for settings in ({"router": "none"}, {"router_address": "http://h:1"}):
        with pytest.raises(LaunchRefused, match="there is none to start"):
            start(**settings)
    with pytest.raises(EnvironmentMissing, match="run `make sglang-env`, or add --router none"):
        routed(SGLANG, replace(cpu, router=None, router_options=()))
