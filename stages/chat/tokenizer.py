"""The tokenizer of a Hugging Face checkpoint: encode, decode, end-of-sequence ids, chat template.

There are two loaders. The light loader reads tokenizer.json with the `tokenizers` library and renders templates with
Jinja; it takes 0.1 s and no torch. It is used if tokenizer.json is complete: the checkpoint names no custom tokenizer
class, the file has every special token of the configuration, and it adds the configured BOS and EOS. The file then
decides; transformers gives the same result, except where it builds its own class from the vocabulary against the
file. All other checkpoints are loaded by transformers, which imports torch.

Templates are rendered without transformers. The environment offers what such templates rely on: trimmed blocks, loop
controls, `raise_exception`, `strftime_now`, a `tojson` that does not escape HTML, and the `generation` block, whose
content is rendered as it stands. A template is a program that came with a checkpoint, so it runs in Jinja's immutable
sandbox on plain JSON values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from stages.chat.messages import PIECE, TokenizerError, refuse_longer

Render = Callable[..., str]


def compile_template(source: str, origin: str) -> Render:
    """A function of keyword arguments (messages, tools, ...) that renders the template. Raises TokenizerError."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        tags = {"generation"}  # noqa: RUF012 - the attribute that Jinja reads

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    try:
        return environment.from_string(source).render
    except jinja2.TemplateSyntaxError as error:
        raise TokenizerError(
            f"the chat template in {origin!r} is not valid Jinja (line {error.lineno}: {error.message}); "
            "correct it, or give another with --chat-template-path"
        ) from error


# Keys of a turn's reasoning. Templates read one of them: Qwen3 and GLM-4.5 the first, gpt-oss the second, some the
# third; data may have any.
REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


def with_reasoning(message: Mapping[str, object]) -> dict[str, object]:
    """The message with its reasoning under every name that a template may read, and without null fields.

    The first non-null name gives the value of missing names. Null fields are removed as in transformers: templates test
    whether a field is defined, not whether it is null.
    """
    present = {key: value for key, value in message.items() if value is not None}
    named = [present[name] for name in REASONING_NAMES if name in present]
    return {**dict.fromkeys(REASONING_NAMES, named[0]), **present} if named else present


def find_template(directory: Path, config: Mapping[str, object], override: str | None) -> tuple[str, str] | None:
    """(source, where it was found): the given file, else chat_template.jinja, else the tokenizer's configuration."""
    if override is not None:
        path = Path(override).expanduser()
        if not path.is_file():
            raise TokenizerError(
                f"chat_template_path is {override!r}, which is no file; give the path of a Jinja template"
            )
        return path.read_text(encoding="utf-8"), override
    beside = directory / "chat_template.jinja"
    if beside.is_file():
        return beside.read_text(encoding="utf-8"), str(beside)
    origin = str(directory / "tokenizer_config.json")
    declared = config.get("chat_template")
    if isinstance(declared, list):
        named = {entry.get("name"): entry.get("template") for entry in declared if isinstance(entry, Mapping)}
        declared = named.get("default")
    return (declared, origin) if isinstance(declared, str) else None


CHECKPOINT_FILES = (  # all files of a checkpoint that a tokenizer needs, and the identity of the model
    "tokenizer*",
    "*.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*config.json",
)
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_tokenizer(checkpoint: str, chat_template_path: str | None = None) -> Tokenizer:
    """The tokenizer of a checkpoint directory, or of a hub id. Raises TokenizerError."""
    directory = locate(checkpoint, CHECKPOINT_FILES)
    config = _read_json(directory / "tokenizer_config.json")
    template = find_template(directory, config, chat_template_path)
    light = (directory / "tokenizer.json").is_file() and "auto_map" not in config
    return (_load_light(directory, config, template) if light else None) or _load_transformers(directory, template)


def locate(checkpoint: str, files: Sequence[str] | None = None) -> Path:
    """The local directory of a checkpoint. Files of a hub id (default: all) come from the cache or are fetched.

    Raises TokenizerError.
    """
    path = Path(checkpoint).expanduser()
    if path.is_dir():
        return path
    looks_like_hub_id = checkpoint.count("/") == 1 and not checkpoint.startswith((".", "/", "~")) and not path.exists()
    if not looks_like_hub_id:
        raise TokenizerError(
            f"hf_checkpoint is {checkpoint!r}, which is no directory; give a Hugging Face model directory or a hub id "
            "of the form organisation/model"
        )
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(checkpoint, allow_patterns=list(files) if files else None))
    except Exception as error:  # the hub client raises many kinds; all mean that the fetch failed
        raise TokenizerError(
            f"hf_checkpoint is {checkpoint!r}, which is neither a local directory nor could be fetched from the hub "
            f"({type(error).__name__}); download the model and give its directory"
        ) from error


