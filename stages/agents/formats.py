"""The chat format of a run's model, for the stage that writes conversations and for the driver, which sets stops."""

from __future__ import annotations

import msgspec

from configs.schema import Config
from stages.agents.chat import ChatFormat
from stages.agents.chat_formats.load import load_chat_format


def chat_format(config: Config) -> ChatFormat:
    """How conversations with the policy are written. Raises ChatFormatError."""
    data, tools = config.data, config.tools
    return load_chat_format(
        config.train.hf_checkpoint,
        chat_template_path=data.chat_template_path,
        parser=tools.tool_call_parser,
        marks=(tools.tool_call_open, tools.tool_call_close),
        template_arguments=data.apply_chat_template_kwargs,
    )


def with_stops(config: Config) -> Config:
    """The configuration with what ends a turn of the model among the stops of sampling. Raises ChatFormatError."""
    if not config.environment:
        return config
    chat, rollout = chat_format(config), config.rollout
    return msgspec.structs.replace(
        config,
        rollout=msgspec.structs.replace(
            rollout,
            rollout_stop=tuple(dict.fromkeys((*rollout.rollout_stop, *chat.stop))),
            rollout_stop_token_ids=tuple(dict.fromkeys((*rollout.rollout_stop_token_ids, *chat.stop_token_ids))),
        ),
    )
