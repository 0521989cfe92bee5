"""The policy's forward pass in shards: decoder, output embedding and log-probs under one gathering root."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from models.train.fsdp.context import ContextParallel
from models.train.fsdp.wrap import Sharding
from models.train.huggingface.scoring import Scorer
from models.train.packing.rows import PackedRows
from models.train.spec import TrainSpec


class ShardedScorer(Scorer):
    """`Scorer` whose tokens may be divided among processes."""

    def __init__(self, model: Any, spec: TrainSpec, sharding: Sharding, context: ContextParallel) -> None:
        super().__init__(
            model,
            device=sharding.mesh.device,
            autocast_dtype=None,  # parameters are gathered in the precision of the forward pass
            mask_dtype=sharding.precision,
            temperature=spec.scoring_temperature,
            chunk_tokens=spec.train.logprob_chunk_tokens,
        )
        context.prepare(model)
        self._context = context

    def forward(self, rows: PackedRows, *, entropy: str = "none") -> tuple[Tensor, Tensor | None]:
        """Log-probs [N] and entropies [N] of the chosen tokens of `rows`, in fp32."""
        part = self._context.part(rows)
        chosen = self._context.run(self, part)
        log_probs, entropies = self.scores(chosen, self._to_device(part.targets), entropy)
        return (
            self._context.joined(log_probs, part),
            None if entropies is None else self._context.joined(entropies, part),
        )
