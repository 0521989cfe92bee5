"""Small chat templates with the features of well-known families, and checkpoints (tokenizer only) that have them.

The tokenizer is byte-level without merges, so a text has one tokenisation, however it is cut.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers


class Family(NamedTuple):
    template: str
    special: tuple[str, ...]
    eos: tuple[str, ...]  # the first is the tokenizer's own
    bos: str = ""
    plain: tuple[str, ...] = ()  # tokens of their own that are text, not markup


def make_checkpoint(directory: Path, family: Family) -> str:
    """A directory with a tokenizer and nothing else."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={symbol: place for place, symbol in enumerate(alphabet)}, merges=[]))
    core.add_special_tokens(list(family.special))
    core.add_tokens(list(family.plain))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    directory.mkdir(parents=True, exist_ok=True)
    core.save(str(directory / "tokenizer.json"))
    config = {"eos_token": family.eos[0], **({"bos_token": family.bos} if family.bos else {})}
    if family.template:
        config["chat_template"] = family.template
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    ids = [core.token_to_id(token) for token in family.eos]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return str(directory)


# `ns.last` is the place of the last question.
_LAST = """{%- set ns = namespace(last=0) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
"""

# Drops the reasoning of turns before the last question; tool answers are one user turn.
QWEN3 = Family(
    _LAST
    + """{%- if tools %}<|im_start|>system
Tools:{% for tool in tools %}
{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}<|im_start|>assistant
{% if message.reasoning_content and loop.index0 > ns.last %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}
{%- if not loop.first or message.content %}{{ '\\n' }}{% endif %}<tool_call>
{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}""",
    ("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    ("<|im_end|>", "<|endoftext|>"),
    plain=("<think>", "</think>", "<tool_call>", "</tool_call>"),
)

# Opens the reasoning in the prompt.
THINKER = QWEN3._replace(
    template=QWEN3.template.replace(
        "{%- if add_generation_prompt %}<|im_start|>assistant\n",
        "{%- if add_generation_prompt %}<|im_start|>assistant\n<think>\n",
    )
)

# Headers, a BOS in the template, a role of its own for tool answers, one call a turn, no content beside a call.
LLAMA3 = Family(
    """{{- bos_token }}
{%- for message in messages %}
{%- set role = 'ipython' if message.role == 'tool' else message.role %}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
{%- if message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}
{%- set f = message.tool_calls[0].function %}
{{- '{"name": "' + f.name + '", "parameters": ' + (f.arguments | tojson) + '}' }}
{%- elif message.role == 'tool' %}{{ message.content | tojson }}
{%- else %}{{ message.content | trim }}{% endif %}
{{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}""",
    ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>"),
    ("<|end_of_text|>",),
    bos="<|begin_of_text|>",
)

# Arguments between tags, without quotes.
QWEN3_CODER = QWEN3._replace(
    template=QWEN3.template.replace(
        "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}",
        "<function={{ call.function.name }}>"
        "{%- for key, value in call.function.arguments.items() %}"
        "{{ '\\n<parameter=' + key + '>\\n' }}"
        "{{ value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}"
        "{{ '\\n</parameter>' }}"
        "{%- endfor %}{{ '\\n</function>' }}",
    )
)

# No token closes a turn: the model writes what opens the next message. Earlier reasoning becomes an empty block.
GLM45 = Family(
    _LAST
    + """{{- '[gMASK]<sop>' }}
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{ '<|assistant|>\\n<think>' }}
{{- message.reasoning_content if message.reasoning_content and loop.index0 > ns.last else '' }}{{ '</think>' }}
{%- if message.content %}{{ '\\n' + message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>' + call.function.name }}
{%- for key, value in call.function.arguments.items() %}
{{- '\\n<arg_key>' + key + '</arg_key>\\n<arg_value>' }}
{{- value if value is string else value | tojson }}{{ '</arg_value>' }}
{%- endfor %}{{ '\\n</tool_call>' }}
{%- endfor %}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- else %}{{ '<|' + message.role + '|>\\n' + message.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}""",
    ("[gMASK]", "<sop>", "<|endoftext|>", "<|user|>", "<|observation|>", "<|assistant|>", "<|system|>"),
    ("<|endoftext|>", "<|user|>", "<|observation|>"),
    plain=("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>"),
)

# Sections of calls in tokens of their own, and no generation prompt behind tool answers.
DEEPSEEK = Family(
    """{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '<｜User｜>' + message.content + '<｜Assistant｜>' }}
{%- elif message.role == 'assistant' %}{{ message.content }}
{%- for call in message.tool_calls or [] %}
{%- if loop.first %}{{ '<｜tool▁calls▁begin｜>' }}{% endif %}
{{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' }}
{{- call.function.arguments | tojson }}{{ '<｜tool▁call▁end｜>' }}
{%- if loop.last %}{{ '<｜tool▁calls▁end｜>' }}{% endif %}
{%- endfor %}{{ '<｜end▁of▁sentence｜>' }}
{%- elif message.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
{%- else %}{{ message.content }}{% endif %}
{%- endfor %}""",
    tuple(f"<｜{name}｜>" for name in ("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant"))
    + tuple(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"))
    + ("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
    ("<｜end▁of▁sentence｜>",),
    bos="<｜begin▁of▁sentence｜>",
)
DEEPSEEK_FENCED = DEEPSEEK._replace(
    template=DEEPSEEK.template.replace("'<｜tool▁call▁begin｜>' +", "'<｜tool▁call▁begin｜>function<｜tool▁sep｜>' +")
    .replace("call.function.name + '<｜tool▁sep｜>' }}", "call.function.name + '\\n```json\\n' }}")
    .replace("{{ '<｜tool▁call▁end｜>' }}", "{{ '\\n```<｜tool▁call▁end｜>' }}")
)

# Names of calls in their ids, which answers repeat.
KIMI_K2 = Family(
    """{%- for message in messages %}
{{- '<|im_' + message.role + '|>' + message.role + '<|im_middle|>' }}
{%- if message.role == 'tool' %}{{ '## Return of ' + message.tool_call_id + '\\n' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{%- if loop.first %}{{ '<|tool_calls_section_begin|>' }}{% endif %}
{{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}
{{- call.function.arguments | tojson }}{{ '<|tool_call_end|>' }}
{%- if loop.last %}{{ '<|tool_calls_section_end|>' }}{% endif %}
{%- endfor %}{{ '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}""",
    (
        *(f"<|im_{name}|>" for name in ("user", "assistant", "system", "tool", "middle", "end")),
        *(f"<|tool_call{name}|>" for name in ("s_section_begin", "s_section_end", "_begin", "_end", "_argument_begin")),
    ),
    ("<|im_end|>",),
)

# Tools before the last question only, ids of nine letters, alternating roles.
MISTRAL = Family(
    _LAST
    + """{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if not loop.first and messages[loop.index0 - 1].role == 'tool' %}{{ raise_exception('roles') }}{% endif %}
{%- if tools and loop.index0 == ns.last %}{{ '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' + message.content + '[/INST]' }}
{%- elif message.tool_calls %}{{ '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- ', "id": "' + call.id + '"}' + ('' if loop.last else ', ') }}
{%- endfor %}{{ ']' + eos_token }}
{%- elif message.role == 'assistant' %}{{ ' ' + message.content | trim + eos_token }}
{%- elif message.role == 'tool' %}
{%- if message.tool_call_id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}
{{- '[TOOL_RESULTS] {"content": ' + message.content | tojson + ', "call_id": "' + message.tool_call_id + '"}' }}
{{- '[/TOOL_RESULTS]' }}
{%- endif %}
{%- endfor %}""",
    ("<s>", "</s>", "[TOOL_CALLS]", *(f"[{end}{name}]" for name in ("INST", "AVAILABLE_TOOLS") for end in ("", "/"))),
    ("</s>",),
    bos="<s>",
)

# Channels; the end of a last turn is another token than that of an earlier one; earlier analysis is left out.
HARMONY = Family(
    """{%- set ns = namespace(final=-1, name='') %}
{%- for message in messages %}
{%- if message.role == 'assistant' and not message.tool_calls %}{% set ns.final = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- if message.content and message.thinking and message.tool_calls %}{{ raise_exception('both') }}{% endif %}
{%- if message.thinking and (loop.index0 > ns.final or loop.last) %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
{%- endif %}
{%- if message.tool_calls %}
{%- set ns.name = message.tool_calls[0].function.name %}
{{- '<|start|>assistant to=functions.' + ns.name + '<|channel|>commentary json<|message|>' }}
{{- message.tool_calls[0].function.arguments | tojson }}{{ '<|call|>' }}
{%- else %}{{ '<|start|>assistant<|channel|>final<|message|>' + message.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- endif %}
{%- elif message.role == 'tool' %}
{%- if not ns.name %}{{ raise_exception('no call') }}{% endif %}
{{- '<|start|>functions.' + ns.name + ' to=assistant<|channel|>commentary<|message|>' + message.content + '<|end|>' }}
{%- else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}""",
    tuple(f"<|{name}|>" for name in ("start", "end", "return", "call", "message", "channel", "constrain")),
    ("<|return|>", "<|call|>"),
)

PYTHONIC = LLAMA3._replace(
    template=LLAMA3.template[: LLAMA3.template.index("{%- if message.tool_calls %}")]
    + """{%- if message.tool_calls %}
{{- message.content + '[' }}
{%- for call in message.tool_calls %}
{{- call.function.name + '(' }}
{%- for key, value in call.function.arguments.items() %}
{{- key + '=' + value | tojson + ('' if loop.last else ', ') }}
{%- endfor %}{{ ')' + (']' if loop.last else ', ') }}
{%- endfor %}
"""
    + LLAMA3.template[LLAMA3.template.index("{%- elif message.role == 'tool' %}") :]
)

# No markup for tools at all, and text that closes a turn instead of a token.
ALPACA = Family(
    "{% for message in messages %}"
    "{{ '### Response:\\n' if message.role == 'assistant' else '### Instruction:\\n' }}"
    "{{ message.content }}{{ '\\n\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '### Response:\\n' }}{% endif %}",
    ("</s>",),
    ("</s>",),
)


def _alpaca(old: str, new: str) -> Family:
    assert old in ALPACA.template
    return ALPACA._replace(template=ALPACA.template.replace(old, new))


_COUNTING = "{{ '<s>' + messages | length | string + ' messages\\n' }}"
_CONTENT = "{{ message.content }}"
BROKEN = {
    "stand before|stands before": ALPACA._replace(template=_COUNTING + ALPACA.template, special=("</s>", "<s>")),
    "another way when other things": _alpaca(
        "'### Instruction:\\n'", "('### Instruction ' + loop.index | string + ':\\n')"
    ),
    "leaves out what the model wrote in an earlier turn": _alpaca("in messages", "in messages[-1:]"),
    "leaves out what the model wrote in its last turn": _alpaca(_CONTENT, "{{ message.content[:3] }}"),
    "ends a turn of the model in another way": _alpaca("{{ '\\n\\n' }}", "{{ '\\n\\n' if loop.last else '</s>' }}"),
    "does not show a message of role 'user'": _alpaca(
        _CONTENT, "{{ message.content if loop.first or message.role == 'assistant' else '' }}"
    ),
    "refuses messages of user, assistant": ALPACA._replace(
        template="{{ raise_exception('one message only') if messages | length > 1 }}" + ALPACA.template
    ),
}
