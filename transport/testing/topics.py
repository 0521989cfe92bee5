"""What a topic promises, as tests for any kind of link. See `transport.testing`."""

from __future__ import annotations

import asyncio

import pytest

from transport.testing.net import Net


class TopicConformance:
    """What a topic promises."""

    async def test_values_reach_everybody_and_late_joiners(self, net: Net) -> None:
        async with net.node() as node:
            server = await node.topic_server(net.address("topic"))
            one = await node.topic(server.address, replica="one")
            two = await node.topic(server.address, replica="two")
            assert await server.wait(0) if server.revision else server.revision == 0
            await one.publish("weights", b"1")
            await one.publish("applied/a", b"x")
            assert server.get("weights") == b"1"
            while two.get("applied/a") is None:
                await two.wait(two.revision)
            assert two.items("applied/") == {"applied/a": b"x"}
            server.publish("weights", b"2")
            while one.get("weights") != b"2":
                await one.wait(one.revision)
            late = await node.topic(server.address, replica="late")
            assert late.items("") == {"weights": b"2", "applied/a": b"x"}
            assert await late.wait(0) == late.revision > 0

    async def test_waiting_sees_changes_after_a_revision_only(self, net: Net) -> None:
        async with net.node() as node:
            server = await node.topic_server(net.address("topic"))
            client = await node.topic(server.address)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await client.wait(client.revision)
            async with asyncio.TaskGroup() as group:
                waiting = [group.create_task(client.wait(client.revision)) for _ in range(3)]
                local = group.create_task(server.wait(server.revision))
                await asyncio.sleep(0)
                server.publish("k", b"v")
            assert len({task.result() for task in waiting}) == 1
            assert local.result() == server.revision

    async def test_the_server_drops_keys(self, net: Net) -> None:
        async with net.node() as node:
            server = await node.topic_server(net.address("topic"))
            server.publish("a", b"1")
            server.publish("b", b"")
            client = await node.topic(server.address)
            assert client.items("") == {"a": b"1", "b": b""}
            server.drop("a")
            server.drop("absent")
            while client.get("a") is not None:
                await client.wait(client.revision)
            assert client.items("") == {"b": b""}

    async def test_clients_survive_a_new_server(self, net: Net) -> None:
        if not net.rebinds:
            pytest.skip("these links do not reconnect")
        async with net.node() as node:
            server = await node.topic_server(net.address("topic"))
            client = await node.topic(server.address)
            await client.publish("old", b"1")
            address, before = server.address, client.revision
            await server.close()
            again = await node.topic_server(address)
            again.publish("new", b"2")
            while client.get("new") is None:
                await client.wait(client.revision)
            assert client.revision > before
            assert client.items("") == {"new": b"2"}
            await client.publish("more", b"3")
            assert again.get("more") == b"3"

    async def test_a_change_wakes_those_alone_who_read_the_key(self, net: Net) -> None:
        async with net.node() as node:
            server = await node.topic_server(net.address("topic"))
            client = await node.topic(server.address)
            for end in (server, client):
                start = end.revision
                async with asyncio.TaskGroup() as group:
                    readers = group.create_task(end.wait(start, "weights", "device/"))
                    other = group.create_task(end.wait(start, "drain"))
                    await asyncio.sleep(0)
                    for key in ("weight", "device", "eval/released", "device/a"):
                        assert not readers.done()
                        server.publish(key, b"1")
                        while client.get(key) is None:
                            await client.wait(client.revision)
                    assert await readers == end.revision
                    assert not other.done()
                    server.publish("drain", b"now")
                    assert await other == end.revision
                before = end.revision
                server.drop("drain")  # those who read a key learn that it is gone
                assert await end.wait(before, "drain") > before
                for key in ("weight", "device", "eval/released", "device/a"):
                    server.drop(key)
                while client.items(""):
                    await client.wait(client.revision)

    async def test_private_keys_stay_with_the_server(self, net: Net) -> None:
        async with net.node() as node:
            server = await node.topic_server(net.address("topic"), private=("stats/",))
            one = await node.topic(server.address, replica="one")
            two = await node.topic(server.address, replica="two")
            async with asyncio.TaskGroup() as group:
                local = group.create_task(server.wait(server.revision, "stats/"))
                await asyncio.sleep(0)
                await one.publish("stats/one", b"1")
                assert await local == server.revision
            await one.publish("k", b"v")
            while two.get("k") is None:
                await two.wait(two.revision)
            late = await node.topic(server.address, replica="late")
            assert server.items("stats/") == {"stats/one": b"1"}
            assert one.items("") == two.items("") == late.items("") == {"k": b"v"}
            server.drop("stats/one")
            assert server.items("stats/") == {}
