"""What a stream promises, also when its peers leave or die, as tests for any kind of link."""

from __future__ import annotations

import asyncio
from collections import Counter

import msgspec
import numpy as np
import pytest

from tests.transport.memory_link import Extra, Int32s, Job, Net, Ping, send_jobs, take_all, take_one, until
from transport.codec import Codec, checksum, total
from transport.errors import LinkRefused, MessageTooLarge, StreamFinished, UsageError


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

    async def test_what_fails_too_often_and_what_is_refused_are_dead_lettered(self, net: Net) -> None:
        async with net.stream(max_attempts=3) as (node, hub):
            await send_jobs(node, hub, range(1))
            for attempt, name in enumerate(("one", "two", "three"), 1):
                inlet = await node.inlet(hub.address, "jobs", Job, window_items=1, replica=name)
                assert (await take_one(inlet)).attempt == attempt
                await inlet.close(blame=True)
            await hub.wait_empty()
            inlet = await node.inlet(hub.address, "jobs", Job)
            await send_jobs(node, hub, range(1, 2))
            lease = await take_one(inlet)
            lease.poison("wrong number")
            with pytest.raises(UsageError, match="'1/1' was settled before; give each lease exactly one verdict"):
                lease.done()
            await hub.wait_empty()
            assert hub.stats().dead_letters == 2
        failed, refused = net.letters
        words = "replica 'three' failed while executing it (failed 3 of max_attempts=3)"
        assert (failed.key, failed.reason) == ("0/0", words)
        assert (refused.stream, refused.key, refused.reason) == ("jobs", "1/1", "wrong number")
        assert msgspec.msgpack.decode(refused.body, type=Job) == Job(1)

    async def test_a_window_that_admits_nothing_is_refused(self, net: Net) -> None:
        async with net.stream() as (node, hub):
            for window in ({"window_items": 0}, {"window_bytes": 0}):
                with pytest.raises(UsageError, match="admits nothing; use at least 1 of each"):
                    await node.inlet(hub.address, "jobs", Job, **window)

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

    async def test_strangers_are_refused_with_both_names(self, net: Net) -> None:
        async with net.stream() as (node, hub):
            await node.outlet(hub.address, "jobs", Job)
            with pytest.raises(LinkRefused, match=r"declares schema Ping .* carries Job .* same code on both sides"):
                await node.inlet(hub.address, "jobs", Ping)
            with pytest.raises(LinkRefused, match="asked for stream 'other', here is 'jobs'"):
                await node.inlet(hub.address, "other", Job)


class DepartureConformance:
    """What a stream promises when its peers leave or die."""

    async def test_a_lost_replica_is_replaced_and_only_started_work_is_blamed(self, net: Net) -> None:
        async with net.stream(max_attempts=1) as (node, hub):
            lost = await node.inlet(hub.address, "jobs", Job, window_items=3, replica="lost")
            await send_jobs(node, hub, range(3))
            late = [await take_one(lost)]  # started 0, holds 1 and 2
            await asyncio.sleep(0.05)
            hub.peer_lost("lost")
            other = await node.inlet(hub.address, "jobs", Job, replica="other")
            leases = [await take_one(other), await take_one(other)]
            assert [(lease.message.number, lease.attempt) for lease in leases] == [(1, 2), (2, 2)]
            for lease in leases:
                lease.done()
            await hub.wait_empty()
            late.append(await take_one(lost))  # it lives, and does not know
            for lease in late:
                lease.done()
            await until(lambda: hub.stats().duplicates == 2)
            assert (hub.stats().settled, hub.stats().dead_letters) == (2, 1), "the first verdict wins"
        [letter] = net.letters
        assert letter.key == "0/0"
        assert "replica 'lost' died while executing it (failed 1 of max_attempts=1)" in letter.reason

    async def test_who_drains_and_closes_hands_over_what_is_not_done_without_blame(self, net: Net) -> None:
        async with net.stream(max_attempts=1) as (node, hub):
            leaver = await node.inlet(hub.address, "jobs", Job, window_items=5, replica="leaver")
            await send_jobs(node, hub, range(5))
            done, late, unused = [await take_one(leaver) for _ in range(3)]
            await leaver.drain()
            assert await leaver.receive() is None
            assert unused.give_back is not None
            unused.give_back()
            stayer = await node.inlet(hub.address, "jobs", Job, replica="stayer")
            for number in (3, 4, 2):  # were not started, or not used
                lease = await take_one(stayer)
                assert lease.message.number == number
                lease.done()
            done.done()
            await leaver.close()
            late.done()  # too late, and harmless
            hub.finish()
            assert await take_all(stayer) == [1]
            assert hub.stats().settled == 5
        assert net.letters == []

    async def test_leaving_with_an_error_blames_and_does_not_hang(self, net: Net) -> None:
        async def fail() -> None:
            async with net.stream(max_attempts=1) as (node, hub):
                inlet = await node.inlet(hub.address, "jobs", Job)
                await send_jobs(node, hub, range(2))
                assert await inlet.receive() is not None
                raise RuntimeError("application bug")

        with pytest.raises(RuntimeError, match="application bug"):
            await fail()
        assert [letter.key for letter in net.letters] == ["0/0"]

    async def test_leaving_when_cancelled_does_not_hang(self, net: Net) -> None:
        async def linger() -> None:
            async with asyncio.timeout(0.3), net.stream() as (node, hub):
                inlet = await node.inlet(hub.address, "jobs", Job)
                await inlet.receive()

        with pytest.raises(TimeoutError):
            await linger()

    async def test_a_hub_that_closes_waits_for_its_peers_goodbye(self, net: Net) -> None:
        async with net.stream() as (node, hub):
            inlet = await node.inlet(hub.address, "jobs", Job)
            assert not hub.core.peerless
            await hub.close(timeout_s=10.0)
            assert hub.core.peerless
            await inlet.close(timeout_s=0.1)  # nobody is there to answer

    async def test_ports_survive_a_new_hub_at_the_same_address(self, net: Net) -> None:
        if not net.rebinds:
            pytest.skip("these links do not reconnect")
        async with net.stream() as (node, hub):
            inlet = await node.inlet(hub.address, "jobs", Job)
            outlet = await node.outlet(hub.address, "jobs", Job)
            await outlet.send(Job(1), "1")
            orphan = await take_one(inlet)
            await hub.close()
            spec = msgspec.structs.replace(hub.core.spec, address=hub.address)
            again = await node.hub(spec, net.letters.append)
            await outlet.send(Job(2), "2")
            orphan.done()  # of the old hub: nobody is told
            again.finish()
            assert await take_all(inlet) == [2]
            assert again.stats().settled == 1


