"""What the life of processes means to the rest of the run: reports about replicas, engines and router go to the topic,
the hubs, the user and a file.

`replicas/fleet.json` names the servers of the run: address, kind, version, incarnation. The summary reads it, and so
does a person who queries an engine.

Invariant: an address is dropped from the topic before its process is started again.

A dead letter is a message that no stage could process. Its group is settled as failed, with the reason, and only then
named on the topic under `dead`, so that the stage that holds the other members drops them: no group is lost silently.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from models.checkpoint import CheckpointError, final_path, read_manifest, remove_leftovers, verify_files
from models.disk import write_json
from pipeline.errors import ReplicaFailed
from pipeline.facts.run_directory import EngineSpec, Kind, ServerInfo
from pipeline.facts.stats import STATS_PREFIX, StageStats, outage_text, visible
from pipeline.hosts.machine import visible_gpus
from pipeline.record.recorder import Recorder
from stages.base import TrainOptions
from stages.messages import Settled, group_of
from stages.ports import read_value
from stages.topic_values import EVALUATION, POLICY, Complaint, EngineAddress, RouterAddress, entries
from transport import DeadLetter, Hub, TopicServer

REPORTS_POLL_S = 0.02


class Lifecycle:
    """Takes the reports of all supervisors of a run."""

    def __init__(self, topic: TopicServer, hubs: Mapping[str, Hub], recorder: Recorder) -> None:
        self.config = recorder.config
        self.topic, self.hubs, self.recorder = topic, hubs, recorder
        self._fleet: dict[str, ServerInfo] = {}
        recorder.rundir.fleet.unlink(missing_ok=True)  # of the run that is resumed

    def lost(self, stage: str, name: str, why: str) -> None:
        """A process ended, or was ended since it hung, and is started again: release its leases, count the restart."""
        if fault := self.recorder.rundir.keep_sockets():
            raise ReplicaFailed(f"{name} ended with {why}, and {fault}")
        self.recorder.lost(stage, name, why)
        self.release(name, blame=stage != "train")  # it held all that waits, to whatever it was that killed it
        self._drop(stage, name)

    def release(self, name: str, *, blame: bool = True) -> None:
        """A replica has ended with its process: release its leases, and blame what it had started."""
        for hub in self.hubs.values():
            hub.peer_lost(name, blame=blame)
        self.topic.drop(STATS_PREFIX + name)

    async def trainer_state(self, lost: TrainOptions, back: int | None = None) -> TrainOptions | None:
        """Where the next incarnation of a lost trainer begins; None if only a resume can continue. Waits until all that
        the lost trainer had reported is in the ledger. `back`: the checkpoint that the user chose, whose weights become
        the version after the newest."""
        settle = self.hubs["settle"]
        reported = {held.key for held in settle.held()}
        while reported & {held.key for held in settle.held()}:  # noqa: ASYNC110  (a hub announces no single message)
            await asyncio.sleep(REPORTS_POLL_S)
        recorder, ledger = self.recorder, self.recorder.ledger
        remove_leftovers(recorder.rundir.checkpoints)
        step, state = lost.start_step, lost.resume_from
        begun = recorder.training_started is not None
        trained = ledger.steps(self.config.rollout.rollout_batch_size)
        newest = final_path(recorder.rundir.checkpoints, recorder.committed)
        chosen = None if back is None else final_path(recorder.rundir.checkpoints, back)
        if chosen is not None and trained >= (self.config.rollout.num_rollout or math.inf):
            recorder.say(f"the trainer does not go back to the checkpoint of step {back}: all steps are trained")
            chosen = None
        if chosen is not None and chosen.is_dir():  # else somebody removed it
            step, state = trained + 1, str(chosen)
            recorder.say(f"the trainer goes back to the checkpoint of step {back}: its weights become version {step}")
            lost = msgspec.structs.replace(lost, floor=step, restored=frozenset())
        elif newest.is_dir() and recorder.committed >= step:
            step, state = recorder.committed, str(newest)
            if (fault := await asyncio.to_thread(damage, newest)) is not None:
                recorder.say(fault)  # a resume passes it over
                return None
        if begun and step <= trained:
            since = "its beginning" if state is None else f"the checkpoint of step {step}"
            repeats = f", and trains the {trained - step} steps since again at most" if trained > step else ""
            recorder.say(f"the trainer starts again from {since}{repeats}")
        still_open = frozenset(group.group_id for group in ledger.open_groups())
        return msgspec.structs.replace(
            lost,
            start_step=step,
            resume_from=state,
            restored=lost.restored & still_open,
            first_step=lost.start_step if lost.first_step is None else lost.first_step,
            incarnation=lost.incarnation + 1,
            begun=begun,
            trained=trained,
            admitted=ledger.admitted,
            open=still_open,
        )

    def retired(self, stage: str, name: str, why: str) -> None:
        """A replica that was scaled away has ended, with or without an error: its messages go to others."""
        for hub in self.hubs.values():
            hub.peer_lost(name)
        if (value := self.topic.get(STATS_PREFIX + name)) is not None:
            self.recorder.view.stage(msgspec.msgpack.decode(value, type=StageStats))
        self.recorder.view.retire(stage, name)
        self.topic.dismiss(name)
        self.recorder.say(f"{name} has ended, {why}")

    def engine_up(self, spec: EngineSpec, url: str, incarnation: int, version: str) -> None:
        """An engine serves. `version`: as the server itself names it."""
        token = spec.token.token if spec.token is not None else None
        policy, given = spec.frozen or (EVALUATION if spec.evaluates else POLICY), spec.taken_over
        seen = visible_gpus() if spec.gpus else ()  # by the engines stage, too
        gpus = tuple(seen.index(gpu) for gpu in spec.gpus if gpu in seen)
        address = EngineAddress(
            spec.name, url, incarnation, policy, given, fetcher=spec.fetcher, token=token, gpus=gpus
        )
        self.topic.publish(f"engine/{spec.name}", msgspec.msgpack.encode(address))
        # Our servers append their kind after a plus sign; SGLang reports only its version.
        kind = version.partition("+")[2] or "sglang" if spec.external else spec.config.engine
        file = spec.token.path if spec.token is not None else ""
        self._remember(spec.name, ServerInfo(kind, url, incarnation, version, spec.kind, token_file=file))

    def engine_left(self, spec: EngineSpec) -> None:
        """An engine that was scaled away has ended: no part of the run waits for it any more."""
        self._drop(spec.kind, spec.name)
        self.recorder.view.engines_left.add(spec.name)
        if self._fleet.pop(spec.name, None) is not None:
            write_json(self.recorder.rundir.fleet, self._fleet)
        self.recorder.say(f"{spec.name} has ended, engine is scaled down")

    def away(self, kind: Kind, name: str, url: str, why: str) -> None:
        """An external engine or router does not answer: it gets no requests until it is up again."""
        self._drop(kind, name)
        self.recorder.say(f"{name}: {url} is lost after {why}; {outage_text(self.config, kind)}")

    def router_up(self, address: RouterAddress, version: str, metrics: str) -> None:
        """The router takes requests; its engines must be added to it again. `metrics`: the address of its /metrics."""
        self.topic.publish("router", msgspec.msgpack.encode(address))
        facts = ServerInfo(address.kind, address.url, address.incarnation, version, "router", metrics)
        self._remember("router", facts)

    def loading(self, name: str) -> bool:
        """Whether an engine has no published weights yet or loads some now, so that it may be slow to answer."""
        entry = entries(self.topic).get(name)
        return entry is None or entry.version < 0 or entry.fetching >= 0

    def complaint(self, name: str, incarnation: int) -> str | None:
        """Why the engines stage wants this incarnation of an engine replaced, None if it does not."""
        complaint = read_value(self.topic, f"complaint/{name}", Complaint)
        return complaint.reason if complaint is not None and complaint.incarnation == incarnation else None

    def say(self, line: str) -> None:
        """A line for the user."""
        self.recorder.say(line)

    def _drop(self, kind: str, name: str) -> None:
        """Take a server that is gone off the topic; of other processes nothing stands there."""
        of_engine = [f"{what}/{name}" for what in ("engine", "directory", "device", "complaint", "slow")]
        keys = {"engine": of_engine, "evaluation": of_engine, "frozen": of_engine, "router": ["router", "router_state"]}
        for key in keys.get(kind, ()):
            self.topic.drop(key)

    def _remember(self, name: str, facts: ServerInfo) -> None:
        self._fleet[name] = facts
        write_json(self.recorder.rundir.fleet, self._fleet)


def damage(checkpoint: Path) -> str | None:
    """What is wrong with the files of a checkpoint, None if they are as they were written."""
    try:
        verify_files(checkpoint, read_manifest(checkpoint))
    except CheckpointError as error:
        return str(error)
    return None


log = logging.getLogger("sluice.controller")
REMEMBERED: Final = 1000  # on the topic, for a group stage that is started again: its members come a second time
DETAIL_LIMIT: Final = 300


class DeadLetters:
    """What hubs call with their dead letters. `close_groups` settles groups in the ledger."""

    def __init__(
        self, topic: TopicServer, recorder: Recorder, close_groups: Callable[[Sequence[Settled]], None]
    ) -> None:
        self._topic, self._recorder, self._close_groups = topic, recorder, close_groups
        self._groups: deque[str] = deque(maxlen=REMEMBERED)

    def __call__(self, letter: DeadLetter) -> None:
        log.error("dead letter in stream %s, key %s: %s", letter.stream, visible(letter.key), visible(letter.reason))
        self._recorder.dead_letter(letter.stream, letter.key, letter.reason)
        group, counted = group_of(letter.key)
        if counted is not None:
            detail = f"{letter.stream}: {letter.reason}"[:DETAIL_LIMIT]
            self._close_groups([Settled(counted, "failed", detail)])
        if group:
            self._groups.append(group)
            self._topic.publish("dead", msgspec.msgpack.encode(tuple(self._groups)))
