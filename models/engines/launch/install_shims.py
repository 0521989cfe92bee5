"""Puts the torchvision shim into an environment whose torch is a CPU build, and takes it out of any other.

    python -m models.engines.launch.install_shims .venv-sglang/bin/python

The other shim, `sgl_kernel`, is installed nowhere: the server's command line puts it on PYTHONPATH. Only the standard
library is used, so that any Python can run this. Exit code 1 with one sentence if torch does not import.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

SHIMS: Final = Path(__file__).resolve().parent / "shims"
MODULE: Final = "sluice_torchvision"
_ASK: Final = "import sysconfig, torch; print(sysconfig.get_path('purelib')); print(torch.version.cuda or '')"


def install(python: Path) -> bool:
    """Put the shim in place; return whether this environment needs it. Raises RuntimeError with the cure."""
    asked = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, timeout=300)
    if asked.returncode:
        why = asked.stderr.strip().splitlines()[-1:] or ["no reason given"]
        raise RuntimeError(
            f"torch does not import in {python}: {why[0]}; on a machine without a GPU pip must find the CPU build of "
            "torch (name its index with PIP_EXTRA_INDEX_URL and install again)"
        )
    site, cuda = asked.stdout.splitlines()[-2:] if asked.stdout.count("\n") > 1 else (asked.stdout.strip(), "")
    module, hook = Path(site) / f"{MODULE}.py", Path(site) / f"{MODULE}.pth"
    if cuda:
        hook.unlink(missing_ok=True)
        module.unlink(missing_ok=True)
        return False
    shutil.copyfile(SHIMS / f"{MODULE}.py", module)
    hook.write_text(f"import {MODULE}\n", encoding="utf-8")
    return True


def main(argv: Sequence[str]) -> int:
    python = Path(argv[0] if argv else sys.executable)
    try:
        install(python)
    except (RuntimeError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
