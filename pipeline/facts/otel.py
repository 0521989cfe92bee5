"""The spans of the trace for an OpenTelemetry collector, sent by OpenTelemetry's own library (`pip install '.[otel]'`).

A group of rollouts is one trace: its root is `rollout`, from its admission until its end, and all that stages did for
it lies below. What belongs to no group, such as `batch` and `update`, is a trace of one span. All processes work the
number of a trace out of the run and the group, so nothing has to travel for it.

Invariants: a span costs a stage an append to a queue of bounded length; the library sends from a thread of its own, and
a collector that is away loses spans and nothing else.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import secrets
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

import xxhash

from configs.schema import Config
from pipeline.facts.trace import NO_GROUP, NO_SAMPLE, Span, TraceWriter

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

ROOT: Final = "rollout"
NAMES: Final = {"generate": "turn", "update_weights": "update"}  # ours -> as others call it
VARIABLES: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
LAST_S: Final = 1.0  # for what is not sent yet when a replica ends


@functools.cache
def _processor(endpoint: str | None) -> BatchSpanProcessor | None:
    """One for each process; None without the library. `endpoint`: None: as the variables of OpenTelemetry say."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        return None
    first = itertools.count()
    logging.getLogger(OTLPSpanExporter.__module__).addFilter(lambda _: next(first) == 0)  # it repeats itself for ever
    traces = None if endpoint is None else f"{endpoint.rstrip('/').removesuffix('/v1/traces')}/v1/traces"
    return BatchSpanProcessor(OTLPSpanExporter(endpoint=traces))


class Exporter:
    """Gives spans to the library. `run`: the same in all processes of a run."""

    def __init__(self, processor: BatchSpanProcessor, run: str) -> None:
        from opentelemetry.sdk.resources import Resource

        self._processor, self._run = processor, run
        service = os.environ.get("OTEL_SERVICE_NAME", "sluice")
        self._resource = Resource.create({"service.name": service, "sluice.run": run})

    def __call__(self, span: Span | None) -> None:
        """Send it; with None send what is left, and do not wait for a collector that is away."""
        if span is None:
            rest = threading.Thread(target=self._processor.force_flush, daemon=True)
            rest.start()
            rest.join(LAST_S)
        else:
            self._processor.on_end(self._readable(span))

    def _readable(self, span: Span) -> ReadableSpan:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, TraceFlags

        grouped, sampled = span.group_id != NO_GROUP, TraceFlags(TraceFlags.SAMPLED)
        trace = (
            xxhash.xxh3_128_intdigest(f"{self._run}/{span.group_id}".encode()) if grouped else secrets.randbits(127) + 1
        )
        root = SpanContext(trace, (trace & (1 << 63) - 1) + 1, is_remote=True, trace_flags=sampled)
        own = SpanContext(trace, secrets.randbits(63) + 1, is_remote=False, trace_flags=sampled)
        is_root = span.name == ROOT
        attributes: dict[str, str | int] = {"sluice.stage": span.stage, "sluice.replica": span.replica}
        attributes |= {"sluice.detail": span.detail} | ({"sluice.group": span.group_id} if grouped else {})
        attributes |= {"sluice.sample": span.sample} if span.sample != NO_SAMPLE else {}
        return ReadableSpan(
            NAMES.get(span.name, span.name),
            root if is_root else own,
            root if grouped and not is_root else None,
            self._resource,
            attributes,
            start_time=int(span.start_s * 1e9),
            end_time=int((span.start_s + span.dur_s) * 1e9),
        )


def span_writer(config: Config, run: str, run_dir: Path, replica: str, stage: str) -> TraceWriter:
    """Where a replica's spans go: into its file, and to a collector where one is named."""
    endpoint, on = config.observe.otel_endpoint, os.environ.get("OTEL_SDK_DISABLED", "").lower() != "true"
    wanted = on and (endpoint is not None or any(map(os.environ.get, VARIABLES)))
    processor = _processor(endpoint) if wanted else None
    exporter = None if processor is None else Exporter(processor, run)
    return TraceWriter(run_dir / "trace", replica, stage=stage, enabled=config.observe.trace, exporter=exporter)
