"""How long prompt and response may be together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from configs.schema import Config


def context_limit(config: Config) -> int | None:
    """Most tokens of prompt and response: `--rollout-max-context-len`, else the model's positions; None if not known.

    Unknown too where the positions are stretched by a factor: engines do not agree on what the product is.
    """
    if config.rollout.rollout_max_context_len is not None:
        return config.rollout.rollout_max_context_len
    try:
        text = Path(config.train.hf_checkpoint, "config.json").read_bytes()
        found = msgspec.json.decode(text, type=dict[str, Any])
    except (OSError, msgspec.MsgspecError):
        return None  # of the hub, or what reads it will say what is wrong
    if found.get("rope_scaling") or "factor" in (found.get("rope_parameters") or {}):
        return None
    limit = found.get("max_position_embeddings")
    return limit if isinstance(limit, int) else None
