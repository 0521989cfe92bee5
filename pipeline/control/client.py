"""`python launch.py COMMAND RUN` with one of `WHAT`: send a command to a running run, show its reply.

`status` is plain text of at most 80 columns. Where no process answers, it is made from the files of the run:

    starting    a process prepares the run
    stopping    a process writes the last files
    completed   all batches are trained
    drained     the user or a deadline ended it: in order, or at once, as `exit_reason` says
    failed      it ended with an error
    killed      its process went without an end, as by kill -9 or for want of memory
    no run      the path holds none

A live process holds a lock on the directory, and takes its seal away when it ends, in whatever order; so a seal without
a lock is that of a killed process.

`watch` asks for the status once per second. The table is that of the run's own terminal, and without a terminal there
are its plain lines. The run goes on when the watching ends. The exit code is 0 for a run that is completed or drained,
1 for one that failed or was killed, 3 where there is none. A run that starts, stops, or does not answer for a while is
watched on; its end is shown once, with the reason and the command that continues it.
"""

from __future__ import annotations

import argparse
import shlex
import socket
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from models.checkpoint import latest_checkpoint
from models.disk import read_file
from pipeline.control.endpoint import CONTROL_FILE, Command, ControlAddress, Reply, Request, RunStatus, Status
from pipeline.errors import CommandRefused, NotRunning, UsageError
from pipeline.facts.run_directory import LOCK_FILE, SEAL_PREFIX, RunDir, in_use
from pipeline.facts.run_log import PROGRAM, RUN_LOG, show
from pipeline.facts.stats import LedgerCounts, StageRow, visible
from pipeline.observe.summary import NEWEST, read_summary
from pipeline.observe.table import Display, columns, duration, failed_text, goodput_text, number, open_display, quantity
from pipeline.record.metrics import read_metrics

COLUMNS: Final = 80


def table(status: RunStatus) -> str:
    """The status of a run for people."""
    why = f" ({status.exit_reason})" if status.exit_reason not in (None, status.state) else ""
    if (run := status.snapshot) is None:
        rows = [("run", status.run), ("state", visible(f"{status.state}{why}")), ("step", str(status.step))]
        rows += [("checkpoint", status.checkpoint or "none"), ("continue", status.resume or "-")]
        return "\n".join(f"{name:<10} {value}" for name, value in rows)
    total = f"/{run.total_steps}" if run.total_steps else ""
    eta = "" if run.eta_s is None else f", ETA {duration(run.eta_s)}"
    bound = "" if run.staleness_bound is None else f", bound {run.staleness_bound}"
    more = "" if run.may_enter is None else f", {run.may_enter} more may enter"
    stale = "-" if run.staleness_mean is None else f"mean {run.staleness_mean:.2f}, max {run.staleness_max}{bound}"
    rows = [
        ("run", status.run),
        ("state", f"{status.state}{why}, {run.mode}, {duration(run.elapsed_s)}{eta}"),
        ("step", f"{run.step}{total}, reward {number(run.reward_mean)}, engines carry version {run.version}"),
        ("in flight", f"{run.in_flight} groups{more}"),
        ("staleness", stale),
        ("groups", _groups(run.ledger)),
    ]
    lines = [f"{name:<10} {value}" for name, value in rows]
    goodput = "" if run.goodput.goodput is None else goodput_text(run.goodput)
    failed = failed_text(run.failed_rollouts) if run.failed_rollouts else ""
    texts = [("goodput", goodput), ("failed", failed), ("waits", status.waits)]
    for name, text in [*texts, *(("alarm", alarm) for alarm in run.alarms), ("advice", run.advice)]:
        lines += textwrap.wrap(text, COLUMNS, initial_indent=f"{name:<11}", subsequent_indent=" " * 11)
    lines += ["", *columns([_STAGES, *(_stage(row, status.replicas.get(row.stage)) for row in run.stages)])]
    if status.engines:
        engines = [
            (
                *(one.name, one.state, "-" if one.version is None else str(one.version)),
                *(str(one.running), str(one.waiting), str(one.limit or "-")),
                "-" if one.idle is None else f"{one.idle:.0%}",
            )
            for one in status.engines
        ]
        lines += ["", *columns([_ENGINES, *engines])]
    queues = [(one.stream, str(one.queued), str(one.leased), str(one.consumers)) for one in status.queues]
    lines += ["", *columns([_QUEUES, *queues])]
    if status.changes:
        earlier = [f"{n} changes before, see --json"] if (n := len(status.changes) - NEWEST) > 0 else []
        lines += [
            "",
            *earlier,
            *(f"step {one.step}: {one.what} {one.value}".rstrip() for one in status.changes[-NEWEST:]),
        ]
    return "\n".join(map(_cut, lines))


