"""Which version made which tokens of a response: spans filled in, and boundaries put right.

Invariant: spans are half-open, in order, without gaps, and end with the response.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from models.engines.protocol import GenerateOutput, VersionSpan


def with_spans(output: GenerateOutput, spans: Sequence[VersionSpan], early_boundary: bool = False) -> GenerateOutput:
    """The response with these spans, as far as it has tokens; see `later_boundaries` for `early_boundary`."""
    count = len(output.output_ids)
    moved = later_boundaries(spans) if early_boundary else spans
    kept = [VersionSpan(s.version, s.start, min(s.end, count)) for s in moved if s.start < min(s.end, count)]
    last = kept[-1].version if kept else output.meta_info.weight_version
    meta = msgspec.structs.replace(output.meta_info, weight_versions=kept, weight_version=last)
    return msgspec.structs.replace(output, meta_info=meta)


def later_boundaries(spans: Sequence[VersionSpan]) -> list[VersionSpan]:
    """Spans with every interior boundary one token later.

    With its overlap scheduler on, SGLang 0.5.23 has one step under way when it is paused in_place: the first token
    after the boundary that it reports was computed by the weights before it (pinned by a contract test).
    """
    moved: list[VersionSpan] = []
    for index, span in enumerate(spans):
        start = span.start + (index > 0)
        end = span.end + (index < len(spans) - 1)
        if start < min(end, spans[-1].end):
            moved.append(VersionSpan(span.version, start, min(end, spans[-1].end)))
    return moved
