"""What supervised training learns: the label of a row as if it were a rollout of the policy.

Invariants: it ends with one end-of-sequence token; what a tool wrote in it (`metadata.tool_spans`, in characters)
is there and is not learnt.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from stages.data.prompt_set import PreparedPrompt
from stages.messages import (
    Float32Array,
    Int32Array,
    PromptGroup,
    RolloutSlice,
    Sample,
    UInt8Array,
    VersionRun,
    wire,
    without_prompt,
)

Encode = Callable[[str], list[int]]


def demonstration(
    group: PromptGroup, prompt: PreparedPrompt, version: int, *, eos_id: int | None, encode: Encode | None
) -> RolloutSlice:
    """A complete group with one sample. `encode` gives the ids of a text, for the spans of tools."""
    text, ids = prompt.label or "", prompt.label_ids.tolist()
    if eos_id is not None and ids[-1:] != [eos_id]:
        ids.append(eos_id)
    before = len(prompt.prompt_ids)
    mask = np.ones(len(ids), dtype=np.uint8)
    if encode is not None:
        for start, end in group.row_metadata.get("tool_spans", ()):
            mask[len(encode(text[:start])) : len(encode(text[:end]))] = 0
    sample = Sample(
        index=0,
        status="completed",
        response=text,
        token_ids=wire([*prompt.prompt_ids.tolist(), *ids], Int32Array),
        prompt_length=before,
        loss_mask=wire([*([0] * before), *mask], UInt8Array),
        log_probs=wire(np.zeros(before + len(ids)), Float32Array),
        version_runs=(VersionRun(-1, before), VersionRun(version, len(ids))),
        reward=0.0,
    )
    return RolloutSlice(without_prompt(group), (sample,))
