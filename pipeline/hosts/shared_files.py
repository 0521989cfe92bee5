"""What processes that train must find on their node as it is on the controller's: the run directory and the models.

A path that exists says nothing: another machine may have a directory of that name. The run directory holds a file whose
name nobody can guess, made anew at each start of the run. Of a model, sizes and blocks of its files are compared, at
places that nobody can guess either: a copy does as well, for it is only read.

Invariant: who sees `SharedFiles` writes where the controller reads, and trains the model that the controller knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import xxhash
from msgspec import Struct

from configs.schema import Config
from pipeline.facts.run_directory import RunDir
from stages.chat.tokenizer import CHECKPOINT_FILES

log = logging.getLogger("sluice.worker")
TRAINER_LOCK: Final = ".trainer"
LOCK_POLL_S: Final = 0.5
WEIGHT_FILES: Final = "*.safetensors*"
BLOCKS: Final = 16  # of each file
BLOCK_BYTES: Final = 4096


class SharedFiles(Struct, frozen=True):
    """`seal`: name of the file that nobody can guess; `models`: a digest of each by its path."""

    run_dir: str
    seal: str
    models: dict[str, str]

    def lacking(self) -> str | None:
        """What is not seen here, in words; None if all is. Reads a few blocks of each file."""
        if not Path(self.run_dir, self.seal).exists():
            return f"does not see the controller's run directory {self.run_dir}"
        if not os.access(self.run_dir, os.W_OK):
            return f"may not write in the run directory {self.run_dir}"
        for model, digest in self.models.items():
            if not Path(model).is_dir():
                return f"does not see the controller's model {model}"
            if sampled(Path(model), self.seal) != digest:
                return f"has another model than the controller's at {model}, or not all of its files"
        return None


def shared_files(rundir: RunDir, config: Config) -> SharedFiles:
    """What the trainer of this run reads and writes, as it is here. A name on the hub each node finds by itself."""
    train, critic = config.train, config.critic
    named = filter(None, (train.hf_checkpoint, train.ref_load, critic.critic_load))
    models = {name: sampled(Path(name), rundir.seal.name) for name in named if Path(name).is_dir()}
    return SharedFiles(str(rundir.path), rundir.seal.name, models)


@contextlib.asynccontextmanager
async def only_trainer(run_dir: Path) -> AsyncIterator[None]:
    """Holds the place of the run's train stage. Waits for the end of one before, which writes there too: cut off from
    the run, on a node of which nothing is heard, it may live on for a while."""
    with (run_dir / TRAINER_LOCK).open("w") as lock:
        waits = False
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if not waits:
                log.warning("another train stage still writes in %s; this one begins when it has ended", run_dir)
            waits = True
            await asyncio.sleep(LOCK_POLL_S)
        yield


def sampled(model: Path, seed: str) -> str:
    """A digest of names, sizes and some blocks of a model's files; `seed` says which blocks."""
    digest = xxhash.xxh3_128()
    files = {file for pattern in (*CHECKPOINT_FILES, WEIGHT_FILES) for file in model.glob(pattern) if file.is_file()}
    for file in sorted(files):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        places = random.Random(f"{seed}/{file.name}")
        with file.open("rb") as opened:
            for start in (places.randrange(size) for _ in range(BLOCKS if size else 0)):
                opened.seek(start)
                digest.update(opened.read(BLOCK_BYTES))
    return digest.hexdigest()
