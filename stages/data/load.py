"""The prompt sets that a configuration asks for: one for training, one for each held-out file."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from configs.schema import Config
from configs.schema.data import DataConfig
from models.families.source import context_limit
from stages.agents.messages import Message as ChatMessage
from stages.data.prompt_set import Preparer, PromptSet, Render
from stages.data.rows import Message
from stages.data.tokenizer import Tokenizer, load_tokenizer
from stages.tools.registry import resolve_tools


def load_train_prompts(config: Config, tokenizer: Tokenizer) -> PromptSet:
    """The prompts of `--prompt-data`. Raises DataError."""
    return _load(config, config.data, tokenizer, tokenize_labels=config.train.loss_type == "sft_loss")


def row_preparer(config: Config, tokenizer: Tokenizer) -> Preparer:
    """For rows of a data source: text is taken as it stands, messages are rendered."""
    return Preparer(False, tokenizer.encode, tokenizer.encode, _render(config.data, tokenizer), (), False)


def load_eval_prompts(config: Config, path: str) -> PromptSet:
    """The prompts of one held-out file, `path[@[a:b]]`, read with the keys of evaluation. Raises DataError."""
    data = msgspec.structs.replace(
        config.data,
        prompt_data=(path,),
        input_key=config.eval.eval_input_key or config.data.input_key,
        label_key=config.eval.eval_label_key or config.data.label_key,
    )
    return _load(config, data, load_tokenizer(config.train.hf_checkpoint, data.chat_template_path))


def _load(config: Config, data: DataConfig, tokenizer: Tokenizer, *, tokenize_labels: bool = False) -> PromptSet:
    """Plain text gets special tokens (BOS), a rendered chat has its own."""
    context = context_limit(config)  # a longer prompt would leave no token for a response
    if config.environment:
        return _load_tasks(config, data)

    return PromptSet(
        data.prompt_data,
        data,
        lambda text: tokenizer.encode(text, add_special_tokens=True),
        _render(data, tokenizer),
        tokenize_rendered=tokenizer.encode,
        tools=[tool.schema for tool in resolve_tools(config.tools.tools).values()],
        max_prompt_tokens=None if context is None else context - 1,
        tokenize_labels=tokenize_labels,
    )


def _render(data: DataConfig, tokenizer: Tokenizer) -> Render | None:
    def render(messages: list[Message], offered: list[Mapping[str, object]]) -> str:
        return tokenizer.apply_chat_template(messages, offered or None, **data.apply_chat_template_kwargs)

    return render if tokenizer.has_chat_template else None


def _load_tasks(config: Config, data: DataConfig) -> PromptSet:
    """Rows that environments turn into prompts: they travel as messages, and the agents stage makes the tokens."""

    def render(messages: list[Message], offered: list[Mapping[str, object]]) -> str:
        return msgspec.json.encode(msgspec.convert(messages, tuple[ChatMessage, ...])).decode()

    rows = msgspec.structs.replace(data, apply_chat_template=True, rollout_max_prompt_len=None)
    return PromptSet(data.prompt_data, rows, lambda _: (0,), render)
