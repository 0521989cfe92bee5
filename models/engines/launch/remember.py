"""Asks a new environment once, so that the first run does not have to wait for SGLang's imports.

    .venv-sglang/bin/python -m models.engines.launch.remember .venv-sglang/bin/python

It also finds out whether the installation imports at all. Exit code 1 with one sentence if not.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from configs.schema import SglangConfig
from models.engines.launch.environment import find_python, probe
from models.engines.launch.errors import LaunchError


def main(argv: Sequence[str]) -> int:
    try:
        found = probe(find_python(SglangConfig(sglang_python=argv[0]), Path()))
    except LaunchError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    where = "GPU" if found.cuda else "CPU"
    sys.stdout.write(f"SGLang {found.sglang} ({where}, torch {found.torch}), sglang-router {found.router}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
