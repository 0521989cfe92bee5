"""How weights reach the engines. Owner: `models/weights` and `stages/engines/engine_control`."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct


class UpdateConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    update_weight_transport: Annotated[
        Literal["disk", "distributed", "tensor", "delta"],
        Meta(
            description="disk: the engine loads safetensors from shared memory; distributed: broadcast over gloo or "
            "NCCL; tensor: handles of shared memory (CUDA IPC on a GPU); delta: compressed differences in a shared "
            "directory, put together beside the engine"
        ),
    ] = "disk"
    update_weight_buffer_size: Annotated[
        int, Meta(ge=1, description="bytes of one bucket of the routes distributed and tensor")
    ] = 512 << 20
    update_weight_rolling: Annotated[
        int, Meta(ge=1, description="most engines that stand still for an update at the same time")
    ] = 1
    update_weight_delta_dir: Annotated[
        str | None, Meta(description="directory of the delta route that trainer and engines share; default: in the run")
    ] = None
    update_weight_max_failures: Annotated[
        int,
        Meta(
            ge=1,
            description="failures in a row after which an engine that takes no weights is started anew; one that runs "
            "already counts as away for a while, one in this process ends the run",
        ),
    ] = 5
    check_weight_update_equal: Annotated[
        bool, Meta(description="after an update, compare the engines' tensor checksums with each other")
    ] = False
