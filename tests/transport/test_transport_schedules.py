"""Many schedules of a stream under virtual time, and mutants of the protocol that the oracle must catch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs
from transport_simulation import simulate
from transport_world import Rules, Scenario, Violation

from transport.core import custody as custody_module
from transport.core.custody import Custody, Item
from transport.core.hub import HubCore
from transport.core.peers import ConsumerCore, ProducerCore
from transport.core.session import Capacity, KeyMemory, SendCredit, SeqWindow
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


@pytest.mark.parametrize("name", SCENARIOS)
def test_schedules(name: str) -> None:
    for seed in range(4):
        simulate(seed, SCENARIOS[name])


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(4, 14), pytest.param(range(14, 400), marks=pytest.mark.full)], ids=str)
@pytest.mark.parametrize("name", SCENARIOS)
def test_many_schedules(name: str, seeds: range) -> None:
    for seed in seeds:
        simulate(seed, SCENARIOS[name])


@pytest.mark.parametrize("seed", [10, 404, 423, 436])
def test_a_suspect_of_a_keyed_stream_goes_to_who_holds_its_like(seed: int) -> None:
    """In these another consumer comes to hold it between the choice of the ward and the suspect's turn."""
    simulate(seed, SCENARIOS["keyed"])


def test_schedules_are_reproducible() -> None:
    runs = [simulate(7, SCENARIOS["everything"]) for _ in range(2)]
    assert runs[0].events == runs[1].events
    assert runs[0].now == runs[1].now


# Mutants. Each breaks one rule; a test that cannot fail proves nothing.

Patch = Callable[[pytest.MonkeyPatch], Rules]
MUTANTS: dict[str, tuple[Scenario, Patch]] = {}


def mutant(name: str, scenario: Scenario) -> Callable[[Patch], Patch]:
    def register(patch: Patch) -> Patch:
        MUTANTS[name] = (scenario, patch)
        return patch

    return register


RESENT = Scenario(duplicate=0.1, cuts=4)


@mutant("no deduplication of resent messages", RESENT)
def no_seq_dedup(patch: pytest.MonkeyPatch) -> Rules:
    patch.setattr(SeqWindow, "__contains__", lambda self, seq: False)
    patch.setattr(KeyMemory, "add", lambda self, key: True)
    return Rules()


def test_resent_messages_are_known_by_their_numbers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeyMemory, "add", lambda self, key: True)
    for seed in range(8):
        simulate(seed, RESENT)


@mutant("no deduplication of keys", Scenario(producer_deaths=3, regenerated=10))
def no_key_dedup(patch: pytest.MonkeyPatch) -> Rules:
    patch.setattr(KeyMemory, "add", lambda self, key: True)
    return Rules()


@mutant("acknowledged before it is handed over", Scenario(consumer_deaths=3))
def early_ack(patch: pytest.MonkeyPatch) -> Rules:
    class Eager(ConsumerCore):
        def _work(self, now: float, work: Any, body: Any) -> None:
            super()._work(now, work, body)
            self._verdicts[work.id] = None
            self._fresh.append(work.id)

    return Rules(consumer=Eager)


@mutant("grants are increments", Scenario(drop=0.1))
def incremental_credit(patch: pytest.MonkeyPatch) -> Rules:
    class Increment(ConsumerCore):
        granted = 0

        def _report(self, *, beat: bool = False) -> None:
            super()._report(beat=beat)
            if self.session.out and isinstance(self.session.out[-1][0], Report):
                report = self.session.out[-1][0]
                fields = {name: getattr(report, name) for name in report.__struct_fields__}
                fields["limit_items"] -= self.granted
                self.granted = report.limit_items
                self.session.out[-1] = (Report(**fields), None)

    def grant(self: SendCredit, items: int, size: int) -> None:
        self.limit_items += items
        self.limit_bytes = max(self.limit_bytes, size)

    patch.setattr(SendCredit, "grant", grant)
    patch.setattr(ProducerCore, "_accepted", _absolute_accepted)
    return Rules(consumer=Increment)


