"""Turns of gpt-oss: messages in channels. Analysis is reasoning, a message to `functions.NAME` is a call, the rest is
content.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json
    <|message|>{...}<|call|>
"""

from __future__ import annotations

import re
from typing import Final

from stages.agents.chat_formats.parsers.found import Found, Offered, called, found
from stages.agents.messages import ToolCall

_BODY: Final = "<|message|>"
_HEADER: Final = re.compile(r"<\|start\|>assistant|<\|channel\|>")
_END: Final = re.compile(r"<\|(?:end|call|return)\|>|(?=<\|start\|>assistant|<\|channel\|>)")
_RECIPIENT: Final = re.compile(r"to=functions\.([^\s<]+)")
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w*)")


class Harmony:
    opening = "<|channel|>commentary to="
    closing = "<|call|>"
    reads_reasoning = True

    def parse(self, text: str, offered: Offered) -> Found:
        reasoning: list[str] = []
        content: list[str] = []
        calls: list[ToolCall] = []
        faults: list[str] = []
        place = 0
        while (begin := text.find(_BODY, place)) >= 0:
            header = _HEADER.search(text, place, begin)
            start = begin if header is None else header.start()
            end = _END.search(text, begin + len(_BODY))
            content.append(text[place:start])
            place = len(text) if end is None else end.end()
            head, body = text[start:begin], text[begin + len(_BODY) : len(text) if end is None else end.start()]
            recipient, channel = _RECIPIENT.search(head), _CHANNEL.search(head)
            if recipient is not None:
                call = called(offered, recipient[1], body)
                if isinstance(call, ToolCall):
                    calls.append(call)
                    continue
                faults.append(call)
                content.append(text[start:place])
            elif channel is not None and channel[1] == "analysis":
                reasoning.append(body)
            else:
                content.append(body)
        content.append(text[place:])
        parts = found("".join(content), calls, faults)
        return Found(parts.content, parts.calls, parts.fault, "\n".join(reasoning))
