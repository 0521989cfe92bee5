"""/metrics: a text that Prometheus can read, joined from the run and its engines, whatever state those are in.

That of a whole run: tests/pipeline/control/test_changed_runs.py.
"""

from __future__ import annotations

import errno
import json
import re
import socket
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import aiohttp
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import made_model

from configs.schema import Config
from configs.schema.rollout import EngineConfig
from models.engines.serve import EngineServer
from pipeline.control.monitor import Monitor
from pipeline.errors import UsageError
from pipeline.facts.run_directory import ServerInfo
from pipeline.facts.stats import StageStats
from pipeline.facts.trace import Dropped, Span, TraceWriter, merge, read_records
from pipeline.observe.prometheus import Facts, Family, endpoint, families, joined, read, refusal, write
from stages.messages import EVAL_BASE
from stages.topic_values import EVALUATION, EngineAddress, EngineEntry
from tests.other_programs import free_port
from tests.pipeline.observe.test_displays import T0, made_up_run

METRICS = {"train/loss": 0.5, "eval/sums-pass@4": 0.75, "rollout/raw_reward": float("nan")}
LINE = re.compile(r'^([a-zA-Z_:][\w:]*)(?:\{((?:[a-zA-Z_]\w*="(?:[^"\\\n]|\\["\\n])*",?)*)\})? (\S+)$')


def checked(text: str) -> dict[str, float]:
    """Value by sample of a text that keeps the rules of the format: one TYPE per family, samples together, no twin."""
    found: dict[str, float] = {}
    typed: list[str] = []
    for line in text.removesuffix("\n").split("\n"):
        if line.startswith("# TYPE "):
            typed.append(line.split()[2])
        elif not line.startswith("# HELP "):
            match = LINE.match(line)
            assert match, line
            assert match[1] in {typed[-1] + end for end in ("", "_bucket", "_sum", "_count")}, (line, typed[-1])
            assert line.rsplit(" ", 1)[0] not in found, line
            found[line.rsplit(" ", 1)[0]] = float(match[3])
    assert len(typed) == len(set(typed)), "a family is told once"
    assert text.endswith("\n")
    return found


def facts(engines: dict[str, str | None] | None = None, router: str | None = None) -> Facts:
    view = made_up_run()
    view.stage(StageStats(stage="engines", replica="engines-0", unix_s=T0 + 20, extra={"engine-0/idle": 0.25}))
    view.engines({"engine-0": (4, 1.5), "engine-2": None})
    return Facts(view.snapshot(T0 + 20), view.staleness, {"generate-0": 2}, 1, engines or {}, router, METRICS)


def test_the_figures_of_a_run() -> None:
    found = checked(write(families(facts())))
    expected = {
        'sluice_run_info{mode="async"}': 1, "sluice_step": 4, "sluice_steps_planned": 10, "sluice_elapsed_seconds": 20,
        "sluice_eta_seconds": 30, "sluice_weight_version": 4, "sluice_trained_tokens_total": 400,
        "sluice_trained_tokens_per_second": 20, "sluice_wasted_tokens_total": 100, "sluice_groups_admitted_total": 30,
        'sluice_groups_settled_total{outcome="trained"}': 16, 'sluice_groups_settled_total{outcome="stale"}': 1,
        "sluice_groups_open": 8, "sluice_gate_capacity_groups": 12, "sluice_reward_mean": 0.4,
        "sluice_reward_recent_mean": 0.25, 'sluice_eval_score{dataset="heldout"}': 0.625,
        'sluice_eval_version{dataset="heldout"}': 3, "sluice_staleness_mean_versions": 1,
        "sluice_staleness_max_versions": 2, "sluice_staleness_bound_versions": 2,
        'sluice_trained_tokens_by_staleness_total{staleness="1"}': 200, 'sluice_stage_replicas{stage="generate"}': 2,
        'sluice_stage_time_ratio{stage="generate",state="busy"}': 0.75,
        'sluice_stage_time_ratio{stage="generate",state="starved"}': 0.25,
        'sluice_stage_queue_messages{stage="generate"}': 6, 'sluice_stage_in_flight_messages{stage="generate"}': 8,
        'sluice_stage_messages_total{stage="generate"}': 80, 'sluice_stage_failures_total{stage="generate"}': 1,
        'sluice_restarts_total{replica="generate-0"}': 2, "sluice_dead_letters_total": 1,
        'sluice_engine_weight_version{engine="engine-0"}': 4, 'sluice_engine_idle_ratio{engine="engine-0"}': 0.25,
        'sluice_engine_update_seconds{engine="engine-0"}': 1.5,
    }  # fmt: skip
    assert not any("engine-2" in name for name in found), "it has told nothing yet"
    newest = {name: value for name, value in found.items() if name.startswith("sluice_metric{")}
    expected |= {f'sluice_metric{{name="{name}"}}': value for name, value in METRICS.items() if value == value}
    assert len(newest) == len(METRICS), "under the names of metrics.jsonl"
    assert {name: found[name] for name in expected} == pytest.approx(expected)