def _absolute_accepted(self: ProducerCore, now: float, message: Any) -> None:
    self.credit.limit_items = max(self.credit.limit_items, message.limit_items) - message.limit_items
    original_accepted(self, now, message)


original_accepted = ProducerCore._accepted


@mutant("leases of a dead consumer are kept", Scenario(consumer_deaths=2))
def leases_kept(patch: pytest.MonkeyPatch) -> Rules:
    class ServerSupervisor(HubCore):
        def _leave(self, peer: Any, *, blame: bool, how: str = "failed") -> None:
            if hasattr(peer, "held"):
                peer.held = {}
            super()._leave(peer, blame=blame, how=how)

    return Rules(hub=ServerSupervisor)


@mutant("leases never expire", Scenario(consumer_deaths=3, supervised=0.0))
def no_expiry(patch: pytest.MonkeyPatch) -> Rules:
    class Patient(HubCore):
        def on_timer(self, now: float) -> None:
            for peer in self._peers():
                peer.silent_at = now + 1e6
            super().on_timer(now)

    return Rules(hub=Patient)


@mutant("leases run by the wall clock, which is set", Scenario(work_s=0.6))
def wall_clock(patch: pytest.MonkeyPatch) -> Rules:
    class Wall(HubCore):
        def on_timer(self, now: float) -> None:
            super().on_timer(now + (3600.0 if now > 1.0 else 0.0))

    return Rules(hub=Wall)


@mutant("beats do not renew leases", Scenario(work_s=4.0, items=15))
def no_renewal(patch: pytest.MonkeyPatch) -> Rules:
    class Forgetful(HubCore):
        def on_message(self, now: float, route: bytes, message: Any, body: Any = None) -> None:
            peer = self._routes.get(route)
            before = peer.silent_at if peer is not None else 0.0
            super().on_message(now, route, message, body)
            if isinstance(message, Report) and not message.done and peer is not None:
                peer.silent_at = before

    return Rules(hub=Forgetful)


@mutant("everything leased is blamed", Scenario(killers=1, max_attempts=1, concurrency=1, items=80, work_s=0.2))
def blame_all(patch: pytest.MonkeyPatch) -> Rules:
    class Unjust(HubCore):
        def _leave(self, peer: Any, *, blame: bool, how: str = "failed") -> None:
            for item in getattr(peer, "held", {}).values():
                item.started = True
            super()._leave(peer, blame=blame, how=how)

    return Rules(hub=Unjust)


SOLITUDE = Scenario(
    killers=1, consumers=1, concurrency=4, window_items=6, window_bytes=20_000, max_attempts=3, items=60, work_s=0.2
)


@mutant("suspects are not run alone", SOLITUDE)
def no_solitude(patch: pytest.MonkeyPatch) -> Rules:
    patch.setattr(custody_module, "SUSPECT_DEATHS", 10**6)
    patch.setattr(custody_module, "SUSPECT_LOSSES", 10**6)
    return Rules()


@mutant("attempts are not bounded", Scenario(killers=1, patience_s=30.0))
def no_bound(patch: pytest.MonkeyPatch) -> Rules:
    original = Custody.fail

    def fail(self: Custody, item: Item, reason: str) -> None:
        self.spec = structs.replace(self.spec, max_attempts=1 << 30)
        original(self, item, reason)

    patch.setattr(Custody, "fail", fail)
    return Rules()


@mutant("a consumer leaves without FIN", Scenario(leaves=3, max_attempts=1))
def no_fin(patch: pytest.MonkeyPatch) -> Rules:
    class Rude(ConsumerCore):
        def fin(self, now: float, *, blame: bool) -> None:
            self.session.state = "left"

    return Rules(consumer=Rude)


@mutant("the item window is ignored", Scenario(items=80, work_s=0.2))
def no_item_window(patch: pytest.MonkeyPatch) -> Rules:
    patch.setattr(SendCredit, "fits", lambda self, size, alone: alone or self.sent_bytes + size <= self.limit_bytes)
    return Rules()


