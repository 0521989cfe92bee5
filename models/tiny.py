"""Small random Hugging Face checkpoints, made on this machine: for tests, demonstrations and CPU runs.

Invariants:
- the directory is a complete checkpoint that `AutoModelForCausalLM` and `AutoTokenizer` load without network;
- equal arguments give equal bytes in `model.safetensors`;
- a directory appears whole (written beside, then renamed) or not at all; one that exists is reused only if it was
  made with the same arguments;
- the tokenizer and the model agree on the vocabulary: every id that the model can sample decodes;
- neither torch nor a model class is imported: a run makes its checkpoint before anything else, and the user waits.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Architecture = Literal["qwen3", "qwen2", "llama"]
TokenizerKind = Literal["bytes", "arithmetic"]

ARITHMETIC_CHARACTERS: Final = "0123456789+-*=[]: \nacdenorstuw"
RECIPE_FILE: Final = "tiny.json"
# Brings the byte vocabulary to 264, divisible by 8, so that it splits over tensor-parallel ranks. transformers loads
# every "qwen2" checkpoint with its own Qwen2Tokenizer, which would add the first of these names if it were missing.
_RESERVED: Final = ("<|endoftext|>", "<|reserved_1|>", "<|reserved_2|>", "<|reserved_3|>", "<|reserved_4|>")

CHAT_TEMPLATE: Final = (
    "{%- for message in messages -%}"
    "{{ bos_token + message['role'] + '\\n' }}"
    "{%- if message.get('content') -%}{{ message['content'] }}{%- endif -%}"
    "{%- for call in message.get('tool_calls') or [] -%}"
    "{%- set f = call['function'] if 'function' in call else call -%}"
    "{{ '<tool_call>' + ({'name': f['name'], 'arguments': f['arguments']} | tojson) + '</tool_call>' }}"
    "{%- endfor -%}"
    "{{ eos_token }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ bos_token + 'assistant\\n' }}{%- endif -%}"
)


class TinyCheckpointError(ValueError):
    """A tiny checkpoint cannot be made with these arguments."""


class TinyRecipe(Struct, frozen=True, kw_only=True):
    """What a tiny checkpoint is made of; stored in the directory as `tiny.json`.

    `tokenizer="bytes"`: id = byte value, then pad 256, bos 257, eos 258 and reserved ids up to 264, with a chat
    template. `tokenizer="arithmetic"`: one id per character of `ARITHMETIC_CHARACTERS` from 1 on, pad 0, the newline
    is EOS, 32 ids in all; with the default shape the model has 335,664 parameters. `initializer_range`: standard
    deviation of matrices and embeddings; norms begin at one, biases at zero.
    """

    architecture: Architecture = "qwen3"
    tokenizer: TokenizerKind = "bytes"
    seed: int = 0
    hidden_size: int = 96
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 2
    intermediate_size: int = 288
    max_position_embeddings: int = 1024
    tie_word_embeddings: bool = True
    initializer_range: float = 0.02
    format_version: Literal[2] = 2

    def __post_init__(self) -> None:
        """Raise `TinyCheckpointError` for a shape that no attention layer can have."""
        if self.hidden_size % self.num_heads or (self.hidden_size // self.num_heads) % 2:
            raise TinyCheckpointError(
                f"hidden_size={self.hidden_size} with num_heads={self.num_heads}: the head dimension must be an even "
                "whole number (rotary embedding rotates pairs); choose hidden_size as an even multiple of num_heads"
            )
        if self.num_heads % self.num_kv_heads:
            raise TinyCheckpointError(
                f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}; choose a divisor"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


def make_tiny_checkpoint(directory: Path, recipe: TinyRecipe = TinyRecipe()) -> Path:  # noqa: B008 - it is frozen
    """Make (or reuse) a small randomly initialised fp32 checkpoint and return its directory.

    Raises `TinyCheckpointError` if the shape is impossible or if `directory` holds something else.
    """
    if directory.is_dir() and not any(directory.iterdir()):
        directory.rmdir()  # an empty directory, e.g. one made by the caller, is no checkpoint and no conflict
    if directory.exists():
        return _reuse(directory, recipe)
    directory.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        _write(draft, recipe)
        try:
            draft.rename(directory)
        except OSError:
            # Another process was faster; its checkpoint must have the same arguments.
            return _reuse(directory, recipe)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return directory


def _reuse(directory: Path, recipe: TinyRecipe) -> Path:
    if not directory.is_dir():
        raise TinyCheckpointError(f"{directory} is a file; a tiny checkpoint needs a directory: choose another path")
    path = directory / RECIPE_FILE
    if not path.is_file():
        raise TinyCheckpointError(
            f"{directory} exists and was not made here ({RECIPE_FILE} is missing); choose another path or remove it"
        )
    try:
        found = msgspec.json.decode(path.read_bytes(), type=TinyRecipe)
    except msgspec.MsgspecError as error:
        raise TinyCheckpointError(
            f"{directory} holds a tiny checkpoint that another version has made ({error}); choose another path or "
            "remove it"
        ) from error
    if found != recipe:
        different = [
            f"{name}={getattr(found, name)!r} (wanted: {getattr(recipe, name)!r})"
            for name in TinyRecipe.__struct_fields__
            if getattr(found, name) != getattr(recipe, name)
        ]
        raise TinyCheckpointError(
            f"{directory} holds another tiny checkpoint: {', '.join(different)}; choose another path or remove it"
        )
    return directory


def _write(draft: Path, recipe: TinyRecipe) -> None:
    from safetensors.numpy import save_file

    tokenizer = build_tokenizer(recipe.tokenizer)
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    files = {
        "config.json": {**_model_config(recipe), **special, "vocab_size": len(tokenizer)},
        "generation_config.json": {**special, "do_sample": True, "temperature": 1.0},
        RECIPE_FILE: recipe,
    }
    for name, content in files.items():
        (draft / name).write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2))
    save_file(_weights(recipe, len(tokenizer)), draft / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(draft)
    os.chmod(draft, 0o755)  # mkdtemp's 0700 is for the draft only


def _weights(recipe: TinyRecipe, vocabulary: int) -> dict[str, NDArray[np.float32]]:
    """Tensors by their names in the checkpoint; matrices are [outputs, inputs]."""
    hidden, wide = recipe.hidden_size, recipe.intermediate_size
    queries, keys = recipe.num_heads * recipe.head_dim, recipe.num_kv_heads * recipe.head_dim
    random = np.random.RandomState(recipe.seed)  # its stream is the same in every version of numpy

    def matrix(*shape: int) -> NDArray[np.float32]:
        return (random.standard_normal(shape) * recipe.initializer_range).astype(np.float32)

    def ones(size: int) -> NDArray[np.float32]:
        return np.ones(size, dtype=np.float32)

    tensors = {"model.embed_tokens.weight": matrix(vocabulary, hidden), "model.norm.weight": ones(hidden)}
    for layer in range(recipe.num_layers):
        of_layer = {
            "input_layernorm.weight": ones(hidden),
            "self_attn.q_proj.weight": matrix(queries, hidden),
            "self_attn.k_proj.weight": matrix(keys, hidden),
            "self_attn.v_proj.weight": matrix(keys, hidden),
            "self_attn.o_proj.weight": matrix(hidden, queries),
            "post_attention_layernorm.weight": ones(hidden),
            "mlp.gate_proj.weight": matrix(wide, hidden),
            "mlp.up_proj.weight": matrix(wide, hidden),
            "mlp.down_proj.weight": matrix(hidden, wide),
        }
        if recipe.architecture == "qwen3":
            of_layer |= {f"self_attn.{name}_norm.weight": ones(recipe.head_dim) for name in "qk"}
        if recipe.architecture == "qwen2":
            sizes = {"q": queries, "k": keys, "v": keys}
            of_layer |= {f"self_attn.{name}_proj.bias": 0 * ones(size) for name, size in sizes.items()}
        tensors |= {f"model.layers.{layer}.{name}": tensor for name, tensor in of_layer.items()}
    if not recipe.tie_word_embeddings:
        tensors["lm_head.weight"] = matrix(vocabulary, hidden)
    return tensors


def _model_config(recipe: TinyRecipe) -> dict[str, Any]:
    """`config.json` but for the vocabulary; transformers has defaults for the other keys."""
    names = {"qwen3": "Qwen3", "qwen2": "Qwen2", "llama": "Llama"}
    config: dict[str, Any] = {
        "architectures": [f"{names[recipe.architecture]}ForCausalLM"],
        "model_type": recipe.architecture,
        "dtype": "float32",
        "hidden_size": recipe.hidden_size,
        "num_hidden_layers": recipe.num_layers,
        "num_attention_heads": recipe.num_heads,
        "num_key_value_heads": recipe.num_kv_heads,
        "intermediate_size": recipe.intermediate_size,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": recipe.max_position_embeddings,
        "tie_word_embeddings": recipe.tie_word_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "initializer_range": recipe.initializer_range,
        "use_cache": True,
    }
    if recipe.architecture != "qwen2":  # Qwen2 has no head_dim of its own: it is hidden_size / num_heads
        config |= {"head_dim": recipe.head_dim, "attention_bias": False}
    return config


def build_tokenizer(kind: TokenizerKind) -> PreTrainedTokenizerFast:
    """The tokenizer of a tiny checkpoint, without a model or a directory: byte-level BPE without merges.

    bytes: id = byte value, so any text has exactly as many ids as UTF-8 bytes. arithmetic: one id per character; a byte
    outside the alphabet becomes `<unk>` (with "qwen2", transformers drops it). It is byte-level like the other one, so
    that transformers' Qwen2Tokenizer reads spaces from the same file alike.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = _byte_symbols()
    named: dict[str, Any] = {"pad_token": "<|pad|>", "bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    if kind == "bytes":
        core = Tokenizer(models.BPE(vocab={symbol: byte for byte, symbol in enumerate(symbols)}, merges=[]))
        core.add_special_tokens([*named.values(), *_RESERVED])
        named["chat_template"] = CHAT_TEMPLATE
    else:
        symbols[ord("\n")] = "\n"  # a special token is matched in the raw text, before bytes become symbols
        known = ["<pad>", *(symbols[ord(character)] for character in ARITHMETIC_CHARACTERS), "<unk>"]
        vocabulary = {symbol: index for index, symbol in enumerate(known)}
        core = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
        named = {"pad_token": "<pad>", "eos_token": "\n", "unk_token": "<unk>"}
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False, **named)


def _byte_symbols() -> list[str]:
    """The printable stand-in of each byte in byte-level BPE (GPT-2's table): printable Latin-1 stays, the rest moves
    up to U+0100 and above in order."""
    kept = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    symbols, moved = [], 0
    for byte in range(256):
        symbols.append(chr(byte) if byte in kept else chr(256 + moved))
        moved += byte not in kept
    return symbols
