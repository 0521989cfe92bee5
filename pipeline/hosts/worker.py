"""A worker process: one stage replica. Started as `python -m pipeline.hosts.worker SPEC.json`, never by fork.

It ends with 0 (done), 1 (failed: may be restarted) or 2 (the
user's mistake, e.g. an import path: not restarted). The last line of its log says why.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import msgspec

from configs.schema import Config
from pipeline.errors import EXIT_DISK_FULL, disk_full, leaf, user_error
from pipeline.hosts.replica import ReplicaSpec, run_replica
from transport import Node


async def work(spec: ReplicaSpec) -> None:
    config = msgspec.json.decode(Path(spec.config).read_bytes(), type=Config)
    async with Node(spec.run_id, spec.replica, give_up_s=30.0) as node:
        await run_replica(spec, node, config)


def main(argv: list[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    spec = msgspec.json.decode(Path(argv[0]).read_bytes(), type=ReplicaSpec)
    try:
        import uvloop

        uvloop.run(work(spec))
    except BaseException as error:
        cause = leaf(error)
        logging.exception("%s failed", spec.replica)
        logging.error("%s: %s", type(cause).__name__, cause)
        if disk_full(cause):
            return EXIT_DISK_FULL
        return 2 if user_error(cause) is not None else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
