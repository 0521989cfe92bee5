"""How many GPUs a run needs, and on how many nodes. Pure; whether this machine has them is seen at the start."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from configs.graph import replicas
from configs.plan.parallel_layout import layout_of
from configs.schema import Config

NODE_GPUS: Final = 8  # of the nodes that layouts are written for


class Gpus(Struct, frozen=True, kw_only=True):
    """GPUs of the trainer's processes and of all engines. `shared`: they take turns on the same ones;
    `trainer_nodes`: on which the trainer is spread."""

    trainer: int
    engines: int
    trainer_nodes: int = 1
    shared: bool = False

    @property
    def total(self) -> int:
        return max(self.trainer, self.engines) if self.shared else self.trainer + self.engines

    @property
    def nodes(self) -> int:
        """Nodes of 8 GPUs. Those of a trainer on several nodes are its own."""
        if self.trainer_nodes > 1:
            return self.trainer_nodes + -(-self.engines // NODE_GPUS)
        return max(1, -(-self.total // NODE_GPUS))

    def __str__(self) -> str:
        nodes = f"{self.nodes} node{'s' if self.nodes > 1 else ''} of {NODE_GPUS}"
        if self.shared:
            return f"{self.total} in all, on which trainer and engines take turns: {nodes}"
        return f"{self.total} in all, {self.trainer} of the trainer and {self.engines} of engines: {nodes}"


def gpus_of(config: Config) -> Gpus:
    """What is trained or generated on a CPU, or elsewhere, needs none."""
    trains = config.train.train_backend != "simulated" and config.train.train_device != "cpu"
    return Gpus(
        trainer=layout_of(config).world if trains else 0,
        engines=_engines(config),
        trainer_nodes=config.parallel.actor_num_nodes,
        shared=config.asynchrony.colocate,
    )


def _engines(config: Config) -> int:
    count = 0 if config.sglang.rollout_external_engine_addrs else replicas(config).get("engine", 0)
    match config.engine.engine:
        case "sglang":
            return count * config.sglang.rollout_num_gpus_per_engine
        case "embedded":
            return count if config.engine.engine_device != "cpu" else 0
    return 0
