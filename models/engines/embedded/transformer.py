"""The served model: its live weights, and the forward of Llama, Qwen2 and Qwen3.

No modules, no cache objects: every call reads the weights, so the next call uses a swap in place. The caller's `attend`
decides where keys and values go and what attends to what; the rest is the same for prefill and decode.
"""

from __future__ import annotations

import ctypes
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import torch
import torch.nn.functional as F
import xxhash
from safetensors import SafetensorError

from models.engines.embedded.model_spec import ModelSpec
from models.errors import CheckpointUnavailable, WeightsError, WeightsRefused
from models.families.source import CheckpointTensors
from models.weights.layout import TORCH_NAMES
from models.weights.shared_memory_reader import THREADS, Mapped, SlotManifest, SlotReader, keep_mapped

# --------------------------------------------------------------------------------------------------
# Live weights of a served model: allocated once, swapped in place from safetensors files.
#
# Invariants:
# - a swap checks every name, shape and dtype before it writes the first byte: it happens whole or not at all;
# - every swap computes the derived tensors again;
# - tensors stay the same objects, so the forward may keep references; between `free` and `allocate` they have no
#   memory;
# - projections that are applied together lie in one matrix, and the checkpoint's names are views of its rows;
# - a checkpoint's dtype may differ from the served one (fp32 masters into a bf16 engine): values are cast while copied.


_FLOATS: Final = ("F32", "BF16", "F16", "F64", "F8_E4M3")
_SHOWN: Final = 3  # names listed in a refusal


