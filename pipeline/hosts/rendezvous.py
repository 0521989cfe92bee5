"""What a started process finds on the topic, and the weights that it fetches from another host. Its command line holds
the run, the address of the topic and its own name.

On the topic: `config` (the resolved configuration), `spec/<name>` (what this process is to be), `retire/<name>` (while
a replica is to end before its streams do), and, where processes may be on other hosts, `host` (the controller's) and
`files/<name>` (configuration and tokenizer of the checkpoint).

Invariants: a specification is on the topic before its process starts, and until it has ended for good; a process
behaves the same on any host. On another host than the controller's, its run directory is a private one that ends with
the process. The train stage has the run's own directory everywhere.

Weights between hosts: the trainer's slots are offered, and where they are not seen, copied to slots of this host. On
the topic: `weights_source`, which files of slots are served, where, and on which host they lie. The result of `local`
lies on this host and equals the announced version to the byte; it is fetched once for all engines of a replica. A slot
is overwritten while its files stay offered: a concurrent fetch finds a digest that differs, and repeats with the newest
announcement.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct

from configs.layers import build
from configs.schema import Config
from models.errors import TornWeights
from models.weights.layout import WEIGHTS_FILE
from models.weights.shared_memory_reader import STATE_FILE, LocalCopies, SlotManifest
from models.weights.slot_directory import PREFIX, choose_directory, slots_directory
from pipeline.errors import leaf
from pipeline.hosts.launcher import ProcessSpec, run_until
from stages.base import TrainOptions
from stages.chat.tokenizer import CHECKPOINT_FILES
from stages.messages import WeightsAnnouncement
from stages.ports import SameHost, read_value, wait_value
from transport import ByteClient, ByteServer, Node, TopicClient, TopicServer, TransportError
from transport.security import SERVER, add_client, create_keys, load_security, with_serving_key

T = TypeVar("T")
Topic = TopicClient | TopicServer
Keys = tuple[Path, Path] | None  # as `make_keys` returns them; None where all addresses are local
CONFIG: Final = "config"
SERVING: Final = "server"  # name of the directory of what binds
ADMITTED: Final = "client/"  # + name: public key of a process of the run, where there are keys
# A topic or hub on another host that is silent for so long is gone, and its run with it. On one host the kernel ends a
# process with its parent, so silence only says that the controller is stopped: it may go on at any time.
GIVE_UP_S: Final = 300.0


class Entry(Struct, frozen=True):
    """The way into a run. `keys`: directory of keys of its addresses; none where all of them are local. A process of
    its own has its own key there, what has the run's server key that; the controller's has a directory for each
    process, and calls `admit` with the name and the public key of each that is new."""

    run_id: str
    topic: str
    keys: str = ""
    admit: Callable[[str, str], None] | None = None

    def process(self, name: str, others: Sequence[str] = ()) -> ProcessSpec:
        """How a process of that name is started. `others`: further replicas in it."""
        keys = tuple(filter(None, [self._keys_of(name, others)]))
        argv = (sys.executable, "-P", "-m", "pipeline.hosts.worker", self.run_id, self.topic, name, *keys)
        return ProcessSpec(name, argv, files=keys)

    def _keys_of(self, name: str, others: Sequence[str]) -> str:
        """The directory with what a process of that name needs; made at its first start."""
        if not self.keys or self._serves:
            return self.keys
        own = Path(self.keys) / name
        if not own.exists():
            public = add_client(Path(self.keys).with_name(SERVING), name, own, others)
            if self.admit is not None:
                self.admit(name, public)
        return str(own)

    @property
    def _serves(self) -> bool:
        return Path(self.keys, f"{SERVER}.key").exists()

    def node(self, name: str) -> Node:
        security = load_security(Path(self.keys), SERVER if self._serves else name) if self.keys else None
        local = self.topic.startswith("ipc:")
        return Node(self.run_id, name, security, give_up_s=None if local else GIVE_UP_S)

    def serving_node(self, name: str, topic: Callable[[], TopicClient]) -> Node:
        """For a process that binds addresses with its own key. `topic`: lists the clients that may connect."""
        if not self.keys:
            return self.node(name)
        security = load_security(Path(self.keys), name)

        def admitted() -> Mapping[str, str]:
            """The name of each public key."""
            keys = {public.decode(): key.removeprefix(ADMITTED) for key, public in topic().items(ADMITTED).items()}
            return {security.server_public: SERVER} | keys

        return Node(self.run_id, name, with_serving_key(security, admitted), give_up_s=GIVE_UP_S)


def from_command(arguments: Sequence[str]) -> tuple[Entry, str]:
    """The entry and the name in the arguments of a started process."""
    run_id, topic, name, *keys = arguments
    return Entry(run_id, topic, keys[0] if keys else ""), name


def make_keys(directory: Path) -> tuple[Path, Path]:
    """Directories of the keys of a run: of what binds on the controller's host, and of all other processes."""
    serving, processes = directory / SERVING, directory / "processes"
    create_keys(serving, [])
    processes.mkdir(mode=0o700)
    return serving, processes


def admit(topic: TopicServer, name: str, public: str) -> None:
    """Announce this key of a process of the run to all processes that bind addresses with their own keys."""
    topic.publish(ADMITTED + name, public.encode())


