"""Which entries of the engine directory count: those of the processes that have the addresses, and no others."""

from __future__ import annotations

import msgspec

from stages.messages import EngineAddress, EngineEntry
from stages.topic_values import addresses, carrying, entries


class Values:
    """A topic that is read."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def items(self, prefix: str) -> dict[str, bytes]:
        return {key: value for key, value in self.values.items() if key.startswith(prefix)}

    def up(self, name: str, incarnation: int = 0, policy: str = "policy") -> None:
        address = EngineAddress(name, f"http://{name}", incarnation, policy)
        self.values[f"engine/{name}"] = msgspec.msgpack.encode(address)

    def says(self, name: str, version: int, incarnation: int = 0, policy: str = "policy") -> None:
        entry = EngineEntry(
            name, f"http://{name}", incarnation, policy, state="serving", run_generation=0, version=version
        )
        self.values[f"directory/{name}"] = msgspec.msgpack.encode(entry)


def test_an_entry_counts_only_for_the_incarnation_that_has_the_address() -> None:
    topic = Values()
    topic.says("engine-0", 3)
    assert entries(topic) == {}, "its engine is lost: what arrives late is of a process that has died"
    topic.up("engine-0", incarnation=1)
    assert entries(topic) == {}, "a new process listens there, and carries nothing of that"
    assert addresses(topic)["engine-0"].incarnation == 1
    topic.says("engine-0", 4, incarnation=1)
    assert entries(topic)["engine-0"].label == "0.4"
    topic.up("engine-0", incarnation=2)
    assert carrying(topic) == {}


def test_entries_are_told_apart_by_policy_and_those_without_weights_of_the_run_hold_nobody_up() -> None:
    topic = Values()
    for name, policy, version in (("engine-1", "policy", 2), ("engine-0", "policy", -1), ("frozen-j", "j", -1)):
        topic.up(name, policy=policy)
        topic.says(name, version, policy=policy)
    assert list(entries(topic)) == ["engine-0", "engine-1", "frozen-j"]
    assert list(entries(topic, "policy")) == ["engine-0", "engine-1"]
    assert list(entries(topic, "j")) == ["frozen-j"]
    assert list(addresses(topic, "j")) == ["frozen-j"]
    assert list(carrying(topic)) == ["engine-1"]
    assert entries(topic)["frozen-j"].label is None
