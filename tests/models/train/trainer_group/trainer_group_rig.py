"""Ranks as processes that are started again when one ends, and the calls of a short training, made in one way."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file

from configs.schema import Config
from models.train.interface import TrainBackend, TrainSequence
from models.train.trainer_group.calls import TrainerGroupBackend
from models.train.trainer_group.rank_spec import RankSpec, Rendezvous
from models.weights.layout import WEIGHTS_FILE, read_layout
from models.weights.slot_directory import DirectoryLease
from tests.copies import Copy, copied_call
from tests.models.train import rig
from tests.models.train.rig import Tensors, make_sequences

RANKS = 2


def small_config(checkpoint: Path, *, timeout_s: float = 60.0, **train: Any) -> Config:
    """Two ranks on a tiny model, with a correction and several micro-batches."""
    changed, config = msgspec.structs.replace, Config()
    fields = {"hf_checkpoint": str(checkpoint), "train_device": "cpu", "lr": 1e-2, "max_tokens_per_gpu": 48, **train}
    return changed(
        config,
        train=changed(config.train, **fields),
        correction=changed(config.correction, policy_mode="decoupled", use_tis=True),
        rollout=changed(config.rollout, num_rollout=4, rollout_max_response_len=16),
        parallel=changed(config.parallel, actor_num_gpus_per_node=RANKS, distributed_timeout_minutes=timeout_s / 60),
    )


def small_sequences(seed: int, *, groups: int = 3) -> list[TrainSequence]:
    """Uneven lengths, some tokens masked, one version behind."""
    made = make_sequences(
        seed, groups=groups, prompt_lengths=(2, 8), response_lengths=(2, 14), masked=0.2, fan_out=False, dark=False
    )
    return [replace(one, versions=np.where(one.versions < 0, -1, max(seed - 1, 0)).astype(np.int32)) for one in made]


def by_group(sequences: Sequence[TrainSequence]) -> list[list[TrainSequence]]:
    groups = sorted({s.group_id for s in sequences})
    return [[s for s in sequences if s.group_id == group] for group in groups]


def train_batch(backend: TrainBackend, number: int, *, steps: int = 1) -> list[dict[str, float]]:
    """One rollout batch, group by group; the metrics of its steps."""
    return rig.train_batch(backend, *by_group(small_sequences(number)), steps=steps, version=number)


class Slots:
    """The weights of a backend, as it writes them into slots. Leases the directory."""

    def __init__(self, directory: Path, source: Path) -> None:
        self.directory, self.source, self._lease = directory, source, DirectoryLease(directory)
        self.nbytes = 0  # of the last version
        self._versions = itertools.count()

    def weights(self, backend: TrainBackend) -> Tensors:
        manifest = backend.write_slot(self.directory, self.source, next(self._versions), 0)
        file = Path(manifest.path) / WEIGHTS_FILE
        self.nbytes = read_layout(file).data_bytes
        return load_file(file)

    def close(self) -> None:
        self._lease.release()


class Meeting:
    """Where ranks say that they are up: what the topic is to a run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self) -> Rendezvous | None:
        return msgspec.json.decode(self.path.read_bytes(), type=Rendezvous) if self.path.exists() else None

    def announce(self, rendezvous: Rendezvous) -> None:
        draft = self.path.with_suffix(".draft")
        draft.write_bytes(msgspec.json.encode(rendezvous))
        draft.replace(self.path)


def rank_main(home: str, path: str) -> None:
    """Entry point of a rank's process."""
    from models.train.trainer_group.rank import run_rank

    torch.set_num_threads(1)
    with Path(path).with_suffix(".log").open("w") as log:  # what a rank prints is shown if its test fails
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    logging.basicConfig(level=logging.INFO, force=True)
    count_touched(Path(home, "touched", str(os.getpid())))
    config = msgspec.json.decode(Path(home, "config.json").read_bytes(), type=Config)
    spec = msgspec.json.decode(Path(path).read_bytes(), type=RankSpec)
    run_rank(spec, config, Meeting(Path(home, "met.json")).announce)


def count_touched(file: Path) -> None:
    """Add to a file the bytes that this process copies into slots and digests, a line for each call."""
    from models.weights import shared_memory_reader, shared_memory_writer

    copy, digest = np.copyto, shared_memory_writer.digest_of

    def note(what: str, nbytes: int) -> None:
        with file.open("a") as out:
            out.write(f"{what} {nbytes}\n")

    def copyto(target: Any, source: Any, *args: Any, **options: Any) -> None:
        note("copied", target.nbytes)
        copy(target, source, *args, **options)

    def digest_of(piece: Any) -> bytes:
        note("digested", len(piece))
        return digest(piece)

    np.copyto = copyto
    shared_memory_writer.digest_of = shared_memory_reader.digest_of = digest_of


class Ranks:
    """Keeps a trainer group: when one rank ends, all do, and the next incarnation starts. A context manager."""

    def __init__(self, home: Path, config: Config) -> None:
        self.home, self.meeting, self.incarnation = home, Meeting(home / "met.json"), -1
        self.touched = home / "touched"
        self.touched.mkdir()
        (home / "config.json").write_bytes(msgspec.json.encode(config))
        self._stopped = threading.Event()
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        self.processes: list[Copy] = []

    def __enter__(self) -> Ranks:
        self._keeper.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._keeper.join(30)
        assert not self._keeper.is_alive()

    def _keep(self) -> None:
        from tests.other_programs import free_port  # with aiohttp, which no rank needs

        while not self._stopped.is_set():
            self.incarnation += 1
            port = free_port()
            self.processes = [self._start(rank, port) for rank in range(RANKS)]
            while not self._stopped.wait(0.02) and all(one.poll() is None for one in self.processes):
                pass
            for one in self.processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    one.wait(30 if self._ended_well() else 0)  # ranks end one after another
                one.kill()
                one.wait()

    def _ended_well(self) -> bool:
        return all(one.poll() in (None, 0) for one in self.processes) and not self._stopped.is_set()

    def _start(self, rank: int, port: int) -> Copy:
        spec = RankSpec(
            rank=rank,
            processes=RANKS,
            local_rank=rank,
            incarnation=self.incarnation,
            store=("127.0.0.1", port),
            address=str(self.home / f"socket-{self.incarnation}"),
        )
        path = self.home / f"rank-{self.incarnation}-{rank}.json"
        path.write_bytes(msgspec.json.encode(spec))
        return copied_call(rank_main, str(self.home), str(path))

    def backend(self) -> TrainerGroupBackend:
        """On the incarnation that is running."""
        return TrainerGroupBackend(self.meeting, self.incarnation)

    def signal(self, rank: int, number: int) -> None:
        self.processes[rank].send_signal(number)

    @contextlib.contextmanager
    def killed_within(self, rank: int) -> Iterator[None]:
        """Rank 1 is stopped, so that no call can be finished, and a rank is killed while the block makes one."""
        incarnation = self.incarnation
        self.signal(1, signal.SIGSTOP)
        killer = threading.Timer(0.3, self.signal, (rank, signal.SIGKILL))
        killer.start()
        yield
        killer.join()
        until(lambda: self.incarnation > incarnation)


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
