"""A run whose engine takes no weights: it ends with the reason, in bounded time, instead of standing still."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import SIMULATED, SMALL, here, made_model

from models.engines.client import EngineClient, WeightsUpdated
from models.errors import EngineRefused


def test_an_engine_that_refuses_the_second_version_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = EngineClient.update_weights_from_disk

    async def update(client: EngineClient, path: str, label: str | None, flush_cache: bool = True) -> WeightsUpdated:
        if label == "0.0":
            return await original(client, path, label, flush_cache)
        raise EngineRefused(client.base_url, 400, "no room for them")

    monkeypatch.setattr(EngineClient, "update_weights_from_disk", update)
    monkeypatch.setattr("stages.engines.engine_control.RETRY_S", 0.01)
    limits = ["--deadline-s", "60", "--update-weight-max-failures", "3"]  # the first, should it stand still after all
    done = here(tmp_path / "run", *SMALL, *made_model(), *SIMULATED, *limits)
    assert done.code == 1
    assert "engine-0: 3 failures in a row: the update to version" in done.err
    assert "no room for them" in done.err
