"""The run's `/metrics` for Prometheus (format 0.0.4): its own figures, joined with those of engines and router.

Everything is read at the moment of the request, so nothing is out of date. All engines are queried at once, within a
short limit. The part of an engine that does not answer is missing, and its `sluice_engine_up` is 0; the run's own
figures are always there. Names are stable; units are in the names. docs/observability.md lists them.

Invariants: each family is written once, its samples together, however many sources it has; a label of a source with
the name of a label of the run becomes `exported_<name>`, as in Prometheus; a line that is no sample is dropped, so that
a faulty source cannot make the whole text unreadable.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import math
import re
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import starmap
from typing import Final, Literal

import aiohttp
from aiohttp import web

from configs.schema.notation import as_number
from pipeline.errors import UsageError
from pipeline.facts.stats import RunSnapshot

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
Kind = Literal["counter", "gauge", "histogram", "summary", "untyped"]
KINDS: Final = ("counter", "gauge", "histogram", "summary", "untyped")

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*\s*=\s*"(?:[^"\\]|\\.)*"'
_SAMPLE = re.compile(rf"^({_NAME})\s*(?:\{{\s*((?:{_LABEL}\s*,?\s*)*)\}})?\s+([^\s#]+)(?:\s+-?\d+)?\s*$")
_ONE_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*("(?:[^"\\]|\\.)*")')
_PARTS = ("_bucket", "_sum", "_count")  # of a histogram or a summary


@dataclass
class Family:
    """Samples of one name: `name{labels} value` each, with the kind and the help of their first source."""

    name: str
    kind: Kind = "untyped"
    help: str = ""
    samples: list[str] = field(default_factory=list)

    def add(self, value: float | None, **labels: str) -> Family:
        """Add a sample; None adds none."""
        if value is not None:
            self.samples.append(sample(self.name, starmap(label, labels.items()), number(value)))
        return self


def sample(name: str, labels: Iterable[str], value: str) -> str:
    """One line. `labels`: as `label` writes them."""
    written = ",".join(labels)
    return f"{name}{{{written}}} {value}" if written else f"{name} {value}"


def label(key: str, text: str) -> str:
    escaped = text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
    return f'{key}="{escaped}"'


def number(value: float) -> str:
    """As Prometheus writes numbers."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if float(value).is_integer() and abs(value) < 1 << 53 else repr(float(value))


def read(text: str, labels: Mapping[str, str]) -> list[Family]:
    """Families of a text, with labels added to every sample; time stamps are left out."""
    families: dict[str, Family] = {}
    for line in text.split("\n"):  # a label may hold what splitlines takes for an end of line
        line = line.strip()
        if line.startswith("#"):
            _describe(families, line)
        elif (match := _SAMPLE.match(line)) and as_number(match[3]) is not None:
            name, given = match[1], _ONE_LABEL.findall(match[2] or "")
            kept = [f"{f'exported_{key}' if key in labels else key}={value}" for key, value in given]
            _of(families, name).samples.append(sample(name, [*starmap(label, labels.items()), *kept], match[3]))
    return [family for family in families.values() if family.samples]


def _describe(families: dict[str, Family], line: str) -> None:
    """Take a HELP or TYPE line; other comments are ignored."""
    words = line.split(None, 3)
    if len(words) < 3 or words[1] not in ("HELP", "TYPE") or not re.fullmatch(_NAME, words[2]):
        return
    family = families.setdefault(words[2], Family(words[2]))
    text = words[3] if len(words) > 3 else ""
    if words[1] == "HELP":
        family.help = text
    elif text in KINDS:
        family.kind = text  # type: ignore[assignment]  # one of the words of Kind


def _of(families: dict[str, Family], name: str) -> Family:
    """The family of a sample: its own name, or that of the histogram or summary whose part it is."""
    for part in _PARTS:
        whole = families.get(name.removesuffix(part)) if name.endswith(part) else None
        if whole is not None and whole.kind in ("histogram", "summary"):
            return whole
    return families.setdefault(name, Family(name))


def write(families: Iterable[Family]) -> str:
    """The text of all families; those of equal name become one."""
    joined: dict[str, Family] = {}
    for family in families:
        into = joined.setdefault(family.name, Family(family.name, family.kind, family.help))
        into.samples += family.samples
    lines: list[str] = []
    for family in joined.values():
        if not family.samples:
            continue
        lines += [f"# HELP {family.name} {family.help}"] if family.help else []
        lines += [f"# TYPE {family.name} {family.kind}", *family.samples]
    return "".join(f"{line}\n" for line in lines)


