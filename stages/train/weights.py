"""The trainer's end of the weights: wait until a slot may be overwritten, write a version into it, announce it.

Invariants:
- a version is announced only when its bytes lie complete in a slot, and its difference, if that is the route, in the
  shared directory;
- the announcement names the route: engines need no configuration of their own to follow it;
- with the weights go the trainer's log-probs of a few canary sequences, which engines must agree with
  (stages/engines/policy_proof.py): one forward pass of at most 100 tokens, by the path that scores for training;
- the weights of an evaluation that has engines of its own are copied, and no slot waits for them: an engine that is
  restarted in the middle finds them;
- this process holds the lease of the slots' directory; the process that has the weights, this one or rank 0 on the same
  host, writes them.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from msgspec import Struct

from configs.schema import Config
from models.disk import read_file, remove
from models.errors import SlotSpaceError
from models.train.interface import TrainBackend, TrainSequence
from models.weights.delta import DeltaStore, Published
from models.weights.shared_memory_reader import SLOT, SlotManifest
from models.weights.slot_directory import DirectoryLease
from stages.errors import UnprovenPolicy
from stages.messages import PolicyProof, WeightsAnnouncement
from stages.ports import Topic, WeightsSource, wait_at_most
from stages.topic_values import KEYS, PINNED, POLICY, carrying, entries, released

log = logging.getLogger("sluice.train")

LANDING_TIMEOUT_S = 60.0
KEPT: Final = "evaluated-"  # begins the name of a copy
WriteSlot = Callable[[int, int], SlotManifest]  # of (version, run generation)
Prove = Callable[[], PolicyProof]


async def await_landing(topic: Topic, newest: int, pinned: int, given_up: Callable[[], bool]) -> None:
    """Waits until no engine reads the slot that the next version takes, and `pinned` has landed everywhere.

    `newest` is the version in the other slot, which may still be read.
    Unblocked by the engines' entries in the directory, by the death of an engine (its entry counts no more), by
    `given_up` within a second, or by a time limit: then the digest of the slot is what protects a reader.
    """
    deadline = time.monotonic() + LANDING_TIMEOUT_S
    revision = 0
    while time.monotonic() < deadline and not given_up():
        # An engine that loads its first weights reads a slot like any other, but no evaluation waits for it.
        read = all(entry.fetching < 0 or entry.fetching >= newest for entry in entries(topic, POLICY).values())
        if read and all(entry.version >= pinned for entry in carrying(topic).values()):
            return
        revision = await wait_at_most(1.0, topic.wait(revision, *KEYS)) or revision
    if not given_up():
        log.warning("the slot before version %d is overwritten, although an engine lacks version %d", newest, pinned)


CANARIES: Final = 4
CANARY_TOKENS: Final = 24
SEED: Final = 20_251_125
REAL_SHARE: Final = 0.75  # of the vocabulary: special tokens and padding rows are at its end


class _ModelConfig(Struct):
    """Of config.json."""

    vocab_size: int | None = None
    text_config: _ModelConfig | None = None


def prover_of(config: Config, backend: TrainBackend) -> Prove | None:
    """What scores the canary sequences with the trainer's current weights, None if the run proves nothing.

    Collective, as `TrainBackend.logprobs`. Raises UnprovenPolicy for weights that are not finite.
    """
    if not config.update.policy_proof:
        return None
    if "simulated" in (config.train.train_backend, config.engine.engine):
        log.info("the policy is not proven: a simulated trainer or engine computes no log-probs")
        return None
    file = Path(config.train.hf_checkpoint) / "config.json"
    model = msgspec.json.decode(read_file(file), type=_ModelConfig)
    vocabulary = model.vocab_size or (model.text_config or model).vocab_size
    if vocabulary is None:
        log.warning("the policy is not proven: %s has no vocab_size", file)
        return None
    real = max(2, int(REAL_SHARE * vocabulary))
    tokens = np.random.default_rng(SEED).integers(0, real, (CANARIES, CANARY_TOKENS), dtype=np.int32)
    zeros = np.zeros(CANARY_TOKENS, dtype=np.float32)
    sequences = [  # scored from the second token on, at temperature 1, as engines score
        TrainSequence(
            group_id=0,
            rollout_id=number,
            tokens=row,
            prompt_length=1,
            loss_mask=zeros.astype(np.uint8),
            rollout_log_probs=zeros,
            advantages=zeros,
            versions=np.full(CANARY_TOKENS, -1, dtype=np.int32),
            temperature=1.0,
        )
        for number, row in enumerate(tokens)
    ]

    def prove() -> PolicyProof:
        started = time.perf_counter()
        found = backend.logprobs(sequences)
        if not np.isfinite(found).all():
            raise UnprovenPolicy(
                "the trainer's log-probs of the canary sequences are not finite, so its weights hold infinity or NaN; "
                "resume from a checkpoint with a lower --lr or --clip-grad"
            )
        scores = tuple(tuple(row.tolist()) for row in found)
        return PolicyProof(tuple(tuple(row.tolist()) for row in tokens), scores, time.perf_counter() - started)

    return prove


class WeightPublisher:
    """Slots and, for the route delta, the directory of differences. Blocking: use it from the thread of torch."""

    def __init__(self, config: Config, slots: Path, run_dir: Path, write: WriteSlot, prove: Prove | None) -> None:
        """`write`: writes the backend's weights into a slot; `prove`: scores the canary sequences with them. Raises
        SlotDirectoryError."""
        self.transport = config.update.update_weight_transport
        self.newest = -1  # version of the last announcement
        self.pinned = -1  # newest version that the engines of the rollouts must have for its evaluation
        self.delta_ratio = 0.0  # bytes of the weights by bytes of the last difference; 0: none was written
        self._apart, self._evaluated = config.eval.apart, -1  # newest version for engines that evaluate alone
        self._write, self._prove = write, prove
        self._lease = DirectoryLease(slots, kept=SLOT)
        self._deltas: DeltaStore | None = None
        if self.transport == "delta":
            self._deltas = DeltaStore(Path(config.update.update_weight_delta_dir or run_dir / "weights"))

    def write(self, version: int, run_generation: int, *, pinned: bool) -> WeightsAnnouncement:
        """Write one version into the free slot; returns its announcement. Raises WeightsError."""
        manifest = self._write(version, run_generation)
        published = self._difference(manifest)
        return WeightsAnnouncement(
            **msgspec.structs.asdict(manifest),
            pinned=pinned,
            transport="disk" if self.transport == "delta" and published is None else self.transport,
            delta=published.path if published is not None else "",
            proof=self._prove() if self._prove is not None else None,
        )

    async def announce(self, topic: Topic, weights: WeightsSource, announcement: WeightsAnnouncement) -> None:
        """Publish it to the engines. A pinned version is also found under its own key, by an engine that comes late to
        its evaluation."""
        await weights.offer(Path(announcement.path))
        pins = announcement.pinned and not self._apart
        value = msgspec.msgpack.encode(msgspec.structs.replace(announcement, pinned=pins))
        if pins:
            self.pinned = announcement.version
            await topic.publish(f"{PINNED}{announcement.version}", value)
        await topic.publish("weights", value)
        self.newest = announcement.version
        if announcement.pinned and self._apart:
            # Last: the engines of the rollouts neither wait for the copy nor keep the version.
            self._evaluated = announcement.version
            kept = await asyncio.to_thread(self._kept, announcement, released(topic))
            await weights.offer(Path(kept.path))
            await topic.publish(f"{PINNED}{announcement.version}", msgspec.msgpack.encode(kept))

    def evaluating(self, topic: Topic) -> bool:
        """Whether engines that evaluate alone are not done with an earlier version: training does not wait for them."""
        return self._apart and released(topic) < self._evaluated

    def close(self) -> None:
        """Remove the slots. May be called twice."""
        self._lease.release()

    def _kept(self, announcement: WeightsAnnouncement, ended: int) -> WeightsAnnouncement:
        """The announcement of a copy that stays until its evaluation has ended. Raises SlotSpaceError."""
        for path in self._lease.directory.glob(f"{KEPT}*"):
            if int(path.name.removeprefix(KEPT)) <= ended:
                remove(path)
        copy = self._lease.directory / f"{KEPT}{announcement.version}"
        try:
            shutil.copytree(announcement.path, copy)
        except (OSError, shutil.Error) as error:
            raise SlotSpaceError(
                f"{copy}: the weights of an evaluation cannot be kept there ({error}); free space there, or leave out "
                "--eval-engines"
            ) from error
        transport = "disk" if announcement.transport == "delta" else announcement.transport
        return msgspec.structs.replace(announcement, path=str(copy), transport=transport, delta="")

    def _difference(self, manifest: SlotManifest) -> Published | None:
        if self._deltas is None:
            return None
        try:
            published = self._deltas.publish(manifest)
        except OSError as error:
            log.error(
                "%s: version %d could not be written there (%s), so engines on other machines do not get it; make room",
                self._deltas.directory,
                manifest.version,
                error,
            )
            return None
        self.delta_ratio = published.ratio
        log.info("version %d: followers read 1/%.1f of its bytes", manifest.version, published.ratio)
        return published
