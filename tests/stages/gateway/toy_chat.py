"""A chat format for tests, in the tokens of the tiny checkpoints: bytes, 257 before a message and 258 behind it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from stages.chat.messages import Message, Reply, ToolCall, ToolSchema

BEGIN, END, VOCABULARY = 257, 258, 264
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_THOUGHT = re.compile(r"\A<think>(.*?)</think>", re.DOTALL)


class ToyChat:
    """As the checkpoints' chat template has it; `<think>` and `<tool_call>` mark thoughts and calls."""

    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = (END,)

    def __init__(self) -> None:
        self.tokenised: list[Message] = []  # all that was ever made tokens of

    def start(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        offered = [BEGIN, *b"tools\n", *json.dumps(list(tools)).encode(), END] if tools else []
        return [*offered, *self._written(messages)]

    def append(self, ids: Sequence[int], messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        return [*([] if ids[-1] == END else [END]), *self._written(messages)]

    def reply(self, ids: Sequence[int], tools: Sequence[ToolSchema]) -> Reply:
        text = bytes(i for i in ids if i < 256).decode(errors="replace")
        thought = _THOUGHT.match(text)
        text = text[thought.end() :] if thought else text
        calls = []
        for found in _CALL.findall(text):
            try:
                call = json.loads(found)
                calls.append(ToolCall(call["name"], call["arguments"]))
            except (ValueError, KeyError, TypeError):
                return Reply(Message("assistant", text), "the call is not valid JSON")
        content = _CALL.sub("", text) if calls else text
        return Reply(Message("assistant", content, thought[1] if thought else "", tuple(calls)))

    def _written(self, messages: Sequence[Message]) -> list[int]:
        self.tokenised += messages
        ids: list[int] = []
        for message in messages:
            ids += [BEGIN, *message.role.encode(), *b"\n", *text_of(message).encode(), END]
        return [*ids, BEGIN, *b"assistant\n"]


def text_of(message: Message) -> str:
    """A message as the model would write it."""
    thought = f"<think>{message.reasoning_content}</think>" if message.reasoning_content else ""
    calls = [json.dumps({"name": call.name, "arguments": call.arguments}) for call in message.tool_calls]
    return thought + message.content + "".join(f"<tool_call>{call}</tool_call>" for call in calls)
