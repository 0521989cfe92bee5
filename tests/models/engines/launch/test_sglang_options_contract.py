"""What we assume about the argument lists of the installed SGLang 0.5.23 and sglang-router 0.3.2.

Needs the real environment (`tests/sglang_server.py` says which). An upgrade that renames an option shows here.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from configs.schema import Config, EngineConfig, RouterConfig, SglangConfig
from models.engines.launch.command import Launch, router_launch, server_launch
from models.engines.launch.environment import Installed, probe
from models.engines.launch.options import ROUTER_RESERVED, SERVER_RESERVED, router_faults, server_faults
from models.engines.protocol import EXPECTED_SGLANG
from tests.sglang_server import needs_sglang

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("options of sglang")]  # each worker would ask it anew

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
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return probe(needs_sglang(), cache=tmp_path_factory.mktemp("answers"))


def parsed(launches: Sequence[Launch], module: str, owner: str, **keywords: bool) -> list[dict[str, object]]:
    """The values that the program's own parser reads from command lines. Fails if it refuses one."""
    call = json.dumps([module, owner, keywords, [launch.argv[3:] for launch in launches]])
    first = launches[0]
    done = subprocess.run(
        [first.argv[0], "-c", PARSE, call],
        capture_output=True,
        text=True,
        env={**os.environ, **first.env},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    values: list[dict[str, object]] = json.loads(done.stderr.splitlines()[-1])
    return values


def test_versions(installed: Installed) -> None:
    assert installed.sglang == EXPECTED_SGLANG == "0.5.23"
    assert installed.router == "0.3.2"
    assert len(installed.server_options) > 500
    assert len(installed.router_options) > 90


def test_reserved_options_exist(installed: Installed) -> None:
    """Else nobody would be told why an option of another name is not his to pass on."""
    for name in SERVER_RESERVED:
        assert installed.option("server", name) is not None, name
    for name in set(ROUTER_RESERVED) - NO_ROUTER_OF_THIS_VERSION:
        assert installed.option("router", name) is not None, name


def test_the_server_reads_its_command_lines_as_they_are_meant(installed: Installed, tmp_path: Path) -> None:
    """One for a CPU, and one for GPUs, which is not run here: only that the parser takes it."""
    args = {"schedule_conservativeness": 0.3, "cuda_graph_bs_decode": [1, 2], "preferred_sampling_params": {"top_k": 5}}
    args |= {
        "max_total_tokens": "16Ki",
        "schedule_policy": "lpm",
        "enable_tf32_matmul": False,
        "skip_server_warmup": True,
    }
    assert server_faults(args, installed) == []
    config = Config(engine=EngineConfig(engine="sglang"), sglang=SglangConfig(sglang_args=args))
    cpu = server_launch(config, installed, model_path=str(tmp_path), port=31000, max_context=512, seed=7)
    on_gpus = Config(
        engine=EngineConfig(engine="sglang", engine_dtype="bfloat16", prefix_cache=False),
        sglang=SglangConfig(rollout_num_gpus_per_engine=8, sglang_args={"pp_size": 2}),
        asynchrony=replace(Config().asynchrony, colocate=True),
        run=replace(Config().run, deterministic=True),
    )
    gpus = replace(installed, cuda=True)
    gpu = server_launch(on_gpus, gpus, model_path="/m", port=1, max_context=None, seed=7)
    of_cpu, of_gpu = parsed([cpu, gpu], "sglang.srt.server_args", "ServerArgs")
    expected = {
        "model_path": str(tmp_path),
        "port": 31000,
        "host": "127.0.0.1",
        "random_seed": 7,
        "context_length": 512,
        "max_running_requests": 256,
        "stream_interval": 32,
        "incremental_streaming_output": True,
        "enable_metrics": True,
        "tp_size": 1,
        "device": "cpu",
        "attention_backend": "torch_native",
        "cuda_graph_backend_decode": "disabled",
        "dtype": "float32",
        "sleep_on_idle": True,
        "disable_overlap_schedule": True,
        "skip_tokenizer_init": False,
        "weight_version": "default",
        "max_total_tokens": 16384,
        "schedule_conservativeness": 0.3,
        "cuda_graph_bs_decode": [1, 2],
        "preferred_sampling_params": {"top_k": 5},
        "schedule_policy": "lpm",
        "enable_tf32_matmul": False,
        "skip_server_warmup": True,
    }
    assert {name: of_cpu[name] for name in expected} == expected
    assert (of_gpu["tp_size"], of_gpu["pp_size"], of_gpu["dtype"]) == (4, 2, "bfloat16")
    for name in ("enable_memory_saver", "enable_deterministic_inference", "disable_radix_cache"):
        assert of_gpu[name] is True, name
    assert of_gpu["disable_overlap_schedule"] is False


def test_the_router_reads_its_command_line_as_it_is_meant(installed: Installed) -> None:
    args = {"max_idle_secs": 60, "log_level": "info"}
    assert router_faults(args, installed) == []
    config = Config(
        engine=EngineConfig(engine="sglang"), router=RouterConfig(router_policy="session", router_args=args)
    )
    launch = router_launch(config, installed, port=42000, metrics_port=42001)
    (values,) = parsed([launch], "sglang_router.router_args", "RouterArgs", use_router_prefix=False)
    expected = {
        "host": "127.0.0.1",
        "port": 42000,
        "prometheus_host": "127.0.0.1",
        "prometheus_port": 42001,
        "policy": "manual",
        "assignment_mode": "min_load",
        "disable_retries": True,
        "request_timeout_secs": 660,
        "worker_startup_check_interval": 1,
        "cb_failure_threshold": 3,
        "cb_success_threshold": 1,
        "cb_timeout_duration_secs": 5,
        "health_check_interval_secs": 5,
        "health_check_timeout_secs": 10,
        "health_failure_threshold": 3,
        "health_success_threshold": 1,
        "max_idle_secs": 60,
        "log_level": "info",
    }
    assert {name: values[name] for name in expected} == expected