def spec_key(name: str) -> str:
    return f"spec/{name}"


def retire_key(name: str) -> str:
    return f"retire/{name}"


async def read(topic: TopicClient, name: str, kind: type[T]) -> tuple[T, Config]:
    """What a process of that name is to be, and the configuration, by which it logs from now on."""
    spec = msgspec.msgpack.decode(await wait_value(topic, spec_key(name)), type=kind)
    config = msgspec.msgpack.decode(await wait_value(topic, CONFIG), type=Config)
    logging.getLogger().setLevel(config.observe.log_level.upper())
    return spec, config


HOST_KEY: Final = "host"
FILES_PREFIX: Final = "files/"
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_MOUNTS: Final = Path("/proc/self/ns/mnt")
# The controller alone writes them.
CONTROLLERS_KEYS: Final = (ADMITTED, CONFIG, spec_key(""), retire_key(""), HOST_KEY, FILES_PREFIX)


def host_id() -> str:
    """The same for processes that see the same files: of one machine, and of one container on it."""
    if not _MOUNTS.exists():
        return socket.gethostname()
    return f"{_BOOT_ID.read_text().strip()}.{_MOUNTS.stat().st_ino}"


def publish_files(topic: TopicServer, checkpoint: str) -> None:
    """Name the hosts whose files other hosts do not see, and send the checkpoint's small files there."""
    topic.publish(HOST_KEY, host_id().encode())
    for pattern in CHECKPOINT_FILES:
        for path in Path(checkpoint).glob(pattern):
            if path.is_file():
                topic.publish(FILES_PREFIX + path.name, path.read_bytes())


def plain_name(name: str) -> str:
    """A file's name that came over the wire. Raises ValueError where it would lead out of its directory."""
    if not name or name in (".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"{name!r} on the topic is no name of a file; is something else writing to this run's topic?")
    return name


@contextlib.contextmanager
def settled(topic: TopicClient, run_dir: str, config: Config) -> Iterator[tuple[str, Config]]:
    """Run directory and configuration with places that exist on this host, for the time of the block."""
    if not elsewhere(topic):
        yield run_dir, config
        return
    with tempfile.TemporaryDirectory(prefix="sluice-host-", ignore_cleanup_errors=True) as home:
        files = topic.items(FILES_PREFIX)  # none of a checkpoint that every host finds by its name on the hub
        if files and not Path(config.train.hf_checkpoint).is_dir():
            checkpoint = Path(home, "checkpoint")
            checkpoint.mkdir()
            for key, value in files.items():
                (checkpoint / plain_name(key.removeprefix(FILES_PREFIX))).write_bytes(value)
            config = build({"train.hf_checkpoint": str(checkpoint)}, config)
        yield home, config


def elsewhere(topic: TopicClient) -> bool:
    """Whether this process sees other files than the controller."""
    controllers = topic.get(HOST_KEY)
    return controllers is not None and controllers.decode() != host_id()


def trainers_place(topic: TopicClient, options: TrainOptions, run_dir: str, config: Config) -> TrainOptions:
    """With slots for the weights where this host has the room for them. Run directory and model are shared with the
    controller: the process would not be here otherwise."""
    if not elsewhere(topic):
        return options
    name = Path(options.slots).name.removeprefix(PREFIX)
    here = slots_directory(name, Path(run_dir), config.train.hf_checkpoint, evaluated=config.eval.apart)
    return msgspec.structs.replace(options, slots=str(here))


log = logging.getLogger("sluice.weights_source")
SOURCE: Final = "weights_source"


class WeightsServer(Struct, frozen=True):
    """Where files of slots are served, by the names `<slot>/<file>`."""

    address: str
    host: str  # whose processes see the slots themselves
    files: tuple[str, ...]


class OfferedWeights(SameHost):
    """The trainer's side of `WeightsSource`: slots are used as they lie, and served to other hosts, under the key of
    the trainer's own process.

    `address`: the host under which others reach this one.
    """

    def __init__(self, node: Node, topic: TopicClient, address: str) -> None:
        self._node, self._topic, self._address = node, topic, address
        self._server: ByteServer | None = None
        self._files: dict[str, Path] = {}

    async def offer(self, slot: Path) -> None:
        """See the Protocol. Files that were removed are not offered any more: an open one keeps its memory."""
        if self._server is None:
            self._server = await self._node.byte_server(f"tcp://{self._address}:0")
        new = {f"{slot.name}/{file.name}": file for file in slot.iterdir() if file.name != STATE_FILE}
        if new.keys() <= self._files.keys():
            return
        for name in [name for name, file in self._files.items() if not file.exists()]:
            self._server.withdraw(name)
            del self._files[name]
        for name, file in new.items():
            self._server.serve(name, file)
        self._files |= new
        served = WeightsServer(self._server.address, host_id(), tuple(sorted(self._files)))
        await self._topic.publish(SOURCE, msgspec.msgpack.encode(served))


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

    def kept(self, announcement: WeightsAnnouncement) -> bool:
        """See the Protocol."""
        place, server = Path(announcement.path), read_value(self._topic, SOURCE, WeightsServer)
        if server is None or server.host == host_id():
            return place.is_dir()
        return any(name.startswith(f"{place.name}/") for name in server.files)

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
