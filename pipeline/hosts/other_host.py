"""What a process on another host than the controller's does not see, brought to it from the topic.

On the topic, where processes may be on other hosts: `host` (the controller's) and `files/<name>` (configuration and
tokenizer of the checkpoint).

Invariant: a process behaves the same on any host; on another one its run directory is a private one that ends with it,
but for the train stage, which has the run's own (pipeline/hosts/shared_files.py).
"""

from __future__ import annotations

import contextlib
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from configs.schema import Config
from models.weights.layout import PREFIX, slots_directory
from stages.base import TrainOptions
from stages.chat.tokenizer import CHECKPOINT_FILES
from transport import TopicClient, TopicServer

HOST: Final = "host"
FILES: Final = "files/"
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_MOUNTS: Final = Path("/proc/self/ns/mnt")


def host_id() -> str:
    """The same for processes that see the same files: of one machine, and of one container on it."""
    if not _MOUNTS.exists():
        return socket.gethostname()
    return f"{_BOOT_ID.read_text().strip()}.{_MOUNTS.stat().st_ino}"


def publish_files(topic: TopicServer, checkpoint: str) -> None:
    """Tell other hosts whose files they do not see, and give them the small ones of the checkpoint."""
    topic.publish(HOST, host_id().encode())
    for pattern in CHECKPOINT_FILES:
        for path in Path(checkpoint).glob(pattern):
            if path.is_file():
                topic.publish(FILES + path.name, path.read_bytes())


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
        files = topic.items(FILES)  # none of a checkpoint that every host finds by its name on the hub
        if files and not Path(config.train.hf_checkpoint).is_dir():
            checkpoint = Path(home, "checkpoint")
            checkpoint.mkdir()
            for key, value in files.items():
                (checkpoint / plain_name(key.removeprefix(FILES))).write_bytes(value)
            config = msgspec.structs.replace(
                config, train=msgspec.structs.replace(config.train, hf_checkpoint=str(checkpoint))
            )
        yield home, config


def elsewhere(topic: TopicClient) -> bool:
    """Whether this process sees other files than the controller."""
    controllers = topic.get(HOST)
    return controllers is not None and controllers.decode() != host_id()


def trainers_place(topic: TopicClient, options: TrainOptions, run_dir: str, config: Config) -> TrainOptions:
    """With slots for the weights where this host has the room for them. Run directory and model are shared with the
    controller: the process would not be here otherwise."""
    if not elsewhere(topic):
        return options
    name = Path(options.slots).name.removeprefix(PREFIX)
    here = slots_directory(name, Path(run_dir), config.train.hf_checkpoint)
    return msgspec.structs.replace(options, slots=str(here))