_STAGES: Final = ("stage", "repl.", "busy", "starved", "blocked", "stalled", "queue", "work", "items/s", "failed")
_ENGINES: Final = ("engine", "state", "version", "running", "waiting", "limit", "idle")
_QUEUES: Final = ("stream", "queued", "in work", "consumers")


def _groups(counts: LedgerCounts) -> str:
    ends = ("trained", "filtered", "stale", "failed", "discarded")
    return f"{counts.admitted} admitted: {', '.join(f'{getattr(counts, name)} {name}' for name in ends)}"


def _stage(row: StageRow, wanted: int | None) -> tuple[str, ...]:
    """`wanted`: number of replicas after scaling; the rest finish their messages."""
    replicas = str(row.replicas) if wanted in (None, row.replicas) else f"{row.replicas}>{wanted}"
    shares = tuple(f"{share:.0%}" for share in (row.busy, row.starved, row.blocked, row.stalled))
    counts = (str(row.queue_depth), str(row.in_flight), quantity(row.items_per_s), str(row.failures))
    return (row.stage, replicas, *shares, *counts)


def _cut(line: str) -> str:
    line = line.rstrip()
    return line if len(line) <= COLUMNS else f"{line[: COLUMNS - 3]}..."


TIMEOUT_S: Final = 30.0
PHASES: Final = ("", "warm_start")  # directories in which a run in one of its phases has its endpoint
WHAT: Final = {
    "status": "what the run does: step, ledger, stages, engines, queues",
    "scale": "bring stages, or the engines, to so many replicas: scale RUN reward=4 engine=2",
    "set": "change a setting: set RUN max_staleness=3 lr=5e-6 temperature=0.8",
    "pause": "admit no new group; groups in flight are finished",
    "resume": "admit new groups again",
    "save": "write a checkpoint after the step in training",
    "drain": "finish the groups in flight and end, as Ctrl-C does",
    "rollback": "go on with model and optimizer of a kept checkpoint: rollback RUN 60",
    "kill": "end a replica at once, as kill -9 does, of a run with --fault-inject: kill RUN reward-0",
    "watch": "show the live table until the run ends",
}


def main(argv: Sequence[str]) -> int:
    """Send a command and show the reply; returns the exit code. Raises UsageError where the run does not do it."""
    arguments = _parser().parse_args(argv)
    run: Path = arguments.run
    if arguments.command == "watch":
        with open_display(None, log_interval=1) as display:
            last = watch(run, display)
        sys.stdout.write(f"{table(with_files(last))}\n")
        return int(last.state in ("failed", "killed"))
    if arguments.command == "status":
        status = with_files(_asked(run))
        show(table(status), status, as_json=arguments.json)
        return NotRunning.exit_code if status.state in (NO_RUN, *ENDED) else 0
    reply = ask(run, _command(arguments))
    if not reply.ok:
        raise CommandRefused(reply.lines)
    show("\n".join(reply.lines), {"lines": reply.lines}, as_json=arguments.json)
    return 0


NO_RUN: Final = "no run"
ASK_S: Final = 1.0  # from one question of `watch` to the next
ENDED: Final = ("completed", "drained", "failed", "killed")


def watch(run: Path, display: Display) -> RunStatus:
    """Draw the run until it ends; returns its last status. Raises NotRunning where there is no run."""
    noted = ""
    while True:
        try:
            status = _asked(run)
            if status.state == NO_RUN:
                raise NotRunning(str(status.exit_reason))
            news = f"{status.state}: {status.waits}" if status.waits else status.state
        except CommandRefused as error:  # too many ask, or it does not answer: it may do so again
            status, news = None, str(error)
        if status is not None and status.snapshot is not None:
            display.update(status.snapshot)
        if news != noted:
            display.note(visible(news))
            noted = news
        if status is not None and status.state in ENDED:
            return status
        time.sleep(ASK_S)


def _asked(run: Path) -> RunStatus:
    """The status from the run's process, else from its files. Raises CommandRefused."""
    try:
        reply = ask(run, Status())
    except NotRunning:
        return from_files(run)
    if reply.status is None:
        raise CommandRefused(reply.lines)
    return reply.status


def with_files(status: RunStatus) -> RunStatus:
    """The status, with facts from the run directory."""
    rundir, step = RunDir(Path(status.run)), 0 if status.snapshot is None else status.snapshot.step
    if status.snapshot is None and rundir.metrics.is_file():
        step = max((int(row["step"]) for row in read_metrics(rundir.metrics)), default=0)
    latest = latest_checkpoint(rundir.checkpoints)
    goes_on = status.state in ENDED[1:] and rundir.config.is_file()
    resume = f"{PROGRAM} --resume {shlex.quote(status.run)}" if goes_on else None
    return msgspec.structs.replace(status, step=step, checkpoint=latest and str(latest), resume=resume)


