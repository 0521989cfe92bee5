"""Start a run: read the command line, settle the configuration, print the plan or hand over to the pipeline.

Invariants: no framework is imported before the configuration is known to be right, so that `--help`, `--dry-run` and a
mistake are answered at once; a fault of the user is one sentence on stderr and exit code 2, never a traceback; what a
run refuses before it starts anything, `--dry-run` refuses too, and all faults are listed together.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Final

from configs.command_line import Arguments, read
from configs.layers import ConfigError
from configs.load import load_arguments, with_work
from configs.schema import Config
from configs.schema.notation import did_you_mean
from models.import_path import add_working_directory

CONTROL: Final = (  # commands to a running run
    "status", "scale", "set", "pause", "resume", "drain", "save", "rollback", "kill", "watch"
)  # fmt: skip
COMMANDS: Final = {  # the other ones, and where they are
    "samples": "pipeline.observe.samples",
    "view": "pipeline.view.server",
    "report": "pipeline.view.html_report",
    "export": "pipeline.record.kept_files",
    "compare": "pipeline.observe.compare",
    "convert": "configs.migrate.convert",
}


def main(argv: Sequence[str] | None = None, *, program: bool = False) -> int:
    """Run the command line; return the exit code. `program`: the process has no other purpose, so it may be forked."""
    add_working_directory()  # functions of the user are found in the folder where the command was started
    argv = sys.argv[1:] if argv is None else argv
    as_json = "--json" in argv
    try:
        return _main(argv, program=program)
    except ConfigError as error:
        return _refuse(error.faults, 2, as_json=as_json)
    except KeyboardInterrupt:
        return _refuse(("interrupted",), 130, as_json=as_json)
    except Exception as error:
        from pipeline.errors import for_user

        if (ended := for_user(error)) is None:  # a defect, which shows itself
            raise
        return _refuse(getattr(ended, "faults", (str(ended),)), ended.exit_code, as_json=as_json)


def load_config(flags: Sequence[str]) -> Config:
    """The resolved and checked configuration of a command line. Raises ConfigError with all faults."""
    add_working_directory()
    return _settle(read(flags), notify=False)[0]


def _main(argv: Sequence[str], *, program: bool = False) -> int:
    if argv and argv[0] in COMMANDS:
        return int(import_module(COMMANDS[argv[0]]).main(argv[1:]))
    if argv[:1] == ["eval"]:
        from pipeline.observe.evaluation import main as evaluate

        return evaluate(argv[1:], _main)
    if argv and argv[0] in CONTROL:
        from pipeline.control.client import main as control

        return control(argv)
    if argv and argv[0].isidentifier():
        names = ("eval", *COMMANDS, *CONTROL)
        raise ConfigError(
            f"{argv[0]!r} is no command{did_you_mean(argv[0], names)}; the commands are {', '.join(names)}; a run "
            "begins with a flag, such as --config quickstart, and its plan is --dry-run"
        )
    arguments = read(argv)
    if arguments.help:
        from configs.help import render_help

        sys.stdout.write(render_help())
        return 0
    if arguments.version:
        from pipeline.facts.run_log import release

        sys.stdout.write(f"sluice {release()}\n")
        return 0
    from pipeline.supervise.auto_resume import facts_from_parent

    resumed = facts_from_parent()
    config, left_out = _settle(arguments, notify=resumed is None)  # else the parent has written the warnings
    if arguments.dry_run:
        from configs.plan.plan import make_plan, render
        from pipeline.facts.run_log import show

        plan = make_plan(config)
        show(render(plan, left_out), {"plan": plan, "left_out": left_out}, as_json=arguments.json)
        return 0
    if program:
        from pipeline.facts.run_log import outlive_output

        outlive_output()
    if config.run.auto_resume and resumed is None:
        return _run_in_child(config, argv, arguments)
    from configs.plan.plan import staleness_line

    sys.stderr.write(f"{staleness_line(config)}\n")
    server = None
    if program and config.run.runner == "local" and config.run.preload:
        from pipeline.hosts.fork_server import ForkServer
        from pipeline.hosts.machine import may_fork

        if may_fork():
            server = ForkServer(config)  # imports on another processor what this run needs, from now on
    try:
        from pipeline.run import run

        return run(config, resumed=resumed, forks=server)
    finally:
        if server is not None:
            server.close()


def _run_in_child(config: Config, argv: Sequence[str], arguments: Arguments) -> int:
    """Start the run as a child, and start it again where that mends its end."""
    from pipeline.supervise.auto_resume import AutoResume

    # Engines that share their devices with the trainer would hold its memory when it starts again.
    keeps = config.run.runner == "local" and not config.asynchrony.colocate
    first, again, run_dir = argv, argv, config.run.resume
    if run_dir is None:
        run_dir = str(config.run.run_dir)
        again = ["--resume", run_dir]
        first = argv if "run.run_dir" in arguments.layer.values else [*argv, "--run-dir", run_dir]
    return AutoResume(__file__, first, again, Path(run_dir), config.run.auto_resume, keeps=keeps).run()


def _settle(arguments: Arguments, *, notify: bool) -> tuple[Config, list[str]]:
    """The resolved and checked configuration, and the checks of a plan that this machine could not make.

    `notify`: warnings go to stderr. Raises ConfigError with all faults.
    """
    try:
        arguments, note = with_work(arguments)
        for line in (*arguments.notes, *([note] if note else [])) if notify and not arguments.faults else ():
            sys.stderr.write(f"{line}\n")
        loaded = load_arguments(arguments)
    except ConfigError as error:
        raise ConfigError([*arguments.faults, *arguments.judged(error.faults)]) from error
    from configs.rules.validate import examined

    config, found = examined(loaded.config, loaded.given)
    faults = [*arguments.faults, *arguments.judged(found.faults)]
    left_out: list[str] = []
    if faults or arguments.dry_run:  # a run does so itself
        from pipeline.preflight.machine import MACHINE
        from pipeline.preflight.refusals import refusals

        try:
            named = set(_FUNCTION.findall(" ".join(faults)))  # each is reported once
            more = arguments.judged(refusals(config, MACHINE, left_out))
            faults += [fault for fault in more if not named.intersection(_FUNCTION.findall(fault))]
        except Exception:
            if not faults:  # these checks expect a valid configuration
                raise
    if faults:
        raise ConfigError(faults)
    for warning in found.warnings if notify else ():
        sys.stderr.write(f"warning: {warning}\n")
    return config, left_out


# The setting that a sentence is about: a flag, or the key of a recipe.
_FUNCTION: Final = re.compile(r"'[\w.]+:\w+'")
_KEY: Final = re.compile(r"--[a-z][\w-]*|\b[a-z_]+\.[a-z_.]+(?= )")


def _refuse(faults: Sequence[str], code: int, *, as_json: bool) -> int:
    for fault in faults:
        sys.stderr.write(f"error: {fault}\n")
    if as_json:
        found = [{"key": key[0] if (key := _KEY.search(fault)) else None, "message": fault} for fault in faults]
        sys.stdout.write(json.dumps({"error": {"exit_code": code, "faults": found}}, indent=2) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main(program=True))
