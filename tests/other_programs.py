"""Programs of others: a web application at work, and interpreters that have the clients of model servers.

Packages of clients refuse each other. Looked at: interpreters of SLUICE_CLIENTS (paths, separated by colons),
`.venv-agents` (`make agents-env`), and this one.
"""

from __future__ import annotations

import functools
import os
import random
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web


@asynccontextmanager
async def served_app(app: web.Application, **options: Any) -> AsyncIterator[str]:
    """Its address, on a free port of this machine. `options`: of its runner."""
    runner = web.AppRunner(app, access_log=None, **options)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def free_port() -> int:
    """Below the ports that the system gives to connections: one of those may be taken by the time that a program binds
    it."""
    while True:
        port = random.randrange(10_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


OWN = Path(__file__).parent.parent / ".venv-agents" / "bin" / "python"


@functools.cache
def interpreter(module: str) -> str:
    """One that has the module; skips the test where there is none."""
    named = filter(None, os.environ.get("SLUICE_CLIENTS", "").split(":"))
    for python in (sys.executable, *named, *([str(OWN)] if OWN.exists() else [])):
        look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
        if subprocess.run([python, "-P", "-c", look], check=False).returncode == 0:
            return python
    pytest.skip(f"no interpreter has {module}: make agents-env, or name one that has it in SLUICE_CLIENTS")
