"""The packs of games: mazes by hand, textarena and gymnasium."""

from __future__ import annotations

import random
import re
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.tiny import ARITHMETIC_CHARACTERS
from stages.agents.environment import Environment, Turn
from stages.agents.packs.gymnasium import Gymnasium, RandomState
from stages.agents.packs.maze import STEPS, Grid, Maze, moves_of
from stages.agents.packs.textarena import Textarena
from stages.chat.messages import Message
from tests.stages.agents.play import Episode, needs


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


@needs("textarena")
async def test_a_game_to_its_end() -> None:
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


@needs("textarena")
async def test_the_same_seed_is_the_same_game_beside_others() -> None:
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


@needs("textarena")
@pytest.mark.parametrize("text", ["", "no", "[" * 100_000, "[999]", "\ud800", "[1][2][3]"], ids=range(6))
async def test_hostile_answers_end_in_a_reward(text: str) -> None:
    played = Episode(Textarena(max_turns=30))
    await played.start(seed=1)
    for _ in range(30):
        step = await played.say(text)
        if step.done:
            break
    assert step.done
    assert step.reward is not None
    assert 0.0 <= step.reward <= 1.0


@needs("gymnasium")
async def test_a_walk_over_the_lake_by_hand() -> None:
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


@needs("gymnasium")
async def test_a_game_without_a_drawing_shows_its_observation_and_sums_its_rewards() -> None:
    played = Episode(Gymnasium(game="Blackjack-v1"))
    start = await played.start(seed=1)
    assert re.match(r"\(\d+, \d+, \d\)", start.messages[1].content)
    end = await played.say("0")
    assert end.done
    assert end.reward in (-1.0, 0.0, 1.0)


@needs("gymnasium")
@pytest.mark.parametrize("text", ["", "9", "-1", "?" * 100_000, "\n\n", "00000"], ids=range(6))
async def test_what_is_no_action_costs_a_turn(text: str) -> None:
    played = Episode(Gymnasium(max_turns=3))
    await played.start(seed=1)
    steps = [await played.say(text) for _ in range(3)]
    assert [step.done for step in steps] == [False, False, True]
    assert steps[-1].reward == 0.0


@needs("gymnasium")
async def test_actions_that_have_no_words_are_refused() -> None:
    with pytest.raises(ValueError, match="only discrete actions"):
        await Gymnasium(game="Pendulum-v1").reset(Episode.task())


@given(size=st.integers(2, 7), number=st.integers(0, 1 << 45), share=st.sampled_from([0.0, 0.3, 1.0]))
def test_a_maze_has_a_way_and_the_shortest_is_known(size: int, number: int, share: float) -> None:
    grid = Grid(size, number, share)
    cells = [(row, column) for row in range(size) for column in range(size)]
    edges = sum(len(grid.ways(cell)) for cell in cells)
    if share == 0.0:
        assert edges == 2 * (size * size - 1)  # a tree: one way to every place
    if share == 1.0:
        assert edges == 4 * size * (size - 1)
        assert len(grid.shortest()) == 2 * (size - 1)
    for cell in cells:
        walked, at = grid.shortest(cell), cell
        for way in walked:
            assert way in grid.ways(at)
            at = grid.after(at, way)
        assert at == grid.goal
        for way in grid.ways(cell):  # no neighbour is nearer than one step
            assert len(grid.shortest(grid.after(cell, way))) >= len(walked) - 1
        for way in set(STEPS) - set(grid.ways(cell)):
            assert grid.after(cell, way) == cell
    assert Grid(size, number, share).draw((0, 0)) == grid.draw((0, 0))


def test_a_maze_by_hand() -> None:
    grid = Grid(4, 3)
    assert grid.draw((0, 0)).splitlines() == [
        "#########",
        "#A..#...#",
        "###.###.#",
        "#.#...#.#",
        "#.###.#.#",
        "#.#...#.#",
        "#.#.###.#",
        "#......B#",
        "#########",
    ]
    assert grid.shortest() == "eseswsee"
    assert grid.near((0, 1)) == "end e2 s3: s w"