def _load_light(directory: Path, config: Mapping[str, object], template: tuple[str, str] | None) -> Tokenizer | None:
    """The light tokenizer, or None if this checkpoint needs transformers."""
    import tokenizers

    try:
        backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception as error:  # the binding raises bare Exception
        raise TokenizerError(
            f"{str(directory / 'tokenizer.json')!r} cannot be read ({error}); save the tokenizer again, or update the "
            "package `tokenizers`"
        ) from error
    backend.no_truncation()
    backend.no_padding()
    special = _special_tokens(directory, config)
    ids = {name: backend.token_to_id(text) for name, text in special.items()}
    added = config.get("added_tokens_decoder")
    if isinstance(added, Mapping):
        ids |= {f"added {key}": backend.token_to_id(_content(value) or "") for key, value in added.items()}
    if any(value is None for value in ids.values()):
        return None
    known = {name: value for name, value in ids.items() if value is not None}
    for flag, name, end in (("add_bos_token", "bos_token", 0), ("add_eos_token", "eos_token", -1)):
        encoded = backend.encode("a").ids
        if flag in config and bool(config[flag]) != (name in known and bool(encoded) and encoded[end] == known[name]):
            return None
    # transformers tidies spaces after decoding for models other than BPE.
    is_bpe = type(backend.model).__name__ == "BPE"
    if (config.get("clean_up_tokenization_spaces") and not is_bpe) or config.get("split_special_tokens"):
        return None
    return Tokenizer(backend, template, special, _eos_ids(directory, known.get("eos_token")))


class Tokenizer:
    """Text to token ids and back, as the checkpoint's model was trained: by tokenizer.json, without transformers.

    `template`: a chat template and where it was found. `special`: texts of named tokens, for the template. `eos_ids`:
    every id that ends a response: the tokenizer's own first, then ascending.
    """

    def __init__(
        self, backend: Any, template: tuple[str, str] | None, special: Mapping[str, Any], eos_ids: tuple[int, ...]
    ) -> None:
        self.eos_ids, self._backend, self._special = eos_ids, backend, special
        self.has_chat_template, self.chat_template = template is not None, template[0] if template is not None else ""
        self._render: Render | None = compile_template(*template) if template is not None else None

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, add_special_tokens: bool = False, most: int | None = None) -> list[int]:
        """Token ids of a text. Only the start of a plain-text prompt needs special tokens (a BOS).

        Raises TooLong for surely more than `most` tokens."""
        refuse_longer(self.encode, text, most)
        if len(text) < PIECE:
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        # The call for batches lets other threads run, and takes less memory, for it records no places in the text.
        return list(self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def markup(self, text: str) -> list[int]:
        """The token ids of a text that are markup, not text."""
        return [id for id in self.encode(text) if self.decode([id], False) and not self.decode([id])]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Render messages to text. `add_generation_prompt` is on unless the keyword arguments say otherwise."""
        if self._render is None:
            raise TokenizerError("the tokenizer has no chat template; give one with --chat-template-path")
        if kwargs.get("continue_final_message"):
            raise TokenizerError(
                "apply_chat_template_kwargs: continue_final_message is not supported; "
                "render the prompt beforehand and give it as text"
            )
        arguments = {"documents": None, "add_generation_prompt": True, **self._special, **kwargs}
        present = [with_reasoning(message) for message in messages]
        return self._render(messages=present, tools=tools or None, **arguments)


class TransformersTokenizer(Tokenizer):
    """By a tokenizer of the transformers library."""

    @property
    def vocab_size(self) -> int:
        return len(self._backend)

    def encode(self, text: str, add_special_tokens: bool = False, most: int | None = None) -> list[int]:
        refuse_longer(self.encode, text, most)
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens))


def _load_transformers(directory: Path, template: tuple[str, str] | None) -> TransformersTokenizer:
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(directory))
        if not tokenizer.encode("a 1"):  # without any file of its own it is one of no words
            raise ValueError("it makes no tokens")
    except Exception as error:  # the library raises many kinds; all mean that there is no usable tokenizer
        raise TokenizerError(
            f"hf_checkpoint {str(directory)!r} has no tokenizer that can be loaded ({type(error).__name__}: {error}); "
            "give a directory with tokenizer.json or the files of a transformers tokenizer"
        ) from error
    if template is None and isinstance(tokenizer.chat_template, str):
        template = tokenizer.chat_template, str(directory)
    eos_ids = _eos_ids(directory, tokenizer.eos_token_id)
    return TransformersTokenizer(tokenizer, template, tokenizer.special_tokens_map, eos_ids)


def _special_tokens(directory: Path, config: Mapping[str, object]) -> dict[str, str]:
    """Named special tokens. Older checkpoints have some of them only in special_tokens_map.json."""
    merged = {**_read_json(directory / "special_tokens_map.json"), **config}
    texts = {name: _content(merged.get(name)) for name in _SPECIAL_NAMES}
    return {name: text for name, text in texts.items() if text is not None}


def _content(value: object) -> str | None:
    """Text of a token, given as text or as an object with `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _eos_ids(directory: Path, own: int | None) -> tuple[int, ...]:
    """The end-of-sequence ids: first the tokenizer's, which ends a turn of a chat, then those of the generation
    configuration, else of the model's configuration."""
    first = () if own is None else (own,)
    for name in ("generation_config.json", "config.json"):
        config = _read_json(directory / name)
        nested = config.get("text_config")
        declared = config.get("eos_token_id", nested.get("eos_token_id") if isinstance(nested, Mapping) else None)
        ids = declared if isinstance(declared, list) else [declared]
        eos = {value for value in ids if isinstance(value, int)}
        if eos:
            return (*first, *sorted(eos - {own}))
    return first


def _read_json(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{str(path)!r} is not valid JSON ({error}); save the tokenizer again") from error
    return value if isinstance(value, dict) else {}
