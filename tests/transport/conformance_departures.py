"""What a stream promises when its peers leave or die, and of extras, as tests for any kind of link."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from tests.transport.conformance_net import Extra, Job, Net, send_jobs, take_all, take_one, until
from transport.codec import Codec, checksum, total
from transport.errors import MessageTooLarge


class DepartureConformance:
    """What a stream promises when its peers leave or die."""

    async def test_a_lost_replica_is_replaced_and_only_started_work_is_blamed(self, net: Net) -> None:
        async with net.stream(max_attempts=1) as (node, hub):
            lost = await node.inlet(hub.address, "jobs", Job, window_items=3, replica="lost")
            await send_jobs(node, hub, range(3))
            assert await lost.receive() is not None  # started 0, holds 1 and 2
            await asyncio.sleep(0.05)
            hub.peer_lost("lost")
            other = await node.inlet(hub.address, "jobs", Job, replica="other")
            leases = [await take_one(other), await take_one(other)]
            assert [(lease.message.number, lease.attempt) for lease in leases] == [(1, 2), (2, 2)]
            for lease in leases:
                lease.done()
            await hub.wait_empty()
        [letter] = net.letters
        assert letter.key == "0/0"
        assert "replica 'lost' died while executing it (failed 1 of max_attempts=1)" in letter.reason

    async def test_the_first_verdict_wins(self, net: Net) -> None:
        async with net.stream() as (node, hub):
            slow = await node.inlet(hub.address, "jobs", Job, replica="slow")
            await send_jobs(node, hub, range(1))
            late = await take_one(slow)
            await asyncio.sleep(0.02)
            quick = await node.inlet(hub.address, "jobs", Job, replica="quick")
            hub.peer_lost("slow")
            lease = await take_one(quick)
            assert (lease.message, lease.attempt) == (Job(0), 2)
            lease.done()
            await hub.wait_empty()
            late.done()
            await until(lambda: hub.stats().duplicates > 0)
            assert hub.stats().settled == 1

    async def test_draining_hands_over_what_was_not_started(self, net: Net) -> None:
        async with net.stream(max_attempts=1) as (node, hub):
            leaver = await node.inlet(hub.address, "jobs", Job, window_items=4, replica="leaver")
            await send_jobs(node, hub, range(4))
            lease = await take_one(leaver)
            await leaver.drain()
            assert await leaver.receive() is None
            stayer = await node.inlet(hub.address, "jobs", Job, replica="stayer")
            async with asyncio.TaskGroup() as group:
                taking = group.create_task(take_all(stayer))
                lease.done()
                await leaver.close()
                hub.finish()
            assert sorted(taking.result()) == [1, 2, 3]
        assert net.letters == []

    async def test_closing_returns_leases_without_blame(self, net: Net) -> None:
        async with net.stream(max_attempts=1) as (node, hub):
            leaver = await node.inlet(hub.address, "jobs", Job, replica="leaver")
            await send_jobs(node, hub, range(3))
            lease = await take_one(leaver)
            await leaver.close()
            lease.done()  # too late, and harmless
            assert hub.stats().queued == 3
            stayer = await node.inlet(hub.address, "jobs", Job, replica="stayer")
            hub.finish()
            assert sorted(await take_all(stayer)) == [0, 1, 2]
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


# Extras: arrays that travel as frames of their own.

SMALL = np.arange(3, dtype="<i2").view(Extra)
LARGE = np.arange(1 << 18, dtype="<f4").reshape(2, -1, 8).view(Extra)  # above the zero-copy threshold
ALL = {"small": SMALL, "none": np.zeros((0, 4), "?").view(Extra), "large": LARGE, "one": np.array(7.5).view(Extra)}


def check(job: Job) -> None:
    assert job.text == "x"
    assert list(job.extras) == list(ALL)
    for name, extra in job.extras.items():
        assert (type(extra), extra.dtype, extra.shape) == (Extra, ALL[name].dtype, ALL[name].shape)
        assert np.array_equal(extra, ALL[name])
        assert not extra.flags.writeable


class ExtrasConformance:
    async def test_extras_arrive_unharmed_also_the_second_time(self, net: Net) -> None:
        async with net.stream(max_message_bytes=1 << 22) as (node, hub):
            outlet = await node.outlet(hub.address, "jobs", Job)
            first = await node.inlet(hub.address, "jobs", Job, replica="first", window_bytes=1 << 22)
            await outlet.send(Job(1, "x", extras=ALL), "one")
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
        assert LARGE.tobytes() in letter.body
        assert SMALL.tobytes() in letter.body

    async def test_extras_count_for_the_limit(self, net: Net) -> None:
        async with net.stream(max_message_bytes=1000) as (node, hub):
            outlet = await node.outlet(hub.address, "jobs", Job)
            halves = {name: np.zeros(600, "u1").view(Extra) for name in "ab"}
            with pytest.raises(MessageTooLarge, match=r"message 'big' has 12\d\d bytes"):
                await outlet.send(Job(1, extras=halves), "big")
            await outlet.send(Job(2, extras={"a": halves["a"]}), "fits")
            assert hub.stats().accepted == 1

    async def test_damaged_extras_are_quarantined_alone(self, net: Net) -> None:
        async with net.stream(max_message_bytes=1 << 22) as (node, hub):
            inlet = await node.inlet(hub.address, "jobs", Job)
            outlet = await node.outlet(hub.address, "jobs", Job)
            frames = Codec(Job).encode(Job(1, "x", extras=ALL))
            flipped = bytearray(frames[3])
            flipped[len(flipped) // 2] ^= 1
            digest = checksum(*frames)
            outlet.core.offer("flipped", total(frames), digest, (*frames[:3], bytes(flipped), *frames[4:]))
            short = frames[:-1]
            outlet.core.offer("missing", total(short), checksum(*short), short)
            await outlet.send(Job(2, "x", extras=ALL), "good")
            lease = await take_one(inlet)
            assert lease.message.number == 2
            check(lease.message)
            lease.done()
            await hub.wait_empty()
        reasons = {letter.key: letter.reason for letter in net.letters}
        assert "checksum of" in reasons["flipped"]
        assert "an extra lies in frame 4 of a body of 4" in reasons["missing"]
