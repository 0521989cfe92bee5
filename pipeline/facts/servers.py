"""The servers of a run: how an engine is described before it starts, and what is known of one that came up."""

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

    `external`: the address of one that runs already, which is watched and never started or ended. `gpus`: those that
    it may see, as CUDA_VISIBLE_DEVICES names them; empty = as the environment says. `faults`: of `--fault-inject`.
    `token`: what requests to it must bring. `fetcher`: what brings weights to the node that it was placed on.
    `taken_over`: an earlier start of the run left it, with weights of its own.
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
        """Whether a server of ours serves it."""
        return not self.external and self.config.engine != "sglang"


class ServerInfo(Struct, frozen=True):
    """One server of the run as it last came up."""

    kind: str  # embedded, simulated, sglang, smg
    url: str
    incarnation: int
    version: str
    role: str  # engine, frozen, router
    metrics: str = ""  # address of its /metrics, where that is not the server's own
    token_file: str = ""  # of the token that it wants, while it runs; the router of the run wants the same


def read_fleet(rundir: RunDir) -> dict[str, ServerInfo]:
    """The servers of a run by name; empty if none came up."""
    path = rundir.fleet
    return msgspec.json.decode(path.read_bytes(), type=dict[str, ServerInfo]) if path.exists() else {}