@dataclass(frozen=True)
class LayerWeights:
    """Parameters of one decoder layer. Matrices are views [inputs, outputs] of the checkpoint's [outputs, inputs];
    columns of `qkv` are q, k, v and columns of `gate_up` are gate, up."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None  # [heads + kv_heads, head_dim], derived: both norms spread over their heads
    o: torch.Tensor
    o_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


class LiveWeights:
    """All parameters of one model on one device."""

    def __init__(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        shape = spec.shape
        self._tied = shape.tied
        self.names: dict[str, torch.Tensor] = {}
        self._derived: list[tuple[torch.Tensor, torch.Tensor]] = []  # (rows, parameter that each of them repeats)
        self._freed: list[tuple[torch.UntypedStorage, int]] = []  # and their bytes
        self.embed = self._whole("model.embed_tokens.weight", shape.vocabulary, shape.hidden)
        self.layers = [self._layer(f"model.layers.{index}.", spec) for index in range(shape.layers)]
        self.norm = self._whole("model.norm.weight", shape.hidden)
        self.head = self.embed if shape.tied else self._whole("lm_head.weight", shape.vocabulary, shape.hidden)

    def load(self, directory: Path, claim: SlotManifest | None = None, *, served: bool = True) -> bool:
        """Copy a checkpoint (one file or a sharded index) into the live tensors. Raises `WeightsRefused`.

        Args:
            claim: what the directory must hold, byte for byte.
            served: nothing may be written before the bytes are compared. Else they are compared while they are copied,
                or not at all where they are copied otherwise: that is done once for all engines of a host.

        Returns whether the bytes were compared.
        """
        if claim is not None and Path(claim.path) != directory:
            raise WeightsRefused(f"model_path={directory}, but the claim is about {claim.path}; name one directory")
        try:
            tensors = _opened(directory)
            self._check(directory, tensors)
            into = {} if served or claim is None else self._targets(tensors)
            slot = SlotReader(claim, into=into) if claim is not None and (served or into) else None
            if not into:
                with ThreadPoolExecutor(THREADS, "load") as threads:
                    list(threads.map(lambda name: _copy(self.names[name], tensors.whole(name)), self.names))
            for spread, norm in self._derived:
                spread.copy_(norm.expand_as(spread))
            if slot is not None:
                slot.check()
            return slot is not None
        except CheckpointUnavailable as error:
            raise WeightsRefused(f"model_path={directory}: {error}") from error
        except WeightsError as error:  # of the claim
            raise WeightsRefused(str(error)) from error
        except (SafetensorError, OSError) as error:
            raise WeightsRefused(f"model_path={directory} cannot be read: {error}; write it again") from error

    def _targets(self, tensors: CheckpointTensors) -> dict[str, tuple[int, int]]:
        """Address and bytes of the live tensors, if all of them take the files' bytes as they are."""
        stored = {TORCH_NAMES.get(tensors.slice(name).get_dtype()) for name in self.names}
        alike = stored == {str(self._dtype).removeprefix("torch.")} and self._device.type == "cpu"
        if not alike or not all(map(torch.Tensor.is_contiguous, self.names.values())):
            return {}
        return {name: (tensor.data_ptr(), tensor.nbytes) for name, tensor in self.names.items()}

    def has_room(self, sets: int) -> bool:
        """Whether the device has memory for so many sets of these weights."""
        nbytes: int = sum(tensor.nbytes for tensor in self.names.values())
        if self._device.type == "cuda":
            return bool(torch.cuda.mem_get_info(self._device)[0] > sets * nbytes)
        found = re.search(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text())
        return found is not None and 1024 * int(found[1]) > sets * nbytes

    def free(self) -> None:
        """Give the memory back; names, shapes and views stay. Until `allocate` no tensor may be touched."""
        tensors = [*self.names.values(), *(spread for spread, _ in self._derived)]
        storages = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        self._freed = [(storage, storage.nbytes()) for storage in storages.values()]
        for storage, _ in self._freed:
            storage.resize_(0)

    def allocate(self) -> None:
        """Take the memory again. The values are undefined until `load`."""
        for storage, nbytes in self._freed:
            storage.resize_(nbytes)
        self._freed = []

    def checksums(self) -> dict[str, str]:
        """xxh3 (64 bits, hexadecimal) of each tensor's bytes as served, by Hugging Face name."""
        return {
            # of a copy: what numpy has seen of a storage cannot be given back by it
            name: xxhash.xxh3_64_hexdigest(tensor.to("cpu", copy=True).contiguous().view(torch.uint8).numpy().data)
            for name, tensor in self.names.items()
        }

    def _check(self, directory: Path, tensors: CheckpointTensors) -> None:
        ignored = {name for name in tensors.files if name.endswith("rotary_emb.inv_freq")}
        if self._tied:
            ignored.add("lm_head.weight")
        missing = sorted(self.names.keys() - tensors.files.keys())
        unknown = sorted(tensors.files.keys() - self.names.keys() - ignored)
        faults = [f"missing {name}" for name in missing] + [f"unknown {name}" for name in unknown]
        for name in self.names.keys() & tensors.files.keys():
            part = tensors.slice(name)
            expected, found = list(self.names[name].shape), part.get_shape()
            if found != expected:
                faults.append(f"{name} has shape {found}, served is {expected}")
            elif part.get_dtype() not in _FLOATS:
                faults.append(f"{name} has dtype {part.get_dtype()}, expected one of {', '.join(_FLOATS)}")
        if faults:
            more = f" and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
            raise WeightsRefused(
                f"model_path={directory} does not fit the served model: {'; '.join(sorted(faults)[:_SHOWN])}{more}; "
                "export the weights of the same architecture"
            )

    def _layer(self, prefix: str, spec: ModelSpec) -> LayerWeights:
        hidden, inner = spec.shape.hidden, spec.shape.ffn
        queries, keys = spec.shape.heads * spec.shape.head, spec.shape.kv_heads * spec.shape.head
        qkv = [("self_attn.q_proj", queries), ("self_attn.k_proj", keys), ("self_attn.v_proj", keys)]
        gate_up = [("mlp.gate_proj", inner), ("mlp.up_proj", inner)]
        return LayerWeights(
            input_norm=self._whole(prefix + "input_layernorm.weight", hidden),
            qkv=self._stacked(prefix, qkv, "weight", hidden).t(),
            qkv_bias=self._stacked(prefix, qkv, "bias") if spec.shape.qkv_bias else None,
            qk_norm=self._spread_norms(prefix, spec) if spec.shape.qk_norm else None,
            o=self._whole(prefix + "self_attn.o_proj.weight", hidden, queries).t(),
            o_bias=self._whole(prefix + "self_attn.o_proj.bias", hidden) if spec.shape.out_bias else None,
            post_norm=self._whole(prefix + "post_attention_layernorm.weight", hidden),
            gate_up=self._stacked(prefix, gate_up, "weight", hidden).t(),
            gate_up_bias=self._stacked(prefix, gate_up, "bias") if spec.shape.ffn_bias else None,
            down=self._whole(prefix + "mlp.down_proj.weight", hidden, inner).t(),
            down_bias=self._whole(prefix + "mlp.down_proj.bias", hidden) if spec.shape.ffn_bias else None,
        )

    def _whole(self, name: str, *shape: int) -> torch.Tensor:
        tensor = torch.zeros(shape, device=self._device, dtype=self._dtype)
        self.names[name] = tensor
        return tensor

    def _spread_norms(self, prefix: str, spec: ModelSpec) -> torch.Tensor:
        """One row per query and key head, so that one product scales them all."""
        q_norm = self._whole(prefix + "self_attn.q_norm.weight", spec.shape.head)
        k_norm = self._whole(prefix + "self_attn.k_norm.weight", spec.shape.head)
        spread = q_norm.new_zeros(spec.shape.heads + spec.shape.kv_heads, spec.shape.head)
        self._derived += [(spread[: spec.shape.heads], q_norm), (spread[spec.shape.heads :], k_norm)]
        return spread

    def _stacked(self, prefix: str, parts: list[tuple[str, int]], kind: str, *columns: int) -> torch.Tensor:
        tensor = torch.zeros((sum(rows for _, rows in parts), *columns), device=self._device, dtype=self._dtype)
        start = 0
        for part, rows in parts:
            self.names[f"{prefix}{part}.{kind}"] = tensor[start : start + rows]
            start += rows
        return tensor


_mapped: Final[Mapped[CheckpointTensors]] = {}


