"""What is known of engines, router and lost replicas, told to all who ask: the topic, the hubs, the user, a file.

`replicas/fleet.json` names the servers of the run: address, kind, version, incarnation. The summary reads it, and so
does a person who wants to ask an engine something.

Invariant: an address is dropped from the topic before its process is started again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from models.checkpoint import CheckpointError, final_path, read_manifest, remove_leftovers, verify_files
from models.disk import write_json
from pipeline.hosts.stream_hub import StreamHub
from pipeline.observe.stats import STATS_PREFIX, StageStats
from pipeline.record.recorder import Recorder
from pipeline.record.run_directory import RunDir
from pipeline.supervise.outage import consequence
from pipeline.supervise.restarts import EngineSpec
from stages.base import TrainOptions
from stages.messages import Complaint, EngineAddress, RouterAddress, group_of
from stages.ports import read_value
from stages.topic_values import POLICY, carrying
from transport import TopicServer

REPORTS_POLL_S = 0.02


class ServerInfo(Struct, frozen=True):
    """One server of the run as it last came up."""

    kind: str  # embedded, simulated, sglang, smg
    url: str
    incarnation: int
    version: str
    role: str  # engine, frozen, router
    metrics: str = ""  # address of its /metrics, where that is not the server's own
    token_file: str = ""  # of the token that it wants, while it runs; the router of the run wants the same


def read_fleet(rundir: RunDir) -> dict[str, ServerInfo]:
    """The servers of a run by name; empty if none came up."""
    path = rundir.fleet
    return msgspec.json.decode(path.read_bytes(), type=dict[str, ServerInfo]) if path.exists() else {}


class Announcer:
    """Implements `Lifecycle`."""

    def __init__(self, topic: TopicServer, hubs: Mapping[str, StreamHub], recorder: Recorder) -> None:
        self.config = recorder.config
        self.topic, self.hubs, self.recorder = topic, hubs, recorder
        self._fleet: dict[str, ServerInfo] = {}
        recorder.rundir.fleet.unlink(missing_ok=True)  # of the run that is resumed

    def lost(self, stage: str, name: str, why: str) -> None:
        self.recorder.lost(stage, name, why)
        for hub in self.hubs.values():
            hub.peer_lost(name, blame=stage != "train")  # it held all that waits, to whatever it was that killed it
        if stage in ("engine", "frozen"):
            self._drop_engine(name)
        elif stage == "router":
            self._drop_router()
        self.topic.drop(STATS_PREFIX + name)

    async def trainer_goes_on(self, lost: TrainOptions, stream: str) -> TrainOptions | None:
        settle = self.hubs["settle"]
        reported = {held.key for held in settle.held()}
        while reported & {held.key for held in settle.held()}:  # noqa: ASYNC110  (a hub announces no single message)
            await asyncio.sleep(REPORTS_POLL_S)
        recorder, step = self.recorder, self.recorder.committed
        behind = recorder.ledger.trained // self.config.rollout.rollout_batch_size - step
        repeat = recorder.last_batch if behind else ()
        account = await self.hubs[stream].account()
        kept = lost.restored.union(group for _, group in map(group_of, (held.key for held in account)))
        if recorder.training_started is None or behind > 1 or not kept.issuperset(repeat):
            return None
        still_open = frozenset(group.group_id for group in recorder.ledger.open_groups())
        checkpoint = final_path(recorder.rundir.checkpoints, step)
        if checkpoint.is_dir() and (fault := await asyncio.to_thread(_damage, checkpoint)) is not None:
            recorder.say(fault)  # a resume passes it over
            return None
        remove_leftovers(recorder.rundir.checkpoints)
        return msgspec.structs.replace(
            lost,
            start_step=step,
            resume_from=str(checkpoint) if checkpoint.is_dir() else lost.resume_from,
            restored=lost.restored & still_open.union(repeat),
            repeat=repeat,
            restarts=lost.restarts + 1,
            first_step=lost.first_step if lost.restarts else lost.start_step,
            admitted=recorder.ledger.admitted,
            open=still_open,
        )

    def retired(self, stage: str, name: str) -> None:
        for hub in self.hubs.values():
            hub.peer_lost(name)
        if (value := self.topic.get(STATS_PREFIX + name)) is not None:
            self.recorder.view.stage(StageStats.decode(value))
        self.recorder.view.retire(stage, name)
        self.topic.dismiss(name)
        why = "no engine is left on its node" if stage == "fetcher" else f"{stage} is scaled down"
        self.recorder.say(f"{name} has ended, {why}")

    def engine_up(self, spec: EngineSpec, url: str, incarnation: int, version: str) -> None:
        token = spec.token.token if spec.token is not None else None
        policy, given = spec.frozen or POLICY, spec.taken_over
        address = EngineAddress(spec.name, url, incarnation, policy, given, fetcher=spec.fetcher, token=token)
        self.topic.publish(f"engine/{spec.name}", msgspec.msgpack.encode(address))
        kind = _kind(version) if spec.external else spec.config.engine
        file = spec.token.path if spec.token is not None else ""
        self._remember(spec.name, ServerInfo(kind, url, incarnation, version, spec.kind, token_file=file))

    def engine_left(self, spec: EngineSpec) -> None:
        self._drop_engine(spec.name)
        self.recorder.view.engines_left.add(spec.name)
        if self._fleet.pop(spec.name, None) is not None:
            write_json(self.recorder.rundir.fleet, self._fleet)
        self.recorder.say(f"{spec.name} has ended, engine is scaled down")

    def engine_away(self, spec: EngineSpec, why: str) -> None:
        self._drop_engine(spec.name)
        self._away(spec.name, spec.external, why, spec.kind)

    def router_away(self, url: str, why: str) -> None:
        self._drop_router()
        self._away("router", url, why, "router")

    def router_up(self, address: RouterAddress, version: str, metrics: str) -> None:
        self.topic.publish("router", msgspec.msgpack.encode(address))
        facts = ServerInfo(address.kind, address.url, address.incarnation, version, "router", metrics)
        self._remember("router", facts)

    def loading(self, name: str) -> bool:
        entry = carrying(self.topic).get(name)
        return entry is None or entry.fetching >= 0

    def complaint(self, name: str, incarnation: int) -> str | None:
        complaint = read_value(self.topic, f"complaint/{name}", Complaint)
        return complaint.reason if complaint is not None and complaint.incarnation == incarnation else None

    def say(self, line: str) -> None:
        self.recorder.say(line)

    def _away(self, name: str, url: str, why: str, kind: str) -> None:
        what = consequence(self.config, kind)
        self.recorder.say(f"{name}: {url} is lost after {why}; {what}")

    def _drop_engine(self, name: str) -> None:
        for kind in ("engine", "directory", "device", "complaint", "slow"):
            self.topic.drop(f"{kind}/{name}")

    def _drop_router(self) -> None:
        for key in ("router", "router_state"):
            self.topic.drop(key)

    def _remember(self, name: str, facts: ServerInfo) -> None:
        self._fleet[name] = facts
        write_json(self.recorder.rundir.fleet, self._fleet)


def _damage(checkpoint: Path) -> str | None:
    """What is wrong with the files of a checkpoint, None if they are as they were written."""
    try:
        verify_files(checkpoint, read_manifest(checkpoint))
    except CheckpointError as error:
        return str(error)
    return None


def _kind(version: str) -> str:
    """Our servers say which they are behind a plus sign; SGLang says only its number."""
    return version.partition("+")[2] or "sglang"
