"""The prompt sets that a configuration asks for: one for training, one for each held-out file.

`checkpoint` is the directory of the tokenizer, where it is not the one that the configuration names.
"""

from __future__ import annotations

import msgspec

from configs.schema import Config
from stages.data.prompt_set import PromptSet
from stages.data.tokenizer import Tokenizer, load_tokenizer
from stages.tools.registry import resolve_tools


def load_train_prompts(config: Config, checkpoint: str | None = None, tokenizer: Tokenizer | None = None) -> PromptSet:
    """The prompts of `--prompt-data`. Raises DataError."""
    return _load(config, config.data.prompt_data, checkpoint, tokenizer, config.train.loss_type == "sft_loss")


def load_eval_prompts(
    config: Config, path: str, checkpoint: str | None = None, tokenizer: Tokenizer | None = None
) -> PromptSet:
    """The prompts of one held-out file, `path[@[a:b]]`, read with the keys of evaluation. Raises DataError."""
    data = msgspec.structs.replace(
        config.data,
        input_key=config.eval.eval_input_key or config.data.input_key,
        label_key=config.eval.eval_label_key or config.data.label_key,
    )
    return _load(msgspec.structs.replace(config, data=data), (path,), checkpoint, tokenizer, False)


def _load(
    config: Config, paths: tuple[str, ...], checkpoint: str | None, tokenizer: Tokenizer | None, labels: bool
) -> PromptSet:
    if tokenizer is None:
        tokenizer = load_tokenizer(checkpoint or config.train.hf_checkpoint, config.data.chat_template_path)
    context = config.rollout.rollout_max_context_len
    return PromptSet.open(
        config.data,
        tokenizer,
        paths=paths,
        tools=[tool.schema for tool in resolve_tools(config.tools.tools).values()],
        max_prompt_tokens=None if context is None else context - 1,
        tokenize_labels=labels,
    )
