"""A rank of the trainer group. Started as `python -m pipeline.hosts.trainer_rank SPEC.json`, never by fork.

It ends with 0 (the run is over), 1 (failed: its trainer group may be started again), 2 (the user's mistake), 3 (the
train stage is gone) or 28 (no space left). The last line of its log says why.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import msgspec

from models.train.trainer_group.errors import StageGone
from models.train.trainer_group.rank_spec import EXIT_STAGE_GONE, RankSpec
from pipeline.errors import EXIT_DISK_FULL, disk_full, leaf, user_error


def main(argv: list[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    spec = msgspec.json.decode(Path(argv[0]).read_bytes(), type=RankSpec)
    try:
        from models.train.trainer_group.rank import run_rank  # imports torch

        run_rank(spec)
    except BaseException as error:
        cause = leaf(error)
        logging.exception("rank %d failed", spec.rank)
        logging.error("%s: %s", type(cause).__name__, cause)
        logging.shutdown()
        os._exit(exit_code(cause))  # at once: threads of a broken process group may wait for ever
    return 0


def exit_code(error: BaseException) -> int:
    """What the trainer group's keeper learns of an error."""
    if isinstance(error, StageGone):
        return EXIT_STAGE_GONE
    if disk_full(error):
        return EXIT_DISK_FULL
    return 2 if user_error(error) is not None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
