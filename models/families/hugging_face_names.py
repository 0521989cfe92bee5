"""How one parameter of Megatron-core is made of tensors of a Hugging Face checkpoint, and back.

No Megatron here: names and arithmetic only. A rule maps whole tensors; `sharding` divides them.

Invariants:
- `Join.split(Join.join(pieces))` returns the pieces, bit by bit;
- the order of the rules is the order of an export, whatever the parallel layout (but for experts, see `weights`);
- a name of Megatron is global: layers and experts count over all processes. Names are those of the local layer
  specification; `models/train/megatron/parameters.py` translates those of Transformer Engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Literal

import torch
from torch import Tensor

Split = Literal["none", "rows", "columns", "gated_rows", "vocabulary"]
"""How tensor parallelism divides a parameter.

none: every process holds all of it; rows, columns: equal contiguous parts of dimension 0 or 1; gated_rows: the gate's
rows and the up projection's rows are divided apart, a process holds its gate rows, then its up rows; vocabulary: rows,
after padding to a multiple of the processes.
"""

Layers = Literal["once", "all", "dense", "moe"]


class Join:
    """Pieces of a checkpoint <-> one Megatron parameter, both whole or both one process's part. Here: one piece."""

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        (piece,) = pieces
        return piece

    def split(self, whole: Tensor) -> list[Tensor]:
        return [whole]

    def parts_alone(self, parts: int) -> bool:
        """Whether the i-th of `parts` equal parts is made of the i-th parts of the pieces."""
        return True


class Gated(Join):
    """Gate rows, then the rows of the up projection: [I, ...], [I, ...] <-> [2 I, ...]."""

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        gate, up = pieces
        return torch.cat([gate, up])

    def split(self, whole: Tensor) -> list[Tensor]:
        return list(whole.chunk(2))


@dataclass(frozen=True)
class QueryGroups(Join):
    """q [nq d, ...], k [nkv d, ...], v [nkv d, ...] <-> by query group: its query heads, its key head, its value head.

    `heads` = nq, `groups` = nkv, `width` = d. Biases have the same rows as weights.
    """

    heads: int
    groups: int
    width: int

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        rest = pieces[0].shape[1:]
        per_group = self.heads // self.groups * self.width
        groups = pieces[0].shape[0] // per_group
        return torch.cat([piece.reshape(groups, -1, *rest) for piece in pieces], dim=1).reshape(-1, *rest)

    def split(self, whole: Tensor) -> list[Tensor]:
        rest = whole.shape[1:]
        per_group = self.heads // self.groups
        by_group = whole.reshape(-1, (per_group + 2) * self.width, *rest)
        widths = [per_group * self.width, self.width, self.width]
        return [piece.reshape(-1, *rest) for piece in by_group.split(widths, dim=1)]

    def parts_alone(self, parts: int) -> bool:
        return self.groups % parts == 0


@dataclass(frozen=True)
class Piece:
    """Rows `part` of `of` equal parts of the tensor `name`; of its entry of this expert if it is `stacked`."""

    name: str
    part: int = 0
    of: int = 1
    stacked: bool = False


def whole(*names: str) -> tuple[Piece, ...]:
    """Pieces that are tensors of their own."""
    return tuple(Piece(name) for name in names)


@dataclass(frozen=True)
class Rule:
    """One kind of parameter. `{layer}` and `{expert}` in names are numbers.

    `pieces`: how published checkpoints store it, and how it is exported. `stacked`: how transformers 5 keeps experts in
    memory, accepted on loading. `replicated_rows`: with this many rows a process holds all of it, against `split`
    (Transformer Engine keeps MLA's down projections whole, the local layers divide them).
    """

    megatron: str
    pieces: tuple[Piece, ...]
    split: Split = "none"
    join: Join = field(default_factory=Join)
    layers: Layers = "all"
    stacked: tuple[Piece, ...] = ()
    replicated_rows: int | None = None

    @property
    def expert(self) -> bool:
        """Whether each expert has one."""
        return "{expert}" in self.megatron


@dataclass(frozen=True)
class Weight:
    """A rule applied to one layer and expert."""

    rule: Rule
    name: str  # of Megatron, global
    pieces: tuple[Piece, ...]
    stacked: tuple[Piece, ...]
    layer: int | None  # from 0 on; None: not of a layer
    expert: int | None


def expand(rules: Sequence[Rule], *, moe_layers: Sequence[bool], experts: int) -> Iterator[Weight]:
    """All parameters of a model, in the order of an export: by layer, in it by rule, in it by expert.

    `moe_layers[i]`: whether layer i has experts. Rules of kind `once` keep their place before or after the layers.
    """
    for once, group in groupby(rules, key=lambda rule: rule.layers == "once"):
        members = list(group)
        if once:
            yield from (_weight(rule, None, None) for rule in members)
            continue
        for layer, moe in enumerate(moe_layers):
            for rule in members:
                if rule.layers in ("all", "moe" if moe else "dense"):
                    for expert in range(experts) if rule.expert else (None,):
                        yield _weight(rule, layer, expert)


def _weight(rule: Rule, layer: int | None, expert: int | None) -> Weight:
    def filled(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
        return tuple(replace(piece, name=piece.name.format(layer=layer, expert=expert)) for piece in pieces)

    return Weight(
        rule=rule,
        name=rule.megatron.format(layer=layer, expert=expert),
        pieces=filled(rule.pieces),
        stacked=filled(rule.stacked),
        layer=layer,
        expert=expert,
    )


# --------------------------------------------------------------------------------------------------
# Division of one whole parameter among tensor-parallel processes, and its reverse.
#
# Invariant: `merge([part(x, split, i, n) for i in range(n)], split)` is x, bit by bit.


def padded_vocab(vocab_size: int, parts: int) -> int:
    """Rows of the embedding that `parts` processes share equally: `vocab_size`, rounded up to a multiple."""
    return -(-vocab_size // parts) * parts


def part(whole: Tensor, split: Split, index: int, parts: int) -> Tensor:
    """The part of process `index` of `parts`. Vocabulary rows are padded already. A view where possible."""
    if split == "none" or parts == 1:
        return whole
    if split == "gated_rows":
        return torch.cat([half.chunk(parts)[index] for half in whole.chunk(2)])
    dimension = 1 if split == "columns" else 0
    length = whole.shape[dimension] // parts
    return whole.narrow(dimension, index * length, length)


def merge(held: Sequence[Tensor], split: Split) -> Tensor:
    """The whole parameter from the parts of all processes, in their order."""
    if split == "none" or len(held) == 1:
        return held[0]
    if split == "gated_rows":
        halves = [one.chunk(2) for one in held]
        return torch.cat([half[0] for half in halves] + [half[1] for half in halves])
    return torch.cat(list(held), dim=1 if split == "columns" else 0)
