"""The way of a version into engines of one host: what is read how often, what is done before an engine stands still,
and on which devices tensors are lent."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch

from configs.schema.rollout import UpdateConfig
from models.engines.client import EngineClient, WeightsUpdated
from models.engines.protocol import ServerInfo, UpdateVersionRequest
from models.errors import EngineRefused, TornWeights
from models.weights import shared_memory_reader
from models.weights.layout import Bucket
from models.weights.shared_memory_reader import SlotManifest, SlotReader
from models.weights.transfer import SharedBuffer
from stages.engines.weight_transfer import BucketTransfer
from stages.topic_values import EngineAddress
from tests.models.weights.made_up import values
from tests.stages.fleet_rig import Fleet, open_fleet
from tests.stages.stage_rig import before_calls, idle, until


def count_verified(fleet: Fleet) -> list[int]:
    """Bytes that are digested for a verification from now on."""
    digested: list[int] = []
    original = shared_memory_reader.digest_of

    def digest(piece: npt.NDArray[np.uint8]) -> bytes:
        digested.append(len(piece))
        return original(piece)

    fleet.patch.setattr(shared_memory_reader, "digest_of", digest)
    return digested


@pytest.mark.parametrize("engines", [1, 3])
async def test_engines_of_one_process_share_one_verification(fleet: Fleet, engines: int) -> None:
    """And prepare one after the other, else each would find the memory free that all of them are about to take."""
    await fleet.serving(engines)
    digested = count_verified(fleet)
    at_work, most, original = 0, 0, EngineClient.prepare_weights

    async def prepare(client: EngineClient, claim: SlotManifest) -> bool:
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        await idle()
        verified = await original(client, claim)
        at_work -= 1
        return verified

    fleet.patch.setattr(EngineClient, "prepare_weights", prepare)
    for version in (1, 2):
        await fleet.land(version)
        assert sum(digested) == version * fleet.weights.slots.layout.data_bytes
    assert most == 1


async def test_an_engine_in_doubt_gets_bytes_that_were_verified_for_it(fleet: Fleet) -> None:
    await fleet.serving(2)
    digested = count_verified(fleet)
    fleet.control(1)._in_full = True
    await fleet.land(1)
    assert sum(digested) > fleet.weights.slots.layout.data_bytes
    assert fleet.labels() == ["0.1", "0.1"]


async def test_engines_prepare_before_their_turn_and_go_on_serving(in_turns: Fleet) -> None:
    """Both of two verify and prepare while the first is being updated; the second is not asked to pause."""
    servers = await in_turns.serving(2)
    asked = in_turns.count_calls()
    go, _ = await in_turns.held_in_update(servers[0].url)
    await until(lambda: (servers[1].url, "/prepare_weights") in asked)
    await idle()
    assert (servers[1].url, "/pause_generation") not in asked
    assert (in_turns.entry(1).state, in_turns.entry(1).fetching, in_turns.entry(1).version) == ("serving", -1, 0)
    go.set()
    await in_turns.all_landed(1)
    for server in servers:
        calls = [path for url, path in asked if url == server.url]
        assert calls.count("/prepare_weights") == 1, "once for each version"
        assert calls.index("/prepare_weights") < calls.index("/pause_generation")


@pytest.mark.parametrize("refusals", [1, 2])
async def test_what_goes_wrong_ahead_of_the_turn_is_judged_in_the_turn(fleet: Fleet, refusals: int) -> None:
    await fleet.serving()
    left = refusals

    def prepare(client: EngineClient, claim: SlotManifest) -> None:
        nonlocal left
        if left:
            left -= 1
            raise EngineRefused(client.base_url, 400, "a checkpoint of another model")

    before_calls(fleet.patch, EngineClient, "prepare_weights", prepare)
    await fleet.land(1)
    assert fleet.failures() == refusals - 1


async def test_a_slot_that_was_overwritten_ahead_of_the_turn_stops_no_engine(in_turns: Fleet) -> None:
    """What was prepared from it is never taken."""
    servers = await in_turns.serving(2)
    go, asked = await in_turns.held_in_update(servers[0].url)
    await idle()
    for version in (2, 3):  # 3 into the slot of version 1
        in_turns.weights.publish(version)
    go.set()
    await in_turns.all_landed(3)
    assert [update.label for update in asked if update.url == servers[1].url] == ["0.3"]
    assert in_turns.failures(1) == 0


# Buckets: the next one is copied while one is sent.


class Sent(BucketTransfer):
    """Remembers what the receiver of each bucket finds in its buffer at the end of the call."""

    def __init__(self, slot: SlotReader, client: EngineClient) -> None:
        super().__init__(client, "0.1", slot, bucket_bytes=100)
        self.memories = [torch.zeros(self.largest, dtype=torch.uint8) for _ in self.parts]
        self.received = b""

    async def _send(self, number: int, label: str | None, flush_cache: bool) -> WeightsUpdated:
        assert (label is not None) == (number == len(self.buckets) - 1)
        if number + 1 < len(self.buckets):  # while this one is being sent
            async with asyncio.timeout(20):
                await until(lambda: self._held[(number + 1) % 2] == number + 1)
        self.received += self.memories[number % 2].numpy()[: self.buckets[number].nbytes].tobytes()
        return WeightsUpdated("", cache_flushed=flush_cache)


class NoBracket(EngineClient):
    def __init__(self) -> None:
        self.calls: list[str] = []

    async def begin_update(self) -> None:
        self.calls.append("begin")

    async def end_update(self) -> None:
        self.calls.append("end")


async def test_the_next_bucket_is_copied_while_one_is_sent(fleet: Fleet) -> None:
    """And each once."""
    fleet.weights.tensors = lambda version: {name: torch.randn(one.shape) for name, one in values(version).items()}
    slot = SlotReader(fleet.weights.write(1))
    sent = Sent(slot, bracket := NoBracket())
    assert len(sent.buckets) > 2
    copied, copyto = [], np.copyto

    def copy(target: npt.NDArray[Any], source: npt.NDArray[Any]) -> None:
        copied.append(source.nbytes)
        copyto(target, source)

    async def whole() -> None:
        sent.received = b""
        await sent.apply(False)
        assert sent.received == slot.between(slot.layout.data_start, slot.layout.file_bytes).tobytes()

    fleet.patch.setattr(np, "copyto", copy)
    sent.fill(0)
    await whole()
    assert copied == [bucket.nbytes for bucket in sent.buckets]
    await whole()  # with another choice of flushing, as for SGLang's label
    assert bracket.calls == ["begin", "end"] * 2


async def test_a_slot_that_is_torn_while_a_bucket_is_copied_ends_the_transfer(fleet: Fleet) -> None:
    sent = Sent(SlotReader(fleet.weights.write(1)), bracket := NoBracket())
    sent.fill(0)
    for version in (2, 3):
        fleet.weights.write(version)
    with pytest.raises(TornWeights):
        await sent.apply(False)
    assert sent.received in (b"", sent.memories[0].numpy()[: sent.buckets[0].nbytes].tobytes())
    assert bracket.calls == ["begin", "end"], "an opened bracket is closed"


# Devices of the route tensor. There is no GPU here: what is asked for is recorded, and lies on the CPU.


async def test_tensors_are_lent_on_the_engines_own_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lent: list[str] = []
    given: dict[str, list[str]] = {}
    views = SharedBuffer._views

    def view(buffer: SharedBuffer, bucket: Bucket, device: str) -> Any:
        lent.append(device)
        return views(buffer, bucket, "cpu")

    async def facts(client: EngineClient) -> ServerInfo:
        return ServerInfo(device="cuda", tp_size=2)

    async def update(
        self: EngineClient, payloads: list[str], *, label: str | None, flush_cache: bool
    ) -> WeightsUpdated:
        assert len(payloads) == 2
        given.setdefault(self.base_url, []).extend(lent)
        lent.clear()
        if label is not None:
            rename = UpdateVersionRequest(new_version=label, abort_all_requests=False)
            await self.call("POST", "/update_weight_version", rename, 60.0)
        return WeightsUpdated("", cache_flushed=False)

    monkeypatch.setattr(SharedBuffer, "_views", view)
    monkeypatch.setattr(EngineClient, "server_info", facts)
    monkeypatch.setattr(EngineClient, "update_from_tensor", update)
    settings = UpdateConfig(update_weight_transport="tensor", update_weight_buffer_size=300)
    async with open_fleet(tmp_path, monkeypatch, update=settings) as fleet:
        gpus = [(4, 5), (6, 7), ()]
        servers = await fleet.serving(3)
        given.clear()
        for index, own in enumerate(gpus):
            address = EngineAddress(f"engine-{index}", servers[index].url, 1, gpus=own)
            fleet.rig.topic.publish(f"engine/engine-{index}", msgspec.msgpack.encode(address))
        fleet.weights.announce(msgspec.structs.replace(fleet.weights.write(1), transport="tensor"))
        for index in range(2):
            await fleet.landed(1, engine=index)
            own = [f"cuda:{gpu}" for gpu in gpus[index]]
            found = given[servers[index].url]
            assert len(found) > 2
            assert found == own * (len(found) // 2), "both ranks, each bucket"
        await until(lambda: fleet.failures(2) > 0)
        assert "knows the places of 0" in fleet.entry(2).detail
        assert servers[2].url not in given
