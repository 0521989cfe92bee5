"""What `status` shows fits a terminal of 80 columns and says what is."""

from __future__ import annotations

import dataclasses

import msgspec

from pipeline.control.client import table
from pipeline.control.endpoint import EngineStatus, QueueStatus, RunStatus
from pipeline.facts.stats import Changed, LedgerCounts, RunSnapshot, StageRow

STAGES = (
    StageRow("generate", 2, 0.921, 0.05, 0.01, 0.019, 3, 12, 56.84, 900.0, 1490, 0, 0),
    StageRow("reward", 4, 1.0, 0.0, 0.0, 0.0, 123_456, 1000, 123_456.0, 0.0, 10, 12_345, 0),
)
SNAPSHOT = RunSnapshot(
    mode="async", step=198, total_steps=4000, elapsed_s=17.0, eta_s=228.0, version=197, in_flight=12,
    may_enter=4, stages=STAGES, ledger=LedgerCounts(admitted=804, trained=792, open=12), reward_mean=0.5,
    reward_recent=0.5, evals={}, staleness_mean=1.79, staleness_max=2, staleness_bound=2, trained_tokens=1,
    trained_tokens_per_s=1.0, wasted_tokens=0, wasted_share=0.0, busiest=None,
)  # fmt: skip
STATUS = RunStatus(
    run="/home/somebody/" + "runs/" * 20,
    state="running",
    snapshot=SNAPSHOT,
    engines=(
        EngineStatus("engine-0", "serving", 197, 21, 3, 512, 0.27),
        EngineStatus("engine-1", "starting", None, 0, 0, 0, None),
    ),
    queues=(QueueStatus("generate", 1, 4, 2),),
    replicas={"generate": 2, "reward": 2},
    changes=(Changed(150, "scale reward", "2"),),
)  # fmt: skip


def test_the_table() -> None:
    lines = table(STATUS).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1:6] == [
        "state      running, async, 0:17, ETA 3:48",
        "step       198/4000, reward 0.500, engines carry version 197",
        "in flight  12 groups, 4 more may enter",
        "staleness  mean 1.79, max 2, bound 2",
        "groups     804 admitted: 792 trained, 0 filtered, 0 stale, 0 failed, 0 discarded",
    ]
    cells = {cells[0]: cells[1:] for line in lines[6:] if (cells := line.split())}
    assert cells["generate"] == ["1", "4", "2"], "its queue stands below its stage"
    assert cells["reward"][:6] == ["4>2", "100%", "0%", "0%", "0%", "123456"], "two replicas finish what they hold"
    assert cells["engine-0"] == ["serving", "197", "21", "3", "512", "27%"]
    assert cells["engine-1"] == ["starting", "-", "0", "0", "-", "-"]
    assert lines[-1] == "step 150: scale reward 2"


def test_an_advice_is_told_in_full() -> None:
    advice = "reward is the bottleneck; reward 1 -> 2 would make about 2 rollouts/s of 1 (+100%), then engine is next"
    advised = msgspec.structs.replace(STATUS, snapshot=dataclasses.replace(SNAPSHOT, advice=advice))
    lines = table(advised).splitlines()
    assert lines[6:8] == [
        "advice     reward is the bottleneck; reward 1 -> 2 would make about 2 rollouts/s",
        "           of 1 (+100%), then engine is next",
    ]
