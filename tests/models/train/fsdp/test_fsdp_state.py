"""States of sharded training: what an unreadable one changes, and what a failed save leaves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fsdp_rig import GRPO, LORA, PPO, state_of, train

from models.errors import TrainStateUnreadable
from models.train.huggingface.sharded_models import SHARDS, STATE, FsdpModels
from models.train.trainer import Trainer
from tests.models.test_checkpoint import check_every_flip_is_noticed

Make = Callable[..., Trainer]


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def damage(path: Path) -> None:
    """As long as before, but no safetensors file."""
    path.write_bytes(b"\xff" * path.stat().st_size)


def edit(path: Path, **fields: Any) -> None:
    path.write_bytes(msgspec.json.encode(json.loads(path.read_text()) | fields))


WAYS: dict[str, tuple[Callable[[Path], None], dict[str, Any], str]] = {
    "no_state_file": (lambda d: (d / STATE).unlink(), {}, "holds no complete state of sharded training"),
    "another_format": (lambda d: edit(d / STATE, format_version=9), {}, "format version 9, this program reads 1"),
    "no_shards": (lambda d: next((d / SHARDS).iterdir()).unlink(), {}, "lacks .*safetensors as it was written"),
    "cut_short": (lambda d: shorten(next((d / SHARDS).iterdir())), {}, "lacks .*safetensors as it was written"),
    "damaged": (lambda d: damage(next((d / SHARDS).iterdir())), {}, "holds no complete state of sharded training"),
    "no_critic": (lambda d: None, PPO, "holds no critic, which this run needs"),
    "other_parts": (lambda d: None, LORA, "the policy in .* has other names or shapes"),
}


@pytest.fixture(scope="module")
def saved(make: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved") / "state"
    trainer = make(**GRPO)
    train(trainer, range(1))
    trainer.save(directory)
    return directory


@pytest.mark.parametrize("way", list(WAYS))
def test_an_unreadable_state_changes_nothing(make: Make, saved: Path, tmp_path: Path, way: str) -> None:
    spoil, fields, words = WAYS[way]
    directory = tmp_path / "state"
    shutil.copytree(saved, directory)
    spoil(directory)
    trainer = make(**GRPO | fields)
    train(trainer, range(1))
    before = state_of(trainer)
    with pytest.raises(TrainStateUnreadable, match=words):
        trainer.load(directory)
    after = state_of(trainer)
    assert all(after[key].equal(one) for key, one in before.items())
    assert trainer._counters.steps == 1


def test_a_flipped_byte_in_any_file_is_noticed(saved: Path, tmp_path: Path) -> None:
    files = check_every_flip_is_noticed(saved, tmp_path / "checkpoints")
    assert str(STATE) in files
    assert any(name.startswith(str(SHARDS)) for name in files)


@pytest.mark.parametrize("in_background", [False, True])
def test_a_save_that_fails_says_so_and_leaves_no_state(make: Make, tmp_path: Path, in_background: bool) -> None:
    trainer = make(lambda spec: FsdpModels(spec, async_save=in_background))
    (tmp_path / "hf").write_text("in the way")

    def save() -> None:
        trainer.save(tmp_path)
        trainer._models.finish_save()  # type: ignore[attr-defined]

    with pytest.raises(OSError, match="hf"):
        save()
    assert not (tmp_path / STATE).exists()
    (tmp_path / "hf").unlink()
    save()
    trainer.load(tmp_path)


def test_a_state_is_replaced_whole(make: Make, tmp_path: Path) -> None:
    """Also by a writer that goes on training; no file of the state before is left."""
    trainer = make(lambda spec: FsdpModels(spec, async_save=True), **GRPO)
    trainer.save(tmp_path)
    (tmp_path / SHARDS / "stale.safetensors").write_bytes(b"")
    trainer.save(tmp_path)  # waits for the one before
    weights = state_of(trainer)
    train(trainer, range(1))
    trainer._models.finish_save()  # type: ignore[attr-defined]
    state = json.loads((tmp_path / STATE).read_text())
    assert set(state["files"]) == {file.name for file in (tmp_path / SHARDS).iterdir()}
    assert "stale.safetensors" not in state["files"]
    trainer.load(tmp_path)
    assert trainer._counters.steps == 0
    found = state_of(trainer)
    assert all(found[key].equal(one) for key, one in weights.items())
