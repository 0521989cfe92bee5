"""Checkpoints between Hugging Face and Megatron-core's distributed format, and to float8 and back, on the CPU.

    python -m models.convert hf-to-megatron --hf DIR --out DIR
    python -m models.convert megatron-to-hf --megatron DIR --out DIR
    python -m models.convert verify --megatron DIR --hf DIR
    python -m models.convert to-float8 --hf DIR --out DIR
    python -m models.convert to-bfloat16 --hf DIR --out DIR

`DIR` of Megatron holds `megatron/` (tensors under Megatron's own names, in the format torch_dist, for any parallel
layout), `config.json` and tokenizer, and `checksums.json`: of every Hugging Face tensor, dtype, shape and xxh3-128. A
training state of this program can be read as well, and with `--hf` a checkpoint that Megatron-LM or slime has saved in
the format torch_dist: its directory, or that of one iteration. One process holds the whole model; where that is too
much, torchrun starts several, which share it by the parallel sizes given.

Invariant: a conversion there and back returns the same names, dtypes, shapes and bytes, and `verify` proves it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from configs.schema.model_shapes import SCALE, fp8_block
from models.errors import CheckpointUnavailable, TrainConfigInvalid, TrainError, TrainStateUnreadable
from models.families.source import CheckpointTensors, read_hf_config

CHECKSUMS: Final = "checksums.json"
_SIZES: Final = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")


@dataclass(frozen=True)
class Loaded:
    """A model in this process: its chunk, and what its export is made with."""

    chunk: Any
    hf_config: dict[str, Any]
    rank: int
    layout: dict[str, int]  # the parallel sizes, as a training state records them
    dtypes: dict[str, str]  # by name, where known: a router's bias is fp32 in the model, whatever it was stored as

    def export(self) -> Iterator[tuple[str, Any]]:
        """(name, tensor) in Hugging Face's layout; with contents in the first process. Collective."""
        import torch

        from models.train.megatron.weights import export_hf

        for name, tensor in export_hf([self.chunk], self.hf_config):
            yield name, tensor.to(getattr(torch, self.dtypes[name])) if name in self.dtypes else tensor


def hf_to_megatron(hf: Path, out: Path, sizes: dict[str, int] | None = None) -> None:
    """Convert, and write the checksums of the tensors read. Raises `TrainError`."""
    _must_be_new(out)
    if read_hf_config(hf).get("quantization_config"):
        raise TrainConfigInvalid(f"--hf {hf} is quantised; run to-bfloat16 first, and convert its result")
    with _processes():
        from models.train.huggingface.hf_files import checksums, copy_tokenizer
        from models.train.megatron.weights import load_hf

        source = checksums(hf)
        loaded = _build(hf, sizes, source)
        load_hf([loaded.chunk], loaded.hf_config, hf)
        _write_megatron(loaded, out)
        found = _checksums(loaded)
        if loaded.rank == 0:
            if changed := [name for name, one in found.items() if source.get(name, one) != one]:
                raise TrainError(f"{changed[0]} of {hf} would not come back as it was; --out {out} must not be used")
            copy_tokenizer(str(hf), out)
            (out / "config.json").write_text((hf / "config.json").read_text())
            (out / CHECKSUMS).write_text(json.dumps(found, indent=1) + "\n")


def megatron_to_hf(megatron: Path, out: Path, hf: Path | None = None, sizes: dict[str, int] | None = None) -> None:
    """Convert; configuration and tokenizer come from `hf`, default: from beside the tensors. Raises `TrainError`."""
    from models.train.huggingface.hf_files import write_hf

    _must_be_new(out)
    source = hf or _settings_of(megatron)
    with _processes():
        loaded = _read_megatron(megatron, source, sizes)
        write_hf(out, loaded.export(), source, writes=loaded.rank == 0)


def verify(megatron: Path, hf: Path | None = None, sizes: dict[str, int] | None = None) -> list[str]:
    """The differences between a converted directory and a Hugging Face one, by tensor; without `hf`, `checksums.json`.

    Empty: all is equal, to the bit. The answer is the first process's. Raises `TrainError`.
    """
    from models.train.huggingface.hf_files import checksums

    source = hf or _settings_of(megatron)
    wanted = _stored_checksums(megatron) if hf is None else checksums(hf)
    if not wanted:
        raise CheckpointUnavailable(f"{megatron / CHECKSUMS} does not exist; give --hf DIR to compare with")
    with _processes():
        loaded = _read_megatron(megatron, source, sizes)
        found = _checksums(loaded)
        return [] if loaded.rank else _differences(wanted, found, loaded.hf_config)


