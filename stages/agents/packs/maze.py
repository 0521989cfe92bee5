"""Pack: a maze in text. The model moves with n, e, s or w, and reads its position after each turn.

    [[environment]]
    name = "maze"
    options = { size = 4, view = "near" }

A number determines the maze, the same for all rollouts of a group. Every cell can be reached in exactly one way, unless
`open` removes more walls. Two views: `map` draws the maze; `near` gives the distance to the end and the open
directions, as `end e2 s1: n s`: two steps east and one south, open to the north and the south.

Invariants: the shortest way is known; an episode ends with reward 1 at the end of the maze, or with reward 0 after
`max_moves` moves. Moves into walls and turns without a move count.
"""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, Literal

from stages.agents.environment import Environment, Start, Step, Task, Turn, system_message
from stages.chat.messages import Message

Cell = tuple[int, int]  # row, column

STEPS: Final[Mapping[str, Cell]] = {"n": (-1, 0), "e": (0, 1), "s": (1, 0), "w": (0, -1)}
_WORD: Final = re.compile(r"\b(north|east|south|west|[nesw])\b", re.IGNORECASE)
_RUN: Final = re.compile(r"[nesw]+", re.IGNORECASE)
_HELDOUT: Final = 1 << 40  # mazes with these numbers and above are held out
_MOST_CHARS: Final = 2000  # read from the end of a turn
INSTRUCTIONS: Final = {
    "map": "Find the way from A to the end B of a maze. # is a wall. Write your moves in the last line: n, e, s or w.",
    "near": "Find the way to the end of a maze. You are told how far it is, as in 'e2 s1' for two steps east and one "
    "south, and behind the colon which ways are open. Write your moves in the last line: n, e, s or w.",
}


class Grid:
    """A maze of size x size cells, from the upper left corner to the lower right corner."""

    def __init__(self, size: int, number: int, open_share: float = 0.0) -> None:
        chosen = random.Random(f"maze {size} {number} {open_share}")
        self.size = size
        self.goal: Cell = (size - 1, size - 1)
        self._ways: dict[Cell, set[str]] = {(row, column): set() for row in range(size) for column in range(size)}
        stack: list[Cell] = [(0, 0)]
        seen = {(0, 0)}
        while stack:  # depth first, as far as it goes
            ways = [
                way for way in STEPS if (beyond := self._beyond(stack[-1], way)) in self._ways and beyond not in seen
            ]
            if not ways:
                stack.pop()
                continue
            way = chosen.choice(ways)
            stack.append(self._opened(stack[-1], way))
            seen.add(stack[-1])
        for cell in self._ways:
            for way in "es":
                if self._beyond(cell, way) in self._ways and chosen.random() < open_share:
                    self._opened(cell, way)

    def ways(self, cell: Cell) -> str:
        """Open directions, in the order of `nesw`."""
        return "".join(way for way in STEPS if way in self._ways[cell])

    def after(self, cell: Cell, way: str) -> Cell:
        """The cell after a move; the same cell if a wall is in the way."""
        return self._beyond(cell, way) if way in self._ways[cell] else cell

    def shortest(self, start: Cell = (0, 0)) -> str:
        """Moves of a shortest way to the end."""
        waiting, seen = deque([(start, "")]), {start}
        while True:
            cell, moves = waiting.popleft()
            if cell == self.goal:
                return moves
            for way in self.ways(cell):
                beyond = self._beyond(cell, way)
                if beyond not in seen:
                    seen.add(beyond)
                    waiting.append((beyond, moves + way))

    def draw(self, at: Cell) -> str:
        """The whole maze in 2 * size + 1 lines."""
        rows = [["#"] * (2 * self.size + 1) for _ in range(2 * self.size + 1)]
        for (row, column), ways in self._ways.items():
            mark = "A" if (row, column) == at else "B" if (row, column) == self.goal else "."
            rows[2 * row + 1][2 * column + 1] = mark
            for way in ways:
                down, right = STEPS[way]
                rows[2 * row + 1 + down][2 * column + 1 + right] = "."
        return "\n".join(map("".join, rows))

    def near(self, at: Cell) -> str:
        """The distance to the end, and the open directions."""
        down, right = self.goal[0] - at[0], self.goal[1] - at[1]
        return f"end e{right} s{down}: {' '.join(self.ways(at))}"

    def _beyond(self, cell: Cell, way: str) -> Cell:
        return (cell[0] + STEPS[way][0], cell[1] + STEPS[way][1])

    def _opened(self, cell: Cell, way: str) -> Cell:
        beyond = self._beyond(cell, way)
        self._ways[cell].add(way)
        self._ways[beyond].add(_opposite(way))
        return beyond


