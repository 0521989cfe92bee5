"""Calls whose arguments stand between tags, without quotes: Qwen3-Coder and GLM-4.5.

    <tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>
    <tool_call>NAME<arg_key>KEY</arg_key><arg_value>value</arg_value></tool_call>

The tool's schema tells whether a value is text or JSON.
"""

from __future__ import annotations

import re
from typing import Final

from stages.agents.chat_formats.parsers.found import CALL_CHARS, Found, Offered, blocks
from stages.agents.messages import ToolCall

_CODER: Final = re.compile(r"\s*<function=([^>\s]+)>(.*?)(?:</function>\s*)?", re.DOTALL)
_CODER_PAIR: Final = re.compile(r"\s*<parameter=([^>\s]+)>(.*?)</parameter>\s*", re.DOTALL)
_CODER_FORM: Final = "<function=NAME><parameter=KEY>value</parameter></function>"
_GLM: Final = re.compile(r"([^<]*)((?:<arg_key>.*)?)", re.DOTALL)
_GLM_PAIR: Final = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)
_GLM_FORM: Final = "NAME<arg_key>KEY</arg_key><arg_value>value</arg_value>"


class Tagged:
    """Calls of one of the two forms. `breaks`: the line breaks on either side of a value are markup."""

    opening = "<tool_call>"
    closing = "</tool_call>"
    reads_reasoning = False

    def __init__(self, call: re.Pattern[str], pair: re.Pattern[str], form: str, breaks: bool) -> None:
        self._call, self._pair, self._form, self._breaks = call, pair, form, breaks

    def parse(self, text: str, offered: Offered) -> Found:
        return blocks(text, self.opening, self.closing, lambda content: self._read(content, offered))

    def _read(self, content: str, offered: Offered) -> ToolCall | str:
        if len(content) > CALL_CHARS:
            return f"the tool call is longer than {CALL_CHARS} characters"
        matched = self._call.fullmatch(content)
        if matched is None:
            return f"a tool call has the form {self._form}; tools: {', '.join(offered.names)}"
        name, rest = matched[1].strip(), matched[2]
        arguments: dict[str, object] = {}
        place = 0
        while rest[place:].strip():
            pair = self._pair.match(rest, place)
            if pair is None:
                return f"an argument of the tool call is not closed or not named; the form is {self._form}"
            key, value = pair[1].strip(), pair[2]
            if self._breaks:
                value = value.removeprefix("\n").removesuffix("\n")
            arguments[key] = offered.value(name, key, value)
            place = pair.end()
        return offered.call(name, arguments)


def qwen3_coder() -> Tagged:
    return Tagged(_CODER, _CODER_PAIR, _CODER_FORM, breaks=True)


def glm() -> Tagged:
    return Tagged(_GLM, _GLM_PAIR, _GLM_FORM, breaks=False)
