"""The page about environments: its classes are what a run takes, its test passes, its recipe loads."""

from __future__ import annotations

import asyncio
import tomllib
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from configs.command_line import parse
from configs.load import load_arguments
from configs.schema import EnvironmentConfig
from stages.agents.calls import Hosted
from stages.agents.describe import answers
from stages.agents.environment import Task, Turn
from stages.chat.messages import Message, ToolCall
from tests.docs.test_docs import FENCE, python_blocks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "agents.md"
EXAMPLES = ("coins", "library")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The modules of the page, as files of the names that stand in them."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_project").mkdir()
    for block in python_blocks(PAGE):
        if block.startswith("# my_project/"):
            (tmp_path / block.splitlines()[0].removeprefix("# ")).write_text(block)
    return tmp_path


def test_the_environments_of_the_page_are_such(project: Path) -> None:
    assert list(answers(["check", "my_project.coins:Coins", '{"most": 40}'])) == [Hosted("environment", tasks=True)]
    assert list(answers(["check", "my_project.library:Library", '{"max_calls": 2}'])) == [Hosted("environment")]
    tasks: Any = list(islice(answers(["tasks", "my_project.coins:Coins", '{"most": 3}', "train", "1", "20"]), 30))
    assert {task["amount"] for task in tasks} == {1, 2, 3}
    assert len(tasks) == 20


def test_the_test_of_the_page_passes_and_its_tool_answers(project: Path) -> None:
    blocks = python_blocks(PAGE)
    scope: dict[str, Any] = {"__name__": "agents_page"}
    for block in blocks:
        exec(compile(block, "docs/agents.md", "exec"), scope)
    scope["test_coins"]()

    async def ask() -> Any:
        library = scope["Library"]()
        await library.reset(Task())
        calls = tuple(ToolCall("shelf", {"title": title}) for title in ("Emma", "Ema"))
        return await library.step(Turn(0, Message("assistant", tool_calls=calls), ""))

    assert [message.content for message in asyncio.run(ask()).messages] == ["A3", "error: KeyError: 'Ema'"]


def test_the_recipe_of_the_page_loads(project: Path) -> None:
    recipe, mixed = [body for language, body in FENCE.findall(PAGE.read_text()) if language == "toml"]
    (project / "coins.toml").write_text(recipe)
    config = load_arguments(parse(["--config", str(project / "coins.toml"), "--num-rollout", "1"])).config
    (table,) = config.environment
    assert (table.class_path, table.options) == ("my_project.coins:Coins", {"most": 40})
    assert config.rollout.max_turns == tomllib.loads(recipe)["rollout"]["max_turns"]

    (project / "mixed.toml").write_text(mixed)
    both = load_arguments(parse(["--config", str(project / "mixed.toml"), "--num-rollout", "1"])).config
    assert [table.name for table in both.environment] == ["guess_number", "maze"]


def test_the_keys_of_the_table_are_on_the_page() -> None:
    section = PAGE.read_text().partition("## The table")[2].partition("\n## ")[0]
    told = [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")]
    assert told == list(EnvironmentConfig.__struct_fields__)
