"""One whole run of seconds in this process, so that the fast tests notice when a run trains nothing.

Every part is the production one, apart from engine and trainer in the first: those take time instead of computing.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from launching import NO_DATA, SIMULATED, SMALL, here, made_model, succeed_here
from safetensors.torch import load_file

from models.tiny import make_tiny_checkpoint

GROUPS = 4 * 4  # --num-rollout x --rollout-batch-size


def test_simulated_engine_and_trainer(tmp_path: Path) -> None:
    done = succeed_here(tmp_path / "run", *SMALL, *made_model(), *SIMULATED, "--update-weights-interval", "2")
    assert done.summary["groups"]["trained"] == done.audit.outcomes["trained"] == GROUPS
    assert done.summary["weight_versions"]["published"] == 3, "versions 0, 2 and 4 of four steps"
    assert done.summary["weight_versions"]["last"] == 4
    assert 0 < done.summary["efficiency_vs_bound"] <= 1
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    turns = [e["args"]["detail"] for e in events if e["name"] == "generate" and e["ph"] == "b"]
    assert turns
    assert all(re.fullmatch(r"turn 1, \d+ tokens, version \d( to \d)?", turn) for turn in turns), turns
    trained = [e["args"]["group_id"] for e in events if e["name"] == "trained" and e["ph"] == "b"]
    assert sorted(trained) == sorted(set(trained))
    assert len(trained) == GROUPS
    train = next(e["pid"] for e in events if e["name"] == "trained")
    ends = [e for e in events if e.get("flow_in") and e["pid"] == train]
    assert len(ends) >= GROUPS, "arrows end where a group is trained"
    assert f"run in {tmp_path / 'run'}: starting its processes, which log to " in done.err


def test_embedded_engine_and_torch(tmp_path: Path) -> None:
    """What is left behind is a model that moved, by gradients of what the engine made while its weights moved."""
    done = succeed_here(
        tmp_path / "run", *SMALL, *made_model(), "--save-interval", "4", "--lr", "1e-2", "--max-staleness", "1"
    )
    assert done.summary["groups"]["trained"] == done.audit.outcomes["trained"] == GROUPS
    assert done.summary["weight_versions"]["last"] > 0
    before = load_file(Path(made_model()[1]) / "model.safetensors")
    [after] = (tmp_path / "run" / "checkpoints").glob("*/hf/model.safetensors")
    moved = load_file(after)
    assert before.keys() == moved.keys()
    assert any(not torch.equal(before[name], moved[name].to(before[name].dtype)) for name in before)


@pytest.mark.slow
def test_prompts_that_nearly_fill_the_model(tmp_path: Path) -> None:
    """The response gets what the context leaves, and a prompt that leaves nothing is skipped: no rollout fails."""
    model = make_tiny_checkpoint(tmp_path / "model", tokenizer="arithmetic", max_position_embeddings=32)
    rows = [{"input": "1" * length, "label": "2"} for length in (31, 30, 8, 32)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = succeed_here(
        tmp_path / "run", *NO_DATA, *SIMULATED, "--hf-checkpoint", str(model), "--rollout-max-response-len", "28",
        "--prompt-data", str(tmp_path / "rows.jsonl"),
    )  # fmt: skip
    assert "skipped 1 rows (too long: 1)" in done.err
    assert done.summary["groups"]["failed"] == 0
    assert done.summary["groups"]["trained"] == GROUPS


STUCK = """
import asyncio, os, signal
from stages.base import MapStage


class Stuck(MapStage):
    interrupted = False

    async def process(self, message):
        if not Stuck.interrupted:  # as Ctrl-C does, once there is something to wait for
            Stuck.interrupted = True
            os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(3600)
"""
STUCK_RECIPE = '[[stage]]\nname = "stuck"\npath = "stuck:Stuck"\nafter = "reward"\n'


def test_a_drain_has_an_end(tmp_path: Path) -> None:
    """A stage that gives nothing back holds a run up for as long as was allowed, and no longer."""
    (tmp_path / "stuck.py").write_text(STUCK)
    (tmp_path / "stuck.toml").write_text(STUCK_RECIPE)
    flags = ["--config", str(tmp_path / "stuck.toml"), "--drain-s", "0.5"]
    done = here(tmp_path / "run", *SMALL, *made_model(), *SIMULATED, *flags, cwd=tmp_path)
    assert done.code == 1
    assert "in-flight work was not finished within --drain-s 0.5: " in done.err
