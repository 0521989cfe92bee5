"""A Hugging Face checkpoint on disk: its directory, its tensors in safetensors read by parts, its context length."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from configs.schema import Config
from configs.schema.model_shapes import SCALE, fp8_block, known_shape, matrices
from models.disk import read_file
from models.errors import CheckpointUnavailable, first_line

if TYPE_CHECKING:
    from torch import Tensor

    from models.families.hugging_face_names import Piece

_INDEX = "model.safetensors.index.json"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")
_OPEN_FILES = 64  # a checkpoint of hundreds of files must not exhaust the process's


def local_directory(checkpoint: str, key: str) -> Path | None:
    """The directory that the option `key` names; None where that must be a hub id. Raises `CheckpointUnavailable`."""
    path = Path(checkpoint).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise CheckpointUnavailable(
                f"{key}={checkpoint!r} is a directory without config.json; give a directory in Hugging Face format"
            )
        return path
    if checkpoint == "tiny":
        raise CheckpointUnavailable(
            f"{key}='tiny' stands for a small random model that has to be made first; "
            "give the directory returned by models.tiny.make_tiny_checkpoint"
        )
    if checkpoint.startswith((".", "/", "~")) or checkpoint.count("/") > 1:
        raise CheckpointUnavailable(
            f"{key}={checkpoint!r} does not exist; give an existing directory in Hugging Face format or a hub id"
        )
    return None


def not_fetched(checkpoint: str, key: str, error: Exception) -> CheckpointUnavailable:
    """The error for a hub id that could not be fetched."""
    return CheckpointUnavailable(
        f"{key}={checkpoint!r} is no directory here and could not be fetched from the hub ({first_line(error)}); "
        "give an existing directory, or download the model first"
    )


class CheckpointTensors:
    """Names and tensors of a directory. Files are mapped into memory, and only the requested parts are read.

    Raises `CheckpointUnavailable`.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.files = files_by_name(directory)  # by name of the tensor
        scales = [name for name in self.files if name.endswith(SCALE) and name.removesuffix(SCALE) in self.files]
        self._scales = {name: self.files.pop(name) for name in scales}
        config = read_hf_config(directory) if scales else {}
        self._block = fp8_block(config)
        if scales and self._block is None:
            raise CheckpointUnavailable(
                f"{directory} has {scales[0]}, and in config.json "
                f"quantization_config={config.get('quantization_config')}; read are quant_method fp8 in e4m3 with "
                "weight_block_size, without scale_fmt: give the config.json that was published with the weights, or "
                "weights in bfloat16"
            )
        self._open: dict[Path, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> CheckpointTensors:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def read(
        self, piece: Piece, expert: int | None = None, dimension: int | None = None, index: int = 0, parts: int = 1
    ) -> Tensor:
        """Part `index` of `parts` equal parts of a piece, along `dimension`; None: the whole piece."""
        view = self.slice(piece.name)
        shape = view.get_shape()
        leading: tuple[Any, ...] = ()
        if piece.stacked:
            leading, shape = (expert,), shape[1:]
        spans = [slice(0, size) for size in shape]
        spans[0] = _span(0, shape[0], piece.part, piece.of, piece.name)
        if dimension is not None:
            span = spans[dimension]
            spans[dimension] = _span(span.start, span.stop, index, parts, piece.name)
        return view[(*leading, *spans)]

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Rows `first` up to `last`, as far as there are."""
        view = self.slice(name)
        size = view.get_shape()[0]
        return view[min(first, size) : max(min(last, size), min(first, size))]

    def whole(self, name: str) -> Tensor:
        """All of a tensor; of one in float8 what it is worth, in float32."""
        found = self._file_of(name).get_tensor(name)
        if self._block is None or (scale := name + SCALE) not in self._scales:
            return found
        from models.families.fp8 import dequantised

        return dequantised(found, self._file_of(scale).get_tensor(scale), self._block)

    def slice(self, name: str) -> Any:
        """The view of a tensor; safetensors reads rows at their first use."""
        return self._file_of(name).get_slice(name)

    def _file_of(self, name: str) -> Any:
        from safetensors import safe_open

        path = self.files.get(name) or self._scales.get(name)
        if path is None:
            raise CheckpointUnavailable(f"{self.directory} has no tensor {name}; download the model again")
        if path not in self._open:
            if len(self._open) >= _OPEN_FILES:
                self._close()
            try:
                self._open[path] = self._stack.enter_context(safe_open(path, framework="pt"))
            except Exception as error:
                raise CheckpointUnavailable(f"{path} cannot be read ({error}); download it again") from error
        return self._open[path]

    def _close(self) -> None:
        self._open.clear()
        self._stack.close()


def _span(start: int, stop: int, index: int, parts: int, name: str) -> slice:
    if (stop - start) % parts:
        raise CheckpointUnavailable(
            f"{name}: {stop - start} rows or columns do not divide into {parts} equal parts; choose a tensor parallel "
            "size that divides them"
        )
    length = (stop - start) // parts
    return slice(start + index * length, start + (index + 1) * length)


def copy_all_but_weights(source: Path, target: Path, but: tuple[str, ...] = ()) -> None:
    """Configuration, tokenizer and other files of a checkpoint, `but` these; existing files are kept."""
    for file in sorted(source.iterdir()):
        wanted = file.is_file() and file.name not in but and not file.name.endswith(_WEIGHT_SUFFIXES)
        if wanted and not (target / file.name).exists():
            shutil.copyfile(file, target / file.name)


def files_by_name(directory: Path) -> dict[str, Path]:
    """In which file each tensor of a checkpoint lies. Raises `CheckpointUnavailable`."""
    from safetensors import SafetensorError, safe_open

    index, names = directory / _INDEX, dict[str, Path]()
    try:
        if index.is_file():
            found = json.loads(index.read_text())["weight_map"]
            names = {name: directory / file for name, file in found.items()}
        else:
            for path in sorted(directory.glob("*.safetensors")):
                with safe_open(path, framework="np") as file:  # names only
                    names |= dict.fromkeys(file.keys(), path)
    except (OSError, ValueError, KeyError, AttributeError, SafetensorError) as error:
        raise CheckpointUnavailable(
            f"{directory} cannot be read ({type(error).__name__}: {error}); fetch the checkpoint again"
        ) from error
    if not names:
        raise CheckpointUnavailable(
            f"{directory} holds no *.safetensors; give a directory in Hugging Face format whose weights are safetensors"
        )
    missing = sorted({path.name for path in names.values() if not path.is_file()})
    if missing:
        raise CheckpointUnavailable(f"{directory} lacks {', '.join(missing)}; give a complete checkpoint")
    return names


def check_files(directory: Path) -> None:
    """Each file has a header that can be read, is as long as that says, and its tensors are those of `config.json`.
    Raises `CheckpointUnavailable`."""
    from safetensors import safe_open

    shapes: dict[str, list[int]] = {}
    for path in sorted({*files_by_name(directory).values()}):
        try:
            with safe_open(path, framework="np") as file:
                shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - no mapping
        except Exception as error:  # the binding's own, and OSError
            raise CheckpointUnavailable(f"{path} cannot be read ({error}); fetch the checkpoint again") from error
    if difference := next(_differences(read_hf_config(directory), shapes), None):
        raise CheckpointUnavailable(
            f"the weights in {directory} are not those of its config.json: {difference}; give the config.json that was "
            "published with them, or fetch the checkpoint again"
        )


def _differences(config: Mapping[str, Any], shapes: Mapping[str, list[int]]) -> Iterator[str]:
    """Of the names and shapes of matrices. A matrix that no layer has may have another name in this family."""
    shape = known_shape(config)
    if shape is None or config.get("quantization_config"):
        return
    wanted = {"model.embed_tokens.weight": [shape.vocabulary, shape.hidden]}
    kinds = {re.sub(r"\d+", "N", name, count=1) for name in shapes}
    for layer in range(shape.layers):
        for matrix in matrices(shape, layer):
            for part in (f"self_attn.{matrix.name}.weight", f"mlp.{matrix.name}.weight"):
                if f"model.layers.N.{part}" in kinds:
                    wanted[f"model.layers.{layer}.{part}"] = [matrix.outputs, matrix.inputs]
    for name, expected in wanted.items():
        if shapes.get(name, expected) != expected:
            yield f"{name} has shape {shapes[name]} instead of {expected}"
        elif name not in shapes and name != "model.embed_tokens.weight":
            yield f"{name} is missing"
    layers = shape.layers + sum(int(config.get(key) or 0) for key in ("num_nextn_predict_layers", "num_mtp_layers"))
    if f"model.layers.{layers}.input_layernorm.weight" in shapes:
        yield f"it says {shape.layers} layers, and they have more"


def prediction_layers(config: Mapping[str, Any]) -> dict[str, str]:
    """Names of layers for multi-token prediction, which stand after the last layer in published checkpoints; why they
    are left out."""
    if (first := config.get("num_hidden_layers")) is None:
        return {}
    count = int(config.get("num_nextn_predict_layers") or config.get("num_mtp_layers") or 1)
    numbers = "|".join(str(first + index) for index in range(count))
    reason = "layers for multi-token prediction are not trained, and not part of an export"
    return {rf"model\.layers\.({numbers})\..*": reason}


def read_hf_config(directory: Path) -> dict[str, Any]:
    """The `config.json` of a checkpoint. Raises `CheckpointUnavailable`."""
    path = directory / "config.json"
    try:
        found = json.loads(read_file(path))
    except OSError as error:
        raise CheckpointUnavailable(
            f"{path} cannot be read ({error.strerror}); give a directory in Hugging Face format"
        ) from error
    except ValueError as error:
        raise CheckpointUnavailable(f"{path} is not JSON ({error}); download the model again") from error
    if not isinstance(found, dict):
        raise CheckpointUnavailable(f"{path} holds no object; download the model again")
    return found


# --------------------------------------------------------------------------------------------------
# How long prompt and response may be together.


def context_limit(config: Config) -> int | None:
    """Most tokens of prompt and response: `--rollout-max-context-len`, else the model's positions; None if not known.

    Unknown too where the positions are stretched by a factor: engines do not agree on what the product is.
    """
    if config.rollout.rollout_max_context_len is not None:
        return config.rollout.rollout_max_context_len
    try:
        text = read_file(Path(config.train.hf_checkpoint, "config.json"))
        found = msgspec.json.decode(text, type=dict[str, Any])
    except (OSError, msgspec.MsgspecError):
        return None  # a hub id, or its reader reports the fault
    if found.get("rope_scaling") or "factor" in (found.get("rope_parameters") or {}):
        return None
    limit = found.get("max_position_embeddings")
    return limit if isinstance(limit, int) else None
