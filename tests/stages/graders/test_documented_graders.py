"""The worked lines of docs/rewards.md are what the graders say."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from stages.graders.grade import GradeRequest
from stages.graders.registry import GRADERS, grade_request

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "rewards.md").read_text()
SECTION = PAGE.partition("### One worked line each\n")[2].partition("\n## ")[0]
LINES = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in SECTION.splitlines() if line[:3] == "| `"]


def plain(cell: str) -> str:
    return cell.strip("`") if cell.startswith("`") else cell


@pytest.mark.parametrize(("name", "response", "given", "score"), LINES)
def test_worked_lines(name: str, response: str, given: str, score: str) -> None:
    reference = plain(given)
    tokens = re.fullmatch(r"(\d+) tokens", response)
    request = GradeRequest(
        plain(name),
        plain(response),
        None if reference.startswith('{"') else reference,
        reference if reference.startswith('{"') else "{}",
        n_tokens=int(tokens[1]) if tokens else 0,
    )
    found = grade_request(request)
    assert found.error is None
    assert found.score == pytest.approx(float(score.strip(" |")))


def test_the_examples_run() -> None:
    scope: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        exec(block, scope)
    assert asyncio.run(scope["fresh"]("7", "7", {}, "3 + 4 = ")) == 1.0
    assert scope["score"](" 7", "7", {}) == {"score": 1.0, "is_correct": True, "digits": 1}
    assert scope["rank"](["long one", "x", "xy"], None, {}) == [1.0, 0.0, 0.5]


def test_every_grader_of_the_table_is_documented() -> None:
    overview = PAGE.partition("### One worked line each")[0]
    missing = [name for name in GRADERS if not re.search(rf"`{name}[`:]", overview)]
    assert not missing


def test_every_grader_that_judges_text_has_a_worked_line() -> None:
    shown = {plain(line[0]).partition(":")[0] for line in LINES}
    elsewhere = {"auto", "boxed", "remote", "judge", "random", "constant", "sleep", "crash"}
    assert set(GRADERS) - shown - elsewhere == set()
