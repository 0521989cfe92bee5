"""Weights under Hugging Face names, gathered from one process or from shards, and the checkpoint directories they fill.

    model.safetensors                   or, where that would exceed `max_shard_bytes`,
    model-00001-of-00003.safetensors    with model.safetensors.index.json
    config.json, tokenizer, ...         as in the checkpoint that training started from

Invariants of gathering, which gives what `save_pretrained` would write:
- names, order and values are the same however a model is sharded; a tensor shared by two names appears once, under the
  name that a checkpoint stores;
- no more than one bucket (a decoder layer, or one tensor that belongs to none) is gathered at a time, from the shards
  that the optimizer updates; what is whole already is copied only where its precision changes.

Invariants of files:
- at most one shard is in memory, on the host; what a tensor is a view of is released with the shard;
- `config.json` appears last: a directory that has one is complete, and is on disk (fsync) when `write_hf` returns;
- names, shapes, dtypes and bytes are those of the caller; in the configuration only `dtype` and a quantisation that no
  longer holds are changed.
"""

from __future__ import annotations

import errno
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from models.disk import sync, sync_tree
from models.errors import CheckpointUnavailable
from models.families.source import CheckpointTensors, copy_all_but_weights

_LAYER = re.compile(r"^(.*\.\d+)\.")


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor; a view."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor without its sharding, in `dtype` if it is floating-point; gathered on `device`. Collective."""
    tensor = _cast(tensor.detach(), dtype)  # before it travels
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.to_local().device != device and device.type == "cuda":  # offloaded: gathered on the GPU
        tensor = DTensor.from_local(
            tensor.to_local().to(device),
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    return tensor.full_tensor()


def hf_tensors(
    model: Any,
    *,
    device: torch.device,
    dtype: torch.dtype | None,
    sort: bool,
    first: bool = True,
    merged: Mapping[str, Callable[[], Tensor]] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of all weights, as a checkpoint stores them; nothing but in the first process.

    Collective: run it to its end everywhere. `dtype`: what floating-point tensors are cast to; `sort`: whether the
    model's weights are converted on the way, which sorts them; `merged`: what makes each whole weight, where it is not
    simply a parameter.
    """
    from transformers.core_model_loading import dot_natural_key, revert_weight_conversion

    if merged is None:
        state = _holders(model)
        merged = {name: partial(whole, state[name], device, dtype) for name in stored_names(model)}
    for bucket in buckets(sorted(merged, key=dot_natural_key) if sort else list(merged)):
        # All gather before one converts: what the first process does with them must not hold up the others.
        found = {name: _cast(merged[name](), dtype) for name in bucket}
        if first:
            # Some architectures fuse weights in memory (experts, for instance) that checkpoints store one by one.
            yield from ((name, tensor.contiguous()) for name, tensor in revert_weight_conversion(model, found).items())


def converts(model: Any) -> bool:
    """Whether checkpoints of a loaded model store some of its weights in another form, sorted by name."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    if getattr(model, "_weight_conversions", None) is not None:
        return True
    return bool(get_model_conversion_mapping(model, add_legacy=False))


def buckets(names: Sequence[str]) -> Iterator[list[str]]:
    """Names of one layer together, others alone, in the order given."""
    by_layer = groupby(names, key=lambda name: found[1] if (found := _LAYER.match(name)) else name)
    return (list(group) for _, group in by_layer)


def stored_names(model: Any) -> list[str]:
    """Names of all weights of a model, in the order of its state, each shared tensor under the name that is stored."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    holders = _holders(model)
    names = list(model.state_dict().keys())
    seen: set[int] = set()
    out = []
    # Names that a checkpoint leaves out come last, so that the stored name of a shared tensor is the one that is kept.
    for name in [n for n in names if n not in tied] + [n for n in names if n in tied]:
        if id(holders[name]) not in seen:
            seen.add(id(holders[name]))
            out.append(name)
    return out


def model_tensors(model: Any) -> dict[str, Tensor]:
    """Parameters, each shared one once, and what else a checkpoint would hold."""
    kept = model.state_dict()
    found = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return found | {name: buffer for name, buffer in model.named_buffers() if name in kept}


def _holders(model: Any) -> dict[str, Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


MAX_SHARD_BYTES: Final = 5_000_000_000
WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
CONFIG: Final = "config.json"
_STAGED: Final = "staged-for-hf"


def write_hf(
    directory: Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    source: Path | str,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    writes: bool = True,
) -> None:
    """Write `tensors` and what belongs to `source` (directory or hub id).

    `writes=False`: a process that only takes part in the collectives behind `tensors`. They are run to their end in any
    case: the other processes wait in them. Weights that are in `directory` already are replaced. Raises `ValueError`
    for a name that comes twice, `OSError`.
    """
    tensors = iter(tensors)
    try:
        if writes:
            _write_hf(directory, tensors, source, max_shard_bytes)
    finally:
        for _ in tensors:
            pass


def _write_hf(
    directory: Path, tensors: Iterable[tuple[str, torch.Tensor]], source: Path | str, max_shard_bytes: int
) -> None:
    path = Path(source).expanduser()
    if path.is_dir() and directory.exists() and path.samefile(directory):
        raise ValueError(f"write_hf would overwrite its source {str(source)!r}; write to another directory")
    directory.mkdir(parents=True, exist_ok=True)
    _remove_weights(directory)
    writer = _ShardWriter(directory, max_shard_bytes)
    for name, tensor in tensors:
        writer.add(name, tensor)
    writer.finish()
    _copy_settings(directory, source, writer.dtypes)
    sync_tree(directory)


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """A safetensors file, on disk when this returns. Raises `OSError`, with errno where the disk is full."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        full = "No space left" in str(error)
        raise OSError(errno.ENOSPC if full else errno.EIO, f"cannot be written: {error}", str(path)) from error
    sync(path)


class _ShardWriter:
    """Collects tensors into files of a bounded size."""

    def __init__(self, directory: Path, max_shard_bytes: int) -> None:
        self._directory, self._limit = directory, max_shard_bytes
        self._shard: dict[str, torch.Tensor] = {}
        self._shard_bytes = 0
        self._storages: set[int] = set()
        self._written: list[list[str]] = []  # names of each file
        self._seen: set[str] = set()
        self.dtypes: Counter[torch.dtype] = Counter()  # bytes of each

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if name in self._seen:
            raise ValueError(f"the weight {name!r} comes twice; each name may be written once")
        nbytes = tensor.numel() * tensor.element_size()
        if self._shard and self._shard_bytes + nbytes > self._limit:
            self._flush()
        self._seen.add(name)
        self._shard[name] = self._owned(tensor)
        self._shard_bytes += nbytes
        self.dtypes[tensor.dtype] += nbytes

    def _owned(self, tensor: torch.Tensor) -> torch.Tensor:
        """On the host, contiguous, and the only user of its memory within the shard, as safetensors asks."""
        host = tensor.detach().cpu().contiguous()
        storage = host.untyped_storage()
        if storage.nbytes() != host.numel() * host.element_size() or storage.data_ptr() in self._storages:
            host = host.clone()
            storage = host.untyped_storage()
        if host.numel():
            self._storages.add(storage.data_ptr())
        return host

    def _flush(self) -> None:
        write_tensors(self._staged(len(self._written)), self._shard)
        self._written.append(list(self._shard))
        self._shard, self._shard_bytes, self._storages = {}, 0, set()

    def finish(self) -> None:
        """Give the files their names, which tell how many there are."""
        if self._shard or not self._written:
            self._flush()
        if len(self._written) == 1:
            self._staged(0).replace(self._directory / WEIGHTS)
            return
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._written):
            file = f"model-{number + 1:05d}-of-{len(self._written):05d}.safetensors"
            self._staged(number).replace(self._directory / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self.dtypes.total()}, "weight_map": dict(sorted(weight_map.items()))}
        (self._directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _staged(self, number: int) -> Path:
        return self._directory / f"{number:05d}.{_STAGED}"


def _remove_weights(directory: Path) -> None:
    """Of a writing before, so that no file of it is taken for one of this; the configuration first."""
    (directory / CONFIG).unlink(missing_ok=True)
    for file in directory.iterdir():
        if file.name == INDEX or file.name.endswith((".safetensors", _STAGED)):
            file.unlink()


def _copy_settings(directory: Path, source: Path | str, dtypes: Mapping[torch.dtype, int]) -> None:
    """Configuration, generation configuration, tokenizer, chat template; the configuration last."""
    path = Path(source).expanduser()
    aside = directory / f"{CONFIG}.{_STAGED}"
    if path.is_dir():
        shutil.copyfile(path / CONFIG, aside)
        copy_all_but_weights(path, directory, but=(CONFIG,))
    else:
        from transformers import GenerationConfig
        from transformers.utils import cached_file

        copy_tokenizer(str(source), directory)
        try:
            aside.write_bytes(Path(str(cached_file(str(source), CONFIG))).read_bytes())
        except OSError as error:
            raise CheckpointUnavailable(
                f"the configuration of {str(source)!r} could not be had ({error}); give a directory in Hugging Face "
                "format"
            ) from error
        if not (directory / "generation_config.json").exists():
            with suppress(OSError):  # the checkpoint may have none
                GenerationConfig.from_pretrained(str(source)).save_pretrained(directory)
    aside.write_text(json.dumps(_true_of(json.loads(aside.read_text()), dtypes), indent=2) + "\n")
    sync(aside)
    sync(directory)
    aside.replace(directory / CONFIG)


def copy_tokenizer(source: str, target: Path) -> None:
    """Put the tokenizer of `source` beside a model: files of a directory as they are, else through transformers."""
    path = Path(source).expanduser()
    if path.is_dir():
        copy_all_but_weights(path, target)
        return
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(source).save_pretrained(target)


def _true_of(config: dict[str, Any], dtypes: Mapping[torch.dtype, int]) -> dict[str, Any]:
    """The configuration with the precision that was written, with its quantisation, and without one that was not."""
    if not dtypes:
        return config
    if torch.float8_e4m3fn in dtypes:
        from models.families.fp8 import PUBLISHED

        return {"quantization_config": PUBLISHED} | config
    main = str(max(dtypes, key=lambda dtype: dtypes[dtype])).removeprefix("torch.")
    floating = [dtype for dtype in dtypes if dtype.is_floating_point]
    if floating and all(dtype.itemsize > 1 for dtype in floating):
        config = {key: value for key, value in config.items() if key != "quantization_config"}
        keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
        config = config | dict.fromkeys(keys, main)
    return config


# -------------------------------------------------------------------------- reading


def checksum(tensor: torch.Tensor) -> str:
    """`<dtype>:<shape>:<xxh3-128 of the bytes>`, equal exactly if the tensors are bit-identical."""
    import xxhash

    host = tensor.detach().cpu().contiguous()
    digest = xxhash.xxh3_128_hexdigest(host.reshape(-1).view(torch.uint8).numpy()) if host.numel() else "empty"
    return f"{str(host.dtype).removeprefix('torch.')}:{'x'.join(map(str, host.shape))}:{digest}"


def checksums(directory: Path) -> dict[str, str]:
    """Of every weight of a checkpoint, by name, however it is cut into files. Raises `CheckpointUnavailable`."""
    with CheckpointTensors(directory) as stored:
        return {name: checksum(stored.whole(name)) for name in stored.files}
