"""The page in a browser: each view by keyboard, with names, in both colours and three widths, with hostile text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import page_documents as made
import pytest
from aiohttp import web
from chromium import CHROMIUM, Page, opened

import pipeline
from tests.other_programs import served_app

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"{CHROMIUM} is missing: install chromium"),
]

FILES: Final = Path(pipeline.__path__[0]) / "view" / "page"
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
VIEWS: Final = ("run", "lanes", "curves", "rollouts", "logs", "steer")
READY: Final = {
    "run": "document.querySelectorAll('.stage').length === 6",
    "lanes": "document.querySelector('#view-lanes').textContent.includes('120 requests')",
    "curves": "document.querySelectorAll('.u-over').length === 10",
    "rollouts": "document.querySelectorAll('.rows tbody tr').length === 24",
    "logs": "document.querySelectorAll('.lines > div').length === 201",
    "steer": "document.querySelectorAll('#view-steer button').length > 5",
}


class Server:
    """The documents made by hand behind the policy of the real server. `asked`: (name, token or body)."""

    def __init__(self, embedded: dict[str, Any] | None) -> None:
        self.embedded, self.asked = embedded, list[tuple[str, str]]()
        self.checkpoints = [260, 240]

    async def document(self, request: web.Request) -> web.Response:
        name, key = request.match_info["name"], request.query.get("key", "")
        told = await request.text() or request.headers.get("Authorization", "")
        self.asked.append((name, told))
        later = {"lines": [], "cursor": "201"} if request.query.get("after") else made.logs()
        if name == "run":
            return web.json_response(made.run_document(checkpoints=self.checkpoints))
        plain = {"metrics": made.metrics, "lanes": made.lanes, "rollouts": made.rollouts}
        if name in plain:
            return web.json_response(plain[name]())
        rest = {"logs": later, "steer": {"ok": True, "lines": ["paused"]}}
        return web.json_response(made.rollout(int(key[1:])) if name == "rollout" else rest[name])

    async def file(self, request: web.Request) -> web.Response:
        path = FILES / (request.match_info["path"] or "index.html")
        kinds = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
        text = path.read_text()
        if self.embedded is not None and path.name == "index.html":
            data = json.dumps(self.embedded).replace("<", "\\u003c")
            text = text.replace("</body>", f'<script type="application/json" id="documents">{data}</script></body>')
        headers = {"Content-Security-Policy": POLICY}
        return web.Response(text=text, content_type=kinds[path.suffix], headers=headers)


@asynccontextmanager
async def shown(
    address: str = "#token=look", embedded: dict[str, Any] | None = None
) -> AsyncIterator[tuple[Page, Server]]:
    server, app = Server(embedded), web.Application()
    app.add_routes([web.route("*", "/api/{name}", server.document), web.get("/{path:.*}", server.file)])
    async with served_app(app) as url, opened(f"{url}/{address}") as page:
        await page.until("['running', 'completed'].includes(document.querySelector('#state')?.textContent)")
        yield page, server
        assert [one for one in page.requests if not one.startswith((f"{url}/", "data:"))] == []


async def go(page: Page, view: str) -> None:
    await page.value(f"location.hash = '#{view}'")
    await page.until(READY[view])


async def test_keys_alone_reach_every_view_which_fits_any_window_and_names_what_can_be_used() -> None:
    async with shown() as (page, server):
        assert await page.value("location.hash") == "#run"
        await page.until("!document.querySelector('#tab-steer').hidden")
        await page.value("document.querySelector('#tab-run').focus()")
        for view in VIEWS:
            await page.until(f"document.activeElement.id === 'tab-{view}'")
            await page.until(f"!document.querySelector('#view-{view}').hidden")
            await page.until(READY[view])
            used = await page.usable()
            assert len(used) > len(VIEWS)
            assert "" not in used
            for width in (360, 1280, 2560):
                await page.size(width)
                over = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
                assert await page.value(over) == 0, (view, width)
            await page.press("ArrowRight", 39)
        await page.until("document.activeElement.id === 'tab-run'")
        papers = set()
        for scheme in ("light", "dark"):
            await page.colours(scheme)
            papers.add(await page.value("getComputedStyle(document.body).backgroundColor"))
        assert len(papers) == 2
        await page.value("for (let i = 0; i < 2; i++) document.querySelector('#theme').click()")  # auto, light, dark
        await page.colours("light")
        assert await page.value("getComputedStyle(document.body).backgroundColor") in papers
        assert await page.value("getComputedStyle(document.documentElement).colorScheme") == "dark"
        assert page.errors == []
        assert {name for name, _ in server.asked} == {"run", "lanes", "metrics", "rollouts", "logs"}
        assert {token for _, token in server.asked} == {"Bearer look"}


async def test_hostile_text_is_shown_as_text_and_tokens_have_the_colours_of_their_versions() -> None:
    async with shown() as (page, _):
        await go(page, "logs")
        await page.value("location.hash = '#rollouts?key=k0'")
        await page.until("document.querySelectorAll('.tokens span').length === 40")
        text = await page.value("document.body.textContent")
        assert "<script>window.hacked=1</script><img src=x onerror=hacked=2>" in text
        assert text.count("⟨U+001B⟩[31mred") >= 4  # list, turn, token, log
        assert "⟨U+202E⟩gnirts⟨U+2069⟩ ⟨U+0000⟩" in text
        assert [one for one in text if one in "\x00\x1b\u202e\u2069"] == []
        assert await page.value("typeof window.hacked") == "undefined"
        assert await page.value("document.querySelectorAll('main img, main script').length") == 0
        spans = "[...document.querySelectorAll('.tokens span')]"
        colours = await page.value(f"{spans}.map((one) => getComputedStyle(one).backgroundColor)")
        runs = [colour for i, colour in enumerate(colours) if i == 0 or colours[i - 1] != colour]
        starts = [i for i, colour in enumerate(colours) if i == 0 or colours[i - 1] != colour]
        assert len(set(runs)) == len(made.RUNS)
        group = "[...document.querySelectorAll('.siblings a')].map((one) => one.textContent)"
        assert await page.value(group) == ["1000.0", "1000.1", "1000.2", "1000.3"]
        assert starts == [0, 6, 26, 35]
        await page.value(f"{spans}[0].focus()")
        for _ in range(30):
            await page.press("ArrowRight", 39)
        told = await page.value("document.querySelector('.detail .facts-line').textContent")
        assert told.startswith("“ t24” (id 130): version 42, published ")
        assert told.endswith("trained, log-prob -0.5, of the trainer -0.5, ratio 1, advantage 0.7")
        assert page.errors == []


async def test_a_bar_of_a_lane_tells_its_facts_and_leads_to_the_rollouts_of_its_group() -> None:
    async with shown() as (page, _):
        await go(page, "lanes")
        await page.value("document.querySelector('#view-lanes canvas').focus()")
        for key in ("n", "n", "+", "ArrowLeft", "-", "p"):
            await page.press(key)
        facts = await page.value("document.querySelector('#view-lanes .facts-line').textContent")
        assert facts.startswith("Group 900: ")
        assert "70 tokens of version 240, 50 tokens of version 241, tool calls: 1, reward 1, trained" in facts
        await page.press("Enter", 13)
        await page.until("location.hash === '#rollouts?group=900'")
        await page.until("document.querySelectorAll('.rows tbody tr').length === 24")
        assert await page.value("document.querySelector('#rollouts-group').value") == "900"
        assert page.errors == []


async def test_a_long_text_and_a_long_list_of_tokens_are_cut() -> None:
    long = made.rollout(2)
    long["row"]["turns"][0]["text"] = "e" * 10_000_000
    long["tokens"] = long["tokens"] * 200
    documents = {"run": made.run_document(), "rollouts": made.rollouts(), "rollout": {"k2": long}}
    async with shown("#rollouts?key=k2", documents) as (page, server):
        await page.until("document.querySelectorAll('.tokens span').length > 0")
        assert await page.value("document.querySelectorAll('.tokens span').length") == 4000
        assert await page.value("document.querySelector('.turn pre').textContent.length") == 20_000
        await page.value("document.querySelector('.turn .more').click()")
        assert await page.value("document.querySelector('.turn pre').textContent.length") == 220_000
        assert server.asked == []


async def test_a_report_shows_its_own_documents_and_asks_nobody() -> None:
    documents = {
        "run": made.run_document(live=False, state="completed"),
        "metrics": made.metrics(),
        "lanes": made.lanes(),
        "rollouts": made.rollouts(),
        "rollout": {"k0": made.rollout(0)},
        "logs": made.logs(),
    }
    async with shown("", documents) as (page, server):
        for view in VIEWS[:-1]:
            await go(page, view)
        await page.value("location.hash = '#rollouts?outcome=stale&reward=%3E0.5'")
        await page.until("document.querySelectorAll('.rows tbody tr').length === 4")
        assert await page.value("document.querySelector('#tab-steer').hidden")
        assert server.asked == []
        assert page.errors == []


async def test_a_run_goes_back_to_a_kept_checkpoint_once_confirmed_and_evaluation_engines_are_listed() -> None:
    async with shown() as (page, server):
        rows = "[...document.querySelectorAll('#view-run .card.engines tbody tr')].map((row) => row.textContent)"
        assert await page.value(rows) == [
            "engine-0serving26931051229%", "engine-1serving26832151229%", "eval-engine-0updating26040512–"
        ]  # fmt: skip
        await page.until("!document.querySelector('#tab-steer').hidden")
        await go(page, "steer")
        steps = "[...document.querySelectorAll('#steer-step option')].map((one) => one.value)"
        assert await page.value(steps) == ["260", "240"]
        back = "document.querySelector('#view-steer [aria-label=Go\\\\ back] button')"
        await page.value("document.querySelector('#steer-step').value = '240'")
        for answer in ("[value=no]", "[value=yes]"):
            await page.value(f"{back}.click()")
            told = await page.value("document.querySelector('#dialog').textContent")
            assert "Rollback?" in told
            assert "the checkpoint of step 240" in told
            assert await page.value("document.querySelector('#dialog-yes').className") == "danger"
            await page.value(f"document.querySelector('#dialog {answer}').click()")
            await page.until("!document.querySelector('#dialog').open")
            await asyncio.sleep(0.1)
        await page.until("document.querySelector('.answers').textContent.includes('paused')")
        sent = [json.loads(body) for name, body in server.asked if name == "steer"]
        assert sent == [{"command": "rollback", "arguments": {"step": 240}}]
        server.checkpoints = [280, 260, 240]
        await page.until(f"{steps}.length === 3")
        assert await page.value("document.querySelector('#steer-step').value") == "240", "a new one leaves it chosen"


async def test_a_change_of_the_run_is_made_once_it_is_confirmed() -> None:
    async with shown() as (page, server):
        await page.until("!document.querySelector('#tab-steer').hidden")
        await go(page, "steer")
        advised = "document.querySelector('#view-steer .primary')"
        assert await page.value(f"{advised}.textContent") == "Scale reward to 3"
        for answer in ("[value=no]", "[value=yes]"):
            await page.value(f"{advised}.click()")
            assert await page.value("document.querySelector('#dialog').open")
            await page.value(f"document.querySelector('#dialog {answer}').click()")
            await page.until("!document.querySelector('#dialog').open")
            await asyncio.sleep(0.1)
        await page.until("document.querySelector('.answers').textContent.includes('paused')")
        sent = [json.loads(body) for name, body in server.asked if name == "steer"]
        assert sent == [{"command": "scale", "arguments": {"reward": 3}}]
