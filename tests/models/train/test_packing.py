"""From sequences to micro-batches: examples, shares of data-parallel ranks, rows, and the queue in front of them."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from branches import Writer, branched_batch, flat, written
from hypothesis import example as given_example
from hypothesis import given
from hypothesis import strategies as st
from test_critic import values_of

from configs.schema.algorithm import AlgorithmConfig
from configs.schema.train import TrainConfig
from models.algorithms.aggregation import StepSize, prefix_fault
from models.algorithms.correction import Correction
from models.algorithms.returns import gae
from models.errors import InvalidSequence
from models.train.huggingface.attention import attention_allowed
from models.train.interface import TrainSequence
from models.train.spec import BatchNeeds, TrainSpec, gradient_scale
from models.train.step.critic import decide_advantages
from models.train.step.examples import Example, Rollout, partition, rollouts_of
from models.train.step.micro_batch_loss import StepTotals
from models.train.step.micro_batches import Assigned, Pending, assign, assign_layouts, balance, micro_batches, pack_rows
from models.train.step.packing import Packing, plan
from tests.models.train.rig import same, scored, train_batch, train_step

ROLLOUT_MEAN = TrainSpec(TrainConfig(), AlgorithmConfig(loss_aggregation="rollout_mean"))

packings = st.builds(
    Packing,
    max_tokens=st.integers(1, 200),
    pack=st.booleans(),
    share_prompts=st.booleans(),
    single_row=st.booleans(),
    quadratic_tokens=st.integers(10, 1000),
)


Batch = tuple[list[npt.NDArray[np.int32]], list[int]]


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Sequences of ids with their prompt lengths; some share a prompt."""
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    tokens, prompts = [], []
    for _ in range(draw(st.integers(0, 6))):
        prompt = rng.integers(1, 1000, draw(st.integers(1, 12)))
        for _ in range(draw(st.integers(1, 5))):
            response = rng.integers(1, 1000, draw(st.integers(1, 12)))
            tokens.append(np.concatenate([prompt, response]).astype(np.int32))
            prompts.append(len(prompt))
    return tokens, prompts


@given(batches(), packings)
def test_every_sequence_once_and_the_budget_kept(batch: Batch, packing: Packing) -> None:
    tokens, prompts = batch
    layouts = plan(tokens, prompts, packing)
    assert sorted(item for layout in layouts for item in layout.items) == list(range(len(tokens)))
    for layout in layouts:
        assert all(sum(unit.length for unit in row) <= layout.row_length for row in layout.rows)
        alone = len(layout.items) == 1 and len(tokens[layout.items[0]]) - 1 > packing.max_tokens
        assert layout.padded_tokens <= packing.max_tokens or alone
        units = [unit for row in layout.rows for unit in row]
        if packing.single_row:
            assert len(layout.rows) == 1
            assert layout.padded_tokens == layout.used_tokens
        elif not packing.pack:
            assert all(len(row) == 1 for row in layout.rows)
        for unit in units:
            if len(unit.members) == 1:
                assert unit.prompt == 0
                assert unit.length == len(tokens[unit.members[0]]) - 1
            else:
                assert packing.share_prompts
                assert len({tokens[item][: unit.prompt].tobytes() for item in unit.members}) == 1
                assert unit.length == unit.prompt + sum(len(tokens[i]) - 1 - unit.prompt for i in unit.members)