def from_files(run: Path) -> RunStatus:
    """The status of a run of which no process answers."""
    rundir, seals = RunDir(run), [path.stat().st_mtime for path in run.glob(f"{SEAL_PREFIX}*")]
    reason, trained = None, rundir.metrics.stat().st_mtime if rundir.metrics.is_file() else 0.0
    if not (run / LOCK_FILE).is_file() and not rundir.config.is_file():
        what = "holds no run" if run.is_dir() else "is no directory"
        state, reason = NO_RUN, f"{run} {what}; give the run directory that the run printed at its start"
    elif in_use(run):
        state = "stopping" if trained > max(seals, default=0.0) else "starting"
    elif seals:
        state, reason = "killed", "its process went without an end, as by kill -9 or for want of memory"
    elif not rundir.summary.is_file():  # it ended in its preparations or its warm start
        log = read_file(run / RUN_LOG).decode(errors="replace") if (run / RUN_LOG).is_file() else ""
        state, reason = "failed", log.rpartition(" ends: ")[2].partition("\n")[0]
    else:
        reason = read_summary(rundir.summary).exit_reason
        state = {"completed": "completed", "failed": "failed"}.get(reason.partition(":")[0], "drained")
    return RunStatus(run=str(rundir.path), state=state, exit_reason=reason and reason.removeprefix("failed: "))


def ask(run: Path, command: Command) -> Reply:
    """Send a command to the run of a run directory. Waits for the reply. Raises UsageError."""
    for phase in PHASES:
        address = _address(run / phase)
        if address is not None and (reply := _exchange(address, command)) is not None:
            return reply
    raise NotRunning(_why(with_files(from_files(run))))


def _exchange(address: ControlAddress, command: Command) -> Reply | None:
    """The reply, None if no process listens."""
    request = msgspec.json.encode(Request(address.token, msgspec.Raw(msgspec.json.encode(command)))) + b"\n"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(TIMEOUT_S)
        try:
            link.connect(address.socket)
            link.sendall(request)
            with link.makefile("rb") as answer:
                line = answer.readline()
            return msgspec.json.decode(line, type=Reply)
        except (FileNotFoundError, ConnectionError):
            return None
        except TimeoutError:
            why = f"the run did not answer within {TIMEOUT_S:g} s; it may hang, see its logs"
            raise CommandRefused([why]) from None
        except msgspec.MsgspecError:
            raise NotRunning("the run ended before it had answered, or is of another version") from None


def _address(directory: Path) -> ControlAddress | None:
    try:
        return msgspec.json.decode(read_file(directory / CONTROL_FILE), type=ControlAddress)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"{directory / CONTROL_FILE} cannot be read: {error.strerror}; ask as its owner") from None
    except msgspec.MsgspecError:
        return None


def _why(status: RunStatus) -> str:
    cure = f"; continue it with {status.resume}" if status.resume else ""
    return str(status.exit_reason) if status.state == NO_RUN else f"{status.run} is not running: {status.state}{cure}"


def _command(arguments: argparse.Namespace) -> Command:
    fields: dict[str, object] = {"type": arguments.command}
    if arguments.command == "scale":
        pairs = (_pair(text, counts=True) for text in arguments.changes)
        fields["counts"] = {stage: int(count) for stage, count in pairs}
    if arguments.command == "set":
        fields["changes"] = dict(_pair(text, counts=False) for text in arguments.changes)
    if arguments.command == "rollback":
        fields["step"] = arguments.step
    if arguments.command == "kill":
        fields["replica"] = arguments.replica
    command: Command = msgspec.convert(fields, Command)
    return command


def _pair(text: str, *, counts: bool) -> tuple[str, str]:
    key, _, value = text.partition("=")
    if not key or not value or (counts and not value.isdecimal()):
        form = "STAGE=COUNT; write for example reward=4" if counts else "KEY=VALUE; write for example max_staleness=3"
        raise UsageError(f"{text!r} is no {form}")
    return key, value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="launch.py", description="Ask a running run for its status, or change it.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in WHAT.items():
        command = commands.add_parser(name, description=text, help=text)
        command.add_argument("run", metavar="RUN", type=Path, help="run directory")
        if name == "scale":
            command.add_argument("changes", metavar="STAGE=COUNT", nargs="+")
        if name == "set":
            command.add_argument("changes", metavar="KEY=VALUE", nargs="+")
        if name == "rollback":
            command.add_argument("step", metavar="STEP", type=int, help="of a checkpoint that the run has kept")
        if name == "kill":
            command.add_argument("replica", metavar="REPLICA", help="its name, as in the logs")
        if name != "watch":
            command.add_argument("--json", action="store_true", help="as JSON")
    return parser
