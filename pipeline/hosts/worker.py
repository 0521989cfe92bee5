"""A worker process: one stage replica. Started as `python -m pipeline.hosts.worker RUN_ID TOPIC NAME [KEYS]`, never by
fork; it finds everything else on the topic. One that stands by (`STANDBY` in its environment) loads what its stage
needs, then waits until it is told to begin.

It ends with 0 (done, or nothing is left to do), 1 (failed: may be restarted), 2 (the user's mistake, e.g. an import
path: not restarted) or 28 (no space left). The last line of its log says why.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from pathlib import Path

import msgspec

from models.import_path import add_working_directory, import_path
from pipeline.errors import exit_code, leaf, user_error
from pipeline.hosts.launcher import STANDBY
from pipeline.hosts.other_host import settled, trainers_place
from pipeline.hosts.rendezvous import Entry, from_command, read
from pipeline.hosts.replica import ReplicaSpec, run_replica
from pipeline.hosts.shared_files import only_trainer
from stages.base import Stage, TrainOptions
from transport import StreamFinished

log = logging.getLogger("sluice.worker")


async def work(entry: Entry, name: str) -> None:
    trains = name.startswith("train-")  # and offers its weights
    async with entry.serving_node(name, lambda: topic) if trains else entry.node(name) as node:
        topic = await node.topic(entry.topic)
        spec, config = await read(topic, name, ReplicaSpec)
        if isinstance(spec.built_in, TrainOptions):
            own = trainers_place(topic, spec.built_in, spec.run_dir, config)
            async with only_trainer(Path(spec.run_dir)) if spec.host else contextlib.nullcontext():
                await run_replica(msgspec.structs.replace(spec, built_in=own), node, topic, config)
            return
        with settled(topic, spec.run_dir, config) as (run_dir, config_here):
            await run_replica(msgspec.structs.replace(spec, run_dir=run_dir), node, topic, config_here)


async def stand_by(entry: Entry, name: str) -> None:
    """Import what the stage of this name will need. Its specification is read again when it begins."""
    async with entry.node(f"{name}-standby") as node:
        spec, config = await read(await node.topic(entry.topic), name, ReplicaSpec)
    try:
        stage: type[Stage] = import_path(spec.path)
        stage.load_libraries(config)
    except Exception as error:  # what is wrong with them is told when they are needed
        log.warning("%s: not all libraries could be loaded in advance: %r", name, error)
    log.info("process %d stands by for %s", os.getpid(), name)


def main(argv: list[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    add_working_directory()
    entry, name = from_command(argv)
    try:
        import uvloop

        if os.environ.pop(STANDBY, None) is not None:
            uvloop.run(stand_by(entry, name))
            if not sys.stdin.readline():  # the run has ended without it
                return 0
        uvloop.run(work(entry, name))
    except BaseException as error:
        cause = leaf(error)
        if isinstance(cause, StreamFinished):  # it stood still, others took its work, and the run is complete
            logging.info("%s ends: %s", name, cause)
            return 0
        logging.exception("%s failed", name)
        logging.error("%s: %s", type(cause).__name__, user_error(cause) or cause)
        return exit_code(cause)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
