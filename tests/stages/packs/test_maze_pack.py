"""The maze: how it is made, what the model sees, and what its words do."""

from __future__ import annotations

from itertools import islice

import pytest
from episodes import Episode
from hypothesis import given, settings
from hypothesis import strategies as st

from models.tiny import ARITHMETIC_CHARACTERS
from stages.agents.environment import Environment, Turn
from stages.agents.packs.maze import STEPS, Grid, Maze, moves_of
from stages.chat.messages import Message


@settings(max_examples=40, deadline=None)
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


@pytest.mark.parametrize(
    ("text", "moves"),
    [
        ("e", "e"),
        ("eess", "eess"),
        ("I see a wall.\nSo: east, then South.\n\n", "es"),
        ("e s", "es"),
        ("north-west", "nw"),
        ("go up", ""),
        ("news", "news"),
        ("the new one", ""),
        ("", ""),
        ("  \n ", ""),
        ("x" * 1_000_000, ""),
        ("n" * 1_000_000, "n" * 2000),
    ],
    ids=range(12),
)
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
