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


# Drops the reasoning of turns before the last question; tool answers are one user turn.
QWEN3 = Family(
    """{%- if tools %}<|im_start|>system
Tools:{% for tool in tools %}
{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
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

# No markup for tools at all, and text that closes a turn instead of a token.
ALPACA = Family(
    "{% for message in messages %}"
    "{{ '### Response:\\n' if message.role == 'assistant' else '### Instruction:\\n' }}"
    "{{ message.content }}{{ '\\n\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '### Response:\\n' }}{% endif %}",
    ("</s>",),
    ("</s>",),
)

_COUNTING = "{{ '<s>' + messages | length | string + ' messages\\n' }}"
BROKEN = {
    "stand before|stands before": ALPACA._replace(template=_COUNTING + ALPACA.template, special=("</s>", "<s>")),
    "another way when other things": ALPACA._replace(
        template=ALPACA.template.replace("'### Instruction:\\n'", "('### Instruction ' + loop.index | string + ':\\n')")
    ),
    "leaves out what the model wrote in an earlier turn": ALPACA._replace(
        template=ALPACA.template.replace("for message in messages", "for message in messages[-1:]")
    ),
    "leaves out what the model wrote in its last turn": ALPACA._replace(
        template=ALPACA.template.replace("{{ message.content }}", "{{ message.content[:3] }}")
    ),
    "ends a turn of the model in another way": ALPACA._replace(
        template=ALPACA.template.replace("{{ '\\n\\n' }}", "{{ '\\n\\n' if loop.last else '</s>' }}")
    ),
    "does not show a message of role 'user'": ALPACA._replace(
        template=ALPACA.template.replace(
            "{{ message.content }}", "{{ message.content if loop.first or message.role == 'assistant' else '' }}"
        )
    ),
    "refuses messages of user, assistant": ALPACA._replace(
        template="{{ raise_exception('one message only') if messages | length > 1 }}" + ALPACA.template
    ),
}
