"""What a consumer does about messages that a hub without memory of its deliveries sends once more.

Invariant: what is held here, or was finished here a moment ago, is known by its key, so that its repetition is taken
for what it is: it is not executed a second time, and the new hub is told which keys to deliver here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from transport.core.custody import Body
from transport.wire import Work

Verdict = Literal["done", "poison", "returned"]
REMEMBERED = 2048  # verdicts: the hub may have recorded them, and died before the sender knew
CLAIMED_BYTES = 1 << 19  # of keys in one report, whose header is bounded


@dataclass(slots=True, eq=False)
class Delivery:
    """One message in a consumer's care."""

    work: Work
    body: Body
    attempt: int
    started: bool = False
    settled: bool = False
    orphan: bool = False


class Repeats:
    def __init__(self) -> None:
        self.orphans: dict[str, Delivery] = {}  # held, of earlier incarnations of the hub
        self._verdicts: OrderedDict[str, tuple[Verdict, str]] = OrderedDict()  # the newest last
        self._doubted: dict[str, tuple[Verdict, str]] = {}  # verdicts given before the hub changed, or to orphans since
        self._until = 0.0

    def settled(self, key: str, verdict: Verdict, reason: str) -> None:
        """A delivery has its verdict."""
        orphan = self.orphans.pop(key, None) is not None
        self._verdicts.pop(key, None)
        self._doubted.pop(key, None)
        if verdict == "returned":
            return
        if orphan:
            self._doubted[key] = (verdict, reason)
        else:
            self._remember(key, (verdict, reason))

    def hub_changed(self, held: Iterable[Delivery], until: float) -> None:
        """All deliveries are of a hub that is gone. What was finished is claimed `until` then."""
        self.orphans.update((delivery.work.key, delivery) for delivery in held)
        self._doubted.update(self._verdicts)
        for key in list(islice(self._doubted, max(0, len(self._doubted) - REMEMBERED))):
            del self._doubted[key]
        self._verdicts.clear()
        self._until = until

    def finished_before(self, key: str) -> tuple[Verdict, str] | None:
        """The verdict that a repetition got before the hub changed, if it did. One that comes later still is another
        message."""
        verdict = self._doubted.pop(key, None)
        if verdict is not None:
            self._remember(key, verdict)  # this hub may die as well
        return verdict

    def claims(self, now: float) -> tuple[str, ...]:
        """Keys whose repetition is to come here."""
        room, claimed = CLAIMED_BYTES, list[str]()
        finished = reversed(self._doubted) if now < self._until else ()
        for key in (*self.orphans, *finished):
            room -= 4 * len(key) + 5
            if room < 0:
                break
            claimed.append(key)
        return tuple(claimed)

    def _remember(self, key: str, verdict: tuple[Verdict, str]) -> None:
        self._verdicts[key] = verdict
        if len(self._verdicts) > REMEMBERED:
            self._verdicts.popitem(last=False)
