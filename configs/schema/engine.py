"""Which inference engine serves the rollouts. Owner: `models/engines`."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct


class SimulatedEngineConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Latency model: one decode step of b requests takes `a_ms + c_ms * b`; prefill costs per token."""

    a_ms: Annotated[float, Meta(ge=0, description="fixed time of a decode step, ms")] = 8.0
    c_ms: Annotated[float, Meta(ge=0, description="time of a decode step per running request, ms")] = 0.1
    prefill_ms_per_token: Annotated[float, Meta(ge=0, description="prefill time per prompt token, ms")] = 0.02
    length_mean: Annotated[float, Meta(gt=0, description="mean response length, tokens")] = 400.0
    length_sigma: Annotated[float, Meta(ge=0, description="sigma of the lognormal response length; 0 = constant")] = 1.0
    length_cap: Annotated[int, Meta(ge=1, description="longest response, tokens")] = 3200
    update_s: Annotated[float, Meta(ge=0, description="time that one weight update stalls the engine, seconds")] = 0.2
    time_scale: Annotated[float, Meta(gt=0, description="multiply all times, e.g. 0.05 for a twentieth")] = 1.0
    kv_tokens: Annotated[int, Meta(ge=1, description="KV capacity, tokens; beyond it requests are retracted")] = (
        1_000_000
    )
    vocab_size: Annotated[int, Meta(ge=2, description="token ids are drawn below this")] = 256


class EngineConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    engine: Annotated[
        Literal["embedded", "simulated", "sglang"],
        Meta(description="inference engine behind the SGLang protocol; sglang starts real SGLang servers"),
    ] = "embedded"
    pause_generation_mode: Annotated[
        Literal["in_place", "retract", "abort"],
        Meta(
            description="in-flight requests at a weight update: keep the KV cache (in_place), recompute it (retract), "
            "or return partial output and resume (abort)"
        ),
    ] = "in_place"
    engine_slots: Annotated[int, Meta(ge=1, description="most requests that one engine decodes together")] = 256
    engine_port: Annotated[
        int, Meta(ge=0, le=65535, description="first port of the engines' HTTP servers; 0 = any free port")
    ] = 0
    engine_device: Annotated[str, Meta(description="device of the embedded engine: auto, cpu, cuda, cuda:1")] = "auto"
    engine_dtype: Annotated[
        Literal["auto", "float32", "bfloat16"], Meta(description="precision of the embedded engine")
    ] = "auto"
    prefix_cache: Annotated[
        bool, Meta(description="reuse the KV cache of equal prompts within one weights version")
    ] = True
    frozen_engine: Annotated[
        tuple[str, ...],
        Meta(
            description="engines whose weights never change (teachers, judges): name=CHECKPOINT starts with the run, "
            "name=http://host:port is used as it is"
        ),
    ] = ()
    simulated: SimulatedEngineConfig = SimulatedEngineConfig()
