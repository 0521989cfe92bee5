"""The servers of a run: how an engine is described before it starts, and the facts about a server that is up.

`replicas/fleet.json` in the run directory has one `ServerInfo` per server, for `status` and the metrics endpoint.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct

from configs.schema import EngineConfig
from models.engines.token import TokenFile
from models.fault_injection import FaultPlan
from pipeline.facts.run_directory import RunDir

Kind = Literal["engine", "frozen", "router"]


class EngineSpec(Struct, frozen=True):
    """One engine. `frozen`: the name of its policy, for an engine that gets no new weights.

    `external`: the address of a running engine, which is watched and never started or ended. `gpus`: the GPUs that it
    may see, as CUDA_VISIBLE_DEVICES names them; empty = as in the environment. `faults`: of `--fault-inject`. `token`:
    requests must carry it. `fetcher`: brings weights to the engine's node. `taken_over`: an earlier start of the run
    left the engine, with its weights.
    """

    name: str
    config: EngineConfig
    model_path: str
    max_context: int | None
    port: int
    seed: int
    frozen: str = ""
    external: str = ""
    gpus: tuple[str, ...] = ()
    faults: FaultPlan | None = None
    token: TokenFile | None = None
    fetcher: str = ""
    taken_over: bool = False

    @property
    def kind(self) -> Kind:
        return "frozen" if self.frozen else "engine"

    @property
    def ours(self) -> bool:
        """Whether a server of this project serves it."""
        return not self.external and self.config.engine != "sglang"


class ServerInfo(Struct, frozen=True):
    """One server of the run as it last came up."""

    kind: str  # embedded, simulated, sglang, smg
    url: str
    incarnation: int
    version: str
    role: str  # engine, frozen, router
    metrics: str = ""  # address of its /metrics, if not under `url`
    token_file: str = ""  # of its token, while it runs; the run's router has the same token


def read_fleet(rundir: RunDir) -> dict[str, ServerInfo]:
    """The servers of a run by name; empty if none came up."""
    path = rundir.fleet
    return msgspec.json.decode(path.read_bytes(), type=dict[str, ServerInfo]) if path.exists() else {}
