"""Loading a Hugging Face causal language model for training, and finding out what may be done with it.

Invariants: parameters are fp32 (the master copy; lower precision comes from autocast); dropout is off, since a policy
ratio compares two passes over the same tokens; the process's random stream is left as it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from configs.schema.train import TrainConfig
from models.train.errors import CheckpointUnavailable, TrainConfigInvalid, TrainStateUnreadable, UnsupportedModel
from models.train.packing import Layout, pack_rows
from models.train.scoring import Scorer, output_head

FLASH_ATTENTION: Final = "flash_attention_2"
_PROBE_TOKENS: Final = 5


@dataclass(frozen=True)
class LoadedModel:
    """A model on its device, with what was found out about it."""

    model: Any
    vocab_size: int
    can_pack: bool  # sequences of one row do not see each other
    single_row: bool  # FlashAttention 2: one row without padding
    quadratic_tokens: int  # row length at which attention costs as much as the rest


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


def autocast_dtype(train_dtype: str, device: torch.device) -> torch.dtype | None:
    """Precision of the forward pass: bf16 on CUDA and where asked for; None is fp32 throughout."""
    if train_dtype == "bfloat16" or (train_dtype == "auto" and device.type == "cuda"):
        return torch.bfloat16
    return None


def load_model(checkpoint: str, key: str, train: TrainConfig, device: torch.device, *, seed: int) -> LoadedModel:
    """Load `checkpoint` (a directory or a hub id, given by the option `key`) in fp32 on the device.

    Raises `CheckpointUnavailable` if it cannot be had, `UnsupportedModel` if its logits cannot be taken apart.
    """
    attention = _attention(train.attn_implementation, device)
    # Parts that a checkpoint lacks are initialised by this seed, without touching the caller's random stream.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _from_pretrained(checkpoint, key, attention, auto=train.attn_implementation == "auto")
    _disable_dropout(model)
    model.to(device)
    model.config.use_cache = False
    text = model.config.get_text_config()
    single_row = getattr(model.config, "_attn_implementation", "") == FLASH_ATTENTION
    precision = autocast_dtype(train.train_dtype, device)
    check_head(model, device)
    can_pack = single_row or _rows_are_separate(model, device, precision)
    return LoadedModel(
        model=model,
        vocab_size=int(model.get_input_embeddings().weight.shape[0]),
        can_pack=can_pack,
        single_row=single_row,
        quadratic_tokens=6 * int(text.hidden_size),
    )


def _attention(name: str, device: torch.device) -> str:
    if name != "auto":
        return name
    from transformers.utils import is_flash_attn_2_available

    return FLASH_ATTENTION if device.type == "cuda" and is_flash_attn_2_available() else "sdpa"


def _from_pretrained(checkpoint: str, key: str, attention: str, *, auto: bool) -> Any:
    from transformers import AutoModelForCausalLM

    looks_local = checkpoint.startswith((".", "/", "~")) or checkpoint.count("/") > 1
    path = Path(checkpoint).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        raise CheckpointUnavailable(
            f"{key}={checkpoint!r} is a directory without config.json; give a directory in Hugging Face format"
        )
    if looks_local and not path.exists():
        raise CheckpointUnavailable(
            f"{key}={checkpoint!r} does not exist; give an existing directory in Hugging Face format or a hub id"
        )
    source = str(path) if path.exists() else checkpoint
    try:
        return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation=attention)
    except (ImportError, ValueError) as error:
        if auto and attention != "eager" and "attention" in str(error).lower():
            return _from_pretrained(checkpoint, key, "eager", auto=False)
        raise CheckpointUnavailable(
            f"{key}={checkpoint!r} cannot be loaded as a causal language model ({_first_line(error)}); "
            "give a checkpoint that AutoModelForCausalLM accepts, and check --attn-implementation"
        ) from error
    except OSError as error:
        raise CheckpointUnavailable(
            f"{key}={checkpoint!r} is no directory here and could not be fetched from the hub ({_first_line(error)}); "
            "give an existing directory, or download the model first"
        ) from error


def enable_checkpointing(model: Any) -> None:
    """Recompute activations in the backward pass instead of keeping them."""
    # The method was renamed within transformers 5.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def load_weights(model: Any, directory: Path) -> None:
    """Overwrite the weights of `model` in place with those of a saved one. Raises `TrainStateUnreadable`."""
    from transformers import AutoModelForCausalLM

    try:
        saved = AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32).state_dict()
        # Compared first: a refused state must not leave half of its weights behind.
        expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
        if expected != {name: tensor.shape for name, tensor in saved.items()}:
            raise ValueError("its tensors have other names or shapes")
        model.load_state_dict(saved)
    except (OSError, ValueError) as error:
        raise TrainStateUnreadable(
            f"{directory} does not hold the weights of this model ({_first_line(error)}); "
            "resume from another checkpoint"
        ) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _disable_dropout(model: torch.nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0


def check_head(model: Any, device: torch.device) -> None:
    """Compare the model's own logits with those of `output_head` on a few tokens; raise `UnsupportedModel`."""
    ids = torch.arange(_PROBE_TOKENS, device=device).remainder(model.get_input_embeddings().weight.shape[0])[None]
    precision = torch.bfloat16 if device.type == "cuda" else None
    scorer = Scorer(model, device=device, autocast_dtype=precision, temperature=1.0, chunk_tokens=_PROBE_TOKENS)
    with torch.no_grad(), scorer.autocast():
        whole = model(input_ids=ids, use_cache=False).logits.float()
        parts = output_head(model)(model.base_model(input_ids=ids, use_cache=False).last_hidden_state).float()
    if not torch.allclose(whole, parts, rtol=1e-2, atol=1e-2 * float(whole.abs().max())):
        raise UnsupportedModel(
            f"{type(model).__name__} changes its logits after the output embedding in a way that is not known here "
            f"(difference {float((whole - parts).abs().max()):.3g}); use another architecture"
        )


def _rows_are_separate(model: Any, device: torch.device, precision: torch.dtype | None) -> bool:
    """Whether a second sequence in a row gives the same output as alone: false for recurrent layers, for instance."""
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    first = np.arange(_PROBE_TOKENS + 1, dtype=np.int32) % vocabulary
    second = (first[::-1] + 1) % vocabulary
    chosen = np.arange(1, _PROBE_TOKENS + 1, dtype=np.int64)
    scorer = Scorer(model, device=device, autocast_dtype=precision, temperature=1.0, chunk_tokens=4 * _PROBE_TOKENS)
    together = pack_rows(Layout(((0, 1),), 2 * _PROBE_TOKENS), [first, second], [chosen, chosen])
    alone = pack_rows(Layout(((0,),), _PROBE_TOKENS), [second], [chosen])
    with torch.no_grad(), scorer.autocast():
        try:
            packed = scorer.hidden(together)[0, _PROBE_TOKENS:].float()
        except (TypeError, ValueError):
            return False  # the architecture takes no position ids: each sequence gets a row of its own
        separate = scorer.hidden(alone)[0].float()
    tolerance = 1e-4 if precision is None else 3e-2
    same: bool = torch.allclose(packed, separate, rtol=tolerance, atol=tolerance * float(separate.abs().max()))
    return same