SGLANG = """\
# HELP sglang:e2e_seconds Time of a request.
# TYPE sglang:e2e_seconds histogram
sglang:e2e_seconds_bucket{le="1.0",model_name="m"} 3.0
sglang:e2e_seconds_bucket{le="+Inf",model_name="m"} 4.0
sglang:e2e_seconds_sum{model_name="m"} 2.5
sglang:e2e_seconds_count{model_name="m"} 4.0
# TYPE sglang:running gauge
sglang:running{engine="inner"} 7 1700000000000
# a remark
this is no sample
sglang:odd{a="x"} notanumber
plain 1e3
"""


def test_sources_are_joined_by_family() -> None:
    text = write([*read(SGLANG, {"engine": "engine-0"}), *read(SGLANG, {"engine": "engine-1"})])
    found = checked(text)
    assert found['sglang:e2e_seconds_bucket{engine="engine-0",le="+Inf",model_name="m"}'] == 4
    assert found['sglang:e2e_seconds_sum{engine="engine-1",model_name="m"}'] == 2.5
    assert found['sglang:running{engine="engine-1",exported_engine="inner"}'] == 7
    assert found['plain{engine="engine-0"}'] == 1000
    assert len(found) == 2 * 6
    assert text.count("# HELP sglang:e2e_seconds Time of a request.") == 1


@given(st.dictionaries(st.from_regex(r"[a-z]\w{0,5}", fullmatch=True).filter(str.isascii), st.text(), max_size=3),
       st.floats())  # fmt: skip
def test_what_is_written_is_read_back(labels: dict[str, str], value: float) -> None:
    """Labels of any text, any number; a second pass changes nothing."""
    text = write([Family("sluice_x", "gauge", "Help.").add(value, **labels)])
    assert text.count("\n") == 3, "no label breaks its line"
    assert write(read(text, {})) == text


@given(st.text())
def test_no_answer_of_an_engine_breaks_the_text(answer: str) -> None:
    checked(write([*families(facts()), *read(answer, {"engine": "e"})]))


