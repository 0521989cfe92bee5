"""An argument list in the making, and the environment variables that every process of SGLang's environment gets.

Invariants: an option is offered only if the installed version has it; of two givings of one option the later one stands
alone; nothing of this project is on the import path of the started process.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from models.engines.launch.environment import SHIMS, Installed, Part
from models.engines.launch.options import dashed, rendered

LOOPBACK: Final = "127.0.0.1"
RUNNER: Final = str(Path(__file__).with_name("with_token.py"))


class Launch(Struct, frozen=True):
    """How to start one process. `env` is laid over the environment of whoever starts it."""

    argv: tuple[str, ...]
    env: dict[str, str]
    url: str


def with_token(launch: Launch, token_file: str, *, hidden: str = "-") -> Launch:
    """The same process with the token as its key, which neither its command line nor its environment shows. `hidden`: a
    module that it may not import."""
    python, flag, module, *rest = launch.argv
    assert flag == "-m"
    return msgspec.structs.replace(launch, argv=(python, RUNNER, token_file, module, hidden, *rest))


class Arguments:
    """An argument list in the making that knows which options the installed version has."""

    def __init__(self, installed: Installed, part: Part) -> None:
        self.installed, self.part = installed, part
        self.argv: list[str] = []

    def give(self, name: str, *values: object) -> None:
        """Give an option that every version has."""
        self.argv += [f"--{name}", *map(str, values)]

    def offer(self, name: str, *values: object) -> bool:
        """Give an option if this version has it; return whether it has."""
        known = self.installed.option(self.part, name) is not None
        if known:
            self.give(name, *values)
        return known

    def pass_on(self, args: Mapping[str, Any]) -> None:
        """Give the user's own options. What was given before under the same name is taken out."""
        options = self.installed.options(self.part)
        for key in args:
            option = self.installed.option(self.part, dashed(key))
            for name in option.names if option is not None else ():
                self._take_out(name)
        self.argv += rendered(args, options)

    def _take_out(self, name: str) -> None:
        if f"--{name}" not in self.argv:
            return
        start = self.argv.index(f"--{name}")
        end = next((i for i in range(start + 1, len(self.argv)) if self.argv[i].startswith("--")), len(self.argv))
        del self.argv[start:end]


def base_environment(installed: Installed) -> dict[str, str]:
    """Variables of the server: imports from its own environment only, a cheap /health, no proxy for the loopback."""
    env = {
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
        "PYTHONPATH": "",
        "PYTHONDONTWRITEBYTECODE": "",  # compiling thousands of modules anew would double the time of each start
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    if not installed.cuda:
        env |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SHIMS)}
    return env | _no_proxy()


def _no_proxy() -> dict[str, str]:
    """SGLang asks itself over HTTP while it starts; a proxy of this machine must not get those requests."""
    if not any(os.environ.get(name) for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")):
        return {}
    known = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    hosts = ",".join(filter(None, [known, LOOPBACK, "localhost", platform.node()]))
    return {"no_proxy": hosts, "NO_PROXY": hosts}
