"""`args` as user code written for slime reads it: every setting by the name of its flag, with underscores.

Most flags have slime's names. The rest is filled in here: where the model is asked, and what no run of ours can have.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import msgspec

from configs.schema import Config
from stages.messages import PromptGroup
from stages.topic_values import sampling

# Settings of slime that are always so here.
_FIXED: Mapping[str, object] = {
    "debug_train_only": False,
    "mask_offpolicy_in_partial_rollout": False,
    "multimodal_keys": None,
    "rollout_skip_special_tokens": True,
    "sglang_enable_deterministic_inference": False,
    "sglang_speculative_algorithm": None,
    "use_opd": False,
    "use_rollout_routing_replay": False,
    "use_slime_router": False,
    "ci_test": False,
}


class SlimeArguments(SimpleNamespace):
    """Settings by name. What is not there says so with the place to look."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"args has no {name!r}: it is no setting of this run; see docs/custom_generate.md for the names, and "
            f"python launch.py --help for all settings"
        )

    def asking(self, url: str, key: str = "") -> SlimeArguments:
        """A copy whose router is this address. The key goes into the host's part of an address made of it."""
        host, _, port = url.removeprefix("http://").rstrip("/").rpartition(":")
        named = f"{key}@{host}" if key else host
        return SlimeArguments(**{**vars(self), "sglang_router_ip": named, "sglang_router_port": int(port)})


def slime_arguments(config: Config, **more: object) -> SlimeArguments:
    """All settings of a configuration under the names of their flags."""
    values: dict[str, object] = dict(_FIXED)
    for section in msgspec.structs.fields(Config):
        value = getattr(config, section.name)
        if isinstance(value, msgspec.Struct):
            values |= {one.name: getattr(value, one.name) for one in msgspec.structs.fields(type(value))}
    files = config.data.prompt_data
    values |= {
        "sglang_server_concurrency": config.rollout.server_concurrency,
        "apply_chat_template_kwargs": dict(config.data.apply_chat_template_kwargs),
        "rollout_stop": list(config.rollout.rollout_stop) or None,
        "rollout_stop_token_ids": list(config.rollout.rollout_stop_token_ids) or None,
        "prompt_data": files[0] if len(files) == 1 else list(files) or None,
        "sglang_router_ip": None,
        "sglang_router_port": None,
        **more,
    }
    return SlimeArguments(**values)


def sampling_parameters(config: Config, group: PromptGroup) -> dict[str, Any]:
    """Of one request, in SGLang's words."""
    rollout, evaluated, evaluation = config.rollout, config.eval, group.purpose == "eval"
    drawn = sampling(group, rollout)
    longest = evaluated.eval_max_response_len if evaluation else rollout.rollout_max_response_len
    return {
        "temperature": evaluated.eval_temperature if evaluation else drawn.temperature,
        "top_p": 1.0 if evaluation else drawn.top_p,
        "top_k": -1 if evaluation else rollout.rollout_top_k,
        "max_new_tokens": longest or rollout.rollout_max_response_len,
        "stop": list(rollout.rollout_stop) or None,
        "stop_token_ids": list(rollout.rollout_stop_token_ids) or None,
        "skip_special_tokens": rollout.rollout_skip_special_tokens,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