SCRAPE_S: Final = 2.0  # most that an engine may take to answer
OUTCOMES: Final = ("trained", "filtered", "stale", "failed", "discarded")
LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")
STATES: Final = ("busy", "starved", "blocked", "stalled")


@dataclass(frozen=True)
class Facts:
    """What the endpoint reports of the run."""

    run: RunSnapshot
    staleness: Mapping[int, int]  # trained tokens by staleness in versions
    restarts: Mapping[str, int]  # of each replica and engine
    dead_letters: int  # messages that no replica could process
    engines: Mapping[str, str | None]  # address by name; None for a lost engine
    router: str | None  # where the router answers /metrics
    metrics: Mapping[str, float]  # newest value by name, as in metrics.jsonl


def families(facts: Facts) -> list[Family]:
    """The run's own figures. Shares of a stage are of its replicas' time in the last 15 seconds; figures of the engines
    that generate stand beside their own metrics."""
    run, share = facts.run, "Share of its replicas' time in the last 15 seconds, by state."
    aged = "Trained tokens by age, in versions."
    scores = [(dataset, score) for dataset, (_, score) in run.evals.items()]
    versions = [(dataset, version) for dataset, (version, _) in run.evals.items()]
    ended = [(outcome, getattr(run.ledger, outcome)) for outcome in OUTCOMES]
    ages, restarts = sorted(facts.staleness.items()), sorted(facts.restarts.items())
    times = Family("sluice_stage_time_ratio", "gauge", share)
    for row in run.stages:
        for state in STATES:
            times.add(getattr(row, state), stage=row.stage, state=state)
    return [
        Family("sluice_run_info", "gauge", "Always 1; the labels say what runs.").add(1, mode=run.mode),
        single("sluice_step", "gauge", "Rollout batches trained.", run.step),
        single("sluice_steps_planned", "gauge", "Rollout batches to train.", run.total_steps),
        single("sluice_elapsed_seconds", "gauge", "Since this phase of the run began.", run.elapsed_s),
        single("sluice_eta_seconds", "gauge", "To the end, at the pace of the last steps.", run.eta_s),
        single("sluice_weight_version", "gauge", "Newest weights that all engines carry.", run.version),
        single("sluice_trained_tokens_total", "counter", "Response tokens trained.", run.trained_tokens),
        single("sluice_trained_tokens_per_second", "gauge", "Over the last steps.", run.trained_tokens_per_s),
        single(
            "sluice_wasted_tokens_total", "counter", "Generated for groups that were not trained.", run.wasted_tokens
        ),
        single("sluice_goodput", "gauge", "Slot time that made trained tokens, a share.", run.goodput.goodput),
        single("sluice_goodput_attainable", "gauge", "By a perfect scheduler.", run.goodput.attainable),
        single("sluice_groups_admitted_total", "counter", "Groups that entered.", run.ledger.admitted),
        by("outcome", "sluice_groups_settled_total", "counter", "Groups that have their outcome, by outcome.", ended),
        single("sluice_groups_open", "gauge", "Groups in flight.", run.ledger.open),
        single("sluice_gate_capacity_groups", "gauge", "Groups that may enter now.", run.may_enter),
        single("sluice_reward_mean", "gauge", "Mean reward of the groups of the last step.", run.reward_mean),
        single("sluice_reward_recent_mean", "gauge", "Mean of the last 20 steps.", run.reward_recent),
        by("dataset", "sluice_eval_score", "gauge", "Newest evaluation of a data set.", scores),
        by("dataset", "sluice_eval_version", "gauge", "Weights that the newest evaluation measured.", versions),
        single("sluice_staleness_mean_versions", "gauge", "Of all trained tokens.", run.staleness_mean),
        single("sluice_staleness_max_versions", "gauge", "Of all trained tokens.", run.staleness_max),
        single("sluice_staleness_bound_versions", "gauge", "No older token is trained.", run.staleness_bound),
        by("staleness", "sluice_trained_tokens_by_staleness_total", "counter", aged, ages),
        times,
        *(
            by("stage", *head, [(r.stage, getattr(r, name)) for r in run.stages])
            for name, head in STAGE_FIGURES.items()
        ),
        *(by("engine", *head, [(r.name, getattr(r, n)) for r in run.engines]) for n, head in ENGINE_FIGURES.items()),
        by("replica", "sluice_restarts_total", "counter", "Restarts of a replica or an engine.", restarts),
        single("sluice_dead_letters_total", "counter", "Messages that no replica could process.", facts.dead_letters),
        by(
            "name",
            "sluice_metric",
            "gauge",
            "Newest value of a metric of metrics.jsonl.",
            sorted(facts.metrics.items()),
        ),
    ]


