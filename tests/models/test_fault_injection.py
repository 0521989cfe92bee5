"""Faults on purpose: what a flag means, who meets a fault, what happens then, what is written down of it."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from configs.schema import Config
from configs.schema.run import read_fault
from models.engines.client import EngineClient
from models.engines.serve import EngineServer
from models.errors import EngineError, EngineUnreachable
from models.fault_injection import FAULTS_FILE, FaultPlan, InjectedError, InjectedFault, fault_plan, injected
from models.train.dp_group import DpGroup
from models.train.trainer_group.calls import END, Plain, Reply
from models.train.trainer_group.rank import Member
from pipeline.hosts.launcher import Handle
from pipeline.supervise.engine_servers import KillingProbe
from tests.models.engines.harness import SIMULATED, ask


def plan(tmp_path: Path, *faults: str, **changed: Any) -> FaultPlan:
    found = FaultPlan(tuple(map(read_fault, faults)), 7, 0, "reward-0", str(tmp_path / FAULTS_FILE))
    return msgspec.structs.replace(found, **changed)


@pytest.mark.parametrize(("text", "words"), [
    ("reward", "must be stage:probability:kind"),
    (":0.1:kill", "must be stage:probability:kind"),
    ("reward:0.1:kill:1:2", "must be stage:probability:kind"),
    ("reward:0.1:die", "the kind is 'die' and must be one of kill, error, hang, slow, drop"),
    ("reward:0:kill", "above 0 and at most 1"),
    ("reward:nan:kill", "above 0 and at most 1"),
    ("reward:often:kill", "above 0 and at most 1"),
    ("reward:0.1:kill:3", "seconds stand only behind hang and slow"),
    ("reward:0.1:slow:-3", "the seconds are '-3'"),
    ("reward:0.1:slow:inf", "the seconds are 'inf'"),
])  # fmt: skip
def test_what_cannot_be_read_names_its_rule(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        read_fault(text)


def test_the_configuration_gives_each_stage_its_own(tmp_path: Path) -> None:
    flags = {"fault_inject": ["reward:0.1:kill", "train:0.2:error", "reward:0.3:slow"]}
    config = msgspec.convert({"debug": flags}, Config)
    found = fault_plan(config, "reward", "reward-1", run_generation=3, run_dir=tmp_path)
    assert [fault.kind for fault in found.faults] == ["kill", "slow"]
    assert (found.run_generation, found.seed) == (3, config.run.seed)
    assert fault_plan(config, "group", "group-0", run_generation=0, run_dir=tmp_path) is None


async def test_what_happens_is_written_down_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[tuple[int, int, dict[str, int]]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: ends.append((pid, number, injected(tmp_path))))
    await plan(tmp_path, "reward:1:kill").meet("12")
    assert ends == [(os.getpid(), signal.SIGKILL, {"reward kill": 1})]
    with pytest.raises(InjectedError, match=r"error at 13, attempt 2 \(--fault-inject\)"):
        await plan(tmp_path, "group:1:error").meet("13", 2)
    assert await plan(tmp_path, "reward:1:slow:0.001").meet("14")
    assert await plan(tmp_path, "reward:1:hang:0.001").meet("15")
    assert await plan(tmp_path, "reward:0.0001:kill").meet("16") is None
    with (tmp_path / FAULTS_FILE).open("ab") as file:
        file.write(b'{"stage":"rew')
    assert injected(tmp_path) == {"group error": 1, "reward hang": 1, "reward kill": 1, "reward slow": 1}
    lines = (tmp_path / FAULTS_FILE).read_bytes().splitlines()
    first = msgspec.json.decode(lines[0], type=InjectedFault)
    assert (first.replica, first.key, first.attempt) == ("reward-0", "12", 1)


def test_a_rank_meets_faults_at_its_calls_but_not_at_its_end(tmp_path: Path) -> None:
    faults = plan(tmp_path, "rank:1:error", replica="train-rank-1/2")
    member = Member(Config(), DpGroup(), leads=False, faults=faults)
    for _ in range(2):
        with pytest.raises(InjectedError, match=r"error at train-rank-1/2/[12] Flush"):
            member.make(Plain("Flush"))
    assert member.make(END) == Reply()
    assert injected(tmp_path) == {"rank error": 2}


async def test_a_server_whose_requests_are_not_seen_is_killed_at_a_health_check(tmp_path: Path) -> None:
    killed: list[str] = []

    class Process:
        async def kill(self) -> int:
            killed.append("SIGKILL")
            return -9

    async def well() -> None:
        return None

    for fault, kills in (("engine:1:kill", ["SIGKILL"]), ("engine:0.0001:kill", [])):
        killed.clear()
        look = KillingProbe(well, cast(Handle, Process()), plan(tmp_path, fault, replica="engine-0/0"))
        assert await look() is None
        assert killed == kills


async def asked(tmp_path: Path, fault: str) -> None:
    faults = plan(tmp_path, fault, replica="engine-0/0")
    async with (
        EngineServer(SIMULATED, "none", max_context_len=None, seed=1, faults=faults) as server,
        EngineClient(server.url) as client,
    ):
        await client.server_info()  # only requests to generate meet faults
        await client.generate(ask([1, 2], max_new_tokens=3))


async def test_an_engine_drops_refuses_and_delays_answers(tmp_path: Path) -> None:
    with pytest.raises(EngineUnreachable):
        await asked(tmp_path, "engine:1:drop")
    with pytest.raises(EngineError, match="error at engine-0/0/1"):
        await asked(tmp_path, "engine:1:error")
    await asked(tmp_path, "engine:1:slow:0.001")
    assert injected(tmp_path) == {"engine drop": 1, "engine error": 1, "engine slow": 1}
