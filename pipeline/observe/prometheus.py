"""The run's `/metrics` for Prometheus: its own figures, joined with those that its engines and its router answer.

Everything is read at the moment of the request: nothing is kept, so nothing is old. Each engine is asked within a short
limit, all at once; one that does not answer leaves its part out and sets `sluice_engine_up` to 0, and the run's own
figures are there whatever the engines do. Names are stable; units are in the names. docs/observability.md lists them.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Final

import aiohttp
from aiohttp import web

from pipeline.errors import EndpointError
from pipeline.facts.stats import RunSnapshot
from pipeline.observe.exposition import CONTENT_TYPE, Family, Kind, read, write

SCRAPE_S: Final = 2.0  # most that an engine may take to answer
OUTCOMES: Final = ("trained", "filtered", "stale", "failed", "discarded")
LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")
STATES: Final = ("busy", "starved", "blocked", "stalled")


@dataclass(frozen=True)
class Facts:
    """What the endpoint tells of the run."""

    run: RunSnapshot
    staleness: Mapping[int, int]  # trained tokens by staleness in versions
    restarts: Mapping[str, int]  # of each replica and engine
    dead_letters: int  # messages that nobody could process
    engines: Mapping[str, str | None]  # address by name; None for one that was there and is lost
    router: str | None  # where the router answers /metrics


def families(facts: Facts) -> list[Family]:
    """The run's own figures."""
    by_age = Family("sluice_trained_tokens_by_staleness_total", "counter", "Trained tokens by age, in versions.")
    for lag, tokens in sorted(facts.staleness.items()):
        by_age.add(tokens, staleness=str(lag))
    restarts = Family("sluice_restarts_total", "counter", "Restarts of a replica or an engine.")
    for replica, n in sorted(facts.restarts.items()):
        restarts.add(n, replica=replica)
    lost = one("sluice_dead_letters_total", "counter", "Messages that no replica could process.", facts.dead_letters)
    run = facts.run
    return [*progress(run), *groups(run), *learning(run), by_age, *stages(run), *engines(run), restarts, lost]


def one(name: str, kind: Kind, help_text: str, value: float | None) -> Family:
    return Family(name, kind, help_text).add(value)


def progress(run: RunSnapshot) -> list[Family]:
    """Steps, time and tokens."""
    planned = None if run.total_steps is None else float(run.total_steps)
    return [
        Family("sluice_run_info", "gauge", "Always 1; the labels say what runs.").add(1, mode=run.mode),
        one("sluice_step", "gauge", "Rollout batches trained.", run.step),
        one("sluice_steps_planned", "gauge", "Rollout batches to train.", planned),
        one("sluice_elapsed_seconds", "gauge", "Since this phase of the run began.", run.elapsed_s),
        one("sluice_eta_seconds", "gauge", "To the end, at the pace of the last steps.", run.eta_s),
        one("sluice_weight_version", "gauge", "Newest weights that all engines carry.", run.version),
        one("sluice_trained_tokens_total", "counter", "Response tokens trained.", run.trained_tokens),
        one("sluice_trained_tokens_per_second", "gauge", "Over the last steps.", run.trained_tokens_per_s),
        one("sluice_wasted_tokens_total", "counter", "Generated for groups that were not trained.", run.wasted_tokens),
    ]


def groups(run: RunSnapshot) -> list[Family]:
    """Ledger and gate."""
    ended = Family("sluice_groups_settled_total", "counter", "Groups that have their outcome, by outcome.")
    for outcome in OUTCOMES:
        ended.add(getattr(run.ledger, outcome), outcome=outcome)
    capacity = None if run.may_enter is None else float(run.may_enter)
    return [
        one("sluice_groups_admitted_total", "counter", "Groups that entered.", run.ledger.admitted),
        ended,
        one("sluice_groups_open", "gauge", "Groups in flight.", run.ledger.open),
        one("sluice_gate_capacity_groups", "gauge", "Groups that may enter now.", capacity),
    ]


def learning(run: RunSnapshot) -> list[Family]:
    """Reward, evaluations, staleness."""
    value = Family("sluice_eval_score", "gauge", "Newest evaluation of a data set.")
    version = Family("sluice_eval_version", "gauge", "Weights that the newest evaluation measured.")
    for dataset, (measured, score) in run.evals.items():
        value.add(score, dataset=dataset)
        version.add(measured, dataset=dataset)
    return [
        one("sluice_reward_mean", "gauge", "Mean reward of the groups of the last step.", run.reward_mean),
        one("sluice_reward_recent_mean", "gauge", "Mean of the last 20 steps.", run.reward_recent),
        value,
        version,
        one("sluice_staleness_mean_versions", "gauge", "Of all trained tokens.", run.staleness_mean),
        one("sluice_staleness_max_versions", "gauge", "Of all trained tokens.", run.staleness_max),
        one("sluice_staleness_bound_versions", "gauge", "No older token is trained.", run.staleness_bound),
    ]


