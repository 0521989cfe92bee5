"""Loading a Hugging Face causal language model for training, and finding out what may be done with it.

Invariants: parameters are fp32 (the master copy; lower precision comes from autocast); dropout is off, since a policy
ratio compares two passes over the same tokens; the process's random stream is left as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from configs.schema.train import TrainConfig
from models.errors import CheckpointUnavailable, TrainConfigInvalid, UnsupportedModel, first_line
from models.families.source import local_directory, not_fetched
from models.train.dp_group import DpGroup, Float32Array
from models.train.huggingface.attention import FLASH_ATTENTION, PACKED_SDPA, register_packed_sdpa
from models.train.huggingface.hf_files import converts
from models.train.huggingface.scoring import Backbone, Passes, Scorer, output_layer
from models.train.spec import TrainSpec
from models.train.step.micro_batches import MicroBatch, PackedRows, pack_rows
from models.train.step.packing import Layout, Packing, Unit

FLASH_PACKING: Final = Packing(max_tokens=1, share_prompts=False, single_row=True)
_PROBE_TOKENS: Final = 5


@dataclass(frozen=True)
class LoadedModel:
    """A model on its device, with what was found out about it. Sharded, its parameters are DTensors."""

    model: Any
    vocab_size: int
    packing: Packing  # what its attention allows; the token budget is the caller's
    converts: bool  # checkpoints store some of its weights in another form, sorted by name
    root: Any = None  # the module whose forward pass is called: it gathers; None before the model is placed


def pick_device(name: str) -> torch.device:
    """The device called `name`; `auto` is CUDA where there is one. Raises `TrainConfigInvalid`."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise TrainConfigInvalid(f"train_device={name!r} is no device: use auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise TrainConfigInvalid(
            f"train_device={name!r}, but this process sees no CUDA device; use --train-device auto or cpu"
        )
    return device


def row_multiple(device: torch.device) -> int:
    """Row lengths that suit the device: kernels for products of matrices on a GPU want multiples of 16."""
    return 16 if device.type == "cuda" else 1


def autocast_dtype(train_dtype: str, device: torch.device) -> torch.dtype | None:
    """Precision of the forward pass: bf16 on CUDA and where requested; None is fp32 throughout."""
    return torch.bfloat16 if train_dtype == "bfloat16" or (train_dtype == "auto" and device.type == "cuda") else None


def load_model(checkpoint: str, key: str, train: TrainConfig, device: torch.device, *, seed: int) -> LoadedModel:
    """Load `checkpoint` (a directory or a hub id, given by the option `key`) in fp32 on the device.

    Raises `CheckpointUnavailable` if it cannot be had, `UnsupportedModel` if its logits cannot be taken apart.
    """
    attention = attention_of(train, device)
    # Parts that a checkpoint lacks are initialised by this seed, without touching the caller's random stream.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _from_pretrained(checkpoint, key, attention, auto=train.attn_implementation == "auto")
    disable_dropout(model)
    model.to(device)
    check_head(model, device)
    vocab_size = int(model.get_input_embeddings().weight.shape[0])
    return LoadedModel(model, vocab_size, find_packing(model, device), converts(model))


def attention_of(train: TrainConfig, device: torch.device) -> str:
    """The requested attention, or the best one on this device for the precision of the run."""
    if train.attn_implementation != "auto":
        return train.attn_implementation
    if autocast_dtype(train.train_dtype, device) is None or device.type != "cuda":
        return "sdpa"  # FlashAttention 2 has no fp32
    from transformers.utils import is_flash_attn_2_available

    return FLASH_ATTENTION if is_flash_attn_2_available() else "sdpa"


def _from_pretrained(checkpoint: str, key: str, attention: str, *, auto: bool) -> Any:
    from transformers import AutoModelForCausalLM

    source = local_directory(checkpoint, key) or checkpoint
    try:
        return AutoModelForCausalLM.from_pretrained(str(source), dtype=torch.float32, attn_implementation=attention)
    except (ImportError, ValueError) as error:
        if auto and attention != "eager" and "attention" in str(error).lower():
            return _from_pretrained(checkpoint, key, "eager", auto=False)
        raise CheckpointUnavailable(
            f"{key}={checkpoint!r} cannot be loaded as a causal language model ({first_line(error)}); "
            "give a checkpoint that AutoModelForCausalLM accepts, and check --attn-implementation"
        ) from error
    except OSError as error:
        raise not_fetched(checkpoint, key, error) from error


