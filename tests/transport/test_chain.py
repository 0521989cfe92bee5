"""Links between neighbouring stages of one process: what is acknowledged when, and what a stage of the user gets."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from stages.messages import PromptGroup, RolloutSlice, Sample
from tests.stages.stage_rig import idle, make_group, make_sample
from tests.transport.memory_link import take_one
from transport import ChainLink, EntryInlet
from transport.errors import MessageInvalid, UsageError
from transport.stream import LeaseHandle


class Entry(LeaseHandle[int]):
    """A message that a hub has delivered; its verdict is kept."""

    def __init__(self, key: str, message: int = 0, attempt: int = 1) -> None:
        self.verdicts: list[str] = []
        give_back = partial(self.verdicts.append, "given back")
        super().__init__(message, key, attempt, lambda refused: self.verdicts.append(refused or "done"), give_back)


class Arrivals:
    """An inlet with these messages, which then ends."""

    def __init__(self, *entries: Entry) -> None:
        self.entries = list(entries)

    async def receive(self) -> Entry | None:
        return self.entries.pop(0) if self.entries else None


def make_link(window: int = 100) -> ChainLink[int]:
    return ChainLink(int, window, copies=False)


@given(st.lists(st.tuples(st.sampled_from(["enter", "send", "release", "settle"]), st.integers(0, 2)), max_size=60))
async def test_an_entry_is_acknowledged_once_it_and_all_behind_it_are(operations: list[tuple[str, int]]) -> None:
    link, behind, sent = make_link(), Counter[int](), 0
    entries: list[Entry] = []
    held: dict[int, list[Entry]] = {part: [] for part in range(3)}
    released: dict[int, list[Entry]] = {part: [] for part in range(3)}
    wanted: list[Entry] = []
    messages = {part: [] for part in range(3)}
    for operation, part in operations:
        if operation == "enter":
            entries.append(Entry(f"{part}/{len(entries)}"))
            held[part].append(entries[-1])
            link.entered(entries[-1])
        elif operation == "send" and held[part]:
            sent += 1
            await link.send(sent, f"{part}/{sent}")
            lease = await take_one(link)
            assert lease.message == sent
            messages[part].append(lease)
            behind[part] += 1
        elif operation == "release" and held[part]:
            released[part].append(held[part].pop(0))
            link.released(released[part][-1])
        elif operation == "settle" and messages[part]:
            messages[part].pop(0).done()
            behind[part] -= 1
        for number, waiting in released.items():
            if not behind[number]:
                wanted += waiting
                waiting.clear()
        assert [entry for entry in entries if entry.verdicts == ["done"]] == sorted(wanted, key=entries.index)
        assert all(len(entry.verdicts) <= 1 for entry in entries)
    assert set(link.held(0.0)) == {str(part) for part in range(3) if behind[part] and not held[part]}


async def test_a_refused_message_makes_dead_letters_of_its_part_alone() -> None:
    link = make_link()
    entries = [Entry("1/a"), Entry("1/b"), Entry("2/a")]
    for entry in entries:
        link.entered(entry)
        await link.send(0, entry.key)
    first, second, other = [await take_one(link) for _ in entries]
    link.released(entries[0])
    link.released(entries[2])
    second.poison("it is spoilt")
    assert entries[0].verdicts == ["it is spoilt"]  # at once, though the first message is not settled
    link.released(entries[1])
    assert entries[1].verdicts == ["it is spoilt"]
    first.done()
    other.done()
    assert entries[2].verdicts == ["done"]


async def test_a_chain_of_three_stages_acknowledges_at_its_end_and_counts_the_attempt() -> None:
    first, second = make_link(), make_link()
    entry = Entry("7", attempt=3)
    begin = EntryInlet(Arrivals(entry), first, 5)
    middle = EntryInlet(first, second, 5)
    lease = await take_one(begin)
    await first.send(1, "7/0")
    lease.done()
    between = await take_one(middle)
    assert between.attempt == 3
    await second.send(2, "7/0")
    between.done()
    last = await take_one(second)
    assert last.attempt == 3
    assert not entry.verdicts
    assert first.held(0.0).keys() == second.held(0.0).keys() == {"7"}
    last.done()
    assert entry.verdicts == ["done"]
    assert not first.held(0.0)


async def test_a_stage_has_no_more_in_work_than_its_window_though_its_inlet_holds_more() -> None:
    link = make_link()
    inlet = EntryInlet(Arrivals(*(Entry(str(number)) for number in range(3))), link, 2)
    leases = [await take_one(inlet), await take_one(inlet)]
    third = asyncio.ensure_future(take_one(inlet))
    await idle()
    assert not third.done()
    await link.send(0, "0/0")
    leases[0].done()  # it is not acknowledged, and yet makes room
    with pytest.raises(UsageError, match="message '0' was settled before; give each lease exactly one verdict"):
        leases[0].done()  # which would make room for one more
    assert (await third).key == "2"
    leases[1].done()
    assert await inlet.receive() is None


async def test_send_waits_for_room_and_the_end_comes_to_all_receivers_after_every_source() -> None:
    link = make_link(window=1)
    await link.send(1, "1")
    second = asyncio.ensure_future(link.send(2, "2"))
    merging = asyncio.ensure_future(link.merge(Arrivals(Entry("3", message=3))))
    await idle()
    assert not second.done()
    assert not merging.done()
    seen = [(await take_one(link)).message for _ in range(3)]
    await second
    receivers = [asyncio.ensure_future(link.receive()) for _ in range(3)]
    await merging  # its hub has ended, the stage before has not
    await idle()
    assert not any(receiver.done() for receiver in receivers)
    await link.end()
    assert await asyncio.gather(*receivers) == [None, None, None]
    assert sorted(seen) == [1, 2, 3]


async def test_a_send_that_is_cancelled_leaves_nothing_to_wait_for() -> None:
    link, entry = make_link(window=1), Entry("1")
    await link.send(0, "0")
    link.entered(entry)
    sending = asyncio.ensure_future(link.send(1, "1/0"))
    await idle()
    sending.cancel()
    await idle()
    link.released(entry)
    assert entry.verdicts == ["done"]


async def test_a_stage_of_the_user_gets_a_copy_that_is_checked() -> None:
    link = ChainLink(RolloutSlice, 10, copies=True)
    group: PromptGroup = make_group(5)
    sample: Sample = make_sample(0)
    entry = Entry(group.key)
    link.entered(entry)
    sent = RolloutSlice(group, (sample,))
    await link.send(sent, sent.key)
    lease = await take_one(link)
    assert lease.message is not sent
    [copy] = lease.message.samples
    np.testing.assert_array_equal(copy.token_ids, sample.token_ids)
    with pytest.raises(ValueError, match="read-only"):
        copy.token_ids[0] = 1
    lease.done()
    with pytest.raises(MessageInvalid, match="was sent where RolloutSlice is declared"):
        await link.send(sample, sent.key)  # type: ignore[arg-type]
    wrong = RolloutSlice(group, (replace(sample, reward="much"),))  # type: ignore[arg-type]
    await link.send(wrong, wrong.key)
    link.released(entry)
    [reason] = entry.verdicts
    assert "quarantined in a chain of stages: not a RolloutSlice" in reason
    with pytest.raises(MessageInvalid, match="belongs to none that its stage works on"):
        await link.send(wrong, "99/0")


async def test_a_stage_before_a_link_may_refuse_what_it_received() -> None:
    link, entry = make_link(), Entry("3")
    lease = await take_one(EntryInlet(Arrivals(entry), link, 1))
    lease.poison("it cannot be read")
    assert entry.verdicts == ["it cannot be read"]


class Stream:
    """The outlet of a stream, whose hub takes one message at a time."""

    def __init__(self) -> None:
        self.keys: list[str] = []

    async def send(self, message: int, key: str) -> None:
        await asyncio.sleep(0)
        self.keys.append(key)


async def test_a_chain_that_is_taken_apart_gives_what_waits_to_the_stream_the_oldest_first() -> None:
    link, stream = make_link(), Stream()
    entries = [Entry(str(number)) for number in range(5)]
    hubs = [Entry("7"), Entry("8")]
    inlet = EntryInlet(Arrivals(*entries), link, 9)
    leases = [await take_one(inlet) for _ in entries]
    await link.merge(Arrivals(*hubs))
    for lease in leases[:4]:
        await link.send(0, f"{lease.key}/0")
        lease.done()
    taken = [await take_one(link) for _ in range(4)]
    assert [lease.key for lease in taken] == ["7", "8", "0/0", "1/0"]
    for lease in taken[:3]:
        lease.done()
    await link.leave(stream)
    assert stream.keys == ["2/0", "3/0"], "what the next stage works on is finished there"
    assert await link.receive() is None
    await link.send(0, "4/0")
    leases[4].done()
    assert stream.keys == ["2/0", "3/0", "4/0"]
    await link.end()
    assert await link.receive() is None
    assert link.queued == 1, "one end, for there may be no room for another"
    assert [entry.verdicts for entry in entries] == [["done"], [], ["done"], ["done"], ["done"]]
    await link.give_up()  # the stage has ended, and still holds a part of a group
    assert stream.keys[3:] == ["1/0"]
    assert all(entry.verdicts == ["done"] for entry in entries)
    assert not link.held(0.0)


async def test_what_came_in_by_the_hub_of_the_next_stage_is_not_sent_there_again() -> None:
    link, stream, own, entry = make_link(), Stream(), Entry("7/0"), Entry("8")
    link.entered(entry)
    await link.merge(Arrivals(own))
    await link.send(0, "8/0")
    await link.leave(stream)
    assert stream.keys == ["8/0"]
    assert own.verdicts == ["given back"], "its hub took its key once, and would drop it"
    assert await link.receive() is None


async def test_a_chain_that_stays_together_gives_nothing_up() -> None:
    link, entry = make_link(), Entry("1")
    link.entered(entry)
    await link.send(0, "1/0")
    link.released(entry)
    await take_one(link)
    await link.give_up()
    assert not entry.verdicts
