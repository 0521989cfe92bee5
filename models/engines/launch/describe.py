"""Runs inside the environment of SGLang, by path: prints as JSON which versions and which options it has.

    python describe.py versions        names, versions and change times of what is installed; imports nothing of it
    python describe.py options WHAT..  options of `server` (sglang), `router` (sglang-router), `smg`

Invariant: only the standard library is needed to start it, and none of this project: it must run under any Python that
SGLang runs under. What the packages print while they are imported goes to stderr.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import sys
from typing import Any

PACKAGES = ("sglang", "torch", "sglang-router", "smg")
PARSERS = {
    "server": ("sglang.srt.server_args", "ServerArgs", {}),
    "router": ("sglang_router.router_args", "RouterArgs", {"use_router_prefix": False}),
    "smg": ("smg.router_args", "RouterArgs", {"use_router_prefix": False}),
}
HERE = os.path.dirname(os.path.abspath(__file__))
KINDS = {"int": "int", "float": "float", "human_readable_int": "size", "loads": "json", "json_list_type": "json"}


def versions() -> dict[str, Any]:
    """Name -> [version, time of change of its metadata], for those that are installed."""
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
    """The options of one argument parser, as it stands in the installed version."""
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
    gpu = has_gpu() if "server" in wanted else False
    if not gpu:
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        sys.path.insert(0, os.path.join(HERE, "shims"))
    return {"cuda": gpu, "options": {what: options(what) for what in wanted}}


def main(argv: list[str]) -> None:
    # The modules beside this file must not stand before those of the environment.
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != HERE]
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    with answer:
        json.dump(versions() if argv[0] == "versions" else describe(argv[1:]), answer)


if __name__ == "__main__":
    main(sys.argv[1:])
