"""The ledger: every admitted group is settled exactly once. Pure arithmetic, single writer.

Invariant I1: `admitted` is the sum of `counts` and `open` after every call; a group has one terminal state; a second
settlement of the same group changes nothing and is counted as a duplicate; a settlement of an unknown group is an
error.
"""

from __future__ import annotations

from typing import get_args

from msgspec import Struct

from stages.messages import Outcome

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


class LedgerError(Exception):
    """A group was admitted twice, or settled without having been admitted."""


class OpenGroup(Struct, frozen=True, array_like=True):
    """What is needed to submit the group's prompt again."""

    group_id: int
    position: int  # in the prompt order
    requeued: int = 0


class DrawnRow(Struct, frozen=True, array_like=True):
    """A prompt that a user's data source gave: rendered, its metadata and tools as JSON."""

    prompt: str
    label: str | None
    metadata: str
    tools: str


class LedgerSnapshot(Struct, frozen=True):
    """State of the ledger at a committed step: enough to continue with nothing lost and nothing trained twice."""

    next_group: int
    cursor: int  # next position in the prompt order
    counts: dict[str, int]
    open: tuple[OpenGroup, ...]
    duplicates: int = 0
    tokens: dict[str, int] = {}
    requeue: tuple[int, ...] = ()  # positions of stale prompts that wait for their second visit
    skipped: int = 0  # positions that the curriculum passed over
    pass_rates: dict[int, float] = {}  # prompt index -> moving average, with a curriculum
    rollbacks: tuple[int, ...] = ()  # versions that have the weights of an earlier checkpoint
    drawn: dict[int, DrawnRow] = {}  # position -> prompt of a data source whose group has not ended, or not begun


class Ledger:
    """Terminal state of each group by id. Ids are dense: 0, 1, 2, ..."""

    def __init__(self, snapshot: LedgerSnapshot | None = None) -> None:
        self.next_group = snapshot.next_group if snapshot else 0
        self.cursor = snapshot.cursor if snapshot else 0
        self.counts: dict[Outcome, int] = {o: (snapshot.counts.get(o, 0) if snapshot else 0) for o in OUTCOMES}
        self.tokens: dict[Outcome, int] = {o: (snapshot.tokens.get(o, 0) if snapshot else 0) for o in OUTCOMES}
        self.duplicates = snapshot.duplicates if snapshot else 0
        self.skipped = snapshot.skipped if snapshot else 0
        self.rollbacks = snapshot.rollbacks if snapshot else ()
        self._open: dict[int, OpenGroup] = {g.group_id: g for g in snapshot.open} if snapshot else {}

    @property
    def admitted(self) -> int:
        return self.next_group

    @property
    def open(self) -> int:
        return len(self._open)

    @property
    def trained(self) -> int:
        return self.counts["trained"]

    def steps(self, batch: int) -> int:
        """Steps done, of so many groups each; a rollback takes the number of one, and no groups."""
        return self.trained // batch + len(self.rollbacks)

    def open_groups(self) -> tuple[OpenGroup, ...]:
        """Oldest first."""
        return tuple(self._open[k] for k in sorted(self._open))

    def admit(self, *, position: int, requeued: int = 0) -> OpenGroup:
        """Open the next group for the prompt at `position` of the order; positions before it are passed over."""
        group = OpenGroup(self.next_group, position, requeued)
        self.next_group += 1
        self.skipped += max(position - self.cursor, 0)
        self.cursor = max(self.cursor, position + 1)
        self._open[group.group_id] = group
        return group

    def settle(self, group_id: int, outcome: Outcome, tokens: int = 0) -> OpenGroup | None:
        """Give an open group its terminal state and return it; None if it already had one (first writer wins)."""
        if group_id not in self._open:
            if not 0 <= group_id < self.next_group:
                raise LedgerError(
                    f"group {group_id} was settled as {outcome} but never admitted (next id is {self.next_group})"
                )
            self.duplicates += 1
            return None
        self.counts[outcome] += 1
        self.tokens[outcome] += tokens
        return self._open.pop(group_id)

    def snapshot(self) -> LedgerSnapshot:
        own = {name: getattr(self, name) for name in ("next_group", "cursor", "duplicates", "skipped", "rollbacks")}
        return LedgerSnapshot(
            **own,
            counts={str(k): v for k, v in self.counts.items()},
            open=self.open_groups(),
            tokens={str(k): v for k, v in self.tokens.items()},
        )
