"""The controller of a run: hubs, topic, prompt stage, runner, and the order of their ends.

The main loop of Sluice in three hops: `launch.py` -> `pipeline.run.run` -> `Controller.run`; what circulates is
described in stages/prompts/stage.py (admission and settlement), stages/generate/stage.py and stages/train/stage.py.
Commands of the user to a running run come in through pipeline/control.

Life and death
1. Hubs and topic listen before any replica starts; the prompt stage admits once engines carry published weights.
2. The ledger decides the end: all batches trained, or a drain (Ctrl-C, deadline); then nothing is open.
3. Streams end in order (feedback first, the settle stream last), replicas end with their inlets, the engines stage
  at the key `end`; then engines are stopped.
4. A drain has a deadline; when it passes, the error lists the remaining work by stream.

Invariant: nothing is left running when `run` returns, but servers that the parent of `--auto-resume` ends or hands on.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from configs.graph import autoscale_limits
from models.train.trainer_group.rank_spec import MEETING
from pipeline.control.autoscale import Adviser, Meter
from pipeline.control.endpoint import endpoint as control_endpoint
from pipeline.control.monitor import Monitor, RunParts
from pipeline.control.run_control import RunControl
from pipeline.errors import DrainTimeout, Stalled
from pipeline.facts.stats import STATS_PREFIX
from pipeline.graph import Placement, stream_spec
from pipeline.hosts.launcher import Launcher, at_most
from pipeline.hosts.rendezvous import CONFIG, CONTROLLERS_KEYS, SOURCE, make_keys, publish_files
from pipeline.hosts.worker import FaultyInlet
from pipeline.observe.prometheus import endpoint
from pipeline.record.recorder import Recorder
from pipeline.supervise.lifecycle import DeadLetters, Lifecycle
from pipeline.supervise.runner import ProcessRunner, Runner, TaskRunner
from stages.base import beside
from stages.engines.colocation import KEY as DEVICE
from stages.engines.stage import END
from stages.ports import Inlet, Ports
from stages.prompts.stage import PromptStage
from stages.topic_values import ADDRESS, BROUGHT, DIRECTORY, LEAVE, ORDER, SETTINGS
from stages.train.checkpoints import SAVE
from transport import Hub, Node, TopicServer
from transport.security import load_security

_CONTROLLER: Final = frozenset[str]()
_ENGINES, _TRAIN = frozenset({"engines"}), frozenset({"train"})

# Who may write which keys of the topic: a reward worker publishes no weights. The controller's process may write all.
# Keys that are not listed (figures, notices, values of custom stages) may be written by any replica. Where processes
# are on several hosts, the name of a replica is that of its key. On one machine it is what the process says: all
# processes belong to one user there, and the table keeps mistakes out.
TOPIC_WRITERS: Final[Mapping[str, frozenset[str]]] = {
    SOURCE: _TRAIN,
    "weights": _TRAIN,
    MEETING: frozenset({"train-rank"}),
    DIRECTORY: _ENGINES,
    ORDER: _ENGINES,
    BROUGHT: frozenset({"fetcher"}),
    "router_state": _ENGINES,
    f"{DEVICE}/": _ENGINES,
    DEVICE: _TRAIN,
    "eval/": frozenset({"evaluate"}),
    "drain": frozenset({"prompts"}),
    **dict.fromkeys((*CONTROLLERS_KEYS, SETTINGS, SAVE), _CONTROLLER),
    **dict.fromkeys((ADDRESS, LEAVE, "router", "scale/", "dead", "end"), _CONTROLLER),
}


log = logging.getLogger("sluice.controller")
EMPTY_POLL_S: Final = 0.02
HOLDS_RESULTS: Final = ("train-", "evaluate-")  # replicas that may still write what the run is for


class Controller:
    """One run of one graph."""

    def __init__(self, placement: Placement, stage: PromptStage, recorder: Recorder, launcher: Launcher) -> None:
        self.config, self.rundir, self.graph = placement.config, placement.rundir, placement.graph
        self.placement, self.stage, self.recorder, self.launcher = placement, stage, recorder, launcher
        self.hubs: dict[str, Hub] = {}
        self.reason = "finished"
        self._interrupts = 0
        self._task: asyncio.Task[object] | None = None  # in which `run` is awaited

    async def run(self) -> None:
        """Run to the end. Raises RunError (or an error of the prompt stage) with everything stopped."""
        self._task = asyncio.current_task()
        keys = make_keys(self.rundir.sockets / "keys") if self.launcher.controller else None
        async with Node(self.rundir.run_id, "controller", load_security(keys[0]) if keys else None) as node:
            topic = await node.topic_server(self.placement.topic, private=(STATS_PREFIX,), writers=TOPIC_WRITERS)
            topic.publish(CONFIG, msgspec.msgpack.encode(self.config))
            if keys is not None:
                publish_files(topic, self.config.train.hf_checkpoint)
            dead_letters = DeadLetters(topic, self.recorder, self.stage.close_groups)
            for stream in self.graph.streams:
                spec = stream_spec(self.config, self.stage.gate, stream, self.placement.addresses[stream.name])
                hub = self.hubs[stream.name] = await node.hub(spec, dead_letters)
                self.placement.addresses[stream.name] = hub.address
            lifecycle = Lifecycle(topic, self.hubs, self.recorder)
            kind = TaskRunner if self.config.run.runner == "inprocess" else ProcessRunner
            runner = kind(self.placement, node, self.launcher, lifecycle, keys)
            parts = RunParts(self.placement, self.stage, self.recorder, self.hubs, topic, self.launcher, runner)
            adviser = Adviser(Meter(parts), autoscale_limits(self.config))
            monitor = Monitor(parts, adviser.look)
            observe = self.config.observe
            served = endpoint(observe.prometheus_host, observe.prometheus_port, monitor.facts)
            control = RunControl(parts, monitor, adviser, self._interrupt)
            commands = control_endpoint(self.rundir.path, self.rundir.sockets, control.answer)
            with self._signals(), monitor:
                watched = (monitor.run, control.autoscale, control.follow_lengths, self._deadline)
                async with served, commands, beside(*(watch() for watch in watched)), asyncio.TaskGroup() as tasks:
                    replicas = tasks.create_task(runner.run())
                    stage = tasks.create_task(self.stage.run(await self._ports(node, topic)))
                    try:
                        await self._until_completed(replicas)
                        await self._end(topic, runner, replicas, stage)
                    except DrainTimeout as error:
                        raise self._stalled(f"; {error}") if self._stall_reason is not None else error from None
        if self._stall_reason is not None:
            raise self._stalled()

    _stall_reason: str | None = None  # why the run was ended as stalled

    def _stalled(self, more: str = "") -> Stalled:
        return Stalled(f"{self._stall_reason}{more}; continue with --resume {self.rundir.path}")

    async def _ports(self, node: Node, topic: TopicServer) -> Ports:
        """Ports of the prompt stage."""
        name, at, schemas = "prompts-0", self.placement.addresses, self.placement.schemas
        settle: Inlet[Any] = await node.inlet(at["settle"], "settle", schemas["settle"], window_items=256, replica=name)
        if (faults := self.placement.faults("prompts", name)) is not None:
            settle = FaultyInlet(settle, faults)
        out = self.graph.outlets("prompts")["out"].name
        outlet = await node.outlet(at[out], out, schemas[out], replica=name)
        return Ports(name, {"settle": settle}, {"out": outlet}, await node.topic(topic.address, replica=name))

    async def _until_completed(self, replicas: asyncio.Task[None]) -> None:
        """Waits for the ledger to be closed.

        Ends with it, with a drain that takes too long, a lost run directory, or a failure of the runner.
        """
        completed, loop = self.stage.completed, asyncio.get_running_loop()
        drain_since, sockets_gone = None, False
        while not completed.is_set():
            if self.stage.draining is None and (stall := self.recorder.stalls.over) is not None:
                self._stall_reason = stall
                self.stage.drain("nothing moved any more")
            if self.stage.draining is not None:
                drain_since = loop.time() if drain_since is None else drain_since
                if loop.time() - drain_since > self.config.run.drain_s:
                    limit = f"--drain-s {self.config.run.drain_s:g}"
                    raise DrainTimeout(f"in-flight work was not finished within {limit}: {self._remaining()}")
            if self.rundir.gone:  # a write may recreate its directory: no error, and nothing kept
                raise FileNotFoundError(errno.ENOENT, "the run directory is gone", str(self.rundir.path))
            if not sockets_gone and (fault := self.rundir.keep_sockets()):
                sockets_gone = True
                self.recorder.say(fault)
            if replicas.done():  # every replica ended although the ledger is open
                raise DrainTimeout(f"all replicas ended with {self._remaining()}")
            async with at_most(0.5):
                await completed.wait()

    def _remaining(self) -> str:
        queues = ", ".join(
            f"{name}: {stats.queued} queued, {stats.leased} leased"
            for name, hub in self.hubs.items()
            if (stats := hub.stats()).queued or stats.leased
        )
        return f"{self.stage.ledger.open} groups in flight ({queues or 'no message in any stream'})"

    async def _end(
        self, topic: TopicServer, runner: Runner, replicas: asyncio.Task[None], stage: asyncio.Task[None]
    ) -> None:
        """END in the order of the graph; each stream is empty before the next one ends. Bounded by `drain_s`.

        Messages between generate and its loops may belong to groups that have ended: they still have to come to rest.
        """
        topic.publish("drain", (self.stage.draining or "the run is complete").encode())
        limit_s = self.config.run.drain_s
        try:
            async with asyncio.timeout(limit_s):
                await wait_empty([self.hubs[stream.name] for stream in self.graph.loop])
                for stream in self.graph.ends():
                    if stream.name != "settle":
                        self.hubs[stream.name].finish()
                        await self.hubs[stream.name].wait_empty()
        except TimeoutError:
            raise DrainTimeout(f"the streams did not empty within --drain-s {limit_s:g}; {self._remaining()}") from None
        topic.publish(END, b"")  # for the engines stage, which has no stream: no requests follow
        await asyncio.wait({replicas}, timeout=limit_s)  # unlike a timeout, this leaves the runner alone
        if not replicas.done():
            late = f"{', '.join(runner.alive())} did not end within --drain-s {limit_s:g}"
            if any(name.startswith(HOLDS_RESULTS) for name in runner.alive()):
                raise DrainTimeout(f"{late}; {self._remaining()}")
            self.recorder.say(f"{late}, as a stopped or hanging process: every stream is empty, so it is killed")
            replicas.cancel()
        self.hubs["settle"].finish()
        await stage

    async def _deadline(self) -> None:
        """Waits for the run's deadline, if it has one, then drains."""
        if self.config.run.deadline_s is None:
            return
        await asyncio.sleep(self.config.run.deadline_s)
        self.reason = f"--deadline-s {self.config.run.deadline_s:g} passed"
        self.stage.drain(self.reason)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Signal handlers for the time of a `with` block."""
        loop, signals = asyncio.get_running_loop(), [signal.SIGINT, signal.SIGTERM]
        for number in signals:
            loop.add_signal_handler(number, self._interrupt)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # under nohup the run outlives its terminal
            loop.add_signal_handler(signal.SIGHUP, self._stop_at_once)
            signals.append(signal.SIGHUP)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    def _interrupt(self) -> None:
        self._interrupts += 1
        if self._interrupts == 1:
            self.reason = "interrupted"
            at_most = f"{self.config.run.drain_s:g} s"
            self.recorder.say(f"finishing what is in flight (at most {at_most}); press Ctrl-C again to stop at once")
            self.stage.drain(self.reason)
        else:
            self._stop_at_once()

    def _stop_at_once(self) -> None:
        """End the event loop's run with KeyboardInterrupt: TaskGroups cancel, runners stop their processes."""
        self.reason = "stopped at once"
        if self._task is not None:
            self._task.cancel(self.reason)


async def wait_empty(hubs: Sequence[Hub]) -> None:
    """Wait until all streams of a loop are empty at the same moment: then no message can enter any of them.

    A stage sends a message on before it acknowledges the message. So a message of the loop is always in some hub.
    """
    while any(hub.held() for hub in hubs):  # noqa: ASYNC110  (hubs announce no single message)
        await asyncio.sleep(EMPTY_POLL_S)
