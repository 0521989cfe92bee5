"""Which prompts the prompt stage asks, and how many: the curriculum, over-sampling, and what becomes of leftovers."""

from __future__ import annotations

import msgspec
import pytest

from stages.errors import NoVerdicts
from stages.messages import CheckpointReady, EvalDone, Settled, StepDone
from stages.staleness_gate import StalenessGate
from tests.stages.prompt_rig import PromptDesk, Rows, balanced, prompting, step_done
from tests.stages.stage_rig import idle, make_config, take

CURRICULUM = make_config(
    data={"curriculum": "pass_rate", "curriculum_keep": 0.01, "rollout_seed": 3, "rollout_shuffle": False}
)


async def asked(one: PromptDesk) -> list[tuple[int, int]]:
    """(group, prompt) of what came out since the last call."""
    await idle()
    stats = one.rig.hubs["generate"].stats()
    found = [await take(one.groups) for _ in range(stats.queued + stats.leased)]
    return [(group.group_id, group.prompt_index) for group in found]


def rated(step: int, *groups: tuple[int, float]) -> StepDone:
    done = step_done(step, *(group_id for group_id, _ in groups))
    return msgspec.structs.replace(done, pass_rates=dict(groups))


async def test_prompts_outside_the_bounds_are_passed_over_in_the_next_epoch() -> None:
    async with prompting(batch=4, eta=0, config=CURRICULUM, prompts=Rows(n=4)) as one:
        await one.land(0)
        assert await asked(one) == [(0, 0), (1, 1), (2, 2), (3, 3)]
        await one.report(rated(1, (0, 1.0), (1, 0.5), (2, 0.0)), Settled(3, "filtered", "too_long", pass_rate=0.5))
        assert one.stage.curriculum.rates == {0: 1.0, 1: 0.5, 2: 0.0, 3: 0.5}
        await one.land(1)
        found = [prompt for _, prompt in await asked(one)]
        assert len(found) == 5, "a batch, and the place of the filtered one"
        assert set(found) == {1, 3}, "with 1 % the solved and the hopeless one are not asked here"
        assert one.stage.ledger.skipped > 0
        assert balanced(one.stage.ledger)


async def test_a_resumed_run_knows_the_pass_rates_and_asks_the_same() -> None:
    async with prompting(batch=4, eta=0, config=CURRICULUM, prompts=Rows(n=4)) as one:
        await one.land(0)
        await asked(one)
        await one.report(rated(1, (0, 1.0), (1, 0.5), (2, 0.0), (3, 0.5)), CheckpointReady(1, 1, "draft"))
        await one.land(1)
        after = await asked(one)
        snapshot = one.hooks.commits[0][1]
    async with prompting(batch=4, eta=0, config=CURRICULUM, prompts=Rows(n=4), snapshot=snapshot) as again:
        await again.land(1)
        assert await asked(again) == after


async def test_a_curriculum_without_verdicts_is_told_at_the_first_batch() -> None:
    async def blind() -> None:
        async with prompting(batch=1, eta=0, config=CURRICULUM) as one:
            await one.land(0)
            await one.report(step_done(1, 0))

    with pytest.raises(ExceptionGroup) as caught:
        await blind()
    assert caught.group_contains(
        NoVerdicts, match="--curriculum pass_rate needs a grader .* no response of batch 1 has a verdict"
    )


async def test_over_sampling_admits_more_and_its_leftovers_are_asked_again() -> None:
    async with prompting(batch=2, eta=0) as one:
        one.stage.gate = StalenessGate(2, 0, 10, extra=1)
        await one.land(0)
        assert await asked(one) == [(0, 0), (1, 1), (2, 2)]
        await one.report(Settled(1, "filtered", "zero_std_0.0"))
        assert await asked(one) == [(3, 3)], "a dropped group is replaced at once"
        await one.report(step_done(1, 0, 2), Settled(3, "discarded", "over-sampled: ..."))
        assert await asked(one) == [], "the next weights have not landed"
        await one.land(1)
        assert await asked(one) == [(4, 3), (5, 4), (6, 5)], "the prompt of the leftover comes first"
        await one.report(Settled(4, "discarded", "over-sampled: ..."))
        assert await asked(one) == [(7, 6)], "once"


async def test_leftovers_are_not_asked_again_if_the_user_says_so() -> None:
    config = make_config(asynchrony={"async_unused_samples_handler": "drop"})
    async with prompting(batch=1, eta=0, config=config) as one:
        await one.land(0)
        assert await asked(one) == [(0, 0)]
        await one.report(Settled(0, "discarded", "over-sampled: ..."))
        assert await asked(one) == [(1, 1)]


async def test_leftovers_of_the_last_batch_do_not_cut_off_its_evaluation() -> None:
    async with prompting(batch=1, eta=0, total=1) as one:
        one.stage.gate = StalenessGate(1, 0, 1, extra=1)
        await one.land(0)
        assert await asked(one) == [(0, 0), (1, 1)]
        await one.report(step_done(1, 0, pinned=True))
        assert one.rig.topic.get("drain") is None, "engines still answer the evaluation of version 1"
        await one.report(EvalDone(1, {"eval/x": 0.5}, True))
        assert one.rig.topic.get("drain") == b"all rollout batches are trained"
        await one.report(Settled(1, "discarded", "all rollout batches are trained"))
        assert one.stage.completed.is_set()
