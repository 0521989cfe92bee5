"""The page of real runs in a browser: a quickstart while it goes on and afterwards, and what a stranger finds.

`PICTURES=docs/images pytest tests/pipeline/view/test_view_in_chromium.py` writes the pictures of docs/view.md and the
reports of docs/gallery.md anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest
from chromium import CHROMIUM, Page, opened

from pipeline.view.documents import RunDocuments
from pipeline.view.html_report import documents, html
from tests.pipeline.launching import ROOT, SIMULATED, SMALL, environment, finish, made_model, running

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"{CHROMIUM} is missing: install chromium"),
]

READY: Final = {
    "run": "document.querySelectorAll('#view-run .stage').length > 4",
    "lanes": "/[1-9]\\d* requests/.test(document.querySelector('#view-lanes').textContent)",
    "curves": "document.querySelectorAll('.u-over').length > 4",
    "rollouts": "document.querySelectorAll('.rows tbody tr').length > 0",
    "logs": "document.querySelectorAll('.lines > div').length > 0",
}
PICTURES: Final = Path(os.environ["PICTURES"]) if "PICTURES" in os.environ else None
QUICKSTART: Final = [
    "--mode", "async", "--warm-start-steps", "10", "--num-rollout", "400", "--rollout-batch-size", "8",
    "--rm-type", "random:0.5", "--no-live",
]  # fmt: skip
SLOW_GRADER: Final = '''
import random
import time


def slow(response, label, metadata):
    """Half of the groups get one reward for all rollouts, and are filtered."""
    time.sleep(0.05)
    return float(random.random() < 0.5) if int(label) % 2 else 0.0
'''
HANGS: Final = '''
import asyncio


async def hangs(args, sample, sampling_params):
    """Never comes back."""
    await asyncio.Event().wait()
'''


def keep(run: Path, name: str) -> None:
    """Write the report of a run to the gallery, without paths of this machine."""
    if PICTURES is None:
        return
    text = html(documents(RunDocuments(run)))
    for path, shown in ((str(run.parent), "/home/me/runs"), (tempfile.gettempdir(), "/home/me"), (str(ROOT), "sluice")):
        text = text.replace(path, shown)
    (PICTURES.parent / "gallery").mkdir(exist_ok=True)
    (PICTURES.parent / "gallery" / f"{name}.html").write_text(text)


@contextlib.asynccontextmanager
async def view(run: Path, state: str) -> AsyncIterator[Page]:
    """A browser at the page that `launch.py view --steer` serves, once it shows a run in this state."""
    argv = [sys.executable, "launch.py", "view", str(run), "--steer"]
    server = await asyncio.create_subprocess_exec(*argv, cwd=ROOT, stdout=subprocess.PIPE, env=environment())
    try:
        assert server.stdout is not None
        _, steers = [await server.stdout.readline() for _ in range(2)]
        address = steers.split()[0].decode()
        async with opened(address) as page:
            await page.until(f"document.querySelector('#state')?.textContent === '{state}'")
            yield page
            origin = address.partition("#")[0]
            assert [one for one in page.requests if not one.startswith((origin, "data:"))] == []
            assert page.errors == []
    finally:
        server.terminate()
        await server.wait()


async def trained(process: subprocess.Popen[str], run: Path, steps: int) -> None:
    """Waits until a run has written metrics of so many steps."""
    file = run / "metrics.jsonl"
    async with asyncio.timeout(240):
        while not file.is_file() or len(file.read_bytes().splitlines()) < steps:
            assert process.poll() is None, process.communicate()
            await asyncio.sleep(0.2)


async def click(page: Page, element: str) -> None:
    await page.until(f"document.querySelector({element!r}) !== null")
    await page.value(f"document.querySelector({element!r}).click()")


def polls(page: Page) -> int:
    """How often the page has asked for news."""
    return sum(address.endswith("/api/run") for address in page.requests)


async def by_keyboard(page: Page, pictures: Path | None) -> None:
    """Every view, reached by the arrow keys from the first one. It fits in any window, in both colours, and what can be
    used has a name for a screen reader."""
    papers = set()
    await page.value("document.querySelector('#tab-run').focus()")
    for name, ready in READY.items():
        await page.until(f"document.activeElement.id === 'tab-{name}'")
        await page.until(ready)
        if pictures is not None and name != "logs":  # which have paths of this machine
            await asyncio.sleep(3)  # until the newest answers are drawn
            await page.picture(pictures / f"view_{'overview' if name == 'run' else name}.png")
        for width, scheme in ((360, "dark"), (2560, "light"), (1280, "light")):
            await page.size(width)
            await page.colours(scheme)
            root = "document.documentElement"
            assert await page.value(f"{root}.scrollWidth - {root}.clientWidth") == 0, (name, width)
            papers.add((scheme, await page.value("getComputedStyle(document.body).backgroundColor")))
        used = await page.usable()
        assert len(used) > len(READY)
        assert "" not in used
        await page.press("ArrowRight", 39)
    assert len(papers) == 2, papers


async def test_the_page_of_a_quickstart_while_it_goes_on_and_when_it_has_ended(tmp_path: Path) -> None:
    run = tmp_path / "quickstart"
    with running(run, *(QUICKSTART if PICTURES is None else QUICKSTART[:2])) as process:
        await trained(process, run, 30 if PICTURES is None else 100)
        async with view(run, "running") as page:
            assert await page.value("document.querySelector('#link').textContent") == "live"
            await by_keyboard(page, PICTURES)
            await click(page, "#tab-rollouts")
            await click(page, ".rows tbody a")
            await page.until("document.querySelectorAll('.tokens span').length > 2")
            if PICTURES is not None:
                await page.picture(PICTURES / "view_rollouts.png")
            await click(page, "#tab-steer")
            buttons = "[...document.querySelectorAll('#view-steer button')]"
            await page.value(f"{buttons}.find((one) => one.textContent === 'Drain').click()")
            await page.until("document.querySelector('#dialog').open")
            await click(page, "#dialog-yes")
            await page.until("document.querySelector('#state').textContent === 'drained'")
        finish(process, run).check(130)
    async with view(run, "drained") as page:
        assert await page.value("document.querySelector('#link').textContent") == "ended"
        await by_keyboard(page, None)
        seen = await page.value("document.querySelector('#view-run').textContent")
        assert re.search(r"[\d,]+ admitted = [\d,]+ trained \+ [^=]*, 0 lost", seen), seen
    keep(run, "quickstart")


async def test_three_clicks_tell_the_bottleneck_why_groups_were_dropped_and_who_made_a_token(tmp_path: Path) -> None:
    run = tmp_path / "slow_grader"
    (tmp_path / "grader.py").write_text(SLOW_GRADER)
    flags = [
        *SMALL, *made_model(), *SIMULATED, "--mode", "async", "--num-rollout", "1000", "--samples-interval", "1",
        "--custom-rm-path", f"{tmp_path}/grader.py:slow", "--rm-type", "auto",
        'filter.dynamic_sampling_filter=["nonzero_std"]',
    ]  # fmt: skip
    with running(run, *flags) as process:
        await trained(process, run, 12)
        async with view(run, "running") as page:
            await page.until("document.querySelector('.stage.slowest .title')?.textContent === 'reward'")
            rows = "[...document.querySelectorAll('#view-run tr')].map((row) => row.textContent)"
            await page.until(f"{rows}.some((one) => one.startsWith('filteredzero_std_0.0'))")
            await click(page, "#tab-rollouts")
            await page.until("document.querySelector('.rows tbody a') !== null")
            await page.slow(1200)  # so that a poll falls between the click and its answer
            await click(page, ".rows tbody a")
            await page.until("document.querySelectorAll('.tokens span').length > 2")
            await page.value("document.querySelector('.tokens span').focus()")
            for _ in range(12):  # through the prompt
                await page.press("ArrowRight", 39)
            seen = polls(page)
            async with asyncio.timeout(60):
                while polls(page) < seen + 2:
                    await page.value("0")
                    await asyncio.sleep(0.2)
            assert sum("/api/rollout?" in address for address in page.requests) == 1, "drawn twice, the focus is lost"
            fact = await page.value("document.querySelector('.detail .facts-line').textContent")
            assert re.search(r"version \d+, published \d\d:\d\d:\d\d", fact), fact
        process.terminate()
        finish(process, run).check_books()
    keep(run, "slow_grader")


async def test_the_page_of_a_run_that_stalled_says_what_ended_it(tmp_path: Path) -> None:
    run = tmp_path / "stalled"
    (tmp_path / "hanging.py").write_text(HANGS)
    flags = [
        *SMALL, *made_model(), *SIMULATED, "--mode", "async", "--custom-generate-function-path",
        f"{tmp_path}/hanging.py:hangs", "--stall-limit-s", "3", "--stall-notice-s", "1",
    ]  # fmt: skip
    with running(run, *flags) as process:
        assert finish(process, run).code != 0
    async with view(run, "failed") as page:
        await page.until(
            "document.querySelector('#view-run').textContent.includes('nothing has moved for --stall-limit-s 3')"
        )
    keep(run, "stalled")
