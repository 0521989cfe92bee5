"""`Sample` as user code written for slime knows it: the fields of its public documentation, and the enum of its status.

Only what such code touches is here; a run's own `Sample` is that of stages/messages.py.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from typing import Any


class Status(Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class Sample:
    """One sequence. `tokens` is the prompt and the response, `response_length` counts those behind the prompt."""

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None  # of the response; None: what the model made is trained
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None  # of the response; what the engine said is taken instead
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

    # As slime's: `Sample.Status.COMPLETED`. An annotation would make it a field.
    Status = Status

    def get_reward_value(self, args: Any) -> Any:
        """The reward, or that part of it which `args.reward_key` names."""
        return self.reward[args.reward_key] if isinstance(self.reward, dict) and args.reward_key else self.reward

    @property
    def effective_response_length(self) -> int:
        """Tokens of the response that are trained."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def update_from_meta_info(self, args: Any, meta_info: dict[str, Any]) -> None:
        """Status and weights version from what an engine says of its answer."""
        if meta_info.get("weight_version") is not None:
            self.weight_versions.append(str(meta_info["weight_version"]))
        reason = meta_info.get("finish_reason") or {}
        ends = {"length": Status.TRUNCATED, "abort": Status.ABORTED, "stop": Status.COMPLETED}
        self.status = ends.get(reason.get("type", ""), self.status)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "status": self.status.value}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Sample:
        """What `to_dict` gave; unknown keys are passed over."""
        known = {one.name for one in fields(cls)}
        values = {name: value for name, value in data.items() if name in known}
        return cls(**{**values, "status": Status(values.get("status", "pending"))})


class DataSource:
    """What data sources of slime's users are derived from; the run asks the class itself for its methods."""


@dataclass
class RolloutFnTrainOutput:
    """What a rollout function returns: groups of samples, and numbers that are reported with them."""

    samples: list[list[Sample]]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """What a rollout function returns of an evaluation; no run of ours asks for one."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None
