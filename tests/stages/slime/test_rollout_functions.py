"""Rollout functions in slime's style make whole batches, through a real generate stage and its gateway."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.import_path import ImportPathError
from stages.messages import Sample
from stages.slime.hooks import rollout_function
from tests.stages.engine_rig import World, generating, record_exchanges, simulated
from tests.stages.slime import user_code
from tests.stages.stage_rig import make_group, until

CODE = "tests.stages.slime.user_code"


def world_of(tmp_path: Path, name: str, batch: int = 2, deadline_s: float = 60.0) -> object:
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


async def test_a_batch_is_trained_with_what_the_engine_said_of_each_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchanges = record_exchanges(monkeypatch)
    async with world_of(tmp_path, "whole_batch") as world:  # type: ignore[attr-defined]
        found = await batch_of(world, 4, 5)
    answers = {}
    for exchange in exchanges:
        [output] = exchange.outputs
        answers[tuple(output.output_ids)] = [item[0] for item in output.meta_info.output_token_logprobs or ()]
    made = [sample for samples in found.values() for sample in samples]
    assert len(made) == len(exchanges) == len(answers) == 4, "rollouts of one prompt draw from their own seeds"
    for sample in made:
        response = tuple(sample.token_ids[1:].tolist())
        assert sample.log_probs[1:].tolist() == pytest.approx(answers[response], abs=1e-6)
        assert sample.loss_mask.tolist() == [0] + [1] * 6
        assert (sample.status, sample.reward, sample.fault()) == ("truncated", 7.0, None)
        assert sample.metrics == {"rollout_function/batch": 2.0}, "the first of groups 4 and 5, in batches of two"


async def test_a_group_that_is_put_back_comes_again_and_one_left_out_fails(tmp_path: Path) -> None:
    async with world_of(tmp_path, "drops_the_first", batch=4) as world:  # type: ignore[attr-defined]
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
    async with world_of(tmp_path, name, deadline_s=deadline_s) as world:  # type: ignore[attr-defined]
        found = await batch_of(world, 0, 1)
    for sample in (one for samples in found.values() for one in samples):
        assert sample.status == "failed"
        assert words in str(sample.error)


async def test_a_drain_ends_a_call_that_hangs(tmp_path: Path) -> None:
    user_code.STARTED.clear()
    async with world_of(tmp_path, "hangs") as world:  # type: ignore[attr-defined]
        await world.ready()
        await world.ask(make_group(0, 2))
        await until(lambda: len(user_code.STARTED) == 1)
        world.rig.topic.publish("drain", b"enough")
        samples = await world.whole(2)
    assert [sample.status for sample in samples] == ["aborted", "aborted"]


def test_a_function_without_a_data_source_is_refused_at_the_start() -> None:
    with pytest.raises(ImportPathError, match="cannot be called as function"):
        rollout_function(f"{CODE}.no_source")
