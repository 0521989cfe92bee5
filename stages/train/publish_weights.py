"""The trainer's end of the weights: from the backend's tensors to an announcement.

Invariants:
- a version is announced only when its bytes lie complete in a slot, and its difference, if that is the route, in the
  shared directory;
- the announcement names the route: engines need no configuration of their own to follow it.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from configs.schema import Config
from models.weights.delta import DeltaStore, Published
from models.weights.shared_memory_reader import SlotManifest
from models.weights.shared_memory_writer import Exported, SlotWriter
from stages.messages import WeightsAnnouncement
from stages.ports import Topic, WeightsSource

log = logging.getLogger("sluice.train")


class WeightPublisher:
    """Slots and, for the route delta, the directory of differences. Blocking: use it from the thread of torch."""

    def __init__(self, config: Config, slots: Path, source: Path, run_dir: Path) -> None:
        self.transport = config.update.update_weight_transport
        self.newest = -1  # version of the last announcement
        self.delta_ratio = 0.0  # bytes of the weights by bytes of the last difference; 0: none was written
        self._slots = SlotWriter(slots, source)
        self._deltas: DeltaStore | None = None
        if self.transport == "delta":
            self._deltas = DeltaStore(Path(config.update.update_weight_delta_dir or run_dir / "weights"))

    def write(self, version: int, run_generation: int, tensors: Exported, *, pinned: bool) -> WeightsAnnouncement:
        """Write one version into the free slot; what to announce of it."""
        manifest = self._slots.write(version, run_generation, tensors)
        published = self._difference(manifest)
        return WeightsAnnouncement(
            **msgspec.structs.asdict(manifest),
            pinned=pinned,
            transport="disk" if self.transport == "delta" and published is None else self.transport,
            delta=published.path if published is not None else "",
        )

    async def announce(self, topic: Topic, weights: WeightsSource, announcement: WeightsAnnouncement) -> None:
        """Tell the engines. A pinned version is also found under its own key, by who comes late to its evaluation."""
        await weights.offer(Path(announcement.path))
        value = msgspec.msgpack.encode(announcement)
        if announcement.pinned:
            await topic.publish(f"weights/pinned/{announcement.version}", value)
        await topic.publish("weights", value)
        self.newest = announcement.version

    def close(self) -> None:
        self._slots.close()

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
