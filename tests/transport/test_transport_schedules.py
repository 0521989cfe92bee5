"""Many schedules of a stream under virtual time, and mutants of the protocol that the oracle must catch."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs
from transport_simulation import simulate
from transport_world import Scenario

from transport.core import custody as custody_module
from transport.core.custody import ConsumerPeer, Custody, Item
from transport.core.hub import HubCore
from transport.core.peers import ConsumerCore, ProducerCore
from transport.core.session import Capacity, KeyMemory, SendCredit, SeqWindow, Session
from transport.wire import Report

SCENARIOS = {
    "calm": Scenario(),
    "lossy": Scenario(drop=0.05, duplicate=0.05),
    "unordered": Scenario(reorder=True, duplicate=0.05, drop=0.02),
    "cut links": Scenario(cuts=8),
    "deaths": Scenario(consumer_deaths=3, producer_deaths=2),
    "unsupervised deaths": Scenario(consumer_deaths=3, producer_deaths=1, supervised=0.0),
    "frozen": Scenario(freezes=2, cuts=2),
    "leaving": Scenario(leaves=3, producer_leaves=2, max_attempts=1),
    "killer": Scenario(killers=1, poisons=2, consumer_deaths=1, concurrency=3),
    "regenerated": Scenario(regenerated=10, producer_deaths=1),
    "new hub": Scenario(hub_restarts=2, cuts=1),
    "sticky": Scenario(routing="sticky", consumer_deaths=2, leaves=1, cuts=1),
    "keyed": Scenario(routing="keyed", consumer_deaths=3, leaves=2, cuts=4, freezes=1, killers=1, drop=0.02),
    "gathering": Scenario(gather=4, consumers=2, window_bytes=20_000, window_items=6, consumer_deaths=2),
    "tight": Scenario(capacity_items=1, capacity_bytes=1, window_items=1, window_bytes=1, drop=0.02),
    "slow work": Scenario(work_s=4.0, items=15),
    "everything": Scenario(
        drop=0.02, duplicate=0.02, reorder=True, consumer_deaths=2, producer_deaths=1, cuts=3, leaves=1, poisons=1,
        regenerated=3,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "seeds",
    [
        range(4),
        pytest.param(range(4, 14), marks=pytest.mark.slow),
        pytest.param(range(14, 400), marks=[pytest.mark.slow, pytest.mark.full]),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", SCENARIOS)
def test_schedules(name: str, seeds: range) -> None:
    for seed in seeds:
        simulate(seed, SCENARIOS[name])


@pytest.mark.parametrize("seed", [10, 404, 423, 436])
def test_a_suspect_of_a_keyed_stream_goes_to_who_holds_its_like(seed: int) -> None:
    """In these another consumer comes to hold it between the choice of the ward and the suspect's turn."""
    simulate(seed, SCENARIOS["keyed"])


# Mutants. Each breaks one rule, by other code for one or two methods; a test that cannot fail proves nothing.

Change = tuple[type, str, Any]
work, report, welcome, settled = ConsumerCore._work, ConsumerCore._report, ConsumerCore._welcome, ConsumerCore._settled
to_hub, tick = HubCore.on_message, HubCore.on_timer
leave, reported, fail = HubCore._leave, HubCore._report, Custody.fail


def acknowledged_early(self: ConsumerCore, now: float, message: Any, body: Any) -> None:
    work(self, now, message, body)
    self._verdicts[message.id] = None
    self._fresh.append(message.id)


def increment_sent(self: ConsumerCore, *, beat: bool = False) -> None:
    report(self, beat=beat)
    if self.session.out and isinstance(last := self.session.out[-1][0], Report):
        before = getattr(self, "granted", 0)
        self.granted = last.limit_items  # type: ignore[attr-defined]
        self.session.out[-1] = (structs.replace(last, limit_items=last.limit_items - before), None)


def increment_added(self: HubCore, peer: ConsumerPeer, message: Report) -> None:
    reported(self, peer, structs.replace(message, limit_items=peer.credit.limit_items + message.limit_items))


def leases_kept(self: HubCore, peer: Any, **how: Any) -> None:
    if hasattr(peer, "held"):
        peer.held = {}
    leave(self, peer, **how)


def all_blamed(self: HubCore, peer: Any, **how: Any) -> None:
    for item in getattr(peer, "held", {}).values():
        item.started = True
    leave(self, peer, **how)


def never_expired(self: HubCore, now: float) -> None:
    for peer in self._peers():
        peer.silent_at = now + 1e6
    tick(self, now)


def not_renewed(self: HubCore, now: float, route: bytes, message: Any, body: Any = None) -> None:
    peer = self._routes.get(route)
    before = peer.silent_at if peer is not None else 0.0
    to_hub(self, now, route, message, body)
    if isinstance(message, Report) and not message.done and peer is not None:
        peer.silent_at = before


def unbounded(self: Custody, item: Item, reason: str) -> None:
    self.spec = structs.replace(self.spec, max_attempts=1 << 30)
    fail(self, item, reason)


def without_goodbye(self: ConsumerCore, now: float, *, blame: bool) -> None:
    self.session.state = "left"


def leaking(self: ConsumerCore, now: float, message: Any) -> None:
    settled(self, now, structs.replace(message, sent_items=-1, sent_bytes=-1))