# Arrays, and extras: arrays that travel as frames of their own.

TOKENS = np.arange(100_000, dtype="<i4").view(Int32s)  # above the zero-copy threshold
SMALL = np.arange(3, dtype="<i2").view(Extra)
LARGE = np.arange(1 << 18, dtype="<f4").reshape(2, -1, 8).view(Extra)  # this one too
ALL = {"small": SMALL, "none": np.zeros((0, 4), "?").view(Extra), "large": LARGE, "one": np.array(7.5).view(Extra)}
WHOLE = Job(1, "ü", TOKENS, ALL)


def check(job: Job) -> None:
    assert job.text == "ü"
    assert list(job.extras) == list(ALL)
    for got, sent in ((job.tokens, TOKENS), *((job.extras[name], sent) for name, sent in ALL.items())):
        assert got is not None
        assert (type(got), got.dtype, got.shape) == (type(sent), sent.dtype, sent.shape)
        assert np.array_equal(got, sent)
        assert got.flags.aligned
        assert not got.flags.writeable


class ContentConformance:
    async def test_arrays_arrive_unharmed_also_the_second_time(self, net: Net) -> None:
        async with net.stream(max_message_bytes=1 << 22) as (node, hub):
            outlet = await node.outlet(hub.address, "jobs", Job)
            first = await node.inlet(hub.address, "jobs", Job, replica="first", window_bytes=1 << 22)
            await outlet.send(WHOLE, "one")
            assert hub.stats().bytes_queued > LARGE.nbytes + SMALL.nbytes  # limits and windows count them
            lease = await take_one(first)
            check(lease.message)
            await first.close(blame=True)
            second = await node.inlet(hub.address, "jobs", Job, replica="second")
            last = await take_one(second)
            assert last.attempt == 2
            check(last.message)
            check(lease.message)  # its own frames are kept as long as somebody looks at them
            forward = await node.outlet(hub.address, "jobs", Job)
            await forward.send(last.message, "two")  # a view of what was received travels on as it is
            last.done()
            onward = await take_one(second)
            check(onward.message)
            onward.poison("enough")
            await hub.wait_empty()
        [letter] = net.letters
        assert all(array.tobytes() in letter.body for array in (TOKENS, LARGE, SMALL))

    async def test_too_large_is_refused_before_it_leaves(self, net: Net) -> None:
        async with net.stream(max_message_bytes=1000) as (node, hub):
            outlet = await node.outlet(hub.address, "jobs", Job)
            half = np.zeros(600, "u1").view(Extra)
            words = r"message 'big' has {}\d\d bytes, max_message_bytes of stream 'jobs' is 1000; raise it"
            with pytest.raises(MessageTooLarge, match=words.format(20)):
                await outlet.send(Job(1, "x" * 2000), "big")
            with pytest.raises(MessageTooLarge, match=words.format(12)):
                await outlet.send(Job(1, extras={"a": half, "b": half}), "big")
            await outlet.send(Job(2, extras={"a": half}), "fits")
            assert hub.stats().accepted == 1

    async def test_what_does_not_decode_is_quarantined_alone(self, net: Net) -> None:
        frames = Codec(Job).encode(WHOLE)
        flipped = bytearray(frames[3])
        flipped[len(flipped) // 2] ^= 1
        bodies = [b"\x93\x01\xa1x\xa1y", b"\x91\x00garbage", b"\x92\x01\xa2\xff\xfe", b"\x91" * 200_000, b""]
        async with net.stream(max_message_bytes=1 << 22) as (node, hub):
            inlet = await node.inlet(hub.address, "jobs", Job)
            outlet = await node.outlet(hub.address, "jobs", Job)
            for number, body in enumerate(bodies):
                outlet.core.offer(f"bad{number}", len(body), checksum(body), body)
            outlet.core.offer("flipped", 2, checksum(b"\x91\x01"), b"\x91\x02")
            digest = checksum(*frames)
            outlet.core.offer("flipped extra", total(frames), digest, (*frames[:3], bytes(flipped), *frames[4:]))
            outlet.core.offer("missing extra", total(frames[:-1]), checksum(*frames[:-1]), frames[:-1])
            await outlet.send(WHOLE, "good")
            lease = await take_one(inlet)
            check(lease.message)
            lease.done()
            await hub.wait_empty()
        reasons = {letter.key: letter.reason for letter in net.letters}
        assert sorted(reasons) == ["bad0", "bad1", "bad2", "bad3", "bad4", "flipped", "flipped extra", "missing extra"]
        assert len(net.letters) == len(reasons)
        assert all(reason.startswith("quarantined at ") for reason in reasons.values())
        assert "checksum of 2 bytes differs" in reasons["flipped"]
        assert "checksum of" in reasons["flipped extra"]
        assert "an extra lies in frame 4 of a body of 4" in reasons["missing extra"]
