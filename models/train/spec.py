"""Everything that a trainer and its models are built from, out of the configuration of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from configs.schema import Config
from configs.schema.algorithm import KL_IN_REWARD, AlgorithmConfig, CriticConfig, DistillConfig
from configs.schema.train import FsdpConfig, LoraConfig, MegatronConfig, ParallelConfig, TrainConfig
from models.algorithms.aggregation import Aggregation
from models.algorithms.group_loss import GroupLossFunction, group_loss_of
from models.algorithms.modes import Correction, correction_of
from models.train.errors import TrainConfigInvalid
from models.train.step.learning_rate import check_schedule


@dataclass(frozen=True)
class TrainSpec:
    """`temperature`: of the rollouts; `max_response_len`: tokens, the constant of `constant` aggregation;
    `total_steps`: optimizer steps of the run, needed by a decaying learning rate; `correction`: default: as if samples
    may be stale.

    Raises `TrainConfigInvalid`, `UnknownAlgorithm`.
    """

    train: TrainConfig
    algorithm: AlgorithmConfig
    correction: Correction = field(default_factory=lambda: Correction("decoupled", True))
    critic: CriticConfig = field(default_factory=CriticConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    temperature: float = 1.0
    max_response_len: int = 512
    seed: int = 42
    total_steps: int | None = None

    def __post_init__(self) -> None:
        check_schedule(self.train, self.total_steps)
        if self.whole_groups and self.algorithm.custom_loss_function_path is None:
            raise TrainConfigInvalid(
                "loss_type=custom_loss needs a function; set --custom-loss-function-path package.module:function"
            )

    @property
    def supervised(self) -> bool:
        return self.train.loss_type == "sft_loss"

    @property
    def reinforced(self) -> bool:
        return self.train.loss_type == "policy_loss"

    @property
    def aggregation(self) -> Aggregation:
        """Of the loss."""
        return "token_mean" if self.supervised else self.algorithm.loss_aggregation

    @property
    def opd_kl_coef(self) -> float | None:
        """Weight of the distillation term; None if it is off."""
        wanted = self.distill.use_opd or self.algorithm.advantage_estimator == "on_policy_distillation"
        return self.distill.opd_kl_coef if wanted and self.reinforced else None

    @property
    def reward_kl(self) -> bool:
        """Whether KL to the reference is part of the reward."""
        return self.algorithm.kl_coef > 0 and self.algorithm.advantage_estimator in KL_IN_REWARD

    @property
    def uses_reference(self) -> bool:
        """Whether a reference is loaded: for KL in the loss (a loss of one's own reads it too) or in the reward."""
        in_loss = self.algorithm.use_kl_loss and self.algorithm.kl_loss_coef > 0
        return (in_loss and not self.supervised) or (self.reward_kl and self.reinforced)

    @property
    def uses_critic(self) -> bool:
        """Whether values of states are learned beside the policy."""
        return self.reinforced and self.algorithm.advantage_estimator == "ppo"

    @property
    def whole_groups(self) -> bool:
        """A loss of one's own sees each group in one micro-batch."""
        return self.train.loss_type == "custom_loss"

    @property
    def scoring_temperature(self) -> float:
        """What logits are divided by."""
        return 1.0 if self.supervised else self.temperature

    @property
    def group_loss(self) -> GroupLossFunction | None:
        """The user's own loss, imported. Raises `UnknownAlgorithm`."""
        path = self.algorithm.custom_loss_function_path
        return group_loss_of(path) if self.whole_groups and path is not None else None


def train_spec(config: Config, total_batches: int) -> TrainSpec:
    """Of a run of `total_batches` rollout batches."""
    return TrainSpec(
        train=config.train,
        algorithm=config.algorithm,
        correction=correction_of(config.correction),
        critic=config.critic,
        distill=config.distill,
        parallel=config.parallel,
        fsdp=config.fsdp,
        lora=config.lora,
        megatron=config.megatron,
        temperature=config.rollout.rollout_temperature,
        max_response_len=config.rollout.rollout_max_response_len,
        seed=config.run.seed,
        total_steps=total_batches * (config.train.num_steps_per_rollout or 1),
    )