# What is counted of each row of the tables, with name, kind and help of its family.
STAGE_FIGURES: Final[dict[str, tuple[str, Kind, str]]] = {
    "replicas": ("sluice_stage_replicas", "gauge", "Replicas that report."),
    "queue_depth": ("sluice_stage_queue_messages", "gauge", "Messages waiting in front of the stage."),
    "in_flight": ("sluice_stage_in_flight_messages", "gauge", "Messages being worked on."),
    "items_out": ("sluice_stage_messages_total", "counter", "Messages sent on."),
    "tokens_per_s": ("sluice_stage_tokens_per_second", "gauge", "Tokens made or trained."),
    "failures": ("sluice_stage_failures_total", "counter", "Samples or calls that failed."),
}
ENGINE_FIGURES: Final[dict[str, tuple[str, Kind, str]]] = {
    "version": ("sluice_engine_weight_version", "gauge", "Weights that the engine carries."),
    "idle": ("sluice_engine_idle_ratio", "gauge", "Share of the last seconds in which nothing ran."),
    "update_s": ("sluice_engine_update_seconds", "gauge", "Length of the newest weight update."),
}


def single(name: str, kind: Kind, help_text: str, value: float | None) -> Family:
    """A family of one sample; of none for None."""
    return Family(name, kind, help_text).add(value)


def by(key: str, name: str, kind: Kind, help_text: str, values: Iterable[tuple[object, float | None]]) -> Family:
    """A family with a sample for each value of the label `key`."""
    family = Family(name, kind, help_text)
    for text, value in values:
        family.add(value, **{key: str(text)})
    return family


async def scrape(session: aiohttp.ClientSession, url: str, labels: Mapping[str, str]) -> list[Family] | None:
    """Families of a source; None if it does not answer or reports an error. Waits for it, at most SCRAPE_S.

    A source without metrics (SGLang without --enable-metrics: 404) is up and has no families.
    """
    try:
        async with session.get(f"{url}/metrics") as response:
            if response.status >= 500:
                return None
            return read(await response.text(errors="replace"), labels) if response.status == 200 else []
    except (aiohttp.ClientError, TimeoutError, OSError):  # gone, hung, or without HTTP: its `up` is 0
        return None


async def joined(facts: Facts, session: aiohttp.ClientSession) -> str:
    """The whole text. Waits for the slowest source, at most SCRAPE_S."""
    places = {name: url for name, url in facts.engines.items() if url is not None}
    async with asyncio.TaskGroup() as tasks:
        requests = {n: tasks.create_task(scrape(session, url, {"engine": n})) for n, url in places.items()}
        router = facts.router and tasks.create_task(scrape(session, facts.router, {"router": "router"}))
    up = Family("sluice_engine_up", "gauge", "1 if the engine answered this request, else 0.")
    router_up = Family("sluice_router_up", "gauge", "1 if the router answered this request, else 0.")
    scraped: list[Family] = []
    for name in facts.engines:
        answer = requests[name].result() if name in requests else None
        up.add(float(answer is not None), engine=name)
        scraped += answer or []
    if router:
        router_up.add(float(router.result() is not None))
        scraped += router.result() or []
    return write([*families(facts), up, router_up, *scraped])


@contextlib.asynccontextmanager
async def endpoint(host: str, port: int, facts: Callable[[], Facts]) -> AsyncIterator[None]:
    """Serve `/metrics` for the time of the block; port 0 serves nothing. Raises UsageError."""
    if port == 0:
        yield
        return
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=SCRAPE_S)) as session:

        async def answer(request: web.Request) -> web.Response:
            if host in LOOPBACK and not by_address(request.host):
                raise web.HTTPForbidden(text=f"ask for http://{host}:{port}/metrics\n")
            text = await joined(facts(), session)
            return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})

        app = web.Application()
        app.add_routes([web.get("/metrics", answer)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            await runner.cleanup()
            raise UsageError(refusal(host, port, error)) from None
        try:
            yield
        finally:
            await runner.cleanup()


def by_address(host: str) -> bool:
    """Whether a `Host` (`name`, `name:port`, `[::1]:port`) is an address or `localhost`. A web page may request
    through a name of its own that leads to this machine; on the loopback address that name is refused."""
    name = host[1 : host.index("]")] if host.startswith("[") and "]" in host else host.rpartition(":")[0] or host
    if name == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(name))
    return False


def refusal(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"--prometheus-port {port} is in use on {host}; stop what listens there, or choose another port"
    if error.errno == errno.EACCES:
        return f"--prometheus-port {port} is not allowed to this user; choose a port above 1023"
    return f"/metrics cannot listen on {host}:{port}: {error.strerror or error}; check --prometheus-host"