@given(batches(), packings)
def test_arrays_show_each_sequence_its_own_past_and_nothing_else(batch: Batch, packing: Packing) -> None:
    tokens, prompts = batch
    rng = np.random.default_rng(0)
    chosen = [
        prompt + np.flatnonzero(rng.random(len(ids) - prompt) < 0.7)
        for ids, prompt in zip(tokens, prompts, strict=True)
    ]
    for layout in plan(tokens, prompts, packing):
        rows = pack_rows(layout, tokens, chosen)
        shape = (len(layout.rows), layout.row_length)
        assert rows.input_ids.shape == shape
        positions = np.tile(np.arange(shape[1]), (shape[0], 1)) if rows.position_ids is None else rows.position_ids
        if rows.unit is not None and rows.branch is not None:
            allowed = attention_allowed(torch.from_numpy(rows.unit), torch.from_numpy(rows.branch))[:, 0].numpy()
        else:  # what transformers derives from restarts
            number = np.cumsum(np.diff(positions, axis=1, prepend=positions[:, :1] - 1) != 1, axis=1)
            allowed = (number[:, :, None] == number[:, None, :]) & np.tril(np.ones((shape[1], shape[1]), bool))
        assert allowed.any(axis=-1).all()
        sources = iter(rows.source.tolist())
        for item in layout.items:
            for pick in chosen[item]:
                row, column = divmod(next(sources), shape[1])
                visible = np.flatnonzero(allowed[row, column])
                np.testing.assert_array_equal(rows.input_ids[row, visible], tokens[item][:pick])
                np.testing.assert_array_equal(positions[row, visible], np.arange(pick))
        np.testing.assert_array_equal(rows.targets, np.concatenate([tokens[i][chosen[i]] for i in layout.items]))


APART = Packing(max_tokens=64, share_prompts=False, quadratic_tokens=8)
lengths = st.lists(st.integers(2, 40), min_size=1, max_size=25)


def ids_of(sizes: list[int]) -> list[np.ndarray]:
    return [np.full(size, at % 90, dtype=np.int32) for at, size in enumerate(sizes)]


@given(lengths, st.integers(2, 5))
def test_shares_differ_by_no_more_than_the_costliest_sequence(sizes: list[int], shares: int) -> None:
    assigned = balance(ids_of(sizes), [1] * len(sizes), APART, shares)
    assert sorted(item for share in assigned for item in share) == list(range(len(sizes)))
    loads = [sum(APART.cost(sizes[item] - 1) for item in share) for share in assigned]
    assert max(loads) - min(loads) <= max(APART.cost(size - 1) for size in sizes) + 1e-9


@given(lengths, st.integers(2, 5))
@given_example([2, 3, 4, 5, 40], 2)  # from the cheapest on, one rank would get all of the costly ones
def test_micro_batches_that_are_there_are_assigned_equally(sizes: list[int], shares: int) -> None:
    layouts = [layout for ids in ids_of(sizes) for layout in plan([ids], [1], APART)]
    assigned = assign_layouts(layouts, APART, shares)
    assert sorted(map(id, layouts)) == sorted(id(layout) for share in assigned for layout in share)
    assert max(map(len, assigned)) - min(map(len, assigned)) <= 1
    loads = [sum(APART.cost(layout.row_length) for layout in share) for share in assigned]
    assert max(loads) - min(loads) <= max(APART.cost(size - 1) for size in sizes) + 1e-9


SHARED = replace(APART, share_prompts=True)


