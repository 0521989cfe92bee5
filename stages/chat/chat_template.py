"""Jinja chat templates of Hugging Face checkpoints, rendered without transformers.

The environment offers what such templates rely on: trimmed blocks, loop controls, `raise_exception`, `strftime_now`,
a `tojson` that does not escape HTML, and the `generation` block, whose content is rendered as it stands. A template is
a program that came with a checkpoint, so it runs in Jinja's immutable sandbox on plain JSON values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from stages.chat.errors import TokenizerError

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
    if isinstance(declared, str):
        return declared, origin
    if isinstance(declared, Sequence):
        named = {entry.get("name"): entry.get("template") for entry in declared if isinstance(entry, Mapping)}
        chosen = named.get("default")
        if isinstance(chosen, str):
            return chosen, origin
    return None
