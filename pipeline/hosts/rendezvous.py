"""How a started process finds its work: it is given the run, the address of the topic and its own name, no more.

On the topic: `config` (the resolved configuration), `spec/<name>` (what this process is to be), and, while a replica is
to end before its streams do, `retire/<name>`.

Invariant: a specification is on the topic before its process starts, and until it has ended for good.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from msgspec import Struct

from configs.schema import Config
from pipeline.hosts.launcher import ProcessSpec
from transport import Node, TopicClient, TopicServer
from transport.security import SERVER, add_client, create_keys, load_security, with_serving_key

T = TypeVar("T")
Topic = TopicClient | TopicServer
Keys = tuple[Path, Path] | None  # as `make_keys` returns them; None where all addresses are local
CONFIG: Final = "config"
SERVING: Final = "server"  # name of the directory of what binds
ADMITTED: Final = "client/"  # + name: public key of a process of the run, where there are keys
GIVE_UP_S: Final = 30.0  # a topic or hub that is silent for so long is gone, and its run with it


class Entry(Struct, frozen=True):
    """The way into a run. `keys`: directory of keys of its addresses; none where all of them are local. A process of
    its own has its own key there, what has the run's server key that; the controller's has a directory for each
    process, and calls `admit` with the name and the public key of each that is new."""

    run_id: str
    topic: str
    keys: str = ""
    admit: Callable[[str, str], None] | None = None

    def process(self, module: str, name: str, *, env: Mapping[str, str] = {}, sweep: bool = False) -> ProcessSpec:
        """How a process of that name is started."""
        keys = tuple(filter(None, [self._keys_of(name)]))
        argv = (sys.executable, "-P", "-m", module, self.run_id, self.topic, name, *keys)
        return ProcessSpec(name, argv, env, sweep=sweep, files=keys)

    def _keys_of(self, name: str) -> str:
        """The directory with what a process of that name needs; made at its first start."""
        if not self.keys or self._serves:
            return self.keys
        own = Path(self.keys) / name
        if not own.exists():
            public = add_client(Path(self.keys).with_name(SERVING), name, own)
            if self.admit is not None:
                self.admit(name, public)
        return str(own)

    @property
    def _serves(self) -> bool:
        return Path(self.keys, f"{SERVER}.key").exists()

    def node(self, name: str) -> Node:
        security = load_security(Path(self.keys), SERVER if self._serves else name) if self.keys else None
        return Node(self.run_id, name, security, give_up_s=GIVE_UP_S)

    def serving_node(self, name: str, topic: Callable[[], TopicClient]) -> Node:
        """Of a process that binds addresses with a key of its own. `topic`: tells who may connect there."""
        if not self.keys:
            return self.node(name)
        security = load_security(Path(self.keys), name)

        def admitted() -> Mapping[str, str]:
            return {security.server_public: SERVER} | admitted_keys(topic())

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
    """Tell those that bind addresses with keys of their own that a process of the run has this one."""
    topic.publish(ADMITTED + name, public.encode())


def admitted_keys(topic: TopicClient) -> dict[str, str]:
    """The name of each public key."""
    return {public.decode(): key.removeprefix(ADMITTED) for key, public in topic.items(ADMITTED).items()}


def spec_key(name: str) -> str:
    return f"spec/{name}"


def retire_key(name: str) -> str:
    return f"retire/{name}"


async def awaited(topic: Topic, key: str) -> bytes:
    """The value of a key. Waits until it has one."""
    revision = 0
    while (value := topic.get(key)) is None:
        revision = await topic.wait(revision, key)
    return value


async def read(topic: TopicClient, name: str, kind: type[T]) -> tuple[T, Config]:
    """What a process of that name is to be, and the configuration."""
    spec = msgspec.msgpack.decode(await awaited(topic, spec_key(name)), type=kind)
    return spec, msgspec.msgpack.decode(await awaited(topic, CONFIG), type=Config)
