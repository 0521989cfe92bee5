"""A conversation with a real model whose weights are replaced in the middle of an answer, token by token."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch

from models.tiny import make_tiny_checkpoint
from stages.agents.chat_formats.load import load_chat_format
from stages.agents.gateway.answers import Answers, OpenSession
from stages.agents.gateway.server import Gateway
from stages.agents.gateway.sessions import Session
from stages.generate.requests import Requests
from stages.rollouts import new_sample, rollout_fault, trained_masks
from tests.stages.engine_rig import generating, record_exchanges, tensors_of
from tests.stages.stage_rig import make_group
from tests.stages.test_generate_numerics import EMBEDDED, SHAPE, TOLERANCE, freeze_after, reference


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["retract", "abort"])
async def test_an_update_in_the_middle_of_a_conversation(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    temperature, exchanges = 0.8, record_exchanges(monkeypatch)
    checkpoints = [make_tiny_checkpoint(tmp_path / str(seed), seed=seed, **SHAPE) for seed in range(2)]  # type: ignore[arg-type]
    chat = load_chat_format(str(checkpoints[0]))
    async with generating(
        tmp_path,
        engine=EMBEDDED,
        model=checkpoints[0],
        tensors=tensors_of(checkpoints),
        pause_mode=mode,
        rollout={"rollout_temperature": temperature, "rollout_max_response_len": 200},
    ) as world:
        await world.ready()
        place = OpenSession(make_group(0, 1), new_sample((1,), 0), Session(chat))
        answers = Answers(world.stage.sampler, Requests(world.stage.config, 256), chat)
        async with Gateway(answers) as gateway, aiohttp.ClientSession() as http:
            with gateway.session(place) as endpoint:
                said: list[dict[str, Any]] = []

                async def ask(*messages: dict[str, Any], tokens: int) -> dict[str, Any]:
                    async with http.post(
                        f"{endpoint.base_url}/v1/chat/completions",
                        json={"messages": messages, "max_tokens": tokens, "return_token_ids": True, "logprobs": True},
                        headers={"Authorization": f"Bearer {endpoint.api_key}"},
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
