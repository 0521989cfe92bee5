"""A group is given up when a part of it is in no hub, again and again, and not before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import cast

from pipeline.hosts.stream_hub import StreamHub, stream_key
from pipeline.supervise.lost_groups import REASON, LostGroups, Sent, incomplete
from transport import DeadLetter, Held, StreamSpec, TopicServer
from transport.links.memory import MemoryNetwork, MemoryNode
from transport.testing.net import until


class FakeHub:
    """Holds one set of keys after another, the last one from then on."""

    def __init__(self, *accounts: Sequence[str]) -> None:
        self.accounts = list(accounts)

    async def account(self) -> list[Held]:
        keys = self.accounts.pop(0) if len(self.accounts) > 1 else self.accounts[0]
        return [Held(key, "", 0.0) for key in keys]


def test_all_members_have_to_be_named() -> None:
    keys = ["1", "2/0,1/3", "2/2/3", "3/0,1/1", "eval-7/0/1", "4/0.0/1", "4/0.1,1/1", "4/2/9"]
    assert incomplete([1, 2, 3, 4, 5], keys, 3) == {3, 5}


@asynccontextmanager
async def watched(hubs: dict[str, FakeHub], open_: set[int]) -> AsyncIterator[tuple[TopicServer, list[DeadLetter]]]:
    letters: list[DeadLetter] = []
    async with asyncio.timeout(10), MemoryNode("run", "controller-0", MemoryNetwork()) as node:
        topic = await node.topic_server("topic")
        found = LostGroups(cast(dict[str, StreamHub], hubs), topic, 2, lambda: open_, letters.append, 0.001, 0.01)
        async with asyncio.TaskGroup() as tasks:
            looking = tasks.create_task(found.run())
            yield topic, letters
            looking.cancel()


async def test_a_group_that_no_hub_has_fails_after_a_hub_came_back() -> None:
    hubs = {"generate": FakeHub(["1"]), "reward": FakeHub(["2/0/1"]), "settle": FakeHub([])}
    async with watched(hubs, {1, 2, 3}) as (topic, letters):
        await asyncio.sleep(0.02)
        assert letters == [], "nothing has happened"
        topic.publish(stream_key("generate"), b"here")
        await until(lambda: len(letters) == 2)
        assert {(letter.key, letter.reason) for letter in letters} == {("2", REASON), ("3", REASON)}


async def test_a_group_counts_from_when_its_hub_has_it() -> None:
    async with asyncio.timeout(10), MemoryNode("run", "prompts-0", MemoryNetwork()) as node:
        hub = await node.hub(StreamSpec("generate", "here", capacity_items=2), print)
        outlet = Sent(await node.outlet(hub.address, "generate", str))
        async with asyncio.TaskGroup() as tasks:
            await outlet.send("prompt", "1")
            await outlet.send("prompt", "eval-1")
            waiting = tasks.create_task(outlet.send("prompt", "2"))
            await asyncio.sleep(0.02)
            assert outlet.groups == {1}
            waiting.cancel()


async def test_what_is_seen_once_or_ends_meanwhile_is_not_lost() -> None:
    open_ = {1, 2}
    seen: list[Sequence[str]] = [[], [], ["1"], []]
    hubs = {"generate": FakeHub(*seen)}
    async with watched(hubs, open_) as (topic, letters):
        topic.publish(stream_key("generate"), b"here")
        await until(lambda: len(hubs["generate"].accounts) < 4)
        open_.discard(2)
        await until(lambda: len(hubs["generate"].accounts) == 1)
        await asyncio.sleep(0.02)
        assert letters == []
