"""Weights between hosts: fetched once, to the byte, and refused when they are not what was announced."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from uuid import uuid4

import pytest

from models.errors import TornWeights, WeightsError
from models.weights.shared_memory_reader import SlotReader
from models.weights.shared_memory_writer import SlotWriter
from pipeline.hosts import weights_source
from pipeline.hosts.weights_source import SOURCE, FetchedWeights, OfferedWeights
from stages.messages import WeightsAnnouncement
from tests.models.weights.made_up import checkpoint, values
from transport import ByteServer, Node


@pytest.fixture
def slots(tmp_path: Path) -> Iterator[SlotWriter]:
    with closing(SlotWriter(tmp_path / "slots", checkpoint(tmp_path / "source"))) as writer:
        yield writer


def write(slots: SlotWriter, version: int) -> WeightsAnnouncement:
    slot = slots.write(version, 0, iter(values(version).items()))
    return WeightsAnnouncement(0, version, slot.path, slot.digest, slot.generation)


def contents(announcement: WeightsAnnouncement) -> list[bytes]:
    slot = SlotReader(announcement)
    return [data.tobytes() for _, data in slot.tensors()]


@asynccontextmanager
async def hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, apart: bool = True
) -> AsyncIterator[tuple[OfferedWeights, FetchedWeights]]:
    """The trainer's side, and the other, on hosts that are `apart` or the same."""
    async with Node("run", "controller") as home, Node("run", "engines-0", give_up_s=1.0) as away:
        topic = await home.topic_server(f"ipc://{tmp_path}/topic")
        offered = OfferedWeights(home, await home.topic(topic.address), "127.0.0.1")
        fetched = FetchedWeights(away, await away.topic(topic.address), f"copies-of-{uuid4().hex}", tmp_path)
        original = offered.offer

        async def as_of_its_host(slot: Path) -> None:
            with monkeypatch.context() as patch:
                if apart:
                    patch.setattr(weights_source, "host_id", lambda: "the trainer's")
                await original(slot)

        monkeypatch.setattr(offered, "offer", as_of_its_host)
        try:
            yield offered, fetched
        finally:
            fetched.close()


async def fetch(offered: OfferedWeights, fetched: FetchedWeights, one: WeightsAnnouncement) -> WeightsAnnouncement:
    """As over a topic: an announcement comes after the offer of its slot."""
    await offer(offered, fetched, one)
    return await fetched.local(one)


async def offer(offered: OfferedWeights, fetched: FetchedWeights, one: WeightsAnnouncement) -> None:
    slot, topic = Path(one.path), fetched._topic
    await offered.offer(slot)
    revision = 0
    async with asyncio.timeout(20):
        while f"{slot.name}/".encode() not in (topic.get(SOURCE) or b""):
            revision = await topic.wait(revision, SOURCE)


async def test_a_version_is_fetched_once_for_all_engines(
    slots: SlotWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hosts(tmp_path, monkeypatch) as (offered, fetched):
        for version in range(4):
            one = write(slots, version)
            first = await fetch(offered, fetched, one)
            assert offered._server is not None
            chunks = offered._server.chunks
            others = await asyncio.gather(*(fetched.local(one) for _ in range(5)))
            assert {other.path for other in others} == {first.path} != {one.path}
            assert offered._server.chunks == chunks
            assert contents(first) == contents(one)
            assert (first.label, first.digest, first.generation) == (one.label, one.digest, one.generation)


async def test_on_the_trainers_host_a_slot_is_used_as_it_lies(
    slots: SlotWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hosts(tmp_path, monkeypatch, apart=False) as (offered, fetched):
        one = write(slots, 0)
        await offer(offered, fetched, one)
        assert await fetched.local(one) is one
        assert await offered.local(one) is one
        assert offered._server is not None
        assert offered._server.chunks == 0


async def test_a_slot_that_is_overwritten_meanwhile_is_refused(
    slots: SlotWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hosts(tmp_path, monkeypatch) as (offered, fetched):
        old = write(slots, 0)
        await fetch(offered, fetched, old)
        old = write(slots, 1)
        await offer(offered, fetched, old)
        write(slots, 2)
        newest = write(slots, 3)  # in the place of version 1
        assert newest.path == old.path
        with pytest.raises(WeightsError):
            await fetched.local(old)
        assert contents(await fetched.local(newest)) == contents(newest)


async def test_a_trainer_that_is_gone_is_an_error_of_the_update(
    slots: SlotWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine goes on with what it has, and the update is tried again."""
    async with hosts(tmp_path, monkeypatch) as (offered, fetched):
        await fetch(offered, fetched, write(slots, 0))
        second = write(slots, 1)
        await offer(offered, fetched, second)
        server = offered._server
        assert isinstance(server, ByteServer)
        await server.close()
        with pytest.raises(WeightsError, match=r"version 1 could not be fetched from tcp://127\.0\.0\.1"):
            await fetched.local(second)


async def test_a_fetch_from_a_trainer_that_is_gone_ends_when_another_one_offers(
    slots: SlotWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hosts(tmp_path, monkeypatch) as (offered, fetched):
        fetched._node._give_up_s = None  # it would wait for ever
        one = write(slots, 0)
        await offer(offered, fetched, one)
        assert offered._server is not None
        offered._server.shut(0)
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            task = tasks.create_task(expect_gone(fetched, one))
            while not fetched._turn.locked():  # noqa: ASYNC110  (a lock announces nothing)
                await asyncio.sleep(0.01)
            assert not task.done()
            offered._server, offered._files = None, set()
            await offered.offer(Path(one.path))
        assert contents(await fetched.local(one)) == contents(one)


async def expect_gone(fetched: FetchedWeights, one: WeightsAnnouncement) -> None:
    with pytest.raises(TornWeights, match="is gone; another one offers newer"):
        await fetched.local(one)
