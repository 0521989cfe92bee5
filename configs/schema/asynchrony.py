"""How far generation may run ahead of training. Owner: `stages/staleness_gate` and the weights path."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct


class AsyncConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    async_buffer_size: Annotated[
        int, Meta(ge=0, description="rollout batches that may be out beyond the one in training (N)")
    ] = 2
    update_weights_interval: Annotated[int, Meta(ge=1, description="publish weights every K rollout batches")] = 1
    max_staleness: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="no token older than this many versions is trained; default: N + K - 1"),
    ] = None
    async_unused_samples_handler: Annotated[
        Literal["requeue", "drop"],
        Meta(description="prompt of a group that became too old: submit it once more, or not"),
    ] = "requeue"
    buffer_order: Annotated[
        str,
        Meta(
            description="which finished group is trained next: oldest_first, ready_first, priority (strongest learning "
            "signal), or package.module:function"
        ),
    ] = "oldest_first"
    colocate: Annotated[bool, Meta(description="engine and trainer share their devices in turns (sync mode only)")] = (
        False
    )
