"""textarena and gymnasium as environments."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
from episodes import Episode

from stages.agents.random_state import RandomState


def test_episodes_draw_from_states_of_their_own() -> None:
    def drawn(state: RandomState) -> tuple[float, float]:
        with state.drawn_from():
            return random.random(), float(np.random.rand())

    alone = RandomState(3)
    expected = [drawn(alone) for _ in range(4)]
    first, second = RandomState(3), RandomState(4)
    outside = random.getstate()
    found = []
    for _ in range(4):
        found.append(drawn(first))
        assert drawn(second) not in expected
    assert found == expected
    assert random.getstate() == outside


class TestTextarena:
    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        pytest.importorskip("textarena", reason="textarena is not installed: pip install textarena")

    async def test_a_game_to_its_end(self) -> None:
        from stages.agents.packs.textarena import Textarena

        played = Episode(Textarena())
        start = await played.start(metadata={"seed": 3})
        assert "guess the number between 1 and 20" in start.messages[0].content
        low, high = 1, 20
        while True:
            guess = (low + high) // 2
            step = await played.say(f"I say [{guess}]")
            if step.done:
                break
            (message,) = step.messages
            assert "You are playing" not in message.content, "only what is new is shown"
            low, high = (guess + 1, high) if "higher" in message.content else (low, guess - 1)
        assert step.reward == 1.0
        assert step.metrics == {"finished": 1.0, "invalid": 0.0}

    async def test_the_same_seed_is_the_same_game_beside_others(self) -> None:
        from stages.agents.packs.textarena import Textarena

        async def play(seed: int, *, disturbed: bool) -> list[str]:
            played = Episode(Textarena(game="TowerOfHanoi-v0" if seed % 2 else "GuessTheNumber-v0"))
            seen = [(await played.start(seed=seed)).messages[0].content]
            for guess in (1, 20, 10):
                if disturbed:
                    random.seed(guess)
                    await Episode(Textarena()).start(seed=guess)
                step = await played.say(f"[{guess}]")
                seen += [message.content for message in step.messages]
            return seen

        for seed in (4, 5):
            assert await play(seed, disturbed=False) == await play(seed, disturbed=True)

    @pytest.mark.parametrize("text", ["", "no", "[" * 100_000, "[999]", "\ud800", "[1][2][3]"], ids=range(6))
    async def test_hostile_answers_end_in_a_reward(self, text: str) -> None:
        from stages.agents.packs.textarena import Textarena

        played = Episode(Textarena(max_turns=30))
        await played.start(seed=1)
        for _ in range(30):
            step = await played.say(text)
            if step.done:
                break
        assert step.done
        assert step.reward is not None
        assert 0.0 <= step.reward <= 1.0


class TestGymnasium:
    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        pytest.importorskip("gymnasium", reason="gymnasium is not installed: pip install gymnasium")

    async def test_a_walk_over_the_lake_by_hand(self) -> None:
        from stages.agents.packs.gymnasium import Gymnasium

        actions = ["left", "down", "right", "up"]
        played = Episode(Gymnasium(settings={"is_slippery": False}, actions=actions))
        start = await played.start(seed=1)
        assert start.messages[0].content == "Answer with an action in the last line: left, down, right, up."
        assert start.messages[1].content == "[S]FFF\nFHFH\nFFFH\nHFFG\n"
        step = await played.say("Not right at once.\nFirst down")
        assert re.sub(r".*\n(?=S)", "", step.messages[0].content) == "SFFF\n[F]HFH\nFFFH\nHFFG\n"
        assert (await played.say("what?")).messages[0].content == "That is no action.\n"
        for action in ("down", "2", "Right!", "down"):
            # Two to the right leads onto the third column, from where the end is down and right.
            assert not (await played.say(action)).done
        end = await played.say("right")
        assert (end.done, end.reward, end.metrics) == (True, 1.0, {"finished": 1.0, "return": 1.0})
        await played.environment.close()

    async def test_a_game_without_a_drawing_shows_its_observation_and_sums_its_rewards(self) -> None:
        from stages.agents.packs.gymnasium import Gymnasium

        played = Episode(Gymnasium(game="Blackjack-v1"))
        start = await played.start(seed=1)
        assert re.match(r"\(\d+, \d+, \d\)", start.messages[1].content)
        end = await played.say("0")
        assert end.done
        assert end.reward in (-1.0, 0.0, 1.0)

    @pytest.mark.parametrize("text", ["", "9", "-1", "?" * 100_000, "\n\n", "00000"], ids=range(6))
    async def test_what_is_no_action_costs_a_turn(self, text: str) -> None:
        from stages.agents.packs.gymnasium import Gymnasium

        played = Episode(Gymnasium(max_turns=3))
        await played.start(seed=1)
        steps = [await played.say(text) for _ in range(3)]
        assert [step.done for step in steps] == [False, False, True]
        assert steps[-1].reward == 0.0

    async def test_actions_that_cannot_be_said_are_refused(self) -> None:
        from stages.agents.packs.gymnasium import Gymnasium

        with pytest.raises(ValueError, match="only discrete ones"):
            await Gymnasium(game="Pendulum-v1").reset(Episode.task())
