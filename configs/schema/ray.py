"""Processes on a Ray cluster: which cluster, and which of its nodes. Owner: `pipeline/hosts`."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct


class RayConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    ray_address: Annotated[
        str | None,
        Meta(
            description="the cluster to run on, as host:port, or auto for the one that this machine belongs to; "
            "default: $RAY_ADDRESS, else one of this machine alone, which ends with the run"
        ),
    ] = None
    ray_labels: Annotated[
        tuple[str, ...],
        Meta(
            description="nodes of a role (train, rollout, cpu) by their labels, as role=key:value,key:value, with | "
            "before each fallback: rollout=market:spot|market:on-demand; * is one value that all nodes of a group "
            "have: train=nvlink-domain:*"
        ),
    ] = ()
    ray_cpus: Annotated[
        dict[str, int],
        Meta(description="CPUs of one process of a role, as role=N; default: train=1 rollout=1 cpu=0"),
    ] = {}
    ray_placement: Annotated[
        Literal["pack", "spread"],
        Meta(description="whether processes are put on few nodes or on many, where nothing else decides it"),
    ] = "pack"