def _opposite(way: str) -> str:
    return "nesw"[("nesw".index(way) + 2) % 4]


def moves_of(text: str) -> str:
    """The moves in the last non-empty line: words, single letters, or a run of letters such as `eess`."""
    lines = text[-_MOST_CHARS:].strip().splitlines()
    if not lines:
        return ""
    last = lines[-1].strip()
    return last.lower() if _RUN.fullmatch(last) else "".join(word[0].lower() for word in _WORD.findall(last))


@dataclass
class Maze(Environment):
    """One maze: the metadata's `maze`, else by the task's seed. `instructions=None`: those of the view."""

    size: int = 4
    view: Literal["map", "near"] = "map"
    open: float = 0.0
    max_moves: int = 0
    instructions: str | None = None

    _moves = 0
    _at = (0, 0)

    def __post_init__(self) -> None:
        size, view = self.size, self.view
        if size < 2 or view not in INSTRUCTIONS:
            raise ValueError(f"size is {size} and view {view!r}; the size must be at least 2, the view map or near")
        self._most = self.max_moves or 4 * size * size
        self._instructions = INSTRUCTIONS[view] if self.instructions is None else self.instructions

    @classmethod
    def tasks(cls, split: Literal["train", "heldout"], seed: int, **options: Any) -> Iterator[Mapping[str, Any]]:
        """Numbers of mazes; the splits share none. Without instructions, each task has an example walk for a supervised
        warm start."""
        maze = cls(**options)
        for number in count(_HELDOUT if split == "heldout" else seed * 1_000_003):
            yield {"maze": number} if maze._instructions else {"maze": number, **maze.demonstration(number)}

    def demonstration(self, number: int) -> dict[str, Any]:
        """An example walk, to the end or to the limit of moves: random open directions, back only out of dead ends, an
        end-of-sequence token (a line break) after each move. `tool_spans`: the characters that this environment
        wrote."""
        grid, draw = Grid(self.size, number, self.open), random.Random(f"walk {number}")
        at, back, text, spans = (0, 0), "", "", []
        for left in reversed(range(self._most)):
            ways = grid.ways(at)
            way = draw.choice(ways.replace(back, "") or ways)
            at, back = grid.after(at, way), _opposite(way)
            text += f"{way}\n"
            if at == grid.goal or not left:
                break
            sight = self._sight(grid, at)
            spans.append((len(text), len(text) + len(sight)))
            text += sight
        return {"input": self._sight(grid, (0, 0)), "demonstration": text, "tool_spans": spans}

    async def reset(self, task: Task) -> Start:
        self._grid = Grid(self.size, int(task.metadata.get("maze", task.seed)), self.open)
        self._shortest = len(self._grid.shortest())
        return Start((*system_message(self._instructions), Message("user", self._sight(self._grid, self._at))))

    async def step(self, turn: Turn) -> Step:
        ways = moves_of(turn.message.content)
        self._moves += not ways
        for way in ways:
            if self._at == self._grid.goal or self._moves >= self._most:
                break
            self._moves += 1
            beyond = self._grid.after(self._at, way)
            if beyond == self._at:
                break  # moves planned beyond a wall are void
            self._at = beyond
        solved = self._at == self._grid.goal
        if solved or self._moves >= self._most or turn.truncated or turn.last:
            metrics = {"solved": float(solved), "moves": float(self._moves)}
            if solved:
                metrics["detour"] = self._moves / self._shortest
            return Step(reward=float(solved), done=True, metrics=metrics)
        hint = "" if ways or not self._instructions else "Say n, e, s or w.\n"
        return Step((Message("user", hint + self._sight(self._grid, self._at)),))

    def _sight(self, grid: Grid, at: Cell) -> str:
        return (grid.draw(at) if self.view == "map" else grid.near(at)) + "\n"