@pytest.fixture
def hung() -> Iterator[str]:
    """A server that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


async def test_engines_that_answer_are_joined_and_the_others_are_down(hung: str) -> None:
    model, nobody = made_model()[1], f"http://127.0.0.1:{free_port()}"
    async with (
        EngineServer(EngineConfig(engine="simulated"), model, max_context_len=64, seed=0) as server,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session,
    ):
        engines = {"engine-0": server.url, "engine-1": nobody, "engine-2": None}
        found = checked(await joined(facts(engines, router=server.url), session))
    assert [found[f'sluice_engine_up{{engine="{name}"}}'] for name in engines] == [1, 0, 0]
    assert found["sluice_router_up"] == 1
    assert found['sglang:num_running_reqs{engine="engine-0"}'] == 0
    assert found['sglang:num_running_reqs{router="router"}'] == 0
    assert not any('engine="engine-1"' in name for name in found if "sglang" in name)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=0.2)) as impatient:
        found = checked(await joined(facts({"engine-0": hung}), impatient))
    assert found['sluice_engine_up{engine="engine-0"}'] == 0
    assert found["sluice_step"] == 4, "the run's own figures are there whatever the engines do"


async def test_a_port_in_use_is_one_sentence_and_a_web_page_cannot_read_the_figures_through_a_name_of_its_own() -> None:
    """A page's name may be made to lead to the loopback address; the browser then sends the name."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"--prometheus-port {port} is in use on 127.0.0.1; .*another port"):
            async with endpoint("127.0.0.1", port, facts):
                pass
    assert refusal("127.0.0.1", 80, PermissionError(errno.EACCES, "Permission denied")) == (
        "--prometheus-port 80 is not allowed to this user; choose a port above 1023"
    )
    with pytest.raises(UsageError, match="check --prometheus-host"):
        async with endpoint("192.0.2.1", port, facts):
            pass
    async with endpoint("127.0.0.1", port, facts), aiohttp.ClientSession() as session:
        hosts = {"127.0.0.1": 200, "localhost:9": 200, "[::1]:9": 200, "evil.test:9": 403, "evil.test": 403, "": 403}
        for host, status in hosts.items():
            async with session.get(f"http://127.0.0.1:{port}/metrics", headers={"Host": host}) as answer:
                assert answer.status == status, host
                assert ("sluice_step" in await answer.text()) == (status == 200)
                if status == 200:
                    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
                    assert checked(await answer.text())["sluice_step"] == 4
    async with endpoint("127.0.0.1", 0, facts):
        pass  # off


def test_an_engine_that_is_lost_keeps_its_place(tmp_path: Path) -> None:
    """So that it is told to be down; one that comes back has its new address. The router's metrics have their own."""
    teacher = EngineAddress("frozen-t", "http://t", 0, "t")
    known = {"engine/engine-0": EngineAddress("engine-0", "http://a", 0), "engine/frozen-t": teacher}
    encode = msgspec.msgpack.encode
    topic = SimpleNamespace(items=lambda prefix: {k: encode(v) for k, v in known.items() if k.startswith(prefix)})
    recorder = MagicMock(config=Config(), view=made_up_run(), restarts={}, dead_letters=[])
    recorder.rundir.fleet = tmp_path / "fleet.json"
    monitor = Monitor(MagicMock(recorder=recorder, hubs={}, topic=topic))
    assert monitor.facts().engines == {"engine-0": "http://a", "frozen-t": "http://t"}
    assert monitor.facts().router is None
    del known["engine/engine-0"]
    assert monitor.facts().engines == {"engine-0": None, "frozen-t": "http://t"}
    known["engine/engine-0"] = EngineAddress("engine-0", "http://b", 1)
    assert monitor.facts().engines == {"engine-0": "http://b", "frozen-t": "http://t"}
    router = ServerInfo("sglang", "http://r", 0, "0.3.2", "router", "http://m")
    (tmp_path / "fleet.json").write_bytes(msgspec.json.encode({"router": router}))
    assert monitor.facts().router == "http://m"


def test_the_status_lists_engines_of_evaluations_also_while_they_are_not_up() -> None:
    known = {"engine/engine-0": EngineAddress("engine-0", "http://a", 0)}
    up = EngineAddress("eval-engine-0", "http://e", 1, EVALUATION)
    entry = EngineEntry("eval-engine-0", "http://e", 1, EVALUATION, state="serving", version=6, limit=8)
    encode = msgspec.msgpack.encode
    topic = SimpleNamespace(items=lambda prefix: {k: encode(v) for k, v in known.items() if k.startswith(prefix)})
    beside = [SimpleNamespace(name="eval-engine-0", evaluates=True), SimpleNamespace(name="frozen-t", evaluates=False)]
    recorder = MagicMock(config=Config(), view=made_up_run(), changes=[])
    monitor = Monitor(MagicMock(recorder=recorder, hubs={}, topic=topic, placement=MagicMock(beside=beside)))
    monitor.runner.replicas = lambda stage: [f"{stage}-0"]  # type: ignore[method-assign]
    monitor.refresh = lambda: None  # type: ignore[method-assign]
    engines = [("engine-0", "starting", None), ("eval-engine-0", "starting", None)]
    assert [(one.name, one.state, one.version) for one in monitor.status().engines] == engines
    known |= {"engine/eval-engine-0": up, "directory/eval-engine-0": entry}
    assert [(one.name, one.state, one.version) for one in monitor.status().engines] == [
        engines[0], ("eval-engine-0", "serving", 6)
    ]  # fmt: skip


