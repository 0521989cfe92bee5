"""The trainer group: the processes that train one policy together, and how a batch is dealt to them. Owner:
`models/train`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct


class ParallelConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    actor_num_nodes: Annotated[int, Meta(ge=1, description="machines that the trainer runs on")] = 1
    actor_num_gpus_per_node: Annotated[
        int, Meta(ge=1, description="processes of the trainer on each machine, one for each GPU; on a CPU too")
    ] = 1
    use_dynamic_batch_size: Annotated[
        bool,
        Meta(description="micro-batches by --max-tokens-per-gpu; off: by --micro-batch-size"),
    ] = True
    micro_batch_size: Annotated[
        int, Meta(ge=1, description="sequences of one micro-batch, with --no-use-dynamic-batch-size")
    ] = 1
    balance_data: Annotated[
        bool, Meta(description="deal sequences to the trainer's processes by estimated FLOPs, not by number")
    ] = True
    distributed_timeout_minutes: Annotated[
        float, Meta(gt=0, description="time after which a collective of the trainer counts as hung")
    ] = 10.0
