"""Weights between hosts: the trainer's slots are offered, and where they are not seen, copied to slots of this host.

On the topic: `weights_source`, which files of slots are served, where, and on which host they lie.

Invariant: what `local` returns lies on this host and is what was announced, to the byte; a version is fetched once for
all engines of a replica. A slot is written anew while its files stay offered: who fetches meanwhile finds a digest that
differs, and asks again with the newest announcement.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from models.weights.errors import TornWeights
from models.weights.layout import WEIGHTS_FILE
from models.weights.local_copy import LocalCopies
from models.weights.shared_memory_reader import STATE_FILE, SlotManifest
from models.weights.slots_directory import choose_directory
from pipeline.hosts.other_host import host_id
from stages.messages import WeightsAnnouncement
from stages.ports import read_value
from transport import ByteClient, ByteServer, Node, TopicClient, Transfer, TransportError

log = logging.getLogger("sluice.weights_source")
SOURCE: Final = "weights_source"


class WeightsServer(Struct, frozen=True):
    """Where files of slots are served, by the names `<slot>/<file>`."""

    address: str
    host: str  # whose processes see the slots themselves
    files: tuple[str, ...]


class OfferedWeights:
    """The trainer's side of `WeightsSource`: slots are used as they lie, and served to other hosts.

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
        """See the Protocol. Nobody trains here."""

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
            except TransportError as error:
                raise TornWeights(
                    f"version {announcement.version} could not be fetched from {server.address}: {error}"
                ) from error
        return msgspec.structs.replace(announcement, path=copy.path)

    async def _fetch(self, server: WeightsServer, original: SlotManifest) -> SlotManifest:
        client = self._client
        if client is None or client.address != server.address:
            client = self._client = await self._node.byte_client(server.address)
        slot = Path(original.path).name
        if self._copies is None:
            nbytes = (await client.stat(f"{slot}/{WEIGHTS_FILE}")).size
            self._copies = await asyncio.to_thread(LocalCopies, choose_directory(self._name, self._fallback, nbytes))
        directory, fetched = self._copies.begin(), 0
        for name in server.files:
            if name.startswith(f"{slot}/"):
                fetched += await _copy(client, name, directory / Path(name).name)
        copy = await asyncio.to_thread(self._copies.finish, original)
        log.info("version %d: fetched %d bytes from %s", original.version, fetched, server.address)
        return copy

    def close(self) -> None:
        if self._copies is not None:
            self._copies.close()


async def _copy(client: ByteClient, name: str, target: Path) -> int:
    """Fetch a file over one that may be there already, in place; its size."""
    blob = await client.stat(name)
    handle = os.open(target, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(handle, blob.size)
        await client.fetch(Transfer(blob, handle))
    finally:
        os.close(handle)
    return blob.size
