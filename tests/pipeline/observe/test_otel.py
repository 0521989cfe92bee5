"""Spans at an OpenTelemetry collector: a small one here, which counts what a real run sends, and none at all."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from configs.schema import Config
from configs.schema.run import ObserveConfig
from pipeline.facts import otel
from pipeline.facts.otel import span_writer
from pipeline.facts.trace import read_records
from tests.other_programs import served_app
from tests.pipeline.launching import SIMULATED, SMALL, made_model, succeed

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="pip install '.[otel]'")


class Collector:
    """Everything that was sent to it."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        self.url = ""

    async def take(self, request: web.Request) -> web.Response:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        sent = ExportTraceServiceRequest.FromString(await request.read())
        for resource in sent.resource_spans:
            values = {item.key: item.value.string_value for item in resource.resource.attributes}
            self.services.add(values["service.name"])
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        return web.Response(body=b"", content_type="application/x-protobuf")

    @property
    def names(self) -> Counter[str]:
        return Counter(span.name for span in self.spans)


@contextlib.asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    collector, app = Collector(), web.Application()
    app.router.add_post("/v1/traces", collector.take)
    async with served_app(app) as collector.url:
        yield collector


def attributes(span: Any) -> dict[str, Any]:
    return {item.key: item.value.string_value or item.value.int_value for item in span.attributes}


@pytest.mark.slow
async def test_a_collector_gets_every_span_of_a_run_in_one_trace_for_each_group(tmp_path: Path) -> None:
    async with collecting() as collector:
        flags = [*SMALL, *made_model(), *SIMULATED, "--otel-endpoint", collector.url]
        done = await asyncio.to_thread(succeed, tmp_path / "run", *flags)
    groups, names = done.summary["groups"]["admitted"], collector.names
    assert (names["batch"], names["rollout"]) == (4, groups)
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "b" for event in events) == len(collector.spans) - groups - 4, "and all of the trace"
    assert {"turn", "update", "train", "publish_weights", "trained"} <= names.keys()
    assert "generate" not in names
    roots = {attributes(span)["sluice.group"]: span for span in collector.spans if span.name == "rollout"}
    assert len({root.trace_id for root in roots.values()}) == groups
    for span in collector.spans:
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        found = attributes(span)
        if span.name == "turn":
            root = roots[found["sluice.group"]]
            assert (span.trace_id, span.parent_span_id) == (root.trace_id, root.span_id)
            assert root.start_time_unix_nano < span.end_time_unix_nano < root.end_time_unix_nano
            assert found["sluice.detail"].startswith("turn 1, ")
    assert {attributes(root)["sluice.detail"] for root in roots.values()} >= {"trained"}
    assert collector.services == {"sluice"}


@pytest.mark.slow
def test_a_collector_that_is_away_costs_a_run_nothing(tmp_path: Path, port: int) -> None:
    away = f"http://127.0.0.1:{port}"
    done = succeed(tmp_path / "run", *SMALL, *made_model(), *SIMULATED, "--otel-endpoint", away)
    assert done.summary["steps"] == 4
    assert (tmp_path / "run" / "trace.json").exists()
    assert (tmp_path / "run" / "run.log").read_text().count("Connection refused") == 1, "one line of the library"


async def test_the_variables_of_opentelemetry_name_a_collector_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    otel._processor.cache_clear()
    config = msgspec.structs.replace(Config(), observe=ObserveConfig(trace=False))
    async with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
        for disabled in ("true", "false"):
            monkeypatch.setenv("OTEL_SDK_DISABLED", disabled)
            with span_writer(config, "run-1", tmp_path, "generate-0", "generate") as writer:
                writer.add("generate", 100.0, 0.5, group=3, sample=2, detail="turn 1")
                writer.export("batch", 100.0)
            for _ in range(100 if disabled == "false" else 1):  # the end of a writer waits for the loop of this test
                if len(collector.spans) == 2:
                    break
                await asyncio.sleep(0.1)
    assert collector.services == {"mine"}
    assert collector.names == {"turn": 1, "batch": 1}
    turn = next(span for span in collector.spans if span.name == "turn")
    assert attributes(turn) == {
        "sluice.stage": "generate", "sluice.replica": "generate-0", "sluice.detail": "turn 1", "sluice.group": 3,
        "sluice.sample": 2,
    }  # fmt: skip
    assert (turn.start_time_unix_nano, turn.end_time_unix_nano) == (100_000_000_000, 100_500_000_000)
    assert list(tmp_path.iterdir()) == [], "--no-trace writes no file"
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT")
    with span_writer(Config(), "run-1", tmp_path, "generate-0", "generate") as writer:
        writer.add("generate", 100.0, 0.5)
        writer.export("batch", 100.0)
    assert len(list(read_records(tmp_path / "trace"))) == 1
    otel._processor.cache_clear()
