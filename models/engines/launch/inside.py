"""Scripts that other Python environments run by path, with the standard library alone: nothing of this project.

    python inside.py versions                                    names, versions and change times of installed packages
    python inside.py options WHAT...                             options of `server` (sglang), `router`, `smg`
    python inside.py run TOKEN_FILE MODULE HIDDEN ARGUMENT...    run a module of that environment with a token
    python inside.py install-shim PYTHON                         put the torchvision shim into a CPU environment

`versions` and `options` print JSON. What the packages print while they are imported goes to stderr.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import logging
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = ("sglang", "torch", "sglang-router", "smg")
PARSERS = {
    "server": ("sglang.srt.server_args", "ServerArgs", {}),
    "router": ("sglang_router.router_args", "RouterArgs", {"use_router_prefix": False}),
    "smg": ("smg.router_args", "RouterArgs", {"use_router_prefix": False}),
}
HERE = os.path.dirname(os.path.abspath(__file__))
KINDS = {"int": "int", "float": "float", "human_readable_int": "size", "loads": "json", "json_list_type": "json"}
SHIM = "sluice_torchvision"
ASK = "import sysconfig, torch; print(sysconfig.get_path('purelib')); print(torch.version.cuda or '')"


def versions() -> dict[str, Any]:
    """Name -> [version, time of change of its metadata] of each installed package. Imports none of them."""
    found = {}
    for name in PACKAGES:
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        place = str(getattr(distribution, "_path", ""))
        changed = os.stat(place).st_mtime_ns if place and os.path.exists(place) else 0
        found[name] = [distribution.version, changed]
    return {"packages": found, "python": sys.version.split()[0]}


def option(action: argparse.Action) -> dict[str, Any]:
    """One option as plain values. Kinds: flag, switch (has a no- form), value, list, append (repeated)."""
    names = [text[2:] for text in action.option_strings if text.startswith("--")]
    if isinstance(action, argparse.BooleanOptionalAction):
        kind = "switch"
    elif type(action).__name__ == "_AppendAction":
        kind = "append"
    elif action.nargs == 0:
        kind = "flag"
    else:
        kind = "list" if action.nargs in ("+", "*") or isinstance(action.nargs, int) else "value"
    positive = [name for name in names if not (kind == "switch" and name.startswith("no-"))]
    takes = KINDS.get(getattr(action.type, "__name__", ""), "text")
    default = None if action.default in (None, argparse.SUPPRESS) else str(action.default)
    words = " ".join((action.help or "").split()) if action.help is not argparse.SUPPRESS else ""
    return {
        "names": positive,
        "kind": kind,
        "takes": takes,
        "choices": sorted(str(choice) for choice in action.choices or ()),
        "default": default,
        "help": words[:200],
    }


def options(what: str) -> list[dict[str, Any]]:
    """The options of one argument parser of the installed version."""
    module, owner, keywords = PARSERS[what]
    parser = argparse.ArgumentParser(add_help=False)
    getattr(importlib.import_module(module), owner).add_cli_args(parser, **keywords)
    return [option(action) for action in parser._actions if action.option_strings]


def has_gpu() -> bool:
    """Whether torch of this environment sees a GPU. False without torch: a router needs none."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def describe(wanted: list[str]) -> dict[str, Any]:
    """Whether there is a GPU, and the options of each parser in `wanted`."""
    gpu = has_gpu() if "server" in wanted else False
    if not gpu:
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        sys.path.insert(0, os.path.join(HERE, "shims"))
    return {"cuda": gpu, "options": {what: options(what) for what in wanted}}


# --------------------------------------------------------------------------------------------------
# A module with a token among its options.
#
# SGLang and its router take their key as an option alone, and every user of the machine can read a command line. So
# `run` adds the option inside the process. SGLang logs all of its options; `run` takes the token out of its log.


def keep_out_of_logs(token: str) -> None:
    """Replace the token by "hidden" in all log records of this process."""
    make = logging.getLogRecordFactory()

    def record(*args: object, **named: object) -> logging.LogRecord:
        log_record = make(*args, **named)
        try:
            text = log_record.getMessage()
        except Exception:  # the handler reports the fault
            return log_record
        if token in text:
            log_record.msg, log_record.args = text.replace(token, "hidden"), ()
        return log_record

    logging.setLogRecordFactory(record)


def run(token_file: str, module: str, hidden: str, arguments: list[str]) -> None:
    """Run `module` as `python -m` does, with the token as its key. It may not import `hidden` ("-": no such module)."""
    with open(token_file) as file:
        token = file.read().strip()
    keep_out_of_logs(token)
    os.umask(0o077)  # SGLang's processes meet at sockets in the directory of temporary files, and unpickle what comes
    if hidden != "-":
        # sglang-router imports SGLang where it can, for a debugging mode that is not used here, and with it torch: 6 s
        # of processor time and 0.5 GB for nothing.
        sys.modules[hidden] = None  # type: ignore[assignment]
    sys.path[0] = ""  # as with -m; the modules beside this file must not hide those of the environment
    sys.argv = [module, *arguments, f"--api-key={token}"]  # one word: a token may begin with "-"
    # As __main__, because SGLang's child processes find the module by its name.
    runpy.run_module(module, run_name="__main__", alter_sys=True)


# --------------------------------------------------------------------------------------------------
# The torchvision shim. The other shim, `sgl_kernel`, is installed nowhere: a server's PYTHONPATH names it.


def install_shim(python: Path) -> bool:
    """Put the shim into an environment whose torch is a CPU build, and take it out of any other; return whether the
    environment needs it. Raises RuntimeError with the cure if torch does not import."""
    probe = subprocess.run([python, "-c", ASK], capture_output=True, text=True, timeout=300)
    if probe.returncode:
        why = probe.stderr.strip().splitlines()[-1:] or ["no reason given"]
        raise RuntimeError(
            f"torch does not import in {python}: {why[0]}; on a machine without a GPU pip must find the CPU build of "
            "torch (name its index with PIP_EXTRA_INDEX_URL and install again)"
        )
    site, cuda = probe.stdout.splitlines()[-2:] if probe.stdout.count("\n") > 1 else (probe.stdout.strip(), "")
    module, hook = Path(site) / f"{SHIM}.py", Path(site) / f"{SHIM}.pth"
    if cuda:
        hook.unlink(missing_ok=True)
        module.unlink(missing_ok=True)
        return False
    shutil.copyfile(Path(HERE) / "shims" / f"{SHIM}.py", module)
    hook.write_text(f"import {SHIM}\n", encoding="utf-8")
    return True


def main(command: str, arguments: list[str]) -> int:
    if command == "run":
        run(arguments[0], arguments[1], arguments[2], arguments[3:])
        return 0
    if command == "install-shim":
        try:
            install_shim(Path(arguments[0]))
        except (RuntimeError, OSError) as error:
            sys.stderr.write(f"{error}\n")
            return 1
        return 0
    # The modules beside this file must not hide those of the environment.
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != HERE]
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    with answer:
        json.dump(versions() if command == "versions" else describe(arguments), answer)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
