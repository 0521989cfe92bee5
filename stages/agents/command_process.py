"""`python -m stages.agents.command_process PARENT {"argv": [...], "env": {...}}`: run a program under a guard.

The guard ends the program and all its descendants when the parent dies and at SIGTERM.
"""

from __future__ import annotations

import json
import os
import sys

from stages.workers.guard import become_guarded


def main(parent: str, request: str) -> None:
    """Become the program. Does not return."""
    become_guarded(int(parent))
    fields = json.loads(request)
    argv, environment = fields["argv"], fields["env"]
    try:
        os.execvpe(argv[0], argv, environment)
    except OSError as error:
        print(f"{argv[0]}: {error.strerror}; is it installed, and on the PATH?", file=sys.stderr)  # noqa: T201
        os._exit(127)


if __name__ == "__main__":
    main(*sys.argv[1:])
