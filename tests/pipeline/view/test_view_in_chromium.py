"""The page on the real server and the files of a run: what somebody who does not know the run finds, in few clicks."""

from __future__ import annotations

from pathlib import Path

import pytest
from chromium import CHROMIUM, opened
from made_run import made_run

from pipeline.view import documents as module
from pipeline.view.documents import RunDocuments
from pipeline.view.server import serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"{CHROMIUM} is missing: install chromium"),
]


async def test_two_clicks_tell_how_a_run_ended_why_groups_were_dropped_and_who_made_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "decoder_of", lambda run: None)  # it has no tokenizer
    documents = RunDocuments(made_run(tmp_path / "run").path)
    async with serving(documents, 0, "look") as port, opened(f"http://127.0.0.1:{port}/#token=look") as page:
        await page.until("document.querySelector('#state')?.textContent === 'killed'")
        await page.until("document.querySelector('main').textContent.includes('zero_std_0.0')")
        seen = await page.value("document.querySelector('#view-run').textContent")
        assert "8 admitted = 3 trained + 3 filtered + 1 failed + 1 in flight, 0 lost" in seen
        rows = "[...document.querySelectorAll('#view-run tr')].map((row) => row.textContent)"
        told = await page.value(rows)
        assert {"filteredzero_std_0.02", "filteredtoo_long1"} <= set(told), told

        await page.value("document.querySelector('#tab-rollouts').click()")
        await page.until("document.querySelectorAll('.rows tbody tr').length === 3")
        await page.value("[...document.querySelectorAll('.rows a')].find((one) => one.textContent === '0.0').click()")
        await page.until("document.querySelectorAll('.tokens span').length === 7")
        await page.value("document.querySelector('.tokens span').focus()")
        for _ in range(5):
            await page.press("ArrowRight", 39)
        told = await page.value("document.querySelector('.detail .facts-line').textContent")
        assert "version 1, published " in told
        assert "log-prob -0.4" in told
        assert "advantage 1.5" in told
        assert page.errors == []
        assert "look" not in await page.value("location.href")