# Traces: what processes write is what the merged file shows, in the form that Chrome's format demands.


TRACE_T0 = 1_700_000_000.0


def pipeline_trace(directory: Path, groups: int = 3, samples: int = 2) -> None:
    """Groups through prompts -> generate (two replicas) -> reward -> train, in lockstep."""
    names = ("prompts-0", "train-0", "reward-0", "generate-0", "generate-1")
    writers = [TraceWriter(directory, name, stage=name.partition("-")[0]) for name in names]
    prompts, train, reward, *engines = writers
    for g in range(groups):
        start = TRACE_T0 + g
        prompts.add("admit", start, 0.01, group=g)
        for s in range(samples):
            engine = engines[s % 2]
            engine.add("rollout", start + 0.1, 0.5, group=g, sample=s, detail="turn 1")
            engine.add("turn", start + 0.2, 0.1, group=g, sample=s)
            reward.add("grade", start + 0.65, 0.05, group=g, sample=s)
        train.add("train", start + 0.8, 0.2, group=g)
    for writer in writers:
        writer.close()


def load(path: Path) -> tuple[dict, dict[str, list[dict]]]:
    document = json.loads(path.read_text())
    by_phase: defaultdict[str, list[dict]] = defaultdict(list)
    for event in document["traceEvents"]:
        by_phase[event["ph"]].append(event)
        by_phase["in order"].append(event)
    return document, by_phase


def test_merge_makes_processes_and_nested_spans(tmp_path: Path) -> None:
    pipeline_trace(tmp_path / "trace")
    report = merge(tmp_path / "trace", tmp_path / "trace.json")
    document, events = load(tmp_path / "trace.json")
    assert document["displayTimeUnit"] == "ms"
    assert (report.spans, report.replicas, report.kept_one_group_in) == (3 * 8, 5, 1)
    titles = [event["args"]["name"] for event in events["M"] if event["name"] == "process_name"]
    replicas = ("prompts-0", "generate-0", "generate-1", "reward-0", "train-0")
    assert titles == [f"{name.partition('-')[0]}: {name}" for name in replicas]
    assert len(events["b"]) == len(events["e"]) == 24
    rollout = next(event for event in events["b"] if event["name"] == "rollout")
    assert rollout["args"] == {"detail": "turn 1", "group_id": 0, "sample": 0}
    assert rollout["ts"] == pytest.approx(100_000, abs=1)
    ends = [event["ts"] for event in events["e"] if (event["name"], event["id"]) == ("rollout", rollout["id"])]
    assert ends == [pytest.approx(600_000, abs=1)]
    turn = next(event for event in events["b"] if event["name"] == "turn")
    assert (turn["pid"], turn["id"]) == (rollout["pid"], rollout["id"])


def spans_of(events: dict[str, list[dict]]) -> list[tuple[int, int, float, float]]:
    """(process, id, start, end) of all spans. An end closes the newest open begin of its id, in the file's order."""
    open_begins: defaultdict[tuple[int, int], list[dict]] = defaultdict(list)
    found = []
    for event in events["in order"]:
        if event["ph"] == "b":
            open_begins[event["pid"], event["id"]].append(event)
        elif event["ph"] == "e":
            begin = open_begins[event["pid"], event["id"]].pop()
            assert begin["name"] == event["name"]
            found.append((event["pid"], event["id"], begin.get("ts", 0), event.get("ts", 0)))
    assert not any(open_begins.values())
    return found


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(*(st.integers(*b) for b in ((0, 50), (0, 20), (-1, 4), (-1, 2)))), min_size=1, max_size=40))
def test_spans_of_an_id_nest_or_do_not_touch(tmp_path_factory, spans) -> None:
    path = tmp_path_factory.mktemp("lanes")
    writer = TraceWriter(path / "trace", "r", stage="s")
    for start, dur, group, sample in spans:
        writer.add("x", TRACE_T0 + start, float(dur), group=group, sample=sample)
    writer.close()
    merge(path / "trace", path / "t.json")
    _, events = load(path / "t.json")
    found = spans_of(events)
    assert sorted((end - start) / 1e6 for *_, start, end in found) == sorted(dur for _, dur, *_ in spans)
    tracks: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for _, number, start, end in found:
        tracks[number].append((start, end))
    for track in tracks.values():
        for i, (a, b) in enumerate(track):
            for c, d in track[i + 1 :]:
                assert b <= c or d <= a or (a <= c and d <= b) or (c <= a and b <= d)
    for number in tracks:
        times = [event.get("ts", 0) for event in events["in order"] if event.get("id") == number]
        assert times == sorted(times), "events of an id are in the order of time"