@pytest.mark.parametrize(
    ("packing", "shares", "sizes"), [(APART, 1, [8, 9, 8, 9]), (APART, 2, [16, 17]), (SHARED, 1, [8, 14, 17, 8])]
)
def test_examples_are_planned_when_micro_batches_may_be_full(
    packing: Packing, shares: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not at each arrival: 64 tokens are 8 examples of 8, and more where their prompt of 5 counts once."""
    planned: list[int] = []

    def counted(tokens: list[np.ndarray], *given: Any) -> Any:
        planned.append(len(tokens))
        return plan(tokens, *given)

    monkeypatch.setattr("models.train.step.micro_batches.plan", counted)
    pending = Pending()
    for at in range(20):
        ids = np.array([*range(6), 10 + at, 9, 9], dtype=np.int32)
        example = Example(ids, 6, np.array([8]), np.zeros(1, np.float32), np.zeros(1, np.float32), 1.0, (0, at))
        pending.extend([example])
        pending.take(packing, shares, everything=False)
    assert planned == sizes


def test_micro_batches_are_dealt_in_turns_and_back() -> None:
    """Costs of 8, 7, ... 1: 8 + 5 + 4 + 1 beside 7 + 6 + 3 + 2, and not 8 + 6 + 4 + 2 beside 7 + 5 + 3 + 1."""
    layouts = [layout for ids in ids_of(list(range(2, 10))) for layout in plan([ids], [1], APART)]
    shares = assign_layouts(layouts, APART, 2)
    assert [sorted(layout.row_length for layout in share) for share in shares] == [[1, 4, 5, 8], [2, 3, 6, 7]]


@given(lengths, st.integers(1, 5))
def test_all_shares_run_equally_often_and_blank_ones_count_for_nothing(sizes: list[int], shares: int) -> None:
    examples = [
        Example(ids, 1, np.array([len(ids) - 1]), np.zeros(1, np.float32), np.zeros(1, np.float32), 1.0, (0, at))
        for at, ids in enumerate(ids_of(sizes))
    ]
    assigned = assign([example.tokens for example in examples], [1] * len(examples), APART, shares)
    made = [micro_batches(assigned, examples, share) for share in range(shares)]
    assert len({len(batches) for batches in made}) == 1
    members = [example.key for batches in made for batch in batches for example in batch.members]
    assert sorted(members) == [example.key for example in examples]
    assert all(batch.rows.input_ids.size == 1 for batches in made for batch in batches if batch.blank)
    totals = StepTotals()
    for batches in made:
        totals.count(batches)
    assert totals.costs["micro_batches"] == sum(not batch.blank for batches in made for batch in batches)
    assert totals.costs["used_tokens"] == totals.costs["sequence_tokens"] == sum(size - 1 for size in sizes)


@pytest.mark.parametrize(
    ("norm", "denominator", "clip", "scale"), [(2.0, 4.0, 1.0, 0.125), (0.5, 4.0, 1.0, 0.25), (9.0, 2.0, 0.0, 0.5)]
)
def test_gradients_are_divided_and_clipped(norm: float, denominator: float, clip: float, scale: float) -> None:
    """By hand: a norm of 2 is halved to 1 beside the division; a bound of 0 is none."""
    assert gradient_scale(norm, denominator, clip) == scale


@given(lengths, st.integers(2, 8))
def test_rows_are_as_long_as_a_multiple_and_lose_nothing(sizes: list[int], multiple: int) -> None:
    """For what divides each row over processes."""
    layouts = plan(ids_of(sizes), [1] * len(sizes), replace(APART, row_multiple=multiple))
    assert all(layout.row_length % multiple == 0 for layout in layouts)
    assert sorted(item for layout in layouts for item in layout.items) == list(range(len(sizes)))


def padded_example(index: int, length: int, prompt: int = 1) -> Example:
    tokens = np.full(length + 1, index, dtype=np.int32)
    values = np.zeros(1, dtype=np.float32)
    return Example(tokens, prompt, np.array([length]), values, values, coefficient=1.0)


@given(st.integers(0, 20), st.integers(1, 6), st.randoms())
def test_partition_is_even_complete_and_blind_to_order(count: int, parts: int, random: object) -> None:
    rollouts = [Rollout(key=(i // 3, i), size=StepSize(1, 1, 1), examples=()) for i in range(count)]
    shuffled = list(rollouts)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    cut = partition(shuffled, parts)
    assert len(cut) == parts
    assert [rollout for part in cut for rollout in part] == rollouts
    sizes = [len(part) for part in cut]
    assert max(sizes) - min(sizes) <= 1


def numbers(assigned: Assigned) -> list[int]:
    """The first ids of all sequences."""
    items = [item for layouts in assigned.by_dp_rank for layout in layouts for item in layout.items]
    return [int(assigned.examples[item].tokens[0]) for item in items]


@given(
    st.lists(st.lists(st.integers(1, 30), max_size=4), max_size=15),
    st.integers(1, 80),
    st.booleans(),
    st.integers(1, 3),
)
def test_what_goes_in_comes_out_once_and_early_ones_are_full(
    calls: list[list[int]], budget: int, share: bool, shares: int
) -> None:
    packing = Packing(max_tokens=budget, share_prompts=share)
    pending, out, number = Pending(), [], 0
    for call in calls:
        pending.extend(padded_example(number + offset, length) for offset, length in enumerate(call))
        number += len(call)
        assigned = pending.take(packing, shares, everything=False)
        assert len({len(layouts) for layouts in assigned.by_dp_rank}) == 1
        assert all(
            one.padded_tokens <= budget or len(one.items) == 1 for layouts in assigned.by_dp_rank for one in layouts
        )
        out += numbers(assigned)
    out += numbers(pending.take(packing, shares, everything=True))
    assert sorted(out) == list(range(number))
    assert not pending.take(packing, shares, everything=True)


@given(st.lists(st.integers(1, 4), max_size=6), st.integers(1, 4))
def test_whole_groups_stay_in_one_step(sizes: list[int], parts: int) -> None:
    rollouts = [Rollout((g, r), StepSize(1, 1, 1), ()) for g, size in enumerate(sizes) for r in range(size)]
    cut = partition(rollouts, parts, whole_groups=True)
    assert [rollout.key for part in cut for rollout in part] == [rollout.key for rollout in rollouts]
    homes = [{rollout.key[0] for rollout in part} for part in cut]
    assert sum(map(len, homes)) == len(sizes)
    assert max(map(len, homes)) - min(map(len, homes)) <= 1


# Tokens that several sequences of a rollout show are trained once: as a flat batch written by hand would have it.


VOCABULARY = 32


def trunk_and_branch() -> list[TrainSequence]:
    """prompt p; trunk a b c; branch a b | d e."""
    writer = Writer(np.random.default_rng(0), VOCABULARY)
    writer.begin([7]).tokens += writer.write(3)
    writer.branch(0, 3).tokens += writer.write(2)
    return writer.sequences(0, 0, reward=1.0)


@given(st.data())
def test_each_token_is_trained_once_with_the_mean_of_its_branches(data: st.DataObject) -> None:
    writer = Writer(np.random.default_rng(data.draw(st.integers(0, 99))), VOCABULARY)
    for place in range(data.draw(st.integers(1, 6))):
        if place and data.draw(st.booleans()):
            other = data.draw(st.integers(0, place - 1))
            story = writer.branch(other, data.draw(st.integers(1, len(writer.stories[other].tokens))))
        else:
            story = writer.begin([1, 2])
        for _ in range(data.draw(st.integers(0, 3))):
            trained = data.draw(st.booleans())
            story.tokens += writer.write(data.draw(st.integers(0, 3)), trained=trained)
    sequences = writer.sequences(0, 0)
    removed = data.draw(st.sets(st.integers(0, len(sequences) - 1)))  # mask_truncated, remove_sample
    for place in removed:
        sequences[place] = dataclasses.replace(sequences[place], loss_mask=np.zeros_like(sequences[place].loss_mask))
    (rollout,) = rollouts_of(sequences, ROLLOUT_MEAN, VOCABULARY)
    trained_by: dict[int, list[tuple[int, float]]] = {}
    by_tokens = {id(s.tokens): place for place, s in enumerate(sequences)}
    for example in rollout.examples:
        place = by_tokens[id(example.tokens)]
        for position, advantage in zip(example.chosen.tolist(), example.advantages.tolist(), strict=True):
            number = writer.stories[place].tokens[position].number
            trained_by.setdefault(number, []).append((place, advantage))
    expected = {}
    for number, shown in writer.by_number().items():
        places = [place for place, _ in shown if place not in removed]
        if places:
            expected[number] = (places[0], np.mean([writer.stories[place].advantage for place in places]))
    assert trained_by.keys() == expected.keys()
    for number, found in trained_by.items():
        assert len(found) == 1
        assert found[0] == (expected[number][0], pytest.approx(expected[number][1], abs=1e-6))
    assert rollout.size.tokens == len(expected)
    assert all(example.coefficient == pytest.approx(1 / len(expected)) for example in rollout.examples)


def test_the_newest_version_is_that_of_the_tokens_that_a_sequence_trains() -> None:
    trunk, branch = trunk_and_branch()
    trunk = dataclasses.replace(trunk, versions=np.array([-1, 1, 1, 2], np.int32))
    branch = dataclasses.replace(branch, versions=np.array([-1, 1, 1, 3, 4], np.int32))
    correction = Correction("decoupled", True, mask_offpolicy_in_partial_rollout=True)
    newest = dataclasses.replace(ROLLOUT_MEAN, correction=correction)
    (rollout,) = rollouts_of([trunk, branch], newest, VOCABULARY)
    assert [example.chosen.tolist() for example in rollout.examples] == [[3], [4]]
    assert [one.columns.tolist() for one in rollout.branches] == [[0], [1]]


@pytest.mark.parametrize(("prefix", "words"), [
    ((1, 2), "the prefix of sequence 1 names sequence 1; it must name an earlier one"),
    ((0, 5), "the prefix of sequence 1 has 5 tokens, but the sequences have 5 and 4"),
    ((0, 4), "the first 4 tokens of sequence 1 are not those of sequence 0"),
])  # fmt: skip
def test_a_wrong_prefix_is_refused(prefix: tuple[int, int], words: str) -> None:
    trunk, branch = trunk_and_branch()
    branch.tokens[3] = 31 - trunk.tokens[3]
    branch = dataclasses.replace(branch, prefix=prefix)
    with pytest.raises(InvalidSequence, match=f"rollout 0 of group 0: {words}"):
        rollouts_of([trunk, branch], ROLLOUT_MEAN, VOCABULARY)
    assert prefix_fault([trunk.tokens, branch.tokens], [None, (0, 3)]) is None


# ---------------------------------------------------------------------- golden numbers


def decided(estimator: str, values: list[list[float]] | None = None, **fields: float) -> tuple[Rollout, list[Example]]:
    """The turn that ends with token a earns 0.5, the end 1."""
    trunk, branch = trunk_and_branch()
    sequences = [
        dataclasses.replace(one, token_rewards=np.eye(1, len(one.tokens), 1, dtype=np.float32)[0] * 0.5)
        for one in (trunk, branch)
    ]
    (rollout,) = rollouts_of(sequences, ROLLOUT_MEAN, VOCABULARY)
    for example, own in zip(rollout.examples, values or (), strict=False):
        example.values = np.array(own, np.float32)
    config = AlgorithmConfig(advantage_estimator=estimator, **fields)  # type: ignore[arg-type]
    decide_advantages([rollout], TrainSpec(TrainConfig(), config), BatchNeeds(values=False))
    return rollout, list(rollout.examples)


def test_reinforce_plus_plus_golden() -> None:
    """gamma 1/2. Trunk: c 1, b 0.5, a 0.5 + 0.25. Branch: e 1, d 0.5, b 0.25, a 0.5 + 0.125."""
    _, (trunk, branch) = decided("reinforce_plus_plus", gamma=0.5)
    np.testing.assert_allclose(trunk.advantages, [0.6875, 0.375, 1.0])
    np.testing.assert_allclose(branch.advantages, [0.5, 1.0])


def test_ppo_golden() -> None:
    """gamma 1, lambda 1/2, values a 0.1, b 0.2, c 0.3, d 0.4, e 0.5.

    Trunk: deltas 0.6, 0.1, 0.7 give A = 0.825, 0.45, 0.7; branch: 0.6, 0.2, 0.1, 0.5 give 0.7875, 0.375, 0.35, 0.5.
    """
    _, (trunk, branch) = decided("ppo", [[0.1, 0.2, 0.3], [0.4, 0.5]], gamma=1.0, lambd=0.5)
    np.testing.assert_allclose(trunk.advantages, [0.80625, 0.4125, 0.7], atol=1e-6)
    np.testing.assert_allclose(branch.advantages, [0.35, 0.5], atol=1e-6)
    assert trunk.returns is not None
    assert branch.returns is not None
    np.testing.assert_allclose(trunk.returns, [0.90625, 0.6125, 1.0], atol=1e-6)
    np.testing.assert_allclose(branch.returns, [0.75, 1.0], atol=1e-6)


# ---------------------------------------------------------------------- models


@pytest.mark.parametrize("fields", [
    {"loss_aggregation": "rollout_mean", "use_tis": True, "entropy_coef": 0.01},
    {"loss_aggregation": "token_mean"},
    {"loss_aggregation": "seq_mean"},
    {"loss_aggregation": "constant"},
    {"use_opd": True, "opd_kl_coef": 0.5, "normalize_advantages": True},
    {"mask_offpolicy_in_partial_rollout": True},
    {"rollout_rs": ("token_k2=0.05",), "use_tis": True, "renormalize_after_rejection": True},
])  # fmt: skip
def test_branches_train_as_the_flat_batch_does(backend, fields: dict[str, Any]) -> None:  # type: ignore[no-untyped-def]
    branched, by_hand = taught(branched_batch(3, VOCABULARY)), taught(branched_batch(3, VOCABULARY, as_flat=True))
    metrics, gradient, _ = train_step(backend(**fields, clip_grad=0.0), [branched])
    expected, flat_gradient, _ = train_step(backend(**fields, clip_grad=0.0), [by_hand])
    assert metrics["train/trained_tokens"] == expected["train/trained_tokens"]
    assert metrics["train/loss"] == pytest.approx(expected["train/loss"], abs=1e-6)
    same(gradient, flat_gradient, 1e-6, 1e-6)


def taught(sequences: list[TrainSequence]) -> list[TrainSequence]:
    """Every sequence has log-probs of its own from the teacher, also of the tokens that it shares."""
    rng = np.random.default_rng(1)
    return [
        dataclasses.replace(s, teacher_log_probs=rng.normal(-3.0, 0.5, len(s.tokens)).astype(np.float32))
        for s in sequences
    ]


@pytest.mark.parametrize("estimator", ["ppo", "reinforce_plus_plus"])
def test_episodes_of_branches_run_over_what_they_share(backend, tmp_path: Path, estimator: str) -> None:  # type: ignore[no-untyped-def]
    """KL in the reward, whitening, a critic: as advantages that are worked out branch by branch and handed over."""
    batch = branched_batch(5, VOCABULARY)
    moved = backend(lr=5e-2)
    train_batch(moved, batch)
    moved.save(tmp_path / "moved")
    made = backend(
        advantage_estimator=estimator,
        gamma=0.9,
        lambd=0.8,
        kl_coef=0.1,
        normalize_advantages=True,
        ref_load=str(tmp_path / "moved" / "hf"),
    )
    students, references = scored(made, batch), scored(moved, batch)
    handed, start = [], 0
    for _, _, writer in written(5, VOCABULARY):
        members = range(start, start + len(writer.stories))
        start = members.stop
        of_branches = []
        for at in members:
            one, mask = batch[at], batch[at].loss_mask > 0
            rewards = -0.1 * (students[at] - references[at]).astype(float) * mask
            rewards[np.flatnonzero(mask)[-1]] += one.reward
            values = values_of(made, one).astype(float) if estimator == "ppo" else np.zeros(len(mask))
            lambd = 0.8 if estimator == "ppo" else 1.0
            advantages = gae(rewards, values, mask, gamma=0.9, lambd=lambd)[0].astype(np.float32)
            of_branches.append(dataclasses.replace(one, advantages=advantages))
        handed += flat(writer, of_branches)
    every = np.concatenate([one.advantages[one.loss_mask > 0] for one in handed])
    for one in handed:
        one.advantages[one.loss_mask > 0] -= every.mean()
        one.advantages[:] /= every.std(ddof=1)
    metrics, gradient, _ = train_step(made, [batch])
    expected, flat_gradient, _ = train_step(backend(), [handed])
    assert metrics["train/pg_loss"] == pytest.approx(expected["train/pg_loss"], abs=1e-6)
    same(gradient, flat_gradient, 1e-5, 1e-4)
