"""Tokenizers: the light way gives what transformers gives, or is not taken."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stages.chat.messages import PIECE, TokenizerError, TooLong
from stages.chat.tokenizer import TransformersTokenizer, load_tokenizer
from stages.data.prompt_set import load_train_prompts
from tests.stages.data.test_prompt_set import write
from tests.stages.stage_rig import make_config

TEMPLATE = """{%- if tools %}TOOLS {{ tools | tojson }}
{% endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}{{ raise_exception('system must come first') }}{% endif %}
    {%- if message.role == 'tool' %}{% continue %}{% endif %}
    {%- generation %}<|im_start|>{{ message.role }}{{ message.reasoning_content }}{{ message.thinking }}
{{ message.content }}<|im_end|>
{% endgeneration %}
    {% if message.thinking %}
  thought
    {% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %} (quiet){% endif %}
{% endif %}"""

TEXTS = ["", "a", "Héllo <|im_end|> wörld  ", "日本語 🙂\n\t x\u0301 <s>", "1 + 1 = 2 ."]
MESSAGES = [
    {"role": "system", "content": "Be <b>brief</b> & kind."},
    {"role": "user", "content": "Grüße 'n' \"x\""},
    {"role": "tool", "content": "left out"},
    {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]},
    {"role": "assistant", "content": "a", "reasoning": "so"},
    {"role": "assistant", "content": "b", "thinking": "then"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "größer <x>"}}]


def write_settings(path: Path, **config: Any) -> None:
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<|im_end|>", **config}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def make_checkpoint(path: Path, **config: Any) -> Path:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "<|im_start|>", "<|im_end|>", "<|end|>"])
    if config.get("add_bos_token"):
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    backend.enable_truncation(4)  # a saved training state that must not leak into prompts
    path.mkdir(parents=True, exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    write_settings(path, **config)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, 259, 258]}))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("bos", [False, True])
def test_light_equals_transformers(tmp_path: Path, bos: bool) -> None:
    from transformers import AutoTokenizer

    path = make_checkpoint(tmp_path / "model", add_bos_token=bos)
    light, reference = load_tokenizer(str(path)), AutoTokenizer.from_pretrained(str(path))
    reference._tokenizer.no_truncation()
    assert not isinstance(light, TransformersTokenizer)
    assert light.vocab_size == len(reference)
    for text in TEXTS:
        for special in (False, True):
            ids = light.encode(text, add_special_tokens=special)
            assert ids == reference.encode(text, add_special_tokens=special)
            for skip in (False, True):
                assert light.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)
    for tools in (None, TOOLS):
        for extra in ({}, {"enable_thinking": False}, {"add_generation_prompt": False}):
            expected = reference.apply_chat_template(
                MESSAGES, tools=tools, tokenize=False, **{"add_generation_prompt": True, **extra}
            )
            assert light.apply_chat_template(MESSAGES, tools, **extra) == expected


def test_end_of_sequence_ids_are_joined_with_the_tokenizers_own_first(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model")
    assert load_tokenizer(str(path)).eos_ids == (258, 256, 259)
    (path / "generation_config.json").unlink()
    (path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 256}}))
    assert load_tokenizer(str(path)).eos_ids == (258, 256)


def test_where_a_template_comes_from_and_what_it_sees(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "named"}]
    path = make_checkpoint(tmp_path / "model", chat_template=named)
    (tmp_path / "own.jinja").write_text("own")
    assert load_tokenizer(str(path), str(tmp_path / "own.jinja")).apply_chat_template([]) == "own"
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.has_chat_template
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(messages, TOOLS).startswith('TOOLS [{"type": "function"')
    assert "größer <x>" in tokenizer.apply_chat_template(messages, TOOLS)  # neither escaped for HTML nor for ASCII
    (path / "chat_template.jinja").unlink()
    assert load_tokenizer(str(path)).apply_chat_template([]) == "named"
    make_checkpoint(path)
    (path / "chat_template.jinja").unlink()
    bare = load_tokenizer(str(path))
    assert not bare.has_chat_template
    with pytest.raises(TokenizerError, match="no chat template; give one with --chat-template-path"):
        bare.apply_chat_template([])


def test_prompts_with_a_real_tokenizer(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", add_bos_token=True)
    rows = [{"input": "plain"}, {"input": [{"role": "user", "content": "x"}, {"role": "system", "content": "late"}]}]
    rows.append({"input": [{"role": "user", "content": "hi"}]})
    data = write(tmp_path / "rows.jsonl", rows)
    tokenizer = load_tokenizer(str(path))
    prompts = load_train_prompts(make_config(data={"prompt_data": [data], "rollout_max_prompt_len": 1000}), tokenizer)
    assert prompts.get(0).prompt_ids[0] == 256  # text gets the BOS
    assert prompts.get(1).prompt_ids[0] == 257  # a rendered chat has only what its template writes
    assert tokenizer.decode(prompts.get(1).prompt_ids.tolist(), False) == prompts.get(1).prompt
    assert "system must come first" in prompts.report.bad_rows[0].reason


def test_the_light_way_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model")
    program = (
        "import sys; from stages.chat.tokenizer import load_tokenizer; "
        f"print(load_tokenizer({str(path)!r}).encode('a')); "
        "print([name for name in ('torch', 'transformers', 'datasets', 'pyarrow') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1] == "[]"


@pytest.mark.slow
@pytest.mark.parametrize("config", [
    {"eos_token": "<|not in the file|>"},
    {"add_bos_token": True, "bos_token": "<|end|>"},
    {"added_tokens_decoder": {"300": {"content": "<|extra|>"}}},
])  # fmt: skip
def test_what_the_file_does_not_tell_is_left_to_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    path = make_checkpoint(tmp_path / "model")
    write_settings(path, **config)
    tokenizer = load_tokenizer(str(path))
    assert isinstance(tokenizer, TransformersTokenizer)
    assert tokenizer.has_chat_template
    assert tokenizer.decode(tokenizer.encode("abc")) == "abc"


def test_broken_files(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"'/nowhere/model', which is no directory; give a Hugging Face model"):
        load_tokenizer("/nowhere/model")
    path = make_checkpoint(tmp_path / "model")
    (path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(TokenizerError, match=r"chat_template.jinja' is not valid Jinja \(line 1.*correct it"):
        load_tokenizer(str(path))
    with pytest.raises(TokenizerError, match="which is no file; give the path of a Jinja template"):
        load_tokenizer(str(path), str(tmp_path / "missing.jinja"))
    (path / "chat_template.jinja").unlink()
    (path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"cannot be read .*save the tokenizer again"):
        load_tokenizer(str(path))
    (path / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"not valid JSON .*save the tokenizer again"):
        load_tokenizer(str(path))


@pytest.mark.slow
def test_directory_without_any_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="has no tokenizer that can be loaded"):
        load_tokenizer(str(tmp_path))


def test_a_text_that_cannot_fit_is_never_tokenised_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(str(make_checkpoint(tmp_path / "long")))
    sizes: list[int] = []
    original = type(tokenizer).encode

    def encode(self: Any, text: str, add_special_tokens: bool = False, most: int | None = None) -> list[int]:
        sizes.append(len(text))
        return original(self, text, add_special_tokens, most)

    monkeypatch.setattr(type(tokenizer), "encode", encode)
    with pytest.raises(TooLong, match="over 70000 tokens, which leaves no room for an answer"):
        tokenizer.encode("12+34=" * 2_000_000, most=70_000)
    assert sizes == [12_000_000, PIECE, PIECE]
    fits = "12+34=" * 20_000
    assert tokenizer.encode(fits, most=120_000) == tokenizer.encode("12+34=") * 20_000, "by the call for batches"
