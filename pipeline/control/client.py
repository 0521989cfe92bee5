"""`python launch.py status|scale|set|pause|resume|save|drain RUN`: ask a running run, and show what it says.

Exit codes: 0 done; 2 the run does not run, or refuses.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from pipeline.control.messages import (
    CONTROL_FILE,
    Command,
    ControlAddress,
    Drain,
    Pause,
    Reply,
    Request,
    Resume,
    Save,
    Scale,
    Set,
    Status,
)
from pipeline.control.table import table

TIMEOUT_S: Final = 30.0
PHASES: Final = ("", "warm_start")  # directories in which a run in one of its phases has its endpoint
WHAT: Final = {
    "status": "what the run does: step, ledger, stages, engines, queues",
    "scale": "bring stages, or the engines, to so many replicas: scale RUN reward=4 engine=2",
    "set": "change a setting: set RUN max_staleness=3 lr=5e-6 temperature=0.8",
    "pause": "admit no new group; what is under way goes on",
    "resume": "admit new groups again",
    "save": "write a checkpoint after the step in training",
    "drain": "finish what is under way and end, as Ctrl-C does",
}


class NotRunning(Exception):
    """Nobody answers for the run directory."""


class Refused(Exception):
    """The arguments say nothing that a run could be asked."""


def main(argv: Sequence[str]) -> int:
    """Ask; returns the exit code."""
    asked = _parser().parse_args(argv)
    try:
        reply = ask(Path(asked.run), _command(asked))
    except (NotRunning, Refused) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    if not reply.ok:
        for line in reply.lines:
            sys.stderr.write(f"error: {line}\n")
        return 2
    if reply.status is not None and asked.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(reply.status), indent=2).decode() + "\n")
    elif reply.status is not None:
        sys.stdout.write(table(reply.status) + "\n")
    for line in reply.lines:
        sys.stdout.write(f"{line}\n")
    return 0


def ask(run: Path, command: Command) -> Reply:
    """One question to the run of a run directory. Waits for its answer. Raises NotRunning."""
    for phase in PHASES:
        address = _address(run / phase)
        if address is not None and (reply := _exchange(address, command)) is not None:
            return reply
    raise NotRunning(_why(run))


def _exchange(address: ControlAddress, command: Command) -> Reply | None:
    """None if nobody listens."""
    request = msgspec.json.encode(Request(address.token, command)) + b"\n"
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
            raise NotRunning(f"the run did not answer within {TIMEOUT_S:g} s; it may hang, see its logs") from None
        except msgspec.MsgspecError:
            raise NotRunning("the run ended before it had answered, or is of another version") from None


def _address(directory: Path) -> ControlAddress | None:
    try:
        return msgspec.json.decode((directory / CONTROL_FILE).read_bytes(), type=ControlAddress)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise NotRunning(f"{directory / CONTROL_FILE} cannot be read: {error.strerror}; ask as its owner") from None
    except msgspec.MsgspecError:
        return None


def _why(run: Path) -> str:
    if not run.is_dir():
        return f"{run} is no directory; give the run directory that the run printed at its start"
    if not (run / "config.toml").exists():
        return f"{run} holds no run; give the run directory that the run printed at its start"
    return f"{run} is not running; continue it with python launch.py --resume {run}"


def _command(asked: argparse.Namespace) -> Command:
    match asked.command:
        case "scale":
            return Scale(dict(_count(text) for text in asked.changes))
        case "set":
            return Set(dict(_setting(text) for text in asked.changes))
        case "pause":
            return Pause()
        case "resume":
            return Resume()
        case "save":
            return Save()
        case "drain":
            return Drain()
        case _:
            return Status()


def _count(text: str) -> tuple[str, int]:
    stage, equals, count = text.partition("=")
    if not equals or not stage or not count.isdecimal():
        raise Refused(f"{text!r} is no STAGE=COUNT; write for example reward=4")
    return stage, int(count)


def _setting(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals or not value:
        raise Refused(f"{text!r} is no KEY=VALUE; write for example max_staleness=3")
    return key, value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="launch.py", description="Ask a running run, or change it while it goes on.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in WHAT.items():
        one = commands.add_parser(name, description=text, help=text)
        one.add_argument("run", metavar="RUN", help="run directory")
        if name == "scale":
            one.add_argument("changes", metavar="STAGE=COUNT", nargs="+")
        if name == "set":
            one.add_argument("changes", metavar="KEY=VALUE", nargs="+")
        if name == "status":
            one.add_argument("--json", action="store_true", help="as JSON")
        else:
            one.set_defaults(json=False)
    return parser