def told_once(self: ConsumerCore, *, beat: bool = False) -> None:
    report(self, beat=beat)
    self._verdicts.clear()


def repeated(self: ConsumerCore, now: float, message: Any, body: Any) -> None:
    seen = self.window.seen_items
    self.window.seen_items = min(seen, message.serial - 1)
    work(self, now, message, body)
    self.window.seen_items = max(seen, self.window.seen_items)


def not_resent(self: ProducerCore) -> None:
    self._quiet_beats = 0


greet = Session.say_hello


def link_believed(self: Session, now: float) -> None:
    if self.epoch is None:
        greet(self, now)
    else:
        self.state = "open"


RESENT = Scenario(duplicate=0.1, cuts=4)
SOLITUDE = Scenario(
    killers=1, consumers=1, concurrency=4, window_items=6, window_bytes=20_000, max_attempts=3, items=60, work_s=0.2
)
NEW_KEYS: Change = (KeyMemory, "add", lambda self, key: True)
MUTANTS: dict[str, tuple[Scenario, *tuple[Change, ...]]] = {
    "no deduplication of resent messages": (RESENT, NEW_KEYS, (SeqWindow, "__contains__", lambda self, seq: False)),
    "no deduplication of keys": (Scenario(producer_deaths=3, regenerated=10), NEW_KEYS),
    "acknowledged before it is handed over": (
        Scenario(consumer_deaths=3), (ConsumerCore, "_work", acknowledged_early),
    ),
    "grants are increments": (
        Scenario(drop=0.3), (ConsumerCore, "_report", increment_sent), (HubCore, "_report", increment_added),
    ),
    "leases of a dead consumer are kept": (Scenario(consumer_deaths=2), (HubCore, "_leave", leases_kept)),
    "leases never expire": (Scenario(consumer_deaths=3, supervised=0.0), (HubCore, "on_timer", never_expired)),
    "leases run by the wall clock, which is set": (
        Scenario(work_s=0.6),
        (HubCore, "on_timer", lambda self, now: tick(self, now + (3600.0 if now > 1.0 else 0.0))),
    ),
    "beats do not renew leases": (Scenario(work_s=4.0, items=15), (HubCore, "on_message", not_renewed)),
    "everything leased is blamed": (
        Scenario(killers=1, max_attempts=1, concurrency=1, items=80, work_s=0.2), (HubCore, "_leave", all_blamed),
    ),
    "suspects are not run alone": (
        SOLITUDE, (custody_module, "SUSPECT_DEATHS", 10**6), (custody_module, "SUSPECT_LOSSES", 10**6),
    ),
    "attempts are not bounded": (Scenario(killers=1, patience_s=30.0), (Custody, "fail", unbounded)),
    "a consumer leaves without FIN": (Scenario(leaves=3, max_attempts=1), (ConsumerCore, "fin", without_goodbye)),
    "the item window is ignored": (
        Scenario(items=80, work_s=0.2),
        (SendCredit, "fits", lambda self, size, alone: alone or self.sent_bytes + size <= self.limit_bytes),
    ),
    "the byte window is ignored": (
        Scenario(items=80, work_s=0.2, window_items=8),
        (SendCredit, "fits", lambda self, size, alone: self.sent_items < self.limit_items),
    ),
    "the hub's capacity is ignored": (
        Scenario(items=120, consumers=1, work_s=0.2),
        (Capacity, "unused_items", lambda self, held: 64), (Capacity, "unused_bytes", lambda self, held: 1 << 20),
    ),
    "lost deliveries leak credit": (
        Scenario(drop=0.2, consumers=1, window_items=1, patience_s=60.0), (ConsumerCore, "_settled", leaking),
    ),
    "END before everything is settled": (
        Scenario(work_s=0.6), (HubCore, "ended", property(lambda self: self.finishing)),
    ),
    "verdicts are not repeated": (Scenario(drop=0.1), (ConsumerCore, "_report", told_once)),
    "a repeated delivery is executed again": (
        Scenario(duplicate=0.3, reorder=True, work_s=0.001), (ConsumerCore, "_work", repeated),
    ),
    "nothing is resent": (Scenario(drop=0.1, patience_s=60.0), (ProducerCore, "_resend", not_resent)),
    "ids of an old hub are reported to the new one": (
        Scenario(hub_restarts=2, items=80, work_s=0.3),
        (ConsumerCore, "_welcome", lambda self, now, message, changed, forgotten:
         welcome(self, now, message, False, forgotten or changed)),
    ),
    "only the newest link is believed to be up": (
        Scenario(cuts=8, consumer_deaths=1, patience_s=60.0),
        (Session, "say_hello", link_believed),
    ),
}  # fmt: skip


def test_resent_messages_are_known_by_their_numbers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*NEW_KEYS)
    for seed in range(8):
        simulate(seed, RESENT)


@pytest.mark.full
@pytest.mark.parametrize("name", MUTANTS)
def test_the_oracle_catches_the_mutant(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario, *changes = MUTANTS[name]
    for seed in range(8):
        simulate(seed, scenario)  # the rules as they are hold
    for change in changes:
        monkeypatch.setattr(*change)
    caught = None
    for seed in range(30):
        try:
            simulate(seed, scenario)
        except (AssertionError, KeyError, IndexError) as violation:
            caught = violation
            break
    assert caught is not None, f"no schedule out of 30 shows that {name!r} is wrong"