@mutant("the byte window is ignored", Scenario(items=80, work_s=0.2, window_items=8))
def no_byte_window(patch: pytest.MonkeyPatch) -> Rules:
    patch.setattr(SendCredit, "fits", lambda self, size, alone: self.sent_items < self.limit_items)
    return Rules()


@mutant("the hub's capacity is ignored", Scenario(items=120, consumers=1, work_s=0.2))
def no_capacity(patch: pytest.MonkeyPatch) -> Rules:
    patch.setattr(Capacity, "unused_items", lambda self, held: 64)
    patch.setattr(Capacity, "unused_bytes", lambda self, held: 1 << 20)
    return Rules()


@mutant("lost deliveries leak credit", Scenario(drop=0.2, consumers=1, window_items=1, patience_s=60.0))
def leaking_window(patch: pytest.MonkeyPatch) -> Rules:
    class Deaf(ConsumerCore):
        def _settled(self, now: float, message: Any) -> None:
            super()._settled(now, structs.replace(message, sent_items=-1, sent_bytes=-1))

    return Rules(consumer=Deaf)


@mutant("END before everything is settled", Scenario(work_s=0.6))
def early_end(patch: pytest.MonkeyPatch) -> Rules:
    class Hasty(HubCore):
        @property
        def ended(self) -> bool:
            return self.finishing

    return Rules(hub=Hasty)


@mutant("verdicts are not repeated", Scenario(drop=0.1))
def verdict_once(patch: pytest.MonkeyPatch) -> Rules:
    class Terse(ConsumerCore):
        def _report(self, *, beat: bool = False) -> None:
            super()._report(beat=beat)
            self._verdicts.clear()

    return Rules(consumer=Terse)


@mutant("a repeated delivery is executed again", Scenario(duplicate=0.3, reorder=True, work_s=0.001))
def no_serial_check(patch: pytest.MonkeyPatch) -> Rules:
    class Gullible(ConsumerCore):
        def _work(self, now: float, work: Any, body: Any) -> None:
            seen = self.window.seen_items
            self.window.seen_items = min(seen, work.serial - 1)
            super()._work(now, work, body)
            self.window.seen_items = max(seen, self.window.seen_items)

    return Rules(consumer=Gullible)


@mutant("nothing is resent", Scenario(drop=0.1, patience_s=60.0))
def no_resend(patch: pytest.MonkeyPatch) -> Rules:
    class Once(ProducerCore):
        def _resend(self) -> None:
            self._quiet_beats = 0

    return Rules(producer=Once)


@mutant("ids of an old hub are reported to the new one", Scenario(hub_restarts=2, items=80, work_s=0.3))
def no_epoch(patch: pytest.MonkeyPatch) -> Rules:
    class Confused(ConsumerCore):
        def _welcome(self, now: float, message: Any, changed: bool, forgotten: bool) -> None:
            super()._welcome(now, message, False, forgotten or changed)

    return Rules(consumer=Confused)


@mutant("only the newest link is believed to be up", Scenario(cuts=8, consumer_deaths=1, patience_s=60.0))
def no_rehello(patch: pytest.MonkeyPatch) -> Rules:
    class Mute(ConsumerCore):
        def on_link_up(self, now: float) -> None:
            self.session.state = "open"

        def on_message(self, now: float, message: Any, body: Any = None) -> None:
            if type(message).__name__ != "Who":
                super().on_message(now, message, body)

    return Rules(consumer=Mute)


@pytest.mark.full
@pytest.mark.parametrize("name", MUTANTS)
def test_the_oracle_catches_the_mutant(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario, patch = MUTANTS[name]
    for seed in range(8):
        simulate(seed, scenario)  # the rules as they are hold
    rules = patch(monkeypatch)
    caught = None
    for seed in range(30):
        try:
            simulate(seed, scenario, rules)
        except (Violation, KeyError, IndexError) as violation:
            caught = violation
            break
    assert caught is not None, f"no schedule out of 30 shows that {name!r} is wrong"
