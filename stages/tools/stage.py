"""The tools stage: runs the tool call that ends a turn, appends its result, and returns the sample to generate.

Invariants: no call takes longer than its deadline, whatever the tool does, for tools of the user have processes of
their own; tokens of a tool's result carry loss mask 0, log-prob 0.0 and version -1, and the tokens that the engine made
are kept as they are: nothing is tokenised twice; what a tool said is nobody's answer, so a built-in grader reads what
stands behind it (`answer_start`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from configs.schema import Config
from stages.base import LoopStage, StageContext
from stages.data.tokenizer import load_tokenizer
from stages.messages import RolloutSlice, Sample
from stages.rollouts import append_untrained
from stages.tools.registry import answer_call, close_tools, resolve_tools
from stages.tools.tool import Tool


class ToolStage(LoopStage):
    """Feedback edge: generate -> tools -> generate."""

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        self.settings = context.config.tools
        self._tools: dict[str, Tool] = {}

    @classmethod
    def wants(cls, config: Config, options: Mapping[str, Any], message: RolloutSlice) -> bool:
        return bool(config.tools.tools) and any(_calls(config, sample) for sample in message.samples)

    async def setup(self) -> None:
        self._tools = resolve_tools(self.settings.tools, self.settings.tool_memory_gb)
        self._tokenizer = load_tokenizer(self.config.train.hf_checkpoint)

    async def close(self) -> None:
        await close_tools(self._tools)

    async def process(self, message: RolloutSlice) -> RolloutSlice:
        samples = [await self._answered(message.group.group_id, sample) for sample in message.samples]
        return msgspec.structs.replace(message, samples=tuple(samples))

    async def _answered(self, group_id: int, sample: Sample) -> Sample:
        """The sample behind the result of its call. One of several sequences that calls nothing has ended."""
        if not _calls(self.config, sample):
            return msgspec.structs.replace(sample, done=True)
        with self.span("tool", group=group_id, sample=sample.index):
            result = await answer_call(
                self._tools,
                sample.response,
                self.settings.tool_call_open,
                self.settings.tool_call_close,
                self.settings.tool_deadline_s,
            )
        self.activity.failures += result.startswith("error: ")
        text = self.settings.tool_result_template.replace("{result}", result)
        after = append_untrained(sample, self._tokenizer.encode(text), text)
        return msgspec.structs.replace(after, answer_start=len(after.response))


def _calls(config: Config, sample: Sample) -> bool:
    """Whether the last turn of a sample ended in a call."""
    return (
        sample.status == "completed"
        and not sample.done
        and sample.response.rstrip().endswith(config.tools.tool_call_close)
    )
