"""Token identity: what an episode trains is what engines were given and made, whatever happened meanwhile.

Engines, generate stage, agents stage and gateway are the real ones, in one process; workers of environments are
processes. The engines note what they do, transformers says what the weights make of it (tests/identity.py).
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.schema.rollout import EngineConfig
from models.tiny import TinyRecipe, make_tiny_checkpoint
from stages.agents.stage import AgentsStage
from stages.base import GenerateOptions
from stages.chat.tokenizer import load_tokenizer
from stages.messages import RolloutSlice, Sample
from tests.engine_record import Made, recording
from tests.identity import Checked, check_identity, check_once
from tests.stages.agents.play import EOS, STOPS, TALK, WANDERER, conversing, with_template
from tests.stages.engine_rig import AGENTS, World, freeze_after, generating, record_exchanges, tensors_of
from tests.stages.stage_rig import until

pytestmark = pytest.mark.slow

VERSIONS = 4
SHAPE = {"hidden_size": 32, "num_layers": 2, "intermediate_size": 64, "max_position_embeddings": 192}
ENGINE = EngineConfig(engine="embedded", engine_slots=16, engine_device="cpu", engine_dtype="float32")
ANSWERS: Sequence[Sequence[str]] = (["1+1"], [""], [], ["2", "3-1"], ["4"])  # also nothing at all


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """By version; as different as seeds make them."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("talks")
    shape: dict[str, Any] = {"tokenizer": "arithmetic", **SHAPE}
    return [
        with_template(make_tiny_checkpoint(root / str(seed), TinyRecipe(seed=seed, **shape)))
        for seed in range(VERSIONS)
    ]


@asynccontextmanager
async def talking(
    tmp_path: Path,
    checkpoints: list[Path],
    *,
    path: str = TALK,
    max_context: int = SHAPE["max_position_embeddings"],
    **options: Any,
) -> AsyncIterator[tuple[World, AgentsStage]]:
    """Generate and agents stage with version 0 in the engines."""
    (tmp_path / "bare").mkdir()
    limits = {"max_context": max_context, "vocab_size": load_tokenizer(str(checkpoints[0])).vocab_size}
    options = {
        "engine": ENGINE,
        "model": checkpoints[0],
        "tensors": tensors_of(checkpoints),
        **AGENTS,
        "options": limits,
        "train": {"hf_checkpoint": str(checkpoints[0])},
        "environment": [{"name": "talk", "path": path, "memory_gb": 0, "workers": 2}],
        "rollout": {"rollout_max_response_len": 150, "rollout_stop_token_ids": STOPS},
        **options,
    }
    async with generating(tmp_path, **options) as world:
        agents = await world.run_agents(limits=GenerateOptions(**limits))
        await world.ready()
        yield world, agents


async def ask(world: World, groups: int, members: int, answers: Sequence[Sequence[str]] = ANSWERS) -> None:
    for group_id in range(groups):
        await world.ask(conversing(group_id, members, answers=answers))


async def episodes(world: World, count: int) -> list[Sample]:
    found: list[Sample] = []
    while len(found) < count:
        found += (await world.answer()).samples
    assert {sample.status for sample in found} <= {"completed", "truncated"}, [sample.error for sample in found]
    return found


def check_all(
    samples: Sequence[Sample], made: Sequence[Made], checkpoints: list[Path], **options: Any
) -> list[Checked]:
    return [check_identity((sample,), made, dict(enumerate(checkpoints)), **options) for sample in samples]


def check_turns(sample: Sample) -> tuple[int, int]:
    """Every turn but the last is closed once, by the model or else by the template. How many by whom."""
    ids, policy = sample.token_ids.tolist(), sample.versions >= 0
    closed = [0, 0]
    for at in range(sample.prompt_length, sample.length - 1):
        if policy[at] and not policy[at + 1]:
            by_model = ids[at] == EOS
            closed[not by_model] += 1
            assert (ids[at + 1] == EOS) != by_model, "the end token of a turn stands there once"
    return closed[0], closed[1]