def test_a_torn_line_and_a_killed_writer_cost_only_themselves(tmp_path: Path) -> None:
    pipeline_trace(tmp_path)
    with (tmp_path / "train-0.jsonl").open("r+b") as file:
        file.truncate((tmp_path / "train-0.jsonl").stat().st_size - 4)
    unflushed = TraceWriter(tmp_path, "late", stage="x")
    unflushed.add("lost", TRACE_T0, 1.0)
    records = list(read_records(tmp_path))
    assert len(records) == 24 - 1
    unflushed.flush()
    assert sum(1 for record in read_records(tmp_path) if isinstance(record, Span) and record.name == "lost") == 1
    unflushed.close()


def test_a_writer_stops_at_its_size_and_says_how_much_it_dropped(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, "a/b c", stage="s", max_bytes=2000)
    for i in range(100):
        writer.add("x", TRACE_T0 + i, 1.0, group=i)
    writer.close()
    writer.close()
    assert writer.path.name == "a_b_c.jsonl"
    assert writer.path.stat().st_size < 2100
    records = list(read_records(tmp_path))
    assert isinstance(records[-1], Dropped)
    assert len(records) - 1 + records[-1].records == 100
    assert merge(tmp_path, tmp_path / "t.json").dropped_by_writers == writer.dropped > 0


def test_a_merge_beyond_its_size_keeps_whole_groups(tmp_path: Path) -> None:
    pipeline_trace(tmp_path / "trace", groups=20)
    report = merge(tmp_path / "trace", tmp_path / "t.json", max_events=60)
    _, events = load(tmp_path / "t.json")
    assert report.kept_one_group_in == 3
    kept = {event["args"]["group_id"] for event in events["b"]}
    assert kept == set(range(0, 20, 3))
    assert len(events["b"]) == 8 * len(kept)


def test_a_writer_that_is_off_writes_nothing_and_nothing_to_merge_leaves_no_file(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace", "r", stage="s", enabled=False) as writer:
        writer.add("work", TRACE_T0, 1.0, group=4)
        writer.flush()
    assert not (tmp_path / "trace").exists()
    with pytest.raises(UsageError, match="holds no trace records"):
        merge(tmp_path / "trace", tmp_path / "t.json")
    assert not (tmp_path / "t.json").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_ends_the_trace_and_not_the_run(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").symlink_to("/dev/full")
    writer = TraceWriter(tmp_path, "r", stage="s")
    for i in range(1000):
        writer.add("x", TRACE_T0, 1.0, group=i)
    writer.close()
    assert writer.dropped == 1000


def test_groups_of_an_evaluation_are_called_so(tmp_path: Path) -> None:
    for replica in ("generate", "group"):
        with TraceWriter(tmp_path / "trace", f"{replica}-0", stage=replica) as spans:
            spans.add(replica, 100.0, 1.0, group=EVAL_BASE + 3)
    merge(tmp_path / "trace", tmp_path / "trace.json")
    _, events = load(tmp_path / "trace.json")
    assert {event["args"]["evaluates"] for event in events["b"]} == {"evaluation prompt 3"}
    assert len({event["bind_id"] for event in events["b"]}) == 1
