"""One consumer process for the process tests: takes jobs, passes them on, finishes them. Run as a script."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from transport import Node
from transport.errors import LinkLost


async def work(jobs: str, results: str, replica: str, work_s: float) -> None:
    """Waits for jobs; END ends it."""
    async with Node("run", replica, give_up_s=20.0) as node:
        inlet = await node.inlet(jobs, "jobs", bytes, window_items=8)
        outlet = await node.outlet(results, "results", bytes)
        while (lease := await inlet.receive()) is not None:
            if lease.message == b"deadly":
                sys.exit("this message kills")
            await asyncio.sleep(work_s)
            await outlet.send(lease.message, lease.key)
            lease.done()


if __name__ == "__main__":
    try:
        asyncio.run(work(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])))
    except LinkLost:
        sys.exit(3)
