"""The tools stage: runs the tool call that ends a turn, appends its result, and returns the sample to generate.

Invariant: tokens of a tool's result carry loss mask 0, log-prob 0.0 and version -1, and the tokens that the engine made
are kept as they are: nothing is tokenised twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from configs.schema import Config
from stages.base import LoopStage, StageContext
from stages.data.tokenizer import load_tokenizer
from stages.messages import Float32Array, Int32Array, RolloutSlice, Sample, UInt8Array, VersionRun, wire
from stages.tools.registry import answer_call, resolve_tools


def append_untrained(sample: Sample, ids: Sequence[int], text: str) -> Sample:
    """The sample with tokens after it that the policy did not make (mask 0, log-prob 0.0, version -1)."""
    n = len(ids)
    return msgspec.structs.replace(
        sample,
        response=sample.response + text,
        token_ids=wire(np.concatenate([sample.token_ids, ids]), Int32Array),
        loss_mask=wire(np.concatenate([sample.loss_mask, np.zeros(n)]), UInt8Array),
        log_probs=wire(np.concatenate([sample.log_probs, np.zeros(n)]), Float32Array),
        version_runs=join_runs(sample.version_runs, (VersionRun(-1, n),)),
    )


def join_runs(first: tuple[VersionRun, ...], second: tuple[VersionRun, ...]) -> tuple[VersionRun, ...]:
    """Concatenate version runs, merging neighbours of one version."""
    joined: list[VersionRun] = []
    for run in (*first, *second):
        if run.n_tokens == 0:
            continue
        if joined and joined[-1].version == run.version:
            joined[-1] = VersionRun(run.version, joined[-1].n_tokens + run.n_tokens)
        else:
            joined.append(run)
    return tuple(joined)


class ToolStage(LoopStage):
    """Feedback edge: generate -> tools -> generate."""

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        self.settings = context.config.tools

    @classmethod
    def wants(cls, config: Config, message: RolloutSlice) -> bool:
        settings = config.tools
        if not settings.tools or len(message.samples) != 1:
            return False
        sample = message.samples[0]
        return sample.status == "completed" and sample.response.rstrip().endswith(settings.tool_call_close)

    async def setup(self) -> None:
        self._tools = resolve_tools(self.settings.tools)
        self._tokenizer = load_tokenizer(self.config.train.hf_checkpoint)

    async def process(self, message: RolloutSlice) -> RolloutSlice:
        (sample,) = message.samples
        with self.span("tool", group=message.group.group_id, sample=sample.index):
            result = await answer_call(
                self._tools,
                sample.response,
                self.settings.tool_call_open,
                self.settings.tool_call_close,
                self.settings.tool_deadline_s,
            )
        self.activity.failures += result.startswith("error: ")
        text = self.settings.tool_result_template.replace("{result}", result)
        sample = append_untrained(sample, self._tokenizer.encode(text), text)
        return msgspec.structs.replace(message, samples=(sample,))
