"""Tokens across a weight update, judged by a forward pass of the weights that are said to have made them."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.schema.engine import EngineConfig
from models.engines.embedded.engine import EmbeddedEngine
from models.engines.serve import EngineServer
from models.tiny import make_tiny_checkpoint
from stages.messages import VersionRun
from tests.stages.engine_rig import generating, tensors_of
from tests.stages.stage_rig import make_group, numbers

EMBEDDED = EngineConfig(engine="embedded", engine_slots=16, engine_device="cpu", engine_dtype="float32")
SHAPE = {"hidden_size": 32, "num_layers": 2, "intermediate_size": 64, "max_position_embeddings": 256}
PROMPT = [72, 101, 108, 108, 111]
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Weights of version 0 and 1: as different as two seeds make them."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("checkpoints")
    return [make_tiny_checkpoint(root / str(seed), seed=seed, **SHAPE) for seed in (0, 1)]  # type: ignore[arg-type]


def reference(path: Path, prompt: list[int], response: list[int], temperature: float) -> np.ndarray:
    """[R] log-probs of the response by the Hugging Face model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ids = torch.tensor([[*prompt, *response]])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0].float() / temperature
    every = logits[:-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return np.asarray(every[len(prompt) - 1 :])


def freeze_after(server: EngineServer, steps: int, loop: asyncio.AbstractEventLoop) -> asyncio.Event:
    """Have the engine's own thread pause it after exactly so many steps; the event says that it has."""
    core = server.core
    assert isinstance(core, EmbeddedEngine)
    frozen, stepper, original, made = asyncio.Event(), core.stepper, core.stepper.step, 0
    done = threading.Event()

    def step() -> None:
        nonlocal made
        original()
        made += 1
        if made == steps and not done.is_set():
            stepper.pause("in_place")
            done.set()
            loop.call_soon_threadsafe(frozen.set)

    stepper.step = step  # type: ignore[method-assign]
    return frozen


@pytest.mark.parametrize("mode", ["retract", "abort", "in_place"])
async def test_log_probs_on_both_sides_of_an_update_are_those_of_the_weights_that_are_named(
    mode: str, tmp_path: Path, checkpoints: list[Path]
) -> None:
    temperature, steps = 0.8, 12
    async with generating(
        tmp_path,
        engine=EMBEDDED,
        model=checkpoints[0],
        tensors=tensors_of(checkpoints),
        pause_mode=mode,
        rollout={"rollout_max_response_len": 32, "rollout_temperature": temperature},
    ) as world:
        await world.ready()
        frozen = freeze_after(world.engines[0], steps, asyncio.get_running_loop())
        await world.ask(make_group(0, 4, prompt=PROMPT))
        await frozen.wait()
        world.weights.publish(1)
        slice_ = await world.answer()
    long = [s for s in slice_.samples if s.n_tokens > steps + 1]
    assert len(long) >= 2, "most responses are longer than what was made before the update"
    for sample in long:
        before = sample.version_runs[0].n_tokens
        assert sample.version_runs == (VersionRun(0, before), VersionRun(1, sample.n_tokens - before))
        assert before == steps + 1, "the first step prefills and decodes: two tokens"
        ids, recorded = numbers(sample.response_ids), np.asarray(sample.rollout_log_probs)
        old, new = (reference(path, PROMPT, ids, temperature) for path in checkpoints)
        assert np.abs(recorded[:before] - old[:before]).max() < TOLERANCE
        if mode != "in_place":  # there the new weights read keys and values of the old ones
            assert np.abs(recorded[before:] - new[before:]).max() < TOLERANCE
        assert abs(recorded[before - 1] - new[before - 1]) > 10 * TOLERANCE, "the boundary is exact"
        assert abs(recorded[before] - old[before]) > 10 * TOLERANCE
        assert sample.retractions == (1 if mode == "retract" else 0)
        assert sample.resumed == (1 if mode == "abort" else 0)
