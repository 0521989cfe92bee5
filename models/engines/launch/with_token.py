"""Runs a module of SGLang's environment with a token among its options, by path:

    python with_token.py TOKEN_FILE MODULE HIDDEN ARGUMENT...

SGLang and its router take their key as an option alone, and the command line of a process can be read by every user of
the machine. So the option is added in here, behind what the kernel shows of the process. SGLang writes all of its
options into its log; the token is taken out of what is logged. HIDDEN: a module that may not be imported, or "-".

Nothing of this project is imported: the environment is another one.
"""

from __future__ import annotations

import logging
import os
import runpy
import sys


def keep_out_of_logs(token: str) -> None:
    """Have log records of this process say "hidden" where they would say the token."""
    make = logging.getLogRecordFactory()

    def record(*args: object, **named: object) -> logging.LogRecord:
        made = make(*args, **named)
        try:
            text = made.getMessage()
        except Exception:  # the handler will say what is wrong with it
            return made
        if token in text:
            made.msg, made.args = text.replace(token, "hidden"), ()
        return made

    logging.setLogRecordFactory(record)


def main(token_file: str, module: str, hidden: str, arguments: list[str]) -> None:
    with open(token_file) as file:
        token = file.read().strip()
    keep_out_of_logs(token)
    os.umask(0o077)  # SGLang's processes meet at sockets in the directory of temporary files, and unpickle what comes
    if hidden != "-":
        # sglang-router imports SGLang where it can, for a debugging mode that is not used here, and with it torch: 6 s
        # of processor time and 0.5 GB for nothing.
        sys.modules[hidden] = None  # type: ignore[assignment]
    sys.path[0] = ""  # as with -m; the modules beside this file must not stand before those of the environment
    sys.argv = [module, *arguments, f"--api-key={token}"]  # apart, one that begins with "-" would be an option itself
    # As __main__, for SGLang's child processes look for that by its name.
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])
