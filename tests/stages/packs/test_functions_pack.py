"""The pack `functions`, in a worker process: built-in tools, and functions in processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.tiny import make_tiny_checkpoint
from stages.agents.packs.functions import Functions
from stages.tools.tool import UnknownToolError
from tests.stages.agents.play import playing, world

TOOLS = "tests.stages.toolkit.sample_tools"


async def test_functions_answer_in_a_conversation_until_there_is_no_call(tmp_path: Path) -> None:
    tiny = make_tiny_checkpoint(tmp_path / "tiny", hidden_size=32, num_layers=1)
    tools = ["calculator", f"{TOOLS}:echo", f"{TOOLS}:hang"]
    table = world("stages.agents.packs.functions:Functions", options={"tools": tools, "deadline_s": 1.0})
    async with playing(tiny, table) as play:
        slice_ = await play.begin()
        for name, argument, result in (
            ("calculator", '"expression": "6*7"', "42"),
            ("echo", '"text": "hi"', "hi"),
            ("hang", '"text": "hi"', "error: no answer within 1 s"),
        ):
            slice_ = await play.turn(
                slice_, f'<tool_call>{{"name": "{name}", "arguments": {{{argument}}}}}</tool_call>'
            )
            (sample,) = slice_.samples
            assert sample.response.endswith(f"</tool_call>tool\n{result}assistant\n")
        (sample,) = (await play.turn(slice_, "It is 42.")).samples
        assert (sample.done, sample.response) == (True, "It is 42.")
        assert (sample.metrics["env/world/tool_calls"], sample.metrics["env/world/tool_errors"]) == (3.0, 1.0)


def test_what_is_no_tool_is_refused_before_an_episode() -> None:
    with pytest.raises(UnknownToolError, match="did you mean 'calculator'"):
        Functions(["calculatr"])
