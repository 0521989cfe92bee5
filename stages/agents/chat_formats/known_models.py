"""Chat formats of models that the package `renderers` knows by name, where it is installed (`pip install renderers`).

It writes the markup of a few dozen published checkpoints in Python, also of those that come without a chat template.
It is asked for what stands between two turns; what it does not answer is left to the template.

Invariant: a conversation only grows, also if the package would have it otherwise: its answer is then not taken.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from stages.agents.chat import ChatFormat, Reply
from stages.agents.chat_formats.errors import ChatFormatError
from stages.agents.chat_formats.rendering import as_mapping
from stages.agents.messages import Message, ToolCall, ToolSchema
from stages.data.tokenizer import Tokenizer

_CACHED: Final = re.compile(r"/models--([^/]+?)--([^/]+)/snapshots/")  # of the hub's client


def known_model(checkpoint: str, tokenizer: Tokenizer, template_arguments: Mapping[str, object]) -> KnownModel | None:
    """None without the package, or for a model that it does not know. Raises ChatFormatError."""
    try:
        from renderers import config_from_name, create_renderer
        from renderers.base import MODEL_RENDERER_MAP
    except ImportError:
        return None
    cached = _CACHED.search(f"{checkpoint}/")
    name = f"{cached[1]}/{cached[2]}" if cached else checkpoint
    family = MODEL_RENDERER_MAP.get(name)
    if family is None:
        return None
    try:
        config = type(config_from_name(family))(thinking_retention="all")  # what was sampled stays
        renderer = create_renderer(
            _AsPackageHasIt(tokenizer, name), config, chat_template_kwargs=dict(template_arguments) or None
        )
    except Exception as error:  # of the package, on a checkpoint that is not what its name says
        raise ChatFormatError(
            f"the package renderers knows {name!r} as {family}, but cannot be used with this tokenizer ({error}); "
            "correct --apply-chat-template-kwargs, use the model's own tokenizer, or uninstall the package"
        ) from error
    return KnownModel(renderer, tokenizer)


class KnownModel:
    """Bridges by the package, and a whole chat format for a model that has no template."""

    def __init__(self, renderer: Any, tokenizer: Tokenizer) -> None:
        self._renderer = renderer
        self.stop: Sequence[str] = ()
        self.stop_token_ids: Sequence[int] = tuple(
            id for id in renderer.get_stop_token_ids() if id not in tokenizer.eos_ids
        )
        question = [as_mapping(Message("user", "Where?"))]
        asked = renderer.render_ids(question, add_generation_prompt=True)
        self._begin = asked[len(renderer.render_ids(question)) :]  # what begins a turn

    def start(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        shown = [as_mapping(message) for message in messages]
        try:
            return list(self._renderer.render_ids(shown, tools=list(tools) or None, add_generation_prompt=True))
        except Exception as error:  # of the package, on roles or contents that the model does not know
            raise ChatFormatError(f"the conversation cannot be written for this model: {error}") from error

    def append(self, ids: Sequence[int], messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        behind = self.bridge(ids, messages, tools)
        if behind is None:
            roles = ", ".join(message.role for message in messages)
            raise ChatFormatError(f"messages of {roles} cannot follow a turn of this model")
        return behind

    def reply(self, ids: Sequence[int], tools: Sequence[ToolSchema]) -> Reply:
        parsed = self._renderer.parse_response(list(ids), tools=list(tools) or None)
        calls = [
            ToolCall(call.name, call.arguments if call.arguments is not None else {}, call.id or "")
            for call in parsed.tool_calls
            if call.status == "ok" and call.name
        ]
        wrong = [
            f"{call.status.value.replace('_', ' ')}: {call.raw}" for call in parsed.tool_calls if call.status != "ok"
        ]
        content = parsed.content + "".join(f"\n{call.raw}" for call in parsed.tool_calls if call.status != "ok")
        fault = f"the tool call cannot be read ({'; '.join(wrong)})" if wrong else ""
        return Reply(Message("assistant", content, parsed.reasoning_content or "", tuple(calls)), fault)

    def bridge(self, ids: Sequence[int], messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int] | None:
        """What stands behind a turn; None where the package does not say."""
        # It wants to know where the last turn begins: behind the last generation prompt.
        size, begin = len(self._begin), len(ids) - 1
        while size and begin >= size and list(ids[begin - size : begin]) != self._begin:
            begin -= 1
        begin = begin if begin >= size else 0
        bridged = self._renderer.bridge_to_next_turn(
            list(ids[:begin]), list(ids[begin:]), [as_mapping(one) for one in messages], tools=list(tools) or None
        )
        whole = None if bridged is None else list(bridged.token_ids)
        return whole[len(ids) :] if whole is not None and whole[: len(ids)] == list(ids) else None


class BridgedByPackage:
    """The format of a template, with what stands between turns by the package where it says."""

    def __init__(self, known: KnownModel, otherwise: ChatFormat) -> None:
        self.stop: Sequence[str] = otherwise.stop
        self.stop_token_ids: Sequence[int] = tuple(dict.fromkeys((*otherwise.stop_token_ids, *known.stop_token_ids)))
        self._known, self._otherwise = known, otherwise

    def start(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        return self._otherwise.start(messages, tools)

    def append(self, ids: Sequence[int], messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        behind = self._known.bridge(ids, messages, tools)
        return behind if behind is not None else self._otherwise.append(ids, messages, tools)

    def reply(self, ids: Sequence[int], tools: Sequence[ToolSchema]) -> Reply:
        return self._otherwise.reply(ids, tools)


class _AsPackageHasIt:
    """Our tokenizer under the names that the package calls."""

    unk_token_id = None

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        self.name_or_path = name
        self.eos_token_id = tokenizer.eos_ids[0] if tokenizer.eos_ids else None
        self._tokenizer = tokenizer

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        ids = self._tokenizer.encode(token)
        return ids[0] if len(ids) == 1 else None
