"""Checkpoints of Megatron-LM: the index is read without running code, and the weights are those that were saved."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from models.convert import main
from models.errors import TrainStateUnreadable
from models.train.megatron.checkpoint_files import Chunk, Entry, Index, torch_metadata
from models.train.megatron.foreign_index import iteration_of, read_index
from tests.models.train.families.family_models import save_model

INDEX: Index = {
    "decoder.layers.mlp.linear_fc1.weight": Entry(
        "bfloat16",
        (2, 6, 4),
        [Chunk((0, 0, 0), (1, 6, 4), "__0_0.distcp", 0, 90), Chunk((1, 0, 0), (1, 6, 4), "__1_0.distcp", 7, 90)],
    ),
    "decoder.final_layernorm.weight": Entry("float32", (4,), [Chunk((0,), (4,), "__1_0.distcp", 97, 40)]),
}


def written(directory: Path, metadata: Any = None) -> Path:
    """A checkpoint of one iteration."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("__0_0.distcp", "__1_0.distcp"):
        (directory / name).touch()
    (directory / ".metadata").write_bytes(pickle.dumps(torch_metadata(INDEX) if metadata is None else metadata))
    return directory


def test_the_index_is_that_which_torch_has_written(tmp_path: Path) -> None:
    metadata = torch_metadata(INDEX)
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    metadata.state_dict_metadata["decoder.layers.self_attention.linear_qkv._extra_state"] = BytesStorageMetadata()
    metadata.all_local_plans = [torch.Size((2, 3)), Path("of no use")]
    assert read_index(written(tmp_path, metadata)) == INDEX


class Ran(Exception):
    """Code of a file has run."""


def run(*_: Any) -> None:
    raise Ran


class Hostile:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.reduced = function, arguments

    def __reduce__(self) -> Any:
        return self.reduced


@pytest.mark.parametrize(
    "hostile",
    [Hostile(run), Hostile(os.system, "touch ran"), Hostile(eval, "open('ran', 'w')"), Hostile(torch.load, "ran")],
)
def test_a_file_that_would_run_code_is_only_refused(
    hostile: Hostile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for place, metadata in enumerate((hostile, [hostile], {"state_dict_metadata": hostile})):
        with pytest.raises(TrainStateUnreadable, match=r"\.metadata is damaged, or of a format that is not known here"):
            read_index(written(tmp_path / str(place), metadata))
    assert not (tmp_path / "ran").exists()


def test_a_damaged_index_and_files_that_are_elsewhere_are_refused(tmp_path: Path) -> None:
    whole = written(tmp_path / "cut") / ".metadata"
    data = whole.read_bytes()
    for length in range(0, len(data), 7):
        whole.write_bytes(data[:length])
        with pytest.raises(TrainStateUnreadable, match=r"cut/\.metadata is damaged"):
            read_index(tmp_path / "cut")
    (written(tmp_path / "gone") / "__1_0.distcp").unlink()
    with pytest.raises(TrainStateUnreadable, match=r"'__1_0\.distcp', which is no file of the directory"):
        read_index(tmp_path / "gone")
    outside = {"a": Entry("float32", (1,), [Chunk((0,), (1,), "../__0_0.distcp", 0, 4)])}
    written(tmp_path)
    with pytest.raises(TrainStateUnreadable, match=r"'\.\./__0_0\.distcp', which is no file of the directory"):
        read_index(written(tmp_path / "outside", torch_metadata(outside)))


def test_the_newest_iteration_is_found(tmp_path: Path) -> None:
    assert iteration_of(tmp_path) is None
    newest = tmp_path / "latest_checkpointed_iteration.txt"
    newest.write_text("40\n")
    with pytest.raises(TrainStateUnreadable, match=r"says '40', and iter_0000040/\.metadata does not exist"):
        iteration_of(tmp_path)
    place = written(tmp_path / "iter_0000040")
    assert iteration_of(tmp_path) == iteration_of(place) == place
    newest.write_text("release")
    assert iteration_of(tmp_path.parent / tmp_path.name / "iter_0000040") == place
    assert iteration_of(written(tmp_path / "release").parent) == tmp_path / "release"


SAVE = """
import sys
from pathlib import Path
import torch
from models import convert

def save(hf: Path, out: Path) -> None:
    with convert._processes():
        from models.train.huggingface.hf_files import checksums

        loaded = convert._build(hf, None, checksums(hf))
        from megatron.core import dist_checkpointing
        from models.train.megatron.weights import load_hf

        load_hf([loaded.chunk], loaded.hf_config, hf)
        out.mkdir(parents=True)
        arguments = {"args": {"seq_length": 8}, "iteration": 40, "checkpoint_version": 3.0}
        dist_checkpointing.save({"model": loaded.chunk.sharded_state_dict(), **arguments}, str(out))

if __name__ == "__main__":
    save(*map(Path, sys.argv[1:]))
"""


@pytest.mark.slow
def test_what_megatron_core_has_saved_by_itself_comes_back_to_the_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, saved, back = tmp_path / "hf", tmp_path / "saved", tmp_path / "back"
    save_model("qwen3_moe", source, dtype=torch.bfloat16)
    (tmp_path / "save.py").write_text(SAVE)  # Megatron's writer starts processes, which read the script again
    root = str(Path(__file__).parents[4])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    command = [sys.executable, str(tmp_path / "save.py"), str(source), str(saved / "iter_0000040")]
    subprocess.run(command, check=True, capture_output=True, timeout=240, env=environment)
    (saved / "latest_checkpointed_iteration.txt").write_text("40")

    assert main(["megatron-to-hf", "--megatron", str(saved), "--hf", str(source), "--out", str(back)]) == 0
    was, now = load_file(source / "model.safetensors"), load_file(back / "model.safetensors")
    assert was.keys() == now.keys()
    assert all(was[name].dtype == now[name].dtype and torch.equal(was[name], now[name]) for name in was)

    save_model("qwen3", tmp_path / "other")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 64}))
    for hf, words in ((tmp_path / "other", "is of another model"), (source, f"has {config['vocab_size']} tokens, and")):
        asked = ["megatron-to-hf", "--megatron", str(saved), "--hf", str(hf), "--out", str(tmp_path / "no")]
        assert main(asked) == 2
        shown = capsys.readouterr().err
        assert words in shown
        assert "give the --hf directory that the checkpoint was made from" in shown