def stages(run: RunSnapshot) -> list[Family]:
    """One sample per stage; shares are of its replicas' time in the last 15 seconds."""
    share = Family("sluice_stage_time_ratio", "gauge", "Share of its replicas' time in the last 15 seconds, by state.")
    counted: dict[str, Family] = {
        "replicas": Family("sluice_stage_replicas", "gauge", "Replicas that report."),
        "queue_depth": Family("sluice_stage_queue_messages", "gauge", "Messages waiting in front of the stage."),
        "in_flight": Family("sluice_stage_in_flight_messages", "gauge", "Messages being worked on."),
        "items_out": Family("sluice_stage_messages_total", "counter", "Messages sent on."),
        "tokens_per_s": Family("sluice_stage_tokens_per_second", "gauge", "Tokens made or trained."),
        "failures": Family("sluice_stage_failures_total", "counter", "Samples or calls that failed."),
    }
    for row in run.stages:
        for state in STATES:
            share.add(getattr(row, state), stage=row.stage, state=state)
        for name, family in counted.items():
            family.add(getattr(row, name), stage=row.stage)
    return [share, *counted.values()]


def engines(run: RunSnapshot) -> list[Family]:
    """What is known of the engines that generate beside their own metrics."""
    counted = {
        "version": Family("sluice_engine_weight_version", "gauge", "Weights that the engine carries."),
        "idle": Family("sluice_engine_idle_ratio", "gauge", "Share of the last seconds in which nothing ran."),
        "update_s": Family("sluice_engine_update_seconds", "gauge", "Length of the newest weight update."),
    }
    for row in run.engines:
        for name, family in counted.items():
            if (value := getattr(row, name)) is not None:
                family.add(value, engine=row.name)
    return [*counted.values()]


async def scrape(session: aiohttp.ClientSession, url: str, labels: Mapping[str, str]) -> list[Family] | None:
    """Families of one source; None if it is not there or says that it is broken. Waits for it, at most SCRAPE_S.

    A source without metrics (SGLang without --enable-metrics: 404) is there and has none.
    """
    try:
        async with session.get(f"{url}/metrics") as answer:
            if answer.status >= 500:
                return None
            return read(await answer.text(errors="replace"), labels) if answer.status == 200 else []
    except (aiohttp.ClientError, TimeoutError, OSError):  # gone, hung, or not speaking HTTP: its `up` says so
        return None


async def joined(facts: Facts, session: aiohttp.ClientSession) -> str:
    """The whole text. Waits for the slowest source, at most SCRAPE_S."""
    places = {name: url for name, url in facts.engines.items() if url is not None}
    async with asyncio.TaskGroup() as tasks:
        asked = {n: tasks.create_task(scrape(session, url, {"engine": n})) for n, url in places.items()}
        behind = facts.router and tasks.create_task(scrape(session, facts.router, {"router": "router"}))
    up = Family("sluice_engine_up", "gauge", "1 if the engine answered this request, else 0.")
    router_up = Family("sluice_router_up", "gauge", "1 if the router answered this request, else 0.")
    found: list[Family] = []
    for name in facts.engines:
        answer = asked[name].result() if name in asked else None
        up.add(float(answer is not None), engine=name)
        found += answer or []
    if behind:
        router_up.add(float(behind.result() is not None))
        found += behind.result() or []
    return write([*families(facts), up, router_up, *found])


@contextlib.asynccontextmanager
async def endpoint(host: str, port: int, facts: Callable[[], Facts]) -> AsyncIterator[None]:
    """Serve `/metrics` for the time of the block; port 0 serves nothing. Raises EndpointError."""
    if port == 0:
        yield
        return
    timeout = aiohttp.ClientTimeout(total=SCRAPE_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:

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
            raise EndpointError(refusal(host, port, error)) from None
        try:
            yield
        finally:
            await runner.cleanup()


def by_address(host: str) -> bool:
    """Whether a `Host` (`name`, `name:port`, `[::1]:port`) is an address or `localhost`. What a web page asks through a
    name of its own that leads to this machine has that name there, and is not answered on the loopback address."""
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