def _opened(directory: Path) -> CheckpointTensors:
    """A checkpoint; its files are closed with the object."""
    tensors = CheckpointTensors(directory)
    file = next(iter(tensors.files.values()))  # all that a slot has
    return keep_mapped(_mapped, 2, file, file.stat(), lambda: tensors)


def _copy(live: torch.Tensor, stored: torch.Tensor) -> None:
    if live.device.type == "cpu" and live.dtype == stored.dtype and live.is_contiguous() and stored.is_contiguous():
        # Half of the time that torch's own copy takes on one thread. Not by numpy: `free` could not resize it any more.
        ctypes.memmove(live.data_ptr(), stored.data_ptr(), live.nbytes)
    else:
        live.copy_(stored)


class Attend(Protocol):
    """Stores keys and values of a layer and returns the attention's output [N, heads * head_dim]."""

    def __call__(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """`q` [N, heads, head_dim], `kv` [N, 2 * kv_heads, head_dim], keys first; positions already rotated in."""


class Transformer:
    """Forward of one model. `positions` limits the rotary tables, in tokens."""

    def __init__(self, spec: ModelSpec, weights: LiveWeights, positions: int) -> None:
        self.spec = spec
        self.weights = weights
        device, dtype = weights.embed.device, weights.embed.dtype
        frequencies = torch.tensor(spec.inverse_frequencies, dtype=torch.float32)
        angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies[None, :]
        # The sign of "rotate half" is in the table, which leaves a plain swap of halves to the forward.
        halves = (angles.cos(), angles.cos(), -angles.sin(), angles.sin())
        self._rotations = torch.cat(halves, dim=-1).to(device, dtype)  # [positions, 2 * head_dim], cosines first
        # On a CPU the operation of torch is a chain of eight; elsewhere, and to be exact in half precision, it is one.
        self._by_hand = device.type == "cpu" and dtype == torch.float32
        self._floors = {n: torch.tensor((n * spec.norm_eps) ** 0.5) for n in (spec.shape.hidden, spec.shape.head)}
        self._head = weights.head.t()

    def beside(
        self, directory: Path, claim: SlotManifest | None, positions: int, spare: Transformer | None
    ) -> tuple[Transformer, bool]:
        """The same forward over a second set of weights, in `spare` if there is one, loaded from a checkpoint; and
        whether its bytes were compared with the claim. Raises `WeightsRefused`."""
        if spare is None:
            weights = LiveWeights(self.spec, self.weights.embed.device, self.weights.embed.dtype)
            spare = Transformer(self.spec, weights, positions)
        return spare, spare.weights.load(directory, claim, served=False)

    def trade(self, other: Transformer) -> None:
        """Compute with its weights, for all that hold this forward, and leave it these."""
        self.__dict__, other.__dict__ = other.__dict__, self.__dict__

    def hidden(
        self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Final hidden states [N, hidden] of token ids [N] at `positions` [N]; or only [W, hidden] of those at the
        indices `wanted` [W]: of the others the last layer has to make keys and values alone."""
        x = F.embedding(tokens, self.weights.embed)
        heads, width = self.spec.shape.heads, self.spec.shape.head
        turned, kept = heads + self.spec.shape.kv_heads, heads + 2 * self.spec.shape.kv_heads
        cos, sin = self._rotations.index_select(0, positions).unsqueeze(1).split(width, dim=-1)
        for index, layer in enumerate(self.weights.layers):
            qkv = _project(self._norm(x, layer.input_norm), layer.qkv, layer.qkv_bias).view(-1, kept, width)
            q, kv = qkv.split((heads, kept - heads), dim=1)
            qk = qkv[:, :turned]
            normed = qk if layer.qk_norm is None else self._norm(qk, layer.qk_norm)
            torch.addcmul(normed * cos, normed.roll(width // 2, -1), sin, out=qk)
            attended = attend(index, q, kv)
            if wanted is not None and index == len(self.weights.layers) - 1:
                x, attended = x.index_select(0, wanted), attended.index_select(0, wanted)
            x = _project(attended, layer.o, layer.o_bias, x)
            gate, up = _project(self._norm(x, layer.post_norm), layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
            x = _project(F.silu(gate).mul_(up), layer.down, layer.down_bias, x)
        return self._norm(x, self.weights.norm)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 logits [N, vocabulary] of hidden states [N, hidden]."""
        return torch.mm(hidden, self._head).float()

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Root-mean-square norm over the last dimension, times `weight`."""
        width = x.shape[-1]
        if not self._by_hand:
            return F.rms_norm(x, (width,), None, self.spec.norm_eps) * weight
        # sqrt(mean(x^2) + eps) = hypot(|x|, sqrt(width * eps)) / sqrt(width)
        size = torch.linalg.vector_norm(x, 2, -1, True).hypot_(self._floors[width])
        return (x * weight).div_(size.mul_(width**-0.5))


def _project(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """`x` [N, inputs] times `weight` [inputs, outputs], with what is added to it."""
    if residual is None:
        return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)
    out = torch.addmm(residual, x, weight)
    return out if bias is None else out.add_(bias)
