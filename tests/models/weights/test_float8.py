"""Weights in float8 with a scale for each block: what they are worth, and what of them goes to the engines."""

from __future__ import annotations

import json
import math
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_up import checkpoint
from safetensors.torch import load_file

from models.convert import main
from models.engines.embedded.model_spec import ModelSpec
from models.engines.embedded.transformer import LiveWeights
from models.errors import CheckpointUnavailable, SourceError
from models.families.fp8 import PUBLISHED, quantised
from models.families.source import CheckpointTensors
from models.tiny import TinyRecipe, make_tiny_checkpoint
from models.weights.layout import plan_buckets, stored_tensors
from models.weights.shared_memory_writer import SlotWriter
from models.weights.transfer import tensor_view

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def values_of(numbers: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Number by number."""
    rows, columns = numbers.shape
    found = [[float(scales[i // block[0], j // block[1]]) for j in range(columns)] for i in range(rows)]
    return numbers.float() * torch.tensor(found, dtype=torch.float32).view(rows, columns)


@given(
    st.tuples(st.integers(1, 40), st.integers(1, 40)), st.tuples(st.integers(1, 20), st.integers(1, 20)),
    st.integers(0, 1 << 30), st.sampled_from([1e-20, 1e-3, 1.0, 1e20]),
)  # fmt: skip
def test_a_value_is_off_by_the_rounding_of_four_bits_and_a_second_time_by_nothing(
    shape: tuple[int, int], block: tuple[int, int], seed: int, size: float
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size
    weight[0, 0] = 0.0
    numbers, scales = quantised(weight, block)
    assert (numbers.dtype, numbers.shape, scales.dtype) == (torch.float8_e4m3fn, weight.shape, torch.float32)
    assert scales.shape == tuple(map(math.ceil, (shape[0] / block[0], shape[1] / block[1])))
    found = values_of(numbers, scales, block)
    spread = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]
    # Half of the last of three bits behind the point, or half of the smallest number there is, 2^-9.
    assert bool(((found - weight).abs() <= 1.001 * torch.maximum(weight.abs() / 16, spread * 2**-10)).all())
    assert float(numbers.float().abs().max()) == (448 if weight.any() else 0), "the largest there is is used"
    again, same = quantised(found, block)
    assert torch.equal(again.view(torch.uint8), numbers.view(torch.uint8))
    assert torch.allclose(same, scales, rtol=1e-6)


def test_an_empty_block_stays_empty_and_one_that_went_wrong_stays_wrong() -> None:
    weight = torch.zeros(4, 8)
    weight[0, 5], weight[2, 0], weight[2, 5] = torch.nan, torch.inf, 8.4e-43  # the last scale has one bit
    numbers, scales = quantised(weight, (2, 4))
    found = values_of(numbers, scales, (2, 4)).isnan()
    assert found.tolist() == [[False] * 4 + [True] * 4] * 2 + [[True] * 4 + [False] * 4] * 2
    assert float(scales[0, 0]) == 1.0


def made(root: Path, block: tuple[int, int] = (5, 3)) -> tuple[Path, torch.Tensor]:
    """A checkpoint of one matrix, and what it is worth."""
    weight = torch.randn(13, 17, generator=torch.Generator().manual_seed(1))
    numbers, scales = quantised(weight, block)
    config = json.dumps({"quantization_config": PUBLISHED | {"weight_block_size": block}})
    tensors = {"a.weight": numbers, "a.weight_scale_inv": scales, "b.bias": torch.ones(3)}
    return checkpoint(root / "made", tensors, config), values_of(numbers, scales, block)


def test_a_tensor_is_read_as_what_it_is_worth(tmp_path: Path) -> None:
    """Blocks at both edges are smaller."""
    path, wanted = made(tmp_path)
    with CheckpointTensors(path) as tensors:
        assert sorted(tensors.files) == ["a.weight", "b.bias"], "a scale is no weight of its own"
        assert torch.equal(tensors.whole("a.weight"), wanted)
        assert torch.equal(tensors.whole("b.bias"), torch.ones(3))


def test_scales_that_the_configuration_does_not_explain_are_refused(tmp_path: Path) -> None:
    path, _ = made(tmp_path)
    (path / "config.json").write_text("{}")
    with pytest.raises(CheckpointUnavailable, match=r"a\.weight_scale_inv, .* quantization_config=None"):
        CheckpointTensors(path)
    lonely = {"a.weight": torch.zeros(2, 2, dtype=torch.float8_e4m3fn)}
    with pytest.raises(SourceError, match=r"'a\.weight' has dtype F8_E4M3.*with _scale_inv beside it"):
        SlotWriter(tmp_path / "slots", checkpoint(tmp_path / "lonely", lonely))


# A model of its own in float8: what the trainer exports goes to the engines quantised, and is there what it is worth.


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made by the command; matrices are larger than a block, and no multiple of it."""
    root = tmp_path_factory.mktemp("float8")
    make_tiny_checkpoint(root / "plain", TinyRecipe(hidden_size=192, num_layers=2))
    assert main(["to-float8", "--hf", str(root / "plain"), "--out", str(root / "float8")]) == 0
    return root / "float8"


def exported(source: Path, moved: float = 0.0) -> dict[str, torch.Tensor]:
    """What a trainer has whose values moved."""
    with CheckpointTensors(source) as tensors:
        return {name: tensors.whole(name).float() * (1 + moved) for name in tensors.files}


def test_the_first_version_has_the_bytes_of_the_checkpoint_and_a_later_one_other_scales(
    source: Path, tmp_path: Path
) -> None:
    stored = load_file(source / "model.safetensors")
    with closing(SlotWriter(tmp_path / "slots", source)) as writer:
        first = writer.write(0, 0, iter(exported(source).items()))
        found = load_file(Path(first.path, "model.safetensors"))
        assert found.keys() == stored.keys()
        for name, tensor in stored.items():
            assert found[name].dtype == tensor.dtype, name
            if tensor.dtype == torch.float8_e4m3fn:
                assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
            else:
                assert torch.allclose(found[name], tensor, rtol=1e-6), name
        assert json.loads(Path(first.path, "config.json").read_text())["quantization_config"] == PUBLISHED
        assert first.element_bytes == 1
        later = load_file(Path(writer.write(1, 0, iter(exported(source, 0.5).items())).path, "model.safetensors"))
        assert torch.equal(later[Q_PROJ].view(torch.uint8), stored[Q_PROJ].view(torch.uint8))
        scale = Q_PROJ + "_scale_inv"
        assert torch.allclose(later[scale], 1.5 * stored[scale], rtol=1e-6)


def test_the_embedded_engine_serves_what_the_numbers_are_worth(source: Path, tmp_path: Path) -> None:
    spec = ModelSpec.read(source)
    weights = LiveWeights(spec, torch.device("cpu"), torch.float32)
    with closing(SlotWriter(tmp_path / "slots", source)) as writer:
        moved = exported(source, 0.25)
        weights.load(Path(writer.write(1, 0, iter(moved.items())).path))
    off = {name: float((weights.names[name] - moved[name]).abs().max() / moved[name].abs().max()) for name in moved}
    assert max(off.values()) < 1e-6, "of a matrix that moved as a whole the scales move"
    other = {**moved, Q_PROJ: torch.randn(moved[Q_PROJ].shape, generator=torch.Generator().manual_seed(3))}
    with closing(SlotWriter(tmp_path / "others", source)) as writer:
        weights.load(Path(writer.write(1, 0, iter(other.items())).path))
    difference = (weights.names[Q_PROJ] - other[Q_PROJ]).abs()
    assert 0.01 < float(difference.max()) < float(other[Q_PROJ].abs().max()) / 16


def test_what_a_simulated_trainer_passes_on_is_quantised_too(source: Path, tmp_path: Path) -> None:
    """As in an evaluation of a checkpoint: nothing is trained, and the engines get the policy in their types."""
    policy = source.with_name("plain") / "model.safetensors"
    with closing(SlotWriter(tmp_path / "slots", source)) as writer:
        computed = writer.write(0, 0, iter(load_file(policy).items()))
        passed_on = writer.write(1, 0, iter(stored_tensors(policy)))
    assert passed_on.digest == computed.digest


def test_buckets_carry_numbers_and_scales(source: Path, tmp_path: Path) -> None:
    with closing(SlotWriter(tmp_path / "slots", source)) as writer:
        manifest = writer.write(0, 0, iter(exported(source).items()))
        data = bytearray(Path(manifest.path, "model.safetensors").read_bytes())
        buckets = plan_buckets(writer.layout, 100_000)
        found = {item.spec.name: tensor_view(data, item.spec, item.start) for one in buckets for item in one.tensors}
        stored = load_file(Path(manifest.path, "model.safetensors"))
    assert len(buckets) > 2
    assert {name: tensor.dtype for name, tensor in found.items()} == {name: one.dtype for name, one in stored.items()}
    assert all(torch.equal(found[name].float(), one.float()) for name, one in stored.items())


def test_there_and_back(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`to-bfloat16` gives the values rounded, without the quantisation; a directory that is in use is refused."""
    back = tmp_path / "back"
    assert main(["to-bfloat16", "--hf", str(source), "--out", str(back)]) == 0
    found, wanted = load_file(back / "model.safetensors"), exported(source)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in wanted.items())
    config = json.loads((back / "config.json").read_text())
    assert (config["dtype"], "quantization_config" in config) == ("bfloat16", False)
    assert main(["to-float8", "--hf", str(source), "--out", str(back)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert main(["hf-to-megatron", "--hf", str(source), "--out", str(tmp_path / "megatron")]) == 2
    assert "is quantised; run to-bfloat16 first" in capsys.readouterr().err
    nowhere = source / "model.safetensors" / "out"
    assert main(["to-float8", "--hf", str(source), "--out", str(nowhere)]) == 2
    assert capsys.readouterr().err == f"{nowhere}: Not a directory; remove what was begun, and convert again\n"