def enable_checkpointing(model: Any) -> None:
    """Recompute activations in the backward pass instead of keeping them."""
    # The method was renamed within transformers 5.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def disable_dropout(model: torch.nn.Module) -> None:
    """In all modules, also in attention."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0


def fuse_norms(model: torch.nn.Module) -> None:
    """Let one kernel of torch compute the norms that transformers spells out in six operations, of which each reads and
    writes all hidden states on a GPU: a fifth of a step's time there. The results are the same."""
    for module in model.modules():
        if hasattr(module, "variance_epsilon") and _is_rms_norm(type(module)):
            module.forward = MethodType(_rms_norm, module)


def _is_rms_norm(kind: Any) -> bool:
    """Whether a class of norms, tried on a few numbers, says weight * x / sqrt(mean(x^2) + eps)."""
    try:
        with torch.no_grad(), torch.device("cpu"):
            norm, x = kind(8, eps=0.1).float(), torch.linspace(-2.0, 3.0, 8)
            norm.weight.copy_(torch.linspace(0.5, 1.5, 8))
            return bool(torch.allclose(norm(x), _rms_norm(norm, x)))
    except TypeError:
        return False


def _rms_norm(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    weight, eps = module.weight, module.variance_epsilon
    if hidden.dtype == weight.dtype == torch.float32:
        return F.rms_norm(hidden, weight.shape, weight, eps)
    return weight * F.rms_norm(hidden.float(), weight.shape, None, eps).to(hidden.dtype)


def check_head(model: Any, device: torch.device) -> None:
    """Compare the model's own logits with those of `output_layer` on a few tokens; raise `UnsupportedModel`."""
    ids = torch.arange(_PROBE_TOKENS, device=device).remainder(model.get_input_embeddings().weight.shape[0])[None]
    with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
        whole = model(input_ids=ids, use_cache=False).logits.float()
        parts = output_layer(model)(model.base_model(input_ids=ids, use_cache=False).last_hidden_state).float()
    if not torch.allclose(whole, parts, rtol=1e-2, atol=1e-2 * float(whole.abs().max())):
        raise UnsupportedModel(
            f"{type(model).__name__} changes its logits after the output embedding in a way that is not known here "
            f"(difference {float((whole - parts).abs().max()):.3g}); use another architecture"
        )


def find_packing(model: Any, device: torch.device) -> Packing:
    """Try on a few tokens what the model allows: sequences side by side in one row, responses after one prompt.

    In fp32, so that a difference is a leak and not rounding. Recurrent layers fail the first. Sliding windows and
    chunks need masks of their own, and rule out the second. Where both are allowed, `sdpa` becomes `PACKED_SDPA`.
    """
    text = model.config.get_text_config()
    attention = getattr(model.config, "_attn_implementation", "eager")
    if attention == FLASH_ATTENTION:
        return FLASH_PACKING
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    one = np.arange(2 * _PROBE_TOKENS, dtype=np.int32) % vocabulary
    two = np.concatenate([one[:_PROBE_TOKENS], (one[_PROBE_TOKENS:] + 7) % vocabulary]).astype(np.int32)
    size = len(one) - 1
    apart = Layout(((Unit((0,), 0, size), Unit((1,), 0, size)),), 2 * size)
    shared = Layout(((Unit((0, 1), _PROBE_TOKENS, 2 * size - _PROBE_TOKENS),),), 2 * size - _PROBE_TOKENS)

    def works(layout: Layout, passes: Passes) -> bool:
        return _agrees(Backbone(model, passes), layout, [one, two], 1 if layout is apart else _PROBE_TOKENS)

    usual, unmasked = Passes(device), Passes(device, mask_tokens=0)
    # transformers marks recurrent architectures; the trial finds those that it does not mark.
    pack = not getattr(model, "_is_stateful", False) and works(apart, usual)
    windows = set(getattr(text, "layer_types", None) or ()) - {"full_attention"} or any(
        getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size")
    )
    share = pack and not windows and attention in ("sdpa", "eager") and works(shared, usual)
    if share and attention == "sdpa":
        register_packed_sdpa()
        model.set_attn_implementation(PACKED_SDPA)
        if not (works(apart, unmasked) and works(shared, unmasked)):
            model.set_attn_implementation(attention)
    # Attention with a mask runs at about half the speed of the dense layers, whose cost is 6 * hidden per token.
    return Packing(max_tokens=1, pack=pack, share_prompts=share, quadratic_tokens=3 * int(text.hidden_size))


def _agrees(backbone: Backbone, layout: Layout, tokens: list[npt.NDArray[np.int32]], first: int) -> bool:
    """Whether hidden states, from token `first` on, are those of each sequence in a row of its own."""
    chosen = [np.arange(first, len(ids), dtype=np.int64) for ids in tokens]
    with torch.no_grad():
        try:
            found = backbone.chosen_hidden(pack_rows(layout, tokens, chosen))
        except (TypeError, ValueError, RuntimeError):
            return False  # the architecture takes no position ids, or no mask of this shape
        single = [Layout(((Unit((item,), 0, len(tokens[item]) - 1),),), len(tokens[item]) - 1) for item in layout.items]
        alone = torch.cat([backbone.chosen_hidden(pack_rows(one, tokens, chosen)) for one in single])
    return bool(torch.allclose(found, alone, rtol=1e-4, atol=1e-4 * float(alone.abs().max())))


# --------------------------------------------------------------------------------------------------
# Where the tensors of a run's models lie: whole in every process, here, or in shards (`sharded_loading.py`).
#
# What differs between the two is here and nowhere else: how a model is loaded, which micro-batches a process runs, how
# gradients become sums over all processes, and what has to be given back after a pass.


MakeRoot = Callable[[Any], torch.nn.Module]
Prepare = Callable[[Any], None]


class Placement:
    """Every process holds all of each model: alone, or as plain copies."""

    first = True  # whether this process is given exported weights, and writes files

    def __init__(self, spec: TrainSpec, dp_group: DpGroup | None = None) -> None:
        """`dp_group`: the processes that hold copies (default: this one alone). Raises `TrainConfigInvalid`."""
        self.spec = spec
        self.dp_group: DpGroup = dp_group or DpGroup()
        self.device = pick_device(spec.train.train_device)
        self.precision = autocast_dtype(spec.train.train_dtype, self.device)  # of the forward pass; None = fp32
        self.passes = Passes(self.device, self.precision, self.precision or torch.float32)

    def load(
        self, source: str, key: str, make_root: MakeRoot, *, frozen: bool = False, prepare: Prepare | None = None
    ) -> LoadedModel:
        """A model out of `source`, which the option `key` gave. Collective.

        `make_root`: wraps the module that is called around the model; `prepare`: changes the model first (adapters).
        Raises `CheckpointUnavailable`, `UnsupportedModel`.
        """
        loaded = load_model(source, key, self.spec.train, self.device, seed=self.spec.seed)
        if prepare is not None:
            prepare(loaded.model)
        self._set_mode(loaded.model, frozen=frozen)
        return replace(loaded, root=make_root(loaded.model).to(self.device))

    def _set_mode(self, model: Any, *, frozen: bool) -> None:
        model.train(not frozen)
        if self.device.type == "cuda":
            fuse_norms(model)
        if frozen:
            model.requires_grad_(False)
        elif self.spec.train.gradient_checkpointing:
            enable_checkpointing(model)

    def scorer(self, model: Any) -> Scorer:
        """The root of a model that says log-probs."""
        temperature, at_once = self.spec.scoring_temperature, self.spec.train.logprob_chunk_tokens
        return Scorer(model, self.passes, temperature=temperature, chunk_tokens=at_once)

    def runs(self, batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Those that this process runs."""
        return [batch for batch in batches if not batch.blank]

    def scores(
        self, model: LoadedModel, score: Callable[[PackedRows], Tensor], batches: Sequence[MicroBatch]
    ) -> list[Float32Array]:
        """What `score` says of the chosen tokens by running `model`, without gradient: one array [N] per micro-batch
        that is not blank; nothing without `is_mp_src_rank`.
        """
        with torch.no_grad():
            found = [(batch, score(batch.rows)) for batch in self.runs(batches)]
        self.give_back(model)
        return [one.cpu().numpy() for batch, one in found if not batch.blank and self.dp_group.is_mp_src_rank]

    def give_back(self, model: LoadedModel) -> None:
        """Drop what passes without a gradient have gathered: no copy may be older than the shards."""

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Make gradients sums over data-parallel ranks."""
        self.dp_group.all_reduce_gradients(list(parameters))

    def sum_over_shards(self, value: float) -> float:
        """Sum of one number per shard of a model; equal in all processes."""
        return value
