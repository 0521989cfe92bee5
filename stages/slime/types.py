"""Arguments of user code written for slime: `Sample`, the parts of a data source, and sampling parameters.

`Sample` has the fields of slime's public documentation, as far as user code uses them; the run's own `Sample` is in
stages/messages.py, and `args` in models/slime_arguments.py.
"""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from typing import Any

import msgspec

from models.engines.protocol import SamplingParams


class Status(Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class Sample:
    """One sequence. `tokens`: prompt and response; `response_length`: tokens after the prompt."""

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    multimodal_train_input_id: str | None = None
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None  # of the response; None: generated tokens are trained
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None  # of the response; ignored, the engine's record counts
    rollout_top_p_token_ids: list[int] | None = None
    rollout_top_p_token_offsets: list[int] | None = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0

    # For `Sample.Status.COMPLETED`, as in slime. An annotation would make it a field.
    Status = Status

    def get_reward_value(self, args: Any) -> Any:
        """The reward, or its part `args.reward_key`."""
        return self.reward[args.reward_key] if isinstance(self.reward, dict) and args.reward_key else self.reward

    @property
    def effective_response_length(self) -> int:
        """Trained tokens of the response."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Any = None,
        log_probs: Any = None,
        trainable: bool = True,
        meta_info: dict[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Append to the response, and to its loss mask and log-probs. `tokens`, `log_probs`: lists or tensors.

        `trainable`: tokens of the model, with their log-probs; else of a tool or an environment, without. `meta_info`:
        of the engine's answer, which sets the status if `update_terminal_info`. Raises ValueError.
        """
        ids, probs = _listed(tokens, int), None if log_probs is None else _listed(log_probs, float)
        if trainable and ids and probs is None:
            raise ValueError(
                f"{len(ids)} tokens of the model came without log_probs; give those of the engine's answer"
            )
        if not trainable and probs is not None:
            raise ValueError("tokens with trainable=False have no log_probs, for no policy made them; leave those out")
        if probs is not None and len(probs) != len(ids):
            raise ValueError(f"log_probs has {len(probs)} entries for {len(ids)} tokens; give one for each")
        before = self.response_length
        if self.loss_mask is not None and len(self.loss_mask) != before:
            raise ValueError(
                f"loss_mask has {len(self.loss_mask)} entries for the {before} tokens that are there; give one for each"
            )
        self.response += text or ""
        self.tokens += ids  # in place, as all lists here: examples keep a name for `sample.loss_mask`
        self.response_length += len(ids)
        if ids:
            self.loss_mask = [1] * before if self.loss_mask is None else self.loss_mask
            self.loss_mask += [int(trainable)] * len(ids)
            self.rollout_log_probs = [0.0] * before if self.rollout_log_probs is None else self.rollout_log_probs
            self.rollout_log_probs += [0.0] * len(ids) if probs is None else probs
        if meta_info is not None and update_terminal_info and "finish_reason" in meta_info:
            self.update_from_meta_info(args, meta_info)

    def update_from_meta_info(self, args: Any, meta_info: dict[str, Any]) -> None:
        """Set status and weight version from an engine's answer."""
        if meta_info.get("weight_version") is not None:
            self.weight_versions.append(str(meta_info["weight_version"]))
        reason = meta_info.get("finish_reason") or {}
        ends = {"length": Status.TRUNCATED, "abort": Status.ABORTED, "stop": Status.COMPLETED}
        self.status = ends.get(reason.get("type", ""), self.status)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, attributes of the user's own included."""
        return {**vars(self), **asdict(self), "status": self.status.value}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Sample:
        """The inverse of `to_dict`; unknown keys become attributes."""
        known = {item.name for item in fields(cls)}
        values = {name: value for name, value in data.items() if name in known}
        sample = cls(**{**values, "status": Status(values.get("status", "pending"))})
        for name in data.keys() - known:
            setattr(sample, name, data[name])
        return sample


def _listed(values: Any, kind: type[Any]) -> list[Any]:
    """A list, also of a tensor or array of any shape."""
    flat = values.reshape(-1).tolist() if hasattr(values, "reshape") else values or ()
    return [kind(value) for value in flat]


def label_of(text: str | None) -> Any:
    """A row's label, which travels as text, as slime's functions see it: an object is one again."""
    if text is not None and text.startswith("{"):
        with contextlib.suppress(msgspec.DecodeError):
            return msgspec.json.decode(text)
    return text


class DataSource:
    """Base class for data sources of slime's users. The run checks the methods of the derived class."""


@dataclass
class RolloutFnTrainOutput:
    """Result of a rollout function: groups of samples, and metrics to report."""

    samples: list[list[Sample]]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """Result of a rollout function for an evaluation; exists for imports, never requested."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


def whole_responses(tensor: Any, total_length: int, response_length: int) -> Any:
    """The tensor."""
    return tensor


def sampling_parameters(params: SamplingParams) -> dict[str, Any]:
    """Sampling parameters of a request, with SGLang's names."""
    limits = ("max_new_tokens", "stop", "stop_token_ids", "skip_special_tokens", "no_stop_trim")
    sent = {name: getattr(params, name) for name in ("temperature", "top_p", "top_k", *limits)}
    return {**sent, "spaces_between_special_tokens": False}
