"""A setup that fails is told as it was: closing a stage that was never set up is part of every stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from configs.schema import Config
from models.import_path import import_path
from pipeline.graph import STAGES
from pipeline.hosts.worker import ReplicaSpec, run_replica
from stages.base import MapStage
from stages.messages import RolloutSlice
from tests.stages.stage_rig import make_context


@pytest.mark.parametrize("path", STAGES.values())
async def test_a_stage_that_was_never_set_up_can_be_closed(path: str, tmp_path: Path) -> None:
    await import_path(path)(make_context(run_dir=tmp_path)).close()


class HalfMade(MapStage):
    """A custom stage whose `close` takes for granted what `setup` never made."""

    async def setup(self) -> None:
        raise ValueError("the user's own mistake")

    async def close(self) -> None:
        self.client.close()  # type: ignore[attr-defined]

    async def process(self, message: RolloutSlice) -> RolloutSlice:
        return message


async def test_an_error_of_the_clean_up_does_not_replace_that_of_the_setup(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = f"{HalfMade.__module__}:HalfMade"
    spec = ReplicaSpec("half", "half-0", path, 0, 1, 1, run_dir=str(tmp_path), inlets={}, outlets={})
    nowhere = cast(Any, None)  # a replica connects after its setup
    with pytest.raises(ValueError, match="the user's own mistake"):
        await run_replica(spec, nowhere, nowhere, Config())
    assert "closing after an error failed as well: AttributeError" in caplog.text
