"""Interpreters that have the clients of model servers, whose packages refuse each other.

Looked at: those of SLUICE_CLIENTS (paths, separated by colons), `.venv-agents` (`make agents-env`), and this one.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
