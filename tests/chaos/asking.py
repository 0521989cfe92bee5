"""Runs of agents that ask the gateway, to be killed: what they train must not depend on it.

    python asking.py PROMPT     one of the agents: a command-line program that asks for each line of its prompt

Each rollout is a program of several requests, one behind the other: the openai client in both of its dialects,
openai-agents where it is installed, and the program above, which streams in Anthropic's dialect. The program needs only
the standard library.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import urllib.request
from pathlib import Path

AGENTS_PYTHON = Path(__file__).parents[2] / ".venv-agents" / "bin" / "python"
ASKED = ("1+2=?", "7", "8-9")  # by a user, each behind an answer
STOPS = (5, 11, 17)  # tokens that end a turn, so that turns are short
TEMPLATE = (
    "{%- for m in messages -%}"
    "{{ {'user': 'd: ', 'assistant': 'a: ', 'tool': 'r: ', 'system': 's: '}[m['role']] + m['content'] + eos_token }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ 'a: ' }}{%- endif -%}"
)
TABLE = """
[[environment]]
name = "{name}"
path = "stages.agents.packs.{path}"
workers = 1
memory_gb = 0
retries = 1000
{more}
"""


def write(home: Path) -> list[str]:
    """The recipe, rows and template of such a run in a new directory; the flags that name them."""
    home.mkdir(parents=True)
    program = json.dumps([sys.executable, str(Path(__file__).absolute()), "{prompt}"])
    tables = {
        "chat": ("openai_client:OpenaiClient", ""),
        "responses": ("openai_client:OpenaiClient", 'options = { api = "responses" }'),
        "program": ("command:Command", f"options = {{ argv = {program} }}"),
    }
    if AGENTS_PYTHON.exists():
        tables["agents"] = ("openai_agents:OpenaiAgents", f'python = "{AGENTS_PYTHON}"')
    recipe = "".join(TABLE.format(name=name, path=path, more=more) for name, (path, more) in tables.items())
    (home / "asking.toml").write_text(recipe)
    (home / "template.jinja").write_text(TEMPLATE)
    with (home / "rows.jsonl").open("w") as rows:
        for number in range(400):
            users = [{"role": "user", "content": text} for text in random.Random(number).sample(ASKED, len(ASKED))]
            kind = list(tables)[number % len(tables)]
            rows.write(json.dumps({"input": users, "metadata": {"environment": kind}}) + "\n")
    return [
        "--config", str(home / "asking.toml"), "--prompt-data", str(home / "rows.jsonl"),
        "--chat-template-path", str(home / "template.jinja"), "--rollout-stop-token-ids", *map(str, STOPS),
        "--rollout-max-response-len", "150", "--max-turns", "8", "--scale", "agents=2",
    ]  # fmt: skip


def ask(messages: list[dict[str, str]]) -> str:
    body = {"model": os.environ["ANTHROPIC_MODEL"], "max_tokens": 40, "stream": True, "messages": messages}
    headers = {"x-api-key": os.environ["ANTHROPIC_API_KEY"], "Content-Type": "application/json"}
    url = f"{os.environ['ANTHROPIC_BASE_URL']}/v1/messages"
    text = ""
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as events:
        for line in events:
            if line.startswith(b"data: "):
                text += json.loads(line[6:]).get("delta", {}).get("text", "")
    return text


def main(prompt: str) -> None:
    messages: list[dict[str, str]] = []
    for line in prompt.splitlines():
        messages.append({"role": "user", "content": line})
        messages.append({"role": "assistant", "content": ask(messages)})
        time.sleep(0.05)


if __name__ == "__main__":
    main(sys.argv[1])
