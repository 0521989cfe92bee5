"""A rank of the trainer group. Started as `python -m pipeline.hosts.trainer_rank RUN_ID TOPIC NAME [KEYS]`, never by
fork; it finds everything else on the topic, where rank 0 also says that the group is up.

It ends with 0 (the run is over), 1 (failed), 2 (the user's mistake), 3 (the train stage is gone) or 28 (no space left).
The last line of its log says why.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path

import msgspec

from configs.schema import Config
from models.import_path import add_working_directory
from models.train.trainer_group.rank_spec import MEETING, RankSpec, Rendezvous
from pipeline.errors import exit_code, leaf, user_error
from pipeline.hosts.launcher import SOCKETS
from pipeline.hosts.rendezvous import Entry, from_command, read


async def find(entry: Entry, name: str) -> tuple[RankSpec, Config]:
    """The specification of this rank. Its connection ends here: a rank that computes answers nothing for minutes."""
    async with entry.node(name) as node:
        return await read(await node.topic(entry.topic), name, RankSpec)


async def announce(entry: Entry, name: str, rendezvous: Rendezvous) -> None:
    async with entry.node(name) as node:
        await (await node.topic(entry.topic)).publish(MEETING, msgspec.msgpack.encode(rendezvous))


def main(argv: list[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    add_working_directory()
    entry, name = from_command(argv)
    try:
        spec, config = asyncio.run(find(entry, name))
        spec = msgspec.structs.replace(spec, address=str(Path(os.environ[SOCKETS], spec.address)))
        from models.train.trainer_group.rank import run_rank  # imports torch

        run_rank(spec, config, lambda rendezvous: asyncio.run(announce(entry, name, rendezvous)))
    except BaseException as error:
        cause = leaf(error)
        logging.exception("%s failed", name)
        logging.error("%s: %s", type(cause).__name__, user_error(cause) or cause)
        logging.shutdown()
        os._exit(exit_code(cause))  # at once: threads of a broken process group may wait for ever
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
