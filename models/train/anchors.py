"""What models say of examples before the first backward pass of their batch: no gradient, done as sequences arrive.

Invariant: within a batch, everything here is of the weights of its start, but for `refresh`, which is of the weights
of a later step's start.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from models.train.batch import Example, Float32Array
from models.train.columns import token_counts
from models.train.critic import Critic
from models.train.needs import BatchNeeds
from models.train.packing import Layout, Packing, plan
from models.train.rows import PackedRows, pack_rows
from models.train.scoring import Scorer


class AnchorPass:
    """Log-probs of policy and reference and values of the critic, written into examples."""

    def __init__(self, score: Scorer, score_reference: Scorer | None, critic: Critic | None) -> None:
        self._score = score
        self._score_reference = score_reference
        self._critic = critic

    def fill(self, layout: Layout, examples: Sequence[Example], needs: BatchNeeds) -> None:
        """Fill in what `needs` asks for, and the reference's log-probs if there is one."""
        if not (needs.anchor or needs.values or self._score_reference is not None):
            return
        members = [examples[item] for item in layout.items]
        rows = packed(layout, examples)
        if needs.anchor:
            for example, values in zip(members, self._split(self._score, rows, members), strict=True):
                example.current_log_probs = values
                if not needs.student_is_sampler:
                    example.old_log_probs = values
        if self._score_reference is not None:
            for example, values in zip(members, self._split(self._score_reference, rows, members), strict=True):
                example.ref_log_probs = values
        if needs.values and self._critic is not None:
            self._critic.fill(layout, examples)

    def refresh(self, examples: Sequence[Example], packing: Packing) -> None:
        """Fill in `current_log_probs` under the weights as they are now."""
        if not examples:
            return
        for layout in plan([one.tokens for one in examples], [one.prompt for one in examples], packing):
            members = [examples[item] for item in layout.items]
            for example, values in zip(
                members, self._split(self._score, packed(layout, examples), members), strict=True
            ):
                example.current_log_probs = values

    def _split(self, scorer: Scorer, rows: PackedRows, members: Sequence[Example]) -> list[Float32Array]:
        with torch.no_grad():
            values, _ = scorer(rows)
        return list(np.split(values.cpu().numpy(), np.cumsum(token_counts(members))[:-1]))


def packed(layout: Layout, examples: Sequence[Example]) -> PackedRows:
    """The arrays of a micro-batch of examples."""
    return pack_rows(layout, [example.tokens for example in examples], [example.chosen for example in examples])