@pytest.mark.parametrize("mode", ["retract", "abort", "in_place"])
async def test_turns_observations_and_updates_in_mid_conversation(
    mode: str, tmp_path: Path, checkpoints: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recording(monkeypatch)
    async with talking(tmp_path, checkpoints, pause_mode=mode) as (world, _):
        frozen = freeze_after(world.engines[0], (8, 20, 32), asyncio.get_running_loop())
        await ask(world, 3, 4)
        for version, event in enumerate(frozen, start=1):
            await event.wait()
            world.weights.publish(version)
        samples = await episodes(world, 12)
    looks = check_all(samples, made, checkpoints, keeps_cache=mode == "in_place")
    assert sum(look.boundaries for look in looks) >= 3, "weights changed within turns"
    assert any(sample.resumed for sample in samples) == (mode == "abort")
    assert {len(sample.turn_rewards) for sample in samples} >= {len(ANSWERS)}
    closed = [check_turns(sample) for sample in samples]
    assert min(map(sum, zip(*closed, strict=True))) > 0, "some turns were closed by the model, some by the template"


async def test_an_engine_and_a_worker_lost_in_mid_conversation(
    tmp_path: Path, checkpoints: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Partial output of the lost engine is continued by the other one, with newer weights; the lost worker's episodes
    take their turns again in another process."""
    made, exchanges = recording(monkeypatch), record_exchanges(monkeypatch)
    async with talking(tmp_path, checkpoints, engines=2, streamed=True, proxied=True) as (world, agents):
        loop = asyncio.get_running_loop()
        [[frozen], [later]] = [freeze_after(world.engines[index], (20 + 5 * index,), loop) for index in range(2)]
        await ask(world, 4, 4)
        await frozen.wait()
        [hosting] = agents._hostings
        pid = hosting.workers.processes[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        sent = [exchange.partial for exchange in exchanges if exchange.url == world.proxies[0].url]
        generated = world.engines[0].core.totals().generation_tokens
        await until(lambda: sum(partial.tokens for partial in sent if partial is not None) == generated)
        world.proxies[0].kill()
        world.lose(0)
        await later.wait()
        world.weights.publish(1)
        await world.weights.landed(1, engine=1)
        samples = await episodes(world, 16)
        assert hosting.replayed > 0
        saved = sum(sample.reused_tokens for sample in samples)
        assert saved > 0
    looks = check_all(samples, made, checkpoints, keeps_cache=True, lost=True)
    assert sum(look.boundaries for look in looks) > 0
    assert any(sample.model_versions[0] == 0 and sample.model_versions[-1] == 1 for sample in samples)


@pytest.mark.parametrize("mode", ["abort", "in_place"])
async def test_an_agent_with_branches_edits_and_compaction(
    mode: str, tmp_path: Path, checkpoints: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the gateway, with updates in the middle: each answer is trained, once, in the sequence that has it."""
    made = recording(monkeypatch)
    async with talking(tmp_path, checkpoints, path=WANDERER, pause_mode=mode) as (world, _):
        frozen = freeze_after(world.engines[0], (6, 16), asyncio.get_running_loop())
        await ask(world, 2, 3)
        for version, event in enumerate(frozen, start=1):
            await event.wait()
            world.weights.publish(version)
        slices: list[RolloutSlice] = []
        while len(slices) < 6:
            slices.append(await world.answer())
    published = dict(enumerate(checkpoints))
    looks = [check_identity(slice_.samples, made, published, keeps_cache=mode == "in_place") for slice_ in slices]
    check_once([answer for look in looks for answer in look.answers], made)
    assert sum(len(look.answers) for look in looks) == len([one for one in made if one.ids]), "every answer is trained"
    assert sum(look.boundaries for look in looks) > 0
    for slice_ in slices:
        branched = [part.prefix.length for part in slice_.samples if part.prefix is not None]
        # The edited reply and the compacted context share no token that was sampled, so that they begin anew.
        assert len(slice_.samples) >= 5
        assert len(branched) >= 2
