"""What a stream promises, as tests for any kind of link."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.transport.conformance_net import Int32s, Job, Net, Ping, Pong, send_jobs, take_all, take_one, until
from transport.codec import checksum
from transport.errors import LinkRefused, MessageInvalid, MessageTooLarge, StreamFinished, UsageError


class StreamConformance:
    """What a stream promises."""

    async def test_every_message_arrives_once_and_in_order(self, net: Net) -> None:
        async with net.stream(lease_s=60.0) as (node, hub):  # nothing is sent again because the machine is busy
            inlet = await node.inlet(hub.address, "jobs", Job)
            await send_jobs(node, hub, range(500))
            hub.finish()
            assert await take_all(inlet) == list(range(500))
            await hub.wait_empty()
            stats = hub.stats()
            assert (stats.accepted, stats.settled, stats.redelivered, stats.duplicates) == (500, 500, 0, 0)
        assert net.letters == []

    async def test_arrays_arrive_equal_and_read_only(self, net: Net) -> None:
        async with net.stream() as (node, hub):
            inlet = await node.inlet(hub.address, "jobs", Job)
            outlet = await node.outlet(hub.address, "jobs", Job)
            tokens = np.arange(100_000, dtype="<i4").view(Int32s)  # above the zero-copy threshold
            await outlet.send(Job(1, "ü", tokens), "a")
            lease = await take_one(inlet)
            got = lease.message.tokens
            assert isinstance(got, Int32s)
            assert np.array_equal(got, tokens)
            assert not got.flags.writeable
            assert got.flags.aligned
            lease.done()

    async def test_tagged_unions_are_schemas(self, net: Net) -> None:
        async with net.stream() as (node, hub):
            union: Any = Ping | Pong
            inlet = await node.inlet(hub.address, "jobs", union)
            outlet = await node.outlet(hub.address, "jobs", union)
            await outlet.send(Ping(3), "a")
            await outlet.send(Pong("x"), "b")
            first, second = await take_one(inlet), await take_one(inlet)
            assert (first.message, second.message) == (Ping(3), Pong("x"))
            with pytest.raises(MessageInvalid, match="a Job was sent where"):
                await outlet.send(Job(1), "c")

    async def test_producers_wait_while_the_hub_is_full(self, net: Net) -> None:
        async with net.stream(capacity_items=4) as (node, hub):
            async with asyncio.TaskGroup() as group:
                sending = group.create_task(send_jobs(node, hub, range(50)))
                await until(lambda: hub.stats().queued >= 4)
                await asyncio.sleep(0.05)
                assert 4 <= hub.stats().queued <= 5
                assert not sending.done()
                inlet = await node.inlet(hub.address, "jobs", Job)
                taking = group.create_task(take_all(inlet))
                await sending
                hub.finish()
            assert taking.result() == list(range(50))

    async def test_a_consumer_holds_no_more_than_its_window(self, net: Net) -> None:
        async with net.stream() as (node, hub):
            slow = await node.inlet(hub.address, "jobs", Job, window_items=3, replica="slow")
            await send_jobs(node, hub, range(20))
            await asyncio.sleep(0.05)
            assert (hub.stats().leased, hub.stats().queued) == (3, 17)
            fast = await node.inlet(hub.address, "jobs", Job, window_items=3, replica="fast")
            async with asyncio.TaskGroup() as group:
                taking = group.create_task(take_all(fast))
                await until(lambda: hub.stats().settled >= 17)
                hub.finish()
                assert await take_all(slow) == [0, 1, 2]
            assert taking.result() == list(range(3, 20))

    async def test_what_failed_is_delivered_again_then_dead_lettered(self, net: Net) -> None:
        async with net.stream(max_attempts=3) as (node, hub):
            await send_jobs(node, hub, range(1))
            attempts = []
            for name in ("one", "two", "three"):
                inlet = await node.inlet(hub.address, "jobs", Job, window_items=1, replica=name)
                lease = await take_one(inlet)
                attempts.append(lease.attempt)
                await inlet.close(blame=True)
            await hub.wait_empty()
            assert attempts == [1, 2, 3]
        [letter] = net.letters
        assert letter.key == "0/0"
        assert letter.reason == "replica 'three' failed while executing it (failed 3 of max_attempts=3)"

    async def test_poison_is_dead_lettered_at_once_with_its_body(self, net: Net) -> None:
        async with net.stream() as (node, hub):
            inlet = await node.inlet(hub.address, "jobs", Job)
            await send_jobs(node, hub, range(1))
            lease = await take_one(inlet)
            lease.poison("wrong number")
            await hub.wait_empty()
            assert hub.stats().dead_letters == 1
        [letter] = net.letters
        assert (letter.stream, letter.key, letter.reason) == ("jobs", "0/0", "wrong number")
        assert msgspec.msgpack.decode(letter.body, type=Job) == Job(0)

    async def test_what_does_not_decode_is_quarantined_alone(self, net: Net) -> None:
        async with net.stream() as (node, hub):
            inlet = await node.inlet(hub.address, "jobs", Job)
            outlet = await node.outlet(hub.address, "jobs", Job)
            bodies = [b"\x93\x01\xa1x\xa1y", b"\x91\x00garbage", b"\x92\x01\xa2\xff\xfe", b"\x91" * 200_000, b""]
            for number, body in enumerate(bodies):
                outlet.core.offer(f"bad{number}", len(body), checksum(body), body)
            outlet.core.offer("flipped", 2, checksum(b"\x91\x01"), b"\x91\x02")
            await outlet.send(Job(7), "good")
            lease = await take_one(inlet)
            assert lease.message == Job(7)
            lease.done()
            await hub.wait_empty()
        assert sorted(letter.key for letter in net.letters) == ["bad0", "bad1", "bad2", "bad3", "bad4", "flipped"]
        assert all(letter.reason.startswith("quarantined at ") for letter in net.letters)
        assert any("checksum of 2 bytes differs" in letter.reason for letter in net.letters)

    async def test_cancelled_receives_lose_nothing(self, net: Net) -> None:
        async with net.stream() as (node, hub):
            inlet = await node.inlet(hub.address, "jobs", Job, window_items=4)
            got: list[int] = []

            async def impatient() -> None:
                """Receive under a limit that often strikes. Unblocked by END."""
                while True:
                    try:
                        async with asyncio.timeout(0.0005):
                            lease = await inlet.receive()
                    except TimeoutError:
                        continue
                    if lease is None:
                        return
                    got.append(lease.message.number)
                    lease.done()

            async with asyncio.TaskGroup() as group:
                for _ in range(3):
                    group.create_task(impatient())
                outlet = await node.outlet(hub.address, "jobs", Job)
                for number in range(200):
                    await outlet.send(Job(number), str(number))
                hub.finish()
            assert Counter(got) == Counter(range(200))
            assert hub.stats().redelivered == 0

    async def test_a_cancelled_send_is_withdrawn(self, net: Net) -> None:
        async with net.stream(capacity_items=1) as (node, hub):
            outlet = await node.outlet(hub.address, "jobs", Job)
            await outlet.send(Job(0), "0")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await outlet.send(Job(1), "1")
            inlet = await node.inlet(hub.address, "jobs", Job)
            lease = await take_one(inlet)
            lease.done()
            await outlet.send(Job(2), "2")
            hub.finish()
            assert await take_all(inlet) == [2]

    async def test_end_comes_after_the_last_verdict_and_to_everybody(self, net: Net) -> None:
        async with net.stream() as (node, hub):
            holder = await node.inlet(hub.address, "jobs", Job, replica="holder")
            idle = await node.inlet(hub.address, "jobs", Job, replica="idle")
            await send_jobs(node, hub, range(1))
            lease = await take_one(holder)
            hub.finish()
            async with asyncio.TaskGroup() as group:
                waiting = [group.create_task(idle.receive()) for _ in range(3)]
                await asyncio.sleep(0.05)
                assert not any(task.done() for task in waiting)
                lease.done()
            assert [task.result() for task in waiting] == [None, None, None]
            assert await holder.receive() is None
            late = await node.inlet(hub.address, "jobs", Job, replica="late")
            assert await late.receive() is None
            outlet = await node.outlet(hub.address, "jobs", Job)
            with pytest.raises(StreamFinished, match="stream 'jobs' has ended"):
                await outlet.send(Job(1), "1")

    async def test_a_key_is_accepted_once(self, net: Net) -> None:
        async with net.stream() as (node, hub):
            for replica in ("one", "two"):
                outlet = await node.outlet(hub.address, "jobs", Job, replica=replica)
                await outlet.send(Job(1), "same")
            assert (hub.stats().accepted, hub.stats().duplicates) == (1, 1)

    async def test_strangers_are_refused_with_both_names(self, net: Net) -> None:
        async with net.stream() as (node, hub):
            await node.outlet(hub.address, "jobs", Job)
            with pytest.raises(LinkRefused, match=r"declares schema Ping .* carries Job .* same code on both sides"):
                await node.inlet(hub.address, "jobs", Ping)
            with pytest.raises(LinkRefused, match="asked for stream 'other', here is 'jobs'"):
                await node.inlet(hub.address, "other", Job)

    async def test_too_large_is_refused_before_it_leaves(self, net: Net) -> None:
        async with net.stream(max_message_bytes=1000) as (node, hub):
            outlet = await node.outlet(hub.address, "jobs", Job)
            words = r"message 'big' has 20\d\d bytes, max_message_bytes of stream 'jobs' is 1000; raise it"
            with pytest.raises(MessageTooLarge, match=words):
                await outlet.send(Job(1, "x" * 2000), "big")
            await outlet.send(Job(2), "small")
            assert hub.stats().accepted == 1

    async def test_sticky_streams_keep_a_prefix_together(self, net: Net) -> None:
        async with net.stream(routing="sticky") as (node, hub):
            owners: dict[str, set[str]] = {}

            async def work(name: str) -> None:
                """Note who gets which prefix. Unblocked by END."""
                inlet = await node.inlet(hub.address, "jobs", Job, window_items=64, replica=name)
                ready.release()
                while (lease := await inlet.receive()) is not None:
                    owners.setdefault(lease.key.partition("/")[0], set()).add(name)
                    lease.done()

            ready = asyncio.Semaphore(0)
            async with asyncio.TaskGroup() as group:
                for name in ("a", "b", "c"):
                    group.create_task(work(name))
                for _ in range(3):
                    await ready.acquire()
                outlet = await node.outlet(hub.address, "jobs", Job)
                for number in range(120):
                    await outlet.send(Job(number), f"{number % 12}/{number}")
                hub.finish()
            assert len(owners) == 12
            assert all(len(names) == 1 for names in owners.values())
            assert len(set.union(*owners.values())) > 1

    async def test_a_lease_has_one_verdict(self, net: Net) -> None:
        async with net.stream() as (node, hub):
            inlet = await node.inlet(hub.address, "jobs", Job)
            await send_jobs(node, hub, range(1))
            lease = await take_one(inlet)
            lease.done()
            with pytest.raises(UsageError, match="'0/0' was settled before; give each lease exactly one verdict"):
                lease.poison("again")
