"""What streams promise of extras, the arrays that travel as frames of their own, as tests for any kind of link."""

from __future__ import annotations

import numpy as np
import pytest

from transport.codec import Codec, checksum, total
from transport.errors import MessageTooLarge
from transport.testing.net import Extra, Job, Net, take_one

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
