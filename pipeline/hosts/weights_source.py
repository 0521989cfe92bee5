"""Weights between hosts: the trainer's slots are offered, and where they are not seen, copied to slots of this host.

On the topic: `weights_source`, which files of slots are served, where, and on which host they lie.

Invariant: the result of `local` lies on this host and equals the announced version to the byte; it is fetched once for
all engines of a replica. A slot is overwritten while its files stay offered: a concurrent fetch finds a digest that
differs, and repeats with the newest announcement.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct

from models.errors import TornWeights
from models.weights.layout import WEIGHTS_FILE
from models.weights.shared_memory_reader import STATE_FILE, LocalCopies, SlotManifest
from models.weights.slot_directory import choose_directory
from pipeline.errors import leaf
from pipeline.hosts.launcher import run_until
from pipeline.hosts.rendezvous import host_id
from stages.messages import WeightsAnnouncement
from stages.ports import read_value
from transport import ByteClient, ByteServer, Node, TopicClient, TransportError

T = TypeVar("T")
log = logging.getLogger("sluice.weights_source")
SOURCE: Final = "weights_source"


class WeightsServer(Struct, frozen=True):
    """Where files of slots are served, by the names `<slot>/<file>`."""

    address: str
    host: str  # whose processes see the slots themselves
    files: tuple[str, ...]


class OfferedWeights:
    """The trainer's side of `WeightsSource`: slots are used as they lie, and served to other hosts, under the key of
    the trainer's own process.

    `address`: the host under which others reach this one.
    """

    def __init__(self, node: Node, topic: TopicClient, address: str) -> None:
        self._node, self._topic, self._address = node, topic, address
        self._server: ByteServer | None = None
        self._files: set[str] = set()

    async def offer(self, slot: Path) -> None:
        """See the Protocol."""
        if self._server is None:
            self._server = await self._node.byte_server(f"tcp://{self._address}:0")
        new = {f"{slot.name}/{file.name}": file for file in slot.iterdir() if file.name != STATE_FILE}
        if new.keys() <= self._files:
            return
        for name, file in new.items():
            self._server.serve(name, file)
        self._files |= new.keys()
        served = WeightsServer(self._server.address, host_id(), tuple(sorted(self._files)))
        await self._topic.publish(SOURCE, msgspec.msgpack.encode(served))

    async def local(self, announcement: WeightsAnnouncement) -> WeightsAnnouncement:
        """See the Protocol."""
        return announcement


class FetchedWeights:
    """The other side. `name`: of the directory of copies; `fallback`: where that goes if shared memory has no room."""

    def __init__(self, node: Node, topic: TopicClient, name: str, fallback: Path) -> None:
        self._node, self._topic, self._name, self._fallback = node, topic, name, fallback
        self._turn = asyncio.Lock()
        self._client: ByteClient | None = None
        self._copies: LocalCopies | None = None

    async def offer(self, slot: Path) -> None:
        """See the Protocol. No trainer runs here."""

    async def local(self, announcement: WeightsAnnouncement) -> WeightsAnnouncement:
        """See the Protocol. Waits for the copy."""
        server = read_value(self._topic, SOURCE, WeightsServer)
        followed = announcement.delta and Path(announcement.delta).exists()  # put together from a directory seen here
        if server is None or server.host == host_id() or followed:
            return announcement
        async with self._turn:
            copy = self._copies.find(announcement) if self._copies is not None else None
            try:
                copy = copy or await self._fetch(server, announcement)
            except TornWeights:
                await self._leave()
                raise
            except TransportError as error:
                await self._leave()  # a refused client, or one whose trainer is gone, never recovers: open a new one
                raise TornWeights(
                    f"version {announcement.version} could not be fetched from {server.address}: {error}"
                ) from error
        return msgspec.structs.replace(announcement, path=copy.path)

    async def _fetch(self, server: WeightsServer, original: SlotManifest) -> SlotManifest:
        client = self._client
        if client is None or client.address != server.address:
            await self._leave()
            client = self._client = await self._node.byte_client(server.address)
        slot = Path(original.path).name
        if self._copies is None:
            nbytes = (await self._while_offered(server, client.stat(f"{slot}/{WEIGHTS_FILE}"))).size
            self._copies = await asyncio.to_thread(LocalCopies, choose_directory(self._name, self._fallback, nbytes))
        target, fetched = self._copies.begin(), 0
        for name in server.files:
            if name.startswith(f"{slot}/"):
                fetched += await self._while_offered(server, _copy(client, name, target / Path(name).name))
        copy = await asyncio.to_thread(self._copies.finish, original)
        log.info("version %d: fetched %d bytes from %s", original.version, fetched, server.address)
        return copy

    async def _while_offered(self, server: WeightsServer, work: Coroutine[Any, Any, T]) -> T:
        """Gives up as soon as another trainer offers weights: one that was lost in mid-fetch is silent for long. Raises
        TornWeights then."""
        try:
            done = await run_until(work, self._moved(server))
        except ExceptionGroup as errors:
            raise leaf(errors) from errors
        if done is None:
            raise TornWeights(f"the trainer that offered weights at {server.address} is gone; another one offers newer")
        return done

    async def _moved(self, server: WeightsServer) -> None:
        """Waits for weights to be offered elsewhere."""
        revision = 0
        while (offered := read_value(self._topic, SOURCE, WeightsServer)) and offered.address == server.address:
            revision = await self._topic.wait(revision, SOURCE)

    async def _leave(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def close(self) -> None:
        if self._copies is not None:
            self._copies.close()


async def _copy(client: ByteClient, name: str, target: Path) -> int:
    """Fetch a file over one that may be there already, in place; its size."""
    blob = await client.stat(name)
    handle = os.open(target, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(handle, blob.size)
        await client.fetch(blob, handle)
    finally:
        os.close(handle)
    return blob.size
