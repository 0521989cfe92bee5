"""Inference engines: which, how many, their router, their health, and how weights reach them.

Owners: `models/engines`, `models/weights`, `stages/engines`, `stages/sampling`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from configs.schema.notation import Count, Natural, NonNegative, Port, Positive, ReadBy, Section

RouterPolicy = Literal["auto", "round_robin", "random", "power_of_two", "cache_aware", "session", "least_loaded"]


class SimulatedEngineConfig(Section, frozen=True, kw_only=True):
    """Latency model: one decode step of b requests takes `a_ms + c_ms * b`; prefill costs per token."""

    READ_BY: ClassVar[str] = "--engine simulated"

    a_ms: NonNegative = 8.0
    """fixed time of a decode step, ms"""
    c_ms: NonNegative = 0.1
    """time of a decode step per running request, ms"""
    prefill_ms_per_token: NonNegative = 0.02
    """prefill time per prompt token, ms"""
    length_mean: Positive = 400.0
    """mean response length, tokens"""
    length_sigma: NonNegative = 1.0
    """sigma of the lognormal response length; 0 = constant"""
    length_cap: Count = 3200
    """longest response, tokens"""
    update_s: NonNegative = 0.2
    """time that one weight update stalls the engine, seconds"""
    time_scale: Positive = 1.0
    """multiply all times, e.g. 0.05 for a twentieth"""
    kv_tokens: Count = 1_000_000
    """KV capacity, tokens; beyond it requests are retracted"""
    vocab_size: Annotated[int, Meta(ge=2)] = 256
    """token ids are drawn below this"""


class EngineConfig(Section, frozen=True, kw_only=True):
    """Inference engine."""

    engine: Literal["embedded", "simulated", "sglang"] = "embedded"
    """inference engine behind the SGLang protocol; sglang starts real SGLang servers"""
    pause_generation_mode: Literal["in_place", "retract", "abort"] = "in_place"
    """in-flight requests at a weight update: keep the KV cache (in_place), recompute it (retract), or return partial
    output and resume (abort)"""
    engine_slots: Count = 256
    """most requests that one engine decodes together"""
    engine_port: Port = 0
    """first port of the engines' HTTP servers; 0 = any free port"""
    engine_device: str = "auto"
    """device of the embedded engine: auto, cpu, cuda, cuda:1"""
    engine_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """precision of the embedded engine"""
    prefix_cache: bool = True
    """reuse the KV cache of equal prompts within one weights version"""
    frozen_engine: tuple[str, ...] = ()
    """engines whose weights never change (teachers, judges): name=CHECKPOINT starts with the run, name=http://host:port
    is used as it is"""
    simulated: SimulatedEngineConfig = SimulatedEngineConfig()


class SglangConfig(Section, frozen=True, kw_only=True):
    """SGLang servers."""

    sglang_python: str | None = None
    """Python interpreter of the environment that SGLang is installed in; default: .venv-sglang/bin/python of the
    project (make sglang-env), else the one that runs Sluice"""
    rollout_num_gpus: Count | None = None
    """GPUs of all engines; default: one engine's worth for each of --scale engine=N"""
    rollout_num_gpus_per_engine: Count = 1
    """GPUs of one engine: its tensor parallel times its pipeline parallel size"""
    rollout_external_engine_addrs: tuple[str, ...] = ()
    """engines that run already, as http://host:port; none is started then"""
    rollout_external_engine_token_file: str | None = None
    """file (mode 0600) with the token of engines, router and frozen engines that run already: what SGLang was given as
    its api key"""
    sglang_args: dict[str, Any] = {}
    """options of the SGLang server by name; on the command line --sglang-<option> value"""


class RouterConfig(Section, frozen=True, kw_only=True):
    """Router in front of the engines."""

    router: Literal["auto", "none", "sglang", "smg"] = "auto"
    """router process in front of the engines: sglang (sglang-router), smg (its successor), or none (the generate stage
    chooses); auto = sglang with SGLang engines, else none"""
    router_policy: RouterPolicy = "auto"
    """how an engine is chosen; session keeps the turns of a rollout on one engine; least_loaded is for --router none;
    auto = session where a loop stage sends rollouts round, else round_robin behind a router, least_loaded without
    one"""
    router_address: str | None = None
    """a router that runs already, as http://host:port; none is started then"""
    router_args: dict[str, Any] = {}
    """options of the router by name; on the command line --router-<option> value"""


class HealthConfig(Section, frozen=True, kw_only=True):
    """Health of the engines."""

    rollout_health_check_interval: Positive = 5.0
    """seconds between two requests to an engine's /health"""
    rollout_health_check_timeout: Positive = 10.0
    """seconds after which a request to /health counts as failed"""
    rollout_health_check_failures: Count = 3
    """consecutive failed requests to /health after which an engine is ended and started again"""
    rollout_health_check_first_wait: Positive = 600.0
    """most seconds that an engine may take to come up"""
    stream_interval: Natural = 32
    """tokens in each part of a streamed response; when an engine is lost, the parts that arrived are kept; 0 = do
    not stream, so that its partial output is lost"""


class UpdateConfig(Section, frozen=True, kw_only=True):
    """Weights to the engines."""

    update_weight_transport: Literal["disk", "distributed", "tensor", "delta"] = "disk"
    """disk: the engine loads safetensors from shared memory; distributed: broadcast over gloo or NCCL; tensor:
    handles of shared memory (CUDA IPC on a GPU); delta: compressed differences in a shared directory, assembled
    beside the engine"""
    update_weight_buffer_size: Annotated[Count, ReadBy("--update-weight-transport distributed or tensor")] = 512 << 20
    """bytes of one bucket of the routes distributed and tensor"""
    update_weight_rolling: Count = 1
    """most engines that are paused for an update at the same time"""
    update_weight_delta_dir: Annotated[str | None, ReadBy("--update-weight-transport delta")] = None
    """directory of the delta route that trainer and engines share; default: in the run"""
    update_weight_max_failures: Count = 5
    """consecutive failed updates after which an engine is started again; an external engine counts as away for a
    while instead, and an engine in this process ends the run"""
    check_weight_update_equal: Annotated[bool, ReadBy("several engines")] = False
    """after an update, compare the engines' tensor checksums with each other"""
