"""Log-probs of a real model over updates, in rollouts of one turn and in a conversation through the gateway."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch

from configs.schema.rollout import EngineConfig
from models.engines.embedded.engine import EmbeddedEngine
from models.engines.serve import EngineServer
from models.tiny import make_tiny_checkpoint
from stages.chat.formats import load_chat_format
from stages.gateway.answers import Answers, OpenSession
from stages.gateway.server import Gateway
from stages.gateway.sessions import Session
from stages.rollouts import new_sample, rollout_fault, trained_masks
from stages.sampling.rollout_requests import Requests
from tests.stages.engine_rig import record_exchanges, started, tensors_of
from tests.stages.stage_rig import make_group, response_ids

EMBEDDED = EngineConfig(engine="embedded", engine_slots=16, engine_device="cpu", engine_dtype="float32")
SHAPE = {"hidden_size": 32, "num_layers": 2, "intermediate_size": 64, "max_position_embeddings": 256}
PROMPT = [72, 101, 108, 108, 111]
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Weights of versions 0 to 2: as different as seeds make them."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("checkpoints")
    return [make_tiny_checkpoint(root / str(seed), seed=seed, **SHAPE) for seed in range(3)]  # type: ignore[arg-type]


def reference(path: Path, prompt: list[int], response: list[int], temperature: float) -> np.ndarray:
    """[R] log-probs of the response by the Hugging Face model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ids = torch.tensor([[*prompt, *response]])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0].float() / temperature
    every = logits[:-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return np.asarray(every[len(prompt) - 1 :])


def freeze_after(server: EngineServer, steps: tuple[int, ...], loop: asyncio.AbstractEventLoop) -> list[asyncio.Event]:
    """Have the engine's own thread pause it after exactly so many steps, each time; the events say that it has."""
    core = server.core
    assert isinstance(core, EmbeddedEngine)
    stepper, original, made = core.stepper, core.stepper.step, 0
    frozen = {count: asyncio.Event() for count in steps}

    def step() -> None:
        nonlocal made
        original()
        made += 1
        if made in frozen:
            stepper.pause("in_place")
            loop.call_soon_threadsafe(frozen[made].set)

    stepper.step = step  # type: ignore[method-assign]
    return list(frozen.values())


@pytest.mark.parametrize("mode", ["retract", "abort", "in_place"])
async def test_log_probs_around_two_updates_are_those_of_the_weights_that_are_named(
    mode: str, tmp_path: Path, checkpoints: list[Path]
) -> None:
    temperature, steps = 0.8, (12, 24)
    async with started(
        tmp_path,
        engine=EMBEDDED,
        model=checkpoints[0],
        tensors=tensors_of(checkpoints),
        pause_mode=mode,
        rollout={"rollout_max_response_len": 48, "rollout_temperature": temperature},
    ) as world:
        frozen = freeze_after(world.engines[0], steps, asyncio.get_running_loop())
        await world.ask(make_group(0, 4, prompt=PROMPT))
        for version, event in enumerate(frozen, start=1):
            await event.wait()
            world.weights.publish(version)
        slice_ = await world.answer()
    long = [s for s in slice_.samples if s.response_length > 40]
    assert len(long) >= 2, "most responses are longer than what was made before the updates"
    for sample in long:
        runs = sample.version_runs[1:]
        assert [run.version for run in runs] == [0, 1, 2]
        assert sum(run.n_tokens for run in runs) == sample.response_length
        assert runs[0].n_tokens == steps[0] + 1, "the first step prefills and decodes: two tokens"
        ids, recorded = response_ids(sample), sample.log_probs[sample.prompt_length :]
        by_version = [np.abs(recorded - reference(path, PROMPT, ids, temperature)) for path in checkpoints]
        start = 0
        for run, away in zip(runs, by_version, strict=True):
            end = start + run.n_tokens
            if mode != "in_place" or start == 0:  # later weights there read keys and values of the ones before
                assert away[start:end].max() < TOLERANCE
            if start:
                assert away[start - 1] > 10 * TOLERANCE, "the boundary is exact"
            start = end
        assert by_version[0][runs[0].n_tokens] > 10 * TOLERANCE
        assert sample.retractions == (2 if mode == "retract" else 0)
        assert sample.resumed == (2 if mode == "abort" else 0)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["retract", "abort"])
async def test_an_update_in_the_middle_of_a_conversation(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    temperature, exchanges = 0.8, record_exchanges(monkeypatch)
    checkpoints = [make_tiny_checkpoint(tmp_path / str(seed), seed=seed, **SHAPE) for seed in range(2)]  # type: ignore[arg-type]
    chat = load_chat_format(str(checkpoints[0]))
    async with started(
        tmp_path,
        engine=EMBEDDED,
        model=checkpoints[0],
        tensors=tensors_of(checkpoints),
        pause_mode=mode,
        rollout={"rollout_temperature": temperature, "rollout_max_response_len": 200},
    ) as world:
        place = OpenSession(make_group(0, 1), new_sample((1,), 0), Session(chat))
        answers = Answers(world.stage.sampler, Requests(world.stage.config, 256), chat)
        async with Gateway(answers) as gateway, aiohttp.ClientSession() as http:
            with gateway.session(place) as session_key:
                said: list[dict[str, Any]] = []

                async def ask(*messages: dict[str, Any], tokens: int) -> dict[str, Any]:
                    async with http.post(
                        f"{gateway.url}/v1/chat/completions",
                        json={"messages": messages, "max_tokens": tokens, "return_token_ids": True, "logprobs": True},
                        headers={"Authorization": f"Bearer {session_key}"},
                    ) as response:
                        said.append(await response.json())
                        message: dict[str, Any] = said[-1]["choices"][0]["message"]
                        return message

                question = {"role": "user", "content": "Hello"}
                first = await ask(question, tokens=8)
                [frozen] = freeze_after(world.engines[0], (10,), asyncio.get_running_loop())
                follow_up = (question, first, {"role": "user", "content": "And?"})
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(ask(*follow_up, tokens=30))
                    await frozen.wait()
                    world.weights.publish(1)
                await ask(question, first, {"role": "user", "content": "Or?"}, tokens=8)
    parts = place.session.samples()
    assert rollout_fault(parts) is None
    main, other = parts
    assert other.prefix is not None
    assert [run.version for run in main.version_runs] == [-1, 0, -1, 0, 1]
    assert [run.version for run in other.version_runs] == [-1, 0, -1, 1]
    assert main.resumed == (mode == "abort")
    for part in parts:
        away = [
            np.abs(
                part.log_probs[1:]
                - reference(path, part.token_ids[:1].tolist(), part.token_ids[1:].tolist(), temperature)
            )
            for path in checkpoints
        ]
        for version in (0, 1):
            made = part.versions[1:] == version
            assert away[version][made].max(initial=0.0) < TOLERANCE
            assert away[1 - version][made].max(initial=1.0) > 10 * TOLERANCE
    # What the client was told, what the engine was sent, and what is trained are the same.
    assert sum(int(mask.sum()) for mask in trained_masks(parts)) == sum(
        len(one["choices"][0]["token_ids"]) for one in said
    )
    for one, part in zip(said, (main, main, other), strict=True):
        prompt, made = one["prompt_token_ids"], one["choices"][0]["token_ids"]
        end = len(prompt) + len(made)
        assert part.token_ids[:end].tolist() == [*prompt, *made]
        told = [entry["logprob"] for entry in one["choices"][0]["logprobs"]["content"]]
        assert np.array_equal(np.float32(told), part.log_probs[len(prompt) : end])
        assert prompt in [exchange.request.prompts[0] for exchange in exchanges]