def to_float8(hf: Path, out: Path) -> None:
    """Write a checkpoint whose projections are in float8, with a scale for each block. Raises `TrainError`."""
    from models.families.fp8 import BLOCK, quantised

    block = fp8_block(read_hf_config(hf)) or BLOCK

    def stored(name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
        if tensor.ndim == 2 and re.search(r"_proj\w*\.weight$", name):
            yield from zip((name, name + SCALE), quantised(tensor, block), strict=True)
        else:
            yield name, tensor

    _rewrite(hf, out, stored)


def to_bfloat16(hf: Path, out: Path) -> None:
    """Write a checkpoint in float8 as one in bfloat16, which rounds its values. Raises `TrainError`."""
    _rewrite(hf, out, lambda name, tensor: [(name, tensor.bfloat16() if tensor.is_floating_point() else tensor)])


def _rewrite(hf: Path, out: Path, stored: Callable[[str, Any], Iterable[tuple[str, Any]]]) -> None:
    """Write a checkpoint with what `stored` makes of each of its tensors, one at a time."""
    from models.train.huggingface.hf_files import write_hf

    _must_be_new(out)
    with CheckpointTensors(hf) as tensors:
        write_hf(out, (one for name in tensors.files for one in stored(name, tensors.whole(name))), hf)


def _differences(wanted: dict[str, str], found: dict[str, str], hf_config: dict[str, Any]) -> list[str]:
    from models.families.registry import architecture_of

    surplus = set(wanted) - set(found)
    for names in architecture_of(hf_config).names_left_out(surplus).values():
        surplus -= set(names)
    lines = [f"{name}: missing in the Megatron checkpoint" for name in sorted(surplus)]
    lines += [f"{name}: only in the Megatron checkpoint" for name in sorted(set(found) - set(wanted))]
    for name in sorted(set(wanted) & set(found)):
        if wanted[name] != found[name]:
            lines.append(f"{name}: {found[name]} instead of {wanted[name]}")
    return lines


def _checksums(loaded: Loaded) -> dict[str, str]:
    from models.train.huggingface.hf_files import checksum

    return {name: checksum(tensor) for name, tensor in loaded.export()}


# ---------------------------------------------------------------------- Megatron


@contextmanager
def _processes() -> Iterator[None]:
    """One process, or torchrun's."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # nothing is computed; the host has the memory
    import torch

    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    with tempfile.TemporaryDirectory() as scratch:
        method = "env://" if world > 1 else f"file://{scratch}/rendezvous"
        torch.distributed.init_process_group("gloo", init_method=method, rank=rank, world_size=world)
        try:
            yield
        finally:
            if "megatron.core.parallel_state" in sys.modules:  # its groups, if they were built
                sys.modules["megatron.core.parallel_state"].destroy_model_parallel()
            torch.distributed.destroy_process_group()


def _build(source: Path, sizes: dict[str, int] | None, checksums: dict[str, str]) -> Loaded:
    """The parallel layout, and this process's part of a model without its weights. `checksums`: of its tensors."""
    import torch

    from configs.schema.algorithm import AlgorithmConfig
    from configs.schema.train import MegatronConfig, TrainConfig
    from models.train.megatron.processes import build_layout
    from models.train.spec import TrainSpec

    hf_config = read_hf_config(source)
    stored = str(hf_config.get("dtype") or hf_config.get("torch_dtype") or "float32")
    if stored not in ("float32", "bfloat16"):
        raise TrainConfigInvalid(
            f"dtype={stored!r} in {source}/config.json: float32 and bfloat16 are converted to the bit; convert the "
            "checkpoint to one of them first"
        )
    tensor, pipeline, expert = ((sizes or {}).get(name, 1) for name in _SIZES)
    spec = TrainSpec(
        train=TrainConfig(train_device="cpu", train_dtype="bfloat16" if stored == "bfloat16" else "float32"),
        algorithm=AlgorithmConfig(),
        megatron=MegatronConfig(
            transformer_impl="local",
            tensor_model_parallel_size=tensor,
            sequence_parallel=tensor > 1,
            pipeline_model_parallel_size=pipeline,
            expert_model_parallel_size=expert,
            expert_tensor_parallel_size=1 if expert > 1 else None,
        ),
    )
    layout = build_layout(spec).recorded()
    from megatron.core import parallel_state as ps

    from models.train.megatron.build import build_gpt

    first, last = ps.is_pipeline_first_stage(), ps.is_pipeline_last_stage()
    chunk = build_gpt(hf_config, spec, pre_process=first, post_process=last)
    dtypes = {name: one.partition(":")[0] for name, one in checksums.items()}
    return Loaded(chunk, hf_config, torch.distributed.get_rank(), layout, dtypes)


def _sharded(loaded: Loaded) -> dict[str, Any]:
    """The chunk's tensors with their places in the whole, as a training state has them."""
    from models.train.megatron.checkpoint import POLICY, model_weights

    return {"weights": {POLICY: model_weights([loaded.chunk], POLICY)}}


def _write_megatron(loaded: Loaded, out: Path) -> None:
    """Collective."""
    import megatron.core
    import torch

    from models.train.megatron.checkpoint_files import STATE_DIR, MegatronState, Plan

    files = out / STATE_DIR
    if loaded.rank == 0:
        files.mkdir(parents=True)
    torch.distributed.barrier()
    plan = Plan(files)
    plan.prepare(_sharded(loaded))
    plan.write(MegatronState(models={}, layout=loaded.layout, megatron_core=megatron.core.__version__))
    torch.distributed.barrier()


def _read_megatron(directory: Path, source: Path, sizes: dict[str, int] | None) -> Loaded:
    """The model of a Megatron directory, whose configuration is in `source`; collective. Raises
    `TrainStateUnreadable`."""
    from models.families.registry import architecture_of
    from models.train.megatron.checkpoint import check_tensors, empty_weights, put_weights, read_tensors
    from models.train.megatron.checkpoint_files import STATE_DIR, read_state
    from models.train.megatron.foreign_index import iteration_of, read_index

    iteration = iteration_of(directory)
    index = read_state(directory)[1] if iteration is None else read_index(iteration)
    loaded = _build(source, sizes, _stored_checksums(directory))
    weights = _sharded(loaded)["weights"]
    wanted = {"weights": empty_weights(weights)}
    cure = "give the --hf directory that the checkpoint was made from"
    check_tensors(directory, index, wanted, cure)
    rows, tokens = index["embedding.word_embeddings.weight"].shape[0], architecture_of(loaded.hf_config).vocab_size
    if rows < tokens:  # more are padding
        raise TrainStateUnreadable(f"{directory} has {rows} tokens, and {source}/config.json {tokens}; {cure}")
    put_weights(weights, read_tensors(iteration or directory / STATE_DIR, index, wanted)["weights"])
    return loaded


# ---------------------------------------------------------------------- directories and command line


def _settings_of(megatron: Path) -> Path:
    """Where the configuration and tokenizer of a Megatron directory are. Raises `CheckpointUnavailable`."""
    for place in (megatron, megatron / "hf"):
        if (place / "config.json").is_file():
            return place
    raise CheckpointUnavailable(
        f"{megatron} has no config.json; give --hf DIR, the Hugging Face checkpoint that it was made from"
    )


def _stored_checksums(megatron: Path) -> dict[str, str]:
    """Checksums of the tensors that a directory was converted from, if recorded."""
    path = megatron / CHECKSUMS
    found: dict[str, str] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def _must_be_new(out: Path) -> None:
    if out.exists() and any(out.iterdir()):
        raise CheckpointUnavailable(f"--out {out} is not empty; give a directory that does not exist yet")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m models.convert", description=(__doc__ or "").split("\n", 1)[0])
    commands = parser.add_subparsers(dest="command", required=True)
    to_megatron = commands.add_parser("hf-to-megatron", help="from Hugging Face to Megatron-core")
    to_megatron.add_argument("--hf", type=Path, required=True, help="directory in Hugging Face format")
    to_hf = commands.add_parser("megatron-to-hf", help="from Megatron-core to Hugging Face")
    to_hf.add_argument("--hf", type=Path, help="where configuration and tokenizer come from; default: --megatron")
    to_numbers = [
        commands.add_parser("to-float8", help="projections in float8, with a scale for each block of 128 x 128"),
        commands.add_parser("to-bfloat16", help="from float8"),
    ]
    for command in to_numbers:
        command.add_argument("--hf", type=Path, required=True, help="directory in Hugging Face format")
    for command in (to_megatron, to_hf, *to_numbers):
        command.add_argument("--out", type=Path, required=True, help="new directory")
    check = commands.add_parser("verify", help="compare tensor by tensor; exit status 1 if they differ")
    check.add_argument("--hf", type=Path, help="compare with this directory; default: with checksums.json")
    for command in (to_hf, check):
        help_ = "converted directory, training state, or checkpoint of Megatron-LM or slime"
        command.add_argument("--megatron", type=Path, required=True, help=help_)
    for command in (to_megatron, to_hf, check):
        for size in _SIZES:
            command.add_argument(f"--{size.replace('_', '-')}", type=int, default=1, help="processes of torchrun")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    options = _parser().parse_args(arguments)
    warnings.filterwarnings("ignore", module=r"megatron\.")  # of kernels that are of no use here
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    sizes = {size: int(getattr(options, size, 1)) for size in _SIZES}
    try:
        if options.command == "hf-to-megatron":
            hf_to_megatron(options.hf, options.out, sizes)
        elif options.command == "megatron-to-hf":
            megatron_to_hf(options.megatron, options.out, options.hf, sizes)
        elif options.command == "to-float8":
            to_float8(options.hf, options.out)
        elif options.command == "to-bfloat16":
            to_bfloat16(options.hf, options.out)
        else:
            different = verify(options.megatron, options.hf, sizes)
            if int(os.environ.get("RANK", 0)) == 0:
                sys.stdout.write("".join(f"{line}\n" for line in different) or "all tensors are equal\n")
            return int(bool(different))
    except TrainError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except OSError as error:
        sys.stderr.write(f"{error.filename}: {error.strerror}; remove what was begun, and convert again\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
