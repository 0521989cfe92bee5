"""The prompt stage on real streams: what it admits, what it does with each report, and when all is done."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from stages.data.prepare import PreparedPrompt
from stages.data.rows import LoadReport, SourceCount
from stages.errors import Starved
from stages.messages import CheckpointReady, EvalDone, Int32Array, RolloutSlice, Settled, wire
from stages.prompts.ledger import LedgerSnapshot, OpenGroup
from stages.prompts.stage import sampling_seed
from stages.topic_values import Sampling
from tests.stages.prompt_rig import Rows, balanced, prompting, step_done
from tests.stages.stage_rig import ended_by, idle, make_config, numbers, response_ids, take


async def test_the_gate_follows_the_formula_and_frees_only_when_weights_have_landed() -> None:
    async with prompting(batch=2, eta=1, total=4) as one:
        landed, trained, most = 0, 0, 0

        def check() -> None:
            nonlocal most
            open_ = one.stage.ledger.open
            most = max(most, open_)
            assert open_ <= (landed + 1 + 1) * 2 - trained

        one.hooks.on_admission = check
        assert await one.admitted() == [], "no engine carries weights yet"
        assert await one.admitted_at(0) == [0, 1, 2, 3]
        trained = 2
        await one.report(step_done(0), step_done(1, 0, 1))
        assert await one.admitted() == [], "version 1 is published, but no engine has it"
        await one.land(0, engine=1)
        landed = 1
        assert await one.admitted_at(1) == [], "engine-1 still has version 0"
        assert await one.admitted_at(1, engine=1) == [4, 5]
        trained = 6
        await one.report(step_done(2, 2, 3), step_done(3, 4, 5))
        landed = 3
        assert await one.admitted_at(3) == [], "engine-1 still has version 1"
        one.rig.lose_engine(1)
        assert await one.admitted() == [6, 7], "four batches of two are all that the run trains"
        assert most == 4


async def test_a_changed_sampling_holds_for_groups_that_are_admitted_from_then_on() -> None:
    config = make_config(rollout={"rollout_temperature": 0.7, "rollout_top_p": 0.9})
    async with prompting(config=config, batch=1, eta=0) as one:
        await one.land(0)
        first = await take(one.groups)
        one.stage.sampling = Sampling(0.3, 1.0)
        await one.report(Settled(0, "filtered"))
        second = await take(one.groups)
        assert [(g.temperature, g.top_p) for g in (first, second)] == [(0.7, 0.9), (0.3, 1.0)]


async def test_sources_with_weights_are_mixed_by_position_so_a_resumed_run_goes_on_in_the_same_order() -> None:
    """Prompts 0 to 2 are of one file, 3 to 9 of another that has three times its weight."""
    rows = Rows(n=10)
    rows.report = LoadReport(sources=[SourceCount("a", 3, 3), SourceCount("b", 7, 7)])
    config = make_config(
        data={"rollout_shuffle": False, "prompt_data_weights": [0.25, 0.75], "prompt_data": ["a", "b"]}
    )
    expected = [3, 0, 4, 5, 6, 1, 7, 8, 9, 2, 3, 4]
    async with prompting(batch=4, eta=2, config=config, prompts=rows) as one:
        await one.land(0)
        assert [(await take(one.groups)).prompt_index for _ in range(12)] == expected
    snapshot = LedgerSnapshot(8, 8, {"trained": 8}, ())
    async with prompting(batch=4, eta=0, config=config, prompts=rows, snapshot=snapshot) as one:
        await one.land(2)
        assert [(await take(one.groups)).prompt_index for _ in range(4)] == expected[8:]


async def test_open_groups_of_a_snapshot_are_submitted_again_before_new_ones() -> None:
    snapshot = LedgerSnapshot(6, 6, {"trained": 4}, (OpenGroup(4, 4), OpenGroup(5, 2, requeued=1)))
    async with prompting(batch=2, eta=1, snapshot=snapshot) as one:
        assert await one.admitted() == [], "nothing is asked of engines without weights"
        await one.land(2)
        await idle()
        found = [await take(one.groups) for _ in range(4)]
        assert [(g.group_id, g.prompt_index, g.requeued) for g in found] == [(4, 4, 0), (5, 2, 1), (6, 6, 0), (7, 7, 0)]
        assert found[0].seed == sampling_seed(42, 4), "the same rollouts as in the run before"
        assert [g.group_id for g in one.hooks.admissions] == [6, 7], "an open group is admitted once"


async def test_open_groups_that_the_trainer_holds_are_not_asked_again() -> None:
    snapshot = LedgerSnapshot(
        6, 6, {"trained": 2}, (OpenGroup(2, 2), OpenGroup(3, 3), OpenGroup(4, 4), OpenGroup(5, 5))
    )
    config = make_config(data={"rollout_shuffle": False})
    async with prompting(batch=2, eta=1, config=config, snapshot=snapshot, restored={2, 3, 5}) as one:
        assert await one.admitted_at(1) == [4], "the places of the restored groups are taken"
        await one.report(step_done(2, 2, 3))
        assert await one.admitted_at(2) == [6, 7]
        await one.report(Settled(5, "stale", "too old"))
        again = await take(one.groups)
        assert (again.group_id, again.prompt_index, again.requeued) == (8, 5, 1), "a stale one is asked once more"
        assert balanced(one.stage.ledger)


async def test_open_groups_that_a_drain_overtakes_are_discarded() -> None:
    snapshot = LedgerSnapshot(2, 2, {}, (OpenGroup(0, 0), OpenGroup(1, 1)))
    async with prompting(snapshot=snapshot) as one:
        one.stage.drain("interrupted")
        await idle()
        assert [(r.group_id, r.outcome, r.detail) for _, r in one.hooks.terminal] == [
            (0, "discarded", "stopped before it was submitted"),
            (1, "discarded", "stopped before it was submitted"),
        ]
        assert one.stage.completed.is_set()


@pytest.mark.parametrize("handler", ["requeue", "drop"])
async def test_a_stale_prompt_is_sampled_once_more_and_only_once(handler: str) -> None:
    config = make_config(asynchrony={"async_unused_samples_handler": handler}, data={"rollout_shuffle": False})
    async with prompting(batch=1, eta=0, config=config) as one:
        await one.land(0)
        requested = [await take(one.groups)]
        for _ in range(3):
            await one.report(Settled(requested[-1].group_id, "stale", "too old"))
            requested.append(await take(one.groups))
        found = [(g.group_id, g.prompt_index, g.requeued) for g in requested]
        if handler == "requeue":
            assert found == [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
        else:
            assert found == [(0, 0, 0), (1, 1, 0), (2, 2, 0), (3, 3, 0)]


async def test_drain_admits_no_more_and_completes_when_nothing_is_out() -> None:
    async with prompting(batch=2, eta=0) as one:
        assert await one.admitted_at(0) == [0, 1]
        one.stage.drain("stopped by the user")
        one.stage.drain("a second reason")
        await one.land(5)
        assert one.rig.topic.get("drain") == b"stopped by the user"
        assert await one.admitted() == []
        await one.report(Settled(0, "discarded", "stopped by the user"))
        assert not one.stage.completed.is_set()
        await one.report(step_done(1, 1))
        assert one.stage.completed.is_set()
        assert one.stage.ledger.counts["trained"] == one.stage.ledger.counts["discarded"] == 1


async def test_group_after_group_without_training_is_an_error_with_its_reasons() -> None:
    config = make_config(filter={"max_filter_rounds": 2})
    words = (
        r"3 groups in a row were not trained \(2 x filtered: zero_std_0; 1 x filtered: zero_std_1\); "
        r"look at the rewards, or raise --max-filter-rounds \(now 2\)"
    )
    with ended_by(Starved, words):
        async with prompting(batch=1, eta=0, config=config) as one:
            await one.land(0)
            for group_id, why in enumerate(["zero_std_0", "zero_std_0", "zero_std_1"]):
                await one.report(Settled(group_id, "filtered", why))


async def test_reasons_are_those_since_a_batch_was_trained() -> None:
    config = make_config(filter={"max_filter_rounds": 2})
    with ended_by(Starved, r"3 groups in a row were not trained \(3 x filtered: zero_std_1\); "):
        async with prompting(batch=1, eta=0, config=config) as one:
            await one.land(0)
            await one.report(Settled(0, "filtered", "zero_std_0"))
            await one.report(step_done(1, 1))
            for group_id in (2, 3, 4):
                await one.land(1)
                await one.report(Settled(group_id, "filtered", "zero_std_1"))


async def test_duplicate_reports_change_nothing() -> None:
    async with prompting(batch=2, eta=0) as one:
        assert await one.admitted_at(0) == [0, 1]
        await one.report(Settled(0, "filtered", "x", tokens=5), Settled(0, "stale", "y", tokens=7))
        assert (one.stage.ledger.counts["filtered"], one.stage.ledger.counts["stale"]) == (1, 0)
        assert one.stage.ledger.duplicates == 1
        assert (one.stage.ledger.tokens["filtered"], one.stage.ledger.tokens["stale"]) == (5, 0)
        assert await one.admitted() == [2], "one place came free, and no prompt is asked again"
        await one.report(step_done(1, 1, 2, pinned=True), step_done(1, 1, 2, pinned=True))
        assert one.stage.ledger.trained == 2
        assert len(one.hooks.steps) == 1
        assert one.stage.evals_pending == {1}
        assert balanced(one.stage.ledger)


async def test_a_run_without_training_ends_after_its_evaluation() -> None:
    async with prompting(batch=1, total=0) as one:
        assert await one.admitted_at(0) == []
        assert not one.stage.completed.is_set(), "the trainer has not said yet whether an evaluation follows"
        await one.report(step_done(0, pinned=True))
        assert not one.stage.completed.is_set()
        await one.report(EvalDone(0, {}, True))
        assert one.stage.completed.is_set()


async def test_an_evaluation_that_was_not_announced_ends_no_other() -> None:
    async with prompting(batch=1, total=0) as one:
        await one.report(step_done(0, pinned=True), EvalDone(7, {}, True))
        assert not one.stage.completed.is_set()
        await one.report(EvalDone(0, {}, True))
        assert one.stage.completed.is_set()


async def test_a_rollback_takes_a_step_without_groups_and_counts_once() -> None:
    async with prompting(batch=2, eta=0) as one:
        assert await one.admitted_at(0) == [0, 1]
        await one.report(step_done(1, 0, 1))
        back = msgspec.structs.replace(step_done(2), rolled_back=True)
        await one.report(back, back)
        assert (one.stage.steps, one.stage.ledger.rollbacks, one.stage.ledger.trained) == (2, (2,), 2)
        assert await one.admitted_at(1) == [], "the engines lack the weights of the checkpoint"
        assert await one.admitted_at(2) == [2, 3]
        assert balanced(one.stage.ledger)


async def test_a_rollback_waits_for_no_evaluation_of_a_version_that_was_not_announced() -> None:
    async with prompting(batch=1, total=3) as one:
        one.rig.topic.publish("weights/pinned/0", b"")
        await one.report(step_done(0, pinned=True), step_done(1, pinned=True))
        assert one.stage.evals_pending == {0, 1}
        await one.report(msgspec.structs.replace(step_done(2), rolled_back=True))
        assert one.stage.evals_pending == {0}


async def test_a_rollback_ends_what_a_resume_left_to_the_trainer_alone() -> None:
    opened = tuple(OpenGroup(group_id, group_id) for group_id in (2, 3))
    snapshot = LedgerSnapshot(4, 4, {"trained": 2}, opened)
    async with prompting(batch=2, eta=1, snapshot=snapshot, restored={2}) as one:
        await one.report(msgspec.structs.replace(step_done(2), rolled_back=True))
        assert one.stage.ledger.counts["stale"] == 1
        assert {group.group_id for group in one.stage.ledger.open_groups()} >= {3}
        assert balanced(one.stage.ledger)


async def test_a_checkpoint_is_committed_with_the_ledger_as_it_was_after_its_step() -> None:
    """Terminal states are journalled before they count."""
    async with prompting(batch=2, eta=1) as one:
        counts: list[int] = []
        journal = one.hooks.settled

        def settled(groups: Sequence[tuple[int, Settled]]) -> None:
            counts.append(sum(one.stage.ledger.counts.values()))
            journal(groups)

        one.hooks.settled = settled  # type: ignore[method-assign]
        assert await one.admitted_at(0) == [0, 1, 2, 3]
        await one.report(
            Settled(2, "filtered", "x"), step_done(1, 0, 1), CheckpointReady(1, 1, "draft"), Settled(3, "failed", "y")
        )
        assert counts == [0, 1, 3]
        [(report, ledger)] = one.hooks.commits
        assert (report.step, report.path) == (1, "draft")
        assert (ledger.counts["trained"], ledger.counts["filtered"]) == (2, 1)
        assert ledger.counts["failed"] == 0, "what is reported later belongs to the next checkpoint"
        assert 3 in {group.group_id for group in ledger.open}


SFT = make_config(train={"loss_type": "sft_loss"}, data={"rollout_shuffle": False})
EOS = 99


def demonstration(label: str, ids: list[int], metadata: str = "{}") -> PreparedPrompt:
    return PreparedPrompt("q", wire([1, 2], Int32Array), label, metadata, "[]", wire(ids, Int32Array))


async def test_supervised_prompts_travel_as_rollouts_that_end_with_one_eos() -> None:
    rows = Rows(demonstration("ab", [7, 8]), demonstration("cd", [7, EOS]))
    async with prompting(config=SFT, batch=1, eta=1, prompts=rows, schema=RolloutSlice, eos_id=EOS) as one:
        await idle()
        first, second = await take(one.groups), await take(one.groups)
        for found, ids in ((first, [7, 8, EOS]), (second, [7, EOS])):
            (sample,) = found.samples
            assert response_ids(sample) == ids
            assert numbers(sample.token_ids[:2]) == [1, 2]
            assert numbers(sample.loss_mask) == [0, 0] + [1] * len(ids)
            assert found.group.n_samples == 1
            assert sample.fault() is None
        await one.report(step_done(1, 0))
        assert (await take(one.groups)).group.group_id == 2, "no engine is needed: the trainer's steps open the gate"


async def test_supervised_tokens_that_a_tool_wrote_are_not_learnt() -> None:
    text = "[2*3]6=6"
    row = demonstration(text, list(text.encode()), '{"tool_spans": [[5, 6]]}')
    encode = lambda part: list(part.encode())  # noqa: E731
    async with prompting(
        config=SFT, batch=1, eta=0, prompts=Rows(row), schema=RolloutSlice, eos_id=EOS, encode=encode
    ) as one:
        await idle()
        (sample,) = (await take(one.groups)).samples
        assert numbers(sample.loss_mask) == [0, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1]
