"""Generate functions and rollout functions with slime's signatures, in the generate stage."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from models.import_path import ImportPathError
from stages.messages import PromptGroup, Sample
from stages.rollouts import rollout_fault, rollouts
from stages.slime.hooks import generate_function, rollout_function
from tests.stages.engine_rig import Log, World, generating, simulated, started
from tests.stages.slime import user_code
from tests.stages.stage_rig import make_group, until

CODE = "tests.stages.slime.user_code"
PROMPT = [*b"?"]  # of make_group


@asynccontextmanager
async def world_of(tmp_path: Path, name: str, **rollout: Any) -> AsyncIterator[World]:
    settings = {"custom_generate_function_path": f"{CODE}.{name}", "rollout_max_response_len": 20, **rollout}
    async with started(tmp_path, engine=simulated(length=8), rollout=settings) as world:
        yield world


async def made(world: World, group: PromptGroup) -> list[tuple[Sample, ...]]:
    """The rollouts of a group."""
    await world.ask(group)
    samples: list[Sample] = []
    while len({sample.index for sample in samples}) < group.n_samples:
        samples += (await world.answer()).samples
    return rollouts(samples)


async def test_a_single_turn_is_trained_with_what_the_engine_said(tmp_path: Path, log: Log) -> None:
    async with world_of(tmp_path, "single_turn") as world:
        found = await made(world, make_group(3, 4))
    answers = {}
    for exchange in log:
        [output] = exchange.outputs
        answers[tuple(output.output_ids)] = [item[0] for item in output.meta_info.output_token_logprobs or ()]
        assert list(exchange.request.prompts[0]) == PROMPT
    assert len(found) == len(log) == 4
    for (sample,) in found:
        response = sample.token_ids[sample.prompt_length :].tolist()
        assert sample.token_ids[: sample.prompt_length].tolist() == PROMPT
        assert sample.log_probs[1:].tolist() == pytest.approx(answers[tuple(response)], abs=1e-6)
        assert sample.loss_mask.tolist() == [0] + [1] * len(response)
        assert [(run.version, run.n_tokens) for run in sample.version_runs] == [(-1, 1), (0, len(response))]
        assert (sample.status, sample.reward, sample.fault()) == ("completed", None, None)
    assert len({tuple(sample.token_ids.tolist()) for (sample,) in found}) == 4, "rollouts draw from their own seeds"


async def test_observations_are_masked_and_versions_change_between_turns(tmp_path: Path) -> None:
    async with world_of(tmp_path, "with_tools") as world:
        [(sample,)] = await made(world, make_group(5, 1, label="x"))
    assert sample.loss_mask.tolist() == [0] + [1] * 5 + [0, 0] + [1] * 5
    assert sample.token_ids[6:8].tolist() == [*b"ok"]
    assert [(run.version, run.n_tokens) for run in sample.version_runs] == [(-1, 1), (0, 5), (-1, 2), (0, 5)]
    assert (sample.reward, sample.response, sample.turns) == (0.25, "label x", 2)
    assert all(sample.log_probs[i] == 0.0 for i in (0, 6, 7))
    assert (sample.log_probs[1:6] < 0).all()


async def test_an_evaluation_says_so_to_a_function_that_asks(tmp_path: Path) -> None:
    async with world_of(tmp_path, "with_tools") as world:
        [(sample,)] = await made(world, make_group(5, 1, purpose="eval", pinned_version=0))
    assert sample.reward == 0.0


async def test_a_list_is_the_sequences_of_one_rollout(tmp_path: Path) -> None:
    async with world_of(tmp_path, "segments") as world:
        found = await made(world, make_group(1, 2))
    for parts in found:
        assert [(part.sequence, part.sequences) for part in parts] == [(0, 2), (1, 2)]
        assert rollout_fault(parts) is None
        assert parts[-1].token_ids[:7].tolist() == [*b"summary"]
        assert (parts[-1].reward, parts[-1].prompt_length) == (1.0, 7)


async def test_a_row_may_name_its_own_function(tmp_path: Path) -> None:
    async with world_of(tmp_path, "raising") as world:
        metadata = f'{{"generate_function_path": "{CODE}:single_turn"}}'
        [(sample,)] = await made(world, make_group(1, 1, metadata=metadata))
        [(broken,)] = await made(world, make_group(2, 1))
    assert sample.status == "completed"
    assert (broken.status, broken.error) == ("failed", f"{CODE}.raising raised ConnectionError: the sandbox is gone")


async def test_a_row_names_a_function_in_a_run_that_has_none(tmp_path: Path) -> None:
    async with started(tmp_path, engine=simulated(length=8), rollout={"rollout_max_response_len": 20}) as world:
        metadata = f'{{"generate_function_path": "{CODE}.with_tools"}}'
        [(sample,)] = await made(world, make_group(1, 1, metadata=metadata))
        [(plain,)] = await made(world, make_group(2, 1))
    assert sample.reward == 0.25
    assert (plain.reward, plain.prompt_length, plain.response_length) == (None, 3, 8)


async def test_tokens_that_the_engine_did_not_make_are_never_trained(tmp_path: Path) -> None:
    async with world_of(tmp_path, "drifting") as world:
        [(sample,)] = await made(world, make_group(1, 1))
    assert sample.status == "failed"
    assert "from token 7 on they are not what the engine was sent and answered" in str(sample.error)
    assert "send input_ids=sample.tokens" in str(sample.error)


async def test_a_function_that_hangs_fails_at_its_deadline(tmp_path: Path) -> None:
    async with world_of(tmp_path, "waiting", custom_generate_deadline_secs=0.2) as world:
        [(sample,)] = await made(world, make_group(1, 1))
    assert (sample.status, sample.error) == ("failed", f"{CODE}.waiting took longer than 0.2 s")


async def test_a_drain_ends_functions_that_wait(tmp_path: Path) -> None:
    user_code.STARTED.clear()
    async with world_of(tmp_path, "waiting") as world:
        await world.ask(make_group(1, 2))
        await until(lambda: len(user_code.STARTED) == 2)
        world.rig.topic.publish("drain", b"enough")
        samples = await world.whole(2)
    assert [sample.status for sample in samples] == ["aborted", "aborted"]


async def test_a_function_that_blocks_its_loop_does_not_block_the_stage(tmp_path: Path) -> None:
    async with world_of(tmp_path, "blocking") as world:
        await world.ask(make_group(1, 3))
        metadata = f'{{"generate_function_path": "{CODE}.single_turn"}}'
        await world.ask(make_group(2, 1, metadata=metadata))
        samples = await world.whole(4)
    assert all(sample.status == "completed" for sample in samples)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("not_async", "is no async function; write async def generate"),
        ("too_few", "cannot be called as function"),
        ("missing", "has no 'missing'"),
        ("STARTED", "is no function"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_at_the_start(name: str, words: str) -> None:
    for separator in (":", "."):
        with pytest.raises(ImportPathError, match=words):
            generate_function(f"{CODE}{separator}{name}")


def batch_world(tmp_path: Path, name: str, batch: int = 2, deadline_s: float = 60.0) -> object:
    rollout = {
        "rollout_function_path": f"{CODE}.{name}",
        "rollout_max_response_len": 20,
        "rollout_batch_size": batch,
        "n_samples_per_prompt": 2,
        "custom_generate_deadline_secs": deadline_s,
    }
    return generating(tmp_path, engine=simulated(length=8), rollout=rollout)


async def batch_of(world: World, *groups: int) -> dict[int, list[Sample]]:
    """The rollouts of groups of two, by the group's id, in their order."""
    await world.ready()
    for group_id in groups:
        await world.ask(make_group(group_id, 2))
    found: dict[int, list[Sample]] = {group_id: [] for group_id in groups}
    while any(len(samples) < 2 for samples in found.values()):
        slice_ = await world.answer()
        found[slice_.group.group_id] += slice_.samples
    return {group_id: sorted(samples, key=lambda s: s.index) for group_id, samples in found.items()}


