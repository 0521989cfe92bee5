"""What a started process finds on the topic. Its command line holds the run, the address of the topic and its own name.

On the topic: `config` (the resolved configuration), `spec/<name>` (what this process is to be), `retire/<name>` (while
a replica is to end before its streams do), and, where processes may be on other hosts, `host` (the controller's) and
`files/<name>` (configuration and tokenizer of the checkpoint).

Invariants: a specification is on the topic before its process starts, and until it has ended for good; a process
behaves the same on any host. On another host than the controller's, its run directory is a private one that ends with
the process. The train stage has the run's own directory everywhere.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from msgspec import Struct

from configs.layers import build
from configs.schema import Config
from models.weights.slot_directory import PREFIX, slots_directory
from pipeline.hosts.launcher import ProcessSpec
from stages.base import TrainOptions
from stages.chat.tokenizer import CHECKPOINT_FILES
from stages.ports import wait_value
from transport import Node, TopicClient, TopicServer
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
    """What a process of that name is to be, and the configuration."""
    spec = msgspec.msgpack.decode(await wait_value(topic, spec_key(name)), type=kind)
    return spec, msgspec.msgpack.decode(await wait_value(topic, CONFIG), type=Config)


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
    """Tell other hosts whose files they do not see, and give them the small ones of the checkpoint."""
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
    here = slots_directory(name, Path(run_dir), config.train.hf_checkpoint)
    return msgspec.structs.replace(options, slots=str(here))