MOVES = {
    **{"e": "e", "eess": "eess", "news": "news", "e s": "es", "north-west": "nw", "n" * 1_000_000: "n" * 2000},
    "I see a wall.\nSo: east, then South.\n\n": "es",
    **dict.fromkeys(("go up", "the new one", "", "  \n ", "x" * 1_000_000), ""),
}


@pytest.mark.parametrize(("text", "moves"), MOVES.items(), ids=range(12))
def test_moves_are_read_from_the_last_line(text: str, moves: str) -> None:
    assert moves_of(text) == moves


async def test_an_episode_by_hand() -> None:
    maze = Maze(view="near")
    assert isinstance(maze, Environment)
    played = Episode(maze)
    start = await played.start(metadata={"maze": 3})
    assert [message.role for message in start.messages] == ["system", "user"]
    assert start.messages[-1].content == "end e3 s3: e\n"
    first = await played.say("e")
    assert (first.done, first.reward, first.messages) == (False, None, (Message("user", "end e2 s3: s w\n"),))
    wall = await played.say("north south south")  # what follows a wall is not walked
    assert wall.messages[-1].content == "end e2 s3: s w\n"
    lost = await played.say("which way?")
    assert lost.messages[-1].content == "Say n, e, s or w.\nend e2 s3: s w\n"
    end = await played.say("seswseeeee")  # and what follows the end is not either
    assert (end.done, end.reward) == (True, 1.0)
    assert end.metrics == {"solved": 1.0, "moves": 10.0, "detour": 10 / 8}


@pytest.mark.parametrize("say", ["w", "", "wwwwwwwwwwwww", "?" * 100_000], ids=range(4))
async def test_an_episode_without_an_end_is_worth_nothing(say: str) -> None:
    played = Episode(Maze(size=2, max_moves=3, instructions=""))
    start = await played.start(seed=5)
    assert [message.role for message in start.messages] == ["user"]
    for _ in range(2):
        assert (await played.say(say)).messages[-1].content == start.messages[-1].content
    end = await played.say(say)
    assert (end.done, end.reward, end.metrics) == (True, 0.0, {"solved": 0.0, "moves": 3.0})


async def test_the_last_turn_says_what_it_was_worth() -> None:
    maze = Maze(size=2)
    await maze.reset(Episode.task(seed=5))
    end = await maze.step(Turn(0, Message("assistant", "?"), "?", last=True))
    assert (end.done, end.reward) == (True, 0.0)


async def test_rollouts_of_a_group_meet_the_same_maze_and_splits_share_none() -> None:
    starts = [await Episode(Maze()).start(seed=seed) for seed in (7, 7, 8)]
    assert starts[0] == starts[1] != starts[2]
    train, heldout = ({task["maze"] for task in islice(Maze.tasks(split, 1), 2000)} for split in ("train", "heldout"))
    assert len(train) == len(heldout) == 2000
    assert not train & heldout


async def test_demonstrations_are_walks_as_the_environment_answers_them() -> None:
    options = {"size": 3, "view": "near", "max_moves": 10, "instructions": ""}
    rewards = []
    for task in islice(Maze.tasks("train", 1, **options), 40):
        text, spans = task["demonstration"], task["tool_spans"]
        assert set(task["input"] + text) <= set(ARITHMETIC_CHARACTERS)
        maze, played = Maze(**options), 0
        start = await maze.reset(Episode.task(metadata=task))
        assert start.messages[-1].content == task["input"]
        for number, (begin, end) in enumerate([*spans, (len(text), len(text))]):
            way = text[played:begin]
            step = await maze.step(Turn(number, Message("assistant", way.strip()), way))
            assert "".join(message.content for message in step.messages) == text[begin:end]
            played = end
        assert step.done
        rewards.append(step.reward)
    assert set(rewards) == {0.0, 1.0}, "some walks find the end within their moves"


def test_options_that_make_no_maze_are_refused() -> None:
    with pytest.raises(ValueError, match="size is 1"):
        Maze(size=1)
    with pytest.raises(ValueError, match="view 'far'"):
        Maze(view="far")  # type: ignore[arg-type]