async def test_a_batch_is_trained_with_what_the_engine_said_of_each_rollout(tmp_path: Path, log: Log) -> None:
    async with batch_world(tmp_path, "whole_batch") as world:  # type: ignore[attr-defined]
        found = await batch_of(world, 4, 5)
    answers = {}
    for exchange in log:
        [output] = exchange.outputs
        answers[tuple(output.output_ids)] = [item[0] for item in output.meta_info.output_token_logprobs or ()]
    made = [sample for samples in found.values() for sample in samples]
    assert len(made) == len(log) == len(answers) == 4, "rollouts of one prompt draw from their own seeds"
    for sample in made:
        response = tuple(sample.token_ids[1:].tolist())
        assert sample.log_probs[1:].tolist() == pytest.approx(answers[response], abs=1e-6)
        assert sample.loss_mask.tolist() == [0] + [1] * 6
        assert (sample.status, sample.reward, sample.fault()) == ("truncated", 7.0, None)
        assert sample.metrics == {"rollout_function/batch": 2.0}, "the first of groups 4 and 5, in batches of two"


async def test_a_group_that_is_put_back_comes_again_and_one_left_out_fails(tmp_path: Path) -> None:
    async with batch_world(tmp_path, "drops_the_first", batch=4) as world:  # type: ignore[attr-defined]
        found = await batch_of(world, 0, 1, 2, 3)
    assert [found[2][0].status, found[3][1].status] == ["completed", "completed"]
    assert found[0][0].error == f"{CODE}.drops_the_first drew it, and did not return it"
    assert "raised ValueError" in str(found[1][0].error), "the second call drew it alone, and wants two"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("draws_nothing", "drew nothing from data_source.get_samples"),
        ("draws_too_much", "no group waits beside the 2 that this call has drawn"),
        ("hangs", "took longer than 0.4 s"),
    ],
)
async def test_what_goes_wrong_fails_the_groups_with_the_reason(tmp_path: Path, name: str, words: str) -> None:
    deadline_s = 0.4 if name == "hangs" else 60.0
    async with batch_world(tmp_path, name, deadline_s=deadline_s) as world:  # type: ignore[attr-defined]
        found = await batch_of(world, 0, 1)
    for sample in (one for samples in found.values() for one in samples):
        assert sample.status == "failed"
        assert words in str(sample.error)


async def test_a_drain_ends_a_call_that_hangs(tmp_path: Path) -> None:
    user_code.STARTED.clear()
    async with batch_world(tmp_path, "hangs") as world:  # type: ignore[attr-defined]
        await world.ready()
        await world.ask(make_group(0, 2))
        await until(lambda: len(user_code.STARTED) == 1)
        world.rig.topic.publish("drain", b"enough")
        samples = await world.whole(2)
    assert [sample.status for sample in samples] == ["aborted", "aborted"]


def test_a_function_without_a_data_source_is_refused_at_the_start() -> None:
    with pytest.raises(ImportPathError, match="cannot be called as function"):
        rollout_function(f"{CODE}.no_source")
