"""Advantages, policy loss, KL; the off-policy correction and its rejection rules; the critic; distillation.

Owners: `models/algorithms`, `models/train`, `stages/teacher`. Three policies: mu (sampler), old (centre of the
trust region), theta (current).
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal

from msgspec import Meta

from configs.schema.notation import Count, Factor, Natural, NonNegative, Positive, ReadBy, Section, Share

# Names that `--advantage-estimator` knows; an import path package.module:function is taken beside them.
ESTIMATORS: Final = (
    "grpo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo",
    "on_policy_distillation", "maxrl", "gdpo",
)  # fmt: skip
# Names that `--policy-loss` knows; an import path is taken beside them.
POLICY_LOSSES: Final = (
    "ppo", "gspo", "cispo", "dppo", "topr", "topr_sequence", "aipo", "m2po", "kimi", "sapo", "clip_cov", "kl_cov",
)  # fmt: skip

Aggregation = Literal["rollout_mean", "token_mean", "seq_mean", "seq_mean_token_sum", "constant"]
LOSS_OF_ESTIMATOR: Final = {"gspo": "gspo", "cispo": "cispo"}  # what `auto` means; "ppo" for all others
# Estimators that compare the rollouts of a prompt, hence need two.
GROUP_RELATIVE: Final = frozenset(ESTIMATORS) - {"reinforce_plus_plus", "ppo", "on_policy_distillation"}
KL_IN_REWARD: Final = frozenset(("reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"))  # read kl_coef
WHITENED: Final = KL_IN_REWARD | {"gdpo"}
SAMPLER_LOSSES: Final = frozenset(("dppo", "topr", "topr_sequence", "aipo", "m2po"))  # their ratio is theta / mu


class AlgorithmConfig(Section, frozen=True, kw_only=True):
    """Algorithm: advantages, policy loss, KL, aggregation."""

    advantage_estimator: str = "grpo"
    """how rewards become advantages: grpo, dr_grpo, gspo, cispo, rloo, reinforce_plus_plus,
    reinforce_plus_plus_baseline, ppo, on_policy_distillation, maxrl, gdpo, or package.module:function"""
    policy_loss: str = "auto"
    """loss of a token: ppo, gspo, cispo, dppo, topr, topr_sequence, aipo, m2po, kimi, sapo, clip_cov, kl_cov, or
    package.module:function; auto = the loss of the estimator"""
    rollout_data_postprocess_path: Annotated[str | None, ReadBy("--loss-type policy_loss")] = None
    """function that changes advantages when log-probs and advantages of a batch are there, with slime's interface:
    (args, rollout_id, rollout_data)"""
    custom_advantage_function_path: Annotated[str | None, ReadBy("--loss-type policy_loss")] = None
    """advantages of tokens in place of the estimator's, with slime's signature: package.module:function"""
    custom_pg_loss_reducer_function_path: Annotated[str | None, ReadBy("--loss-type policy_loss")] = None
    """how the policy term becomes one number, with slime's signature: package.module:function"""
    disable_grpo_std_normalization: bool = False
    """grpo without division by the group's standard deviation"""
    disable_rewards_normalization: bool = False
    """group estimators take the rewards as they are, without the group's mean"""
    normalize_advantages: bool | None = None
    """whiten advantages over the whole batch; default: on for ppo, gdpo and both reinforce_plus_plus"""
    gamma: Annotated[Factor, ReadBy("--advantage-estimator ppo or reinforce_plus_plus")] = 1.0
    """discount per trainable token (ppo, reinforce_plus_plus)"""
    lambd: Annotated[Share, ReadBy("--advantage-estimator ppo")] = 1.0
    """lambda of GAE (ppo)"""
    critic_lambd: Annotated[Share | None, ReadBy("--advantage-estimator ppo")] = None
    """lambda of the returns that the critic learns; default: --lambd. VAPO has 1"""
    lambd_alpha: Annotated[Positive | None, ReadBy("--advantage-estimator ppo")] = None
    """lambda of the policy's advantages, 1 - 1 / (alpha l) for l tokens; default: --lambd. VAPO has 0.05"""
    bootstrap_truncated: Annotated[bool, ReadBy("--advantage-estimator ppo")] = False
    """GAE of a truncated response continues with the critic's last value instead of 0"""
    eps_clip: Positive = 0.2
    """PPO clip: ratio below 1 - eps_clip is clipped"""
    eps_clip_high: Positive | None = None
    """PPO clip-higher: ratio above 1 + this is clipped; default: --eps-clip"""
    eps_clip_c: Annotated[Annotated[float, Meta(gt=1)] | None, ReadBy("--policy-loss ppo")] = None
    """dual clip: bound of the loss of tokens with negative advantage, as a multiple of it"""
    dppo_threshold: Annotated[Positive, ReadBy("--policy-loss dppo")] = 0.15
    """dppo: largest move of a token's probability away from the sampler's"""
    dppo_kl_coef: Annotated[NonNegative, ReadBy("--policy-loss dppo")] = 1e-3
    """dppo: weight of the quadratic term (log theta - log mu)^2"""
    aipo_clip: Annotated[Positive, ReadBy("--policy-loss aipo")] = 2.0
    """aipo: upper bound of the ratio theta / mu"""
    m2po_threshold: Annotated[Positive, ReadBy("--policy-loss m2po")] = 0.04
    """m2po: bound of the mean squared log-ratio of the tokens that are kept"""
    kimi_tau: Annotated[NonNegative, ReadBy("--policy-loss kimi")] = 0.1
    """kimi: weight of the quadratic term (log theta - log old)^2"""
    tau_pos: Annotated[Positive, ReadBy("--policy-loss sapo")] = 1.0
    """sapo: temperature of the gate where the advantage is positive"""
    tau_neg: Annotated[Positive, ReadBy("--policy-loss sapo")] = 1.05
    """sapo: temperature of the gate where it is not; higher = ratios far from 1 count less"""
    clip_cov_ratio: Annotated[Share, ReadBy("--policy-loss clip_cov")] = 2e-4
    """clip_cov: share of the step's tokens that lose their gradient"""
    clip_cov_lb: Annotated[NonNegative, ReadBy("--policy-loss clip_cov")] = 1.0
    """clip_cov: they are drawn from tokens with a covariance above this"""
    clip_cov_ub: Annotated[Positive, ReadBy("--policy-loss clip_cov")] = 5.0
    """clip_cov: and below this"""
    kl_cov_ratio: Annotated[Share, ReadBy("--policy-loss kl_cov")] = 2e-4
    """kl_cov: share of the step's tokens, those of the largest covariance, that pay for their distance from old"""
    ppo_kl_coef: Annotated[NonNegative, ReadBy("--policy-loss kl_cov")] = 1.0
    """kl_cov: weight of |log theta - log old| of these tokens"""
    custom_loss_function_path: Annotated[str | None, ReadBy("--loss-type custom_loss")] = None
    """with --loss-type custom_loss: the loss over whole groups, package.module:function"""
    kl_coef: NonNegative = 0.0
    """weight of the KL to the reference in the reward (ppo, reinforce_plus_plus, .._baseline)"""
    use_kl_loss: bool = False
    """add a KL term to the reference policy to the loss"""
    kl_loss_coef: Annotated[NonNegative, ReadBy("--use-kl-loss")] = 0.0
    """weight of the KL term"""
    kl_loss_type: Annotated[Literal["k1", "k2", "k3", "low_var_kl"], ReadBy("--use-kl-loss")] = "low_var_kl"
    """KL estimator"""
    use_unbiased_kl: Annotated[bool, ReadBy("--use-kl-loss")] = False
    """multiply the KL term by the ratio of theta to the policy that sampled, with gradient"""
    ref_update_interval: Annotated[Count | None, ReadBy("--use-kl-loss or --kl-coef")] = None
    """the reference becomes the current policy every this many rollout batches; default: never"""
    entropy_coef: NonNegative = 0.0
    """weight of the entropy bonus"""
    entropy_interval: Count = 1
    """rollout batches from one measurement of the entropy to the next, in the last step of the batch; with an entropy
    bonus or a loss of your own every step computes it"""
    loss_aggregation: Aggregation = "rollout_mean"
    """how token losses become one number, always with the step's global denominators"""


class CorrectionConfig(Section, frozen=True, kw_only=True):
    """Off-policy correction."""

    policy_mode: Literal["auto", "decoupled", "bypass", "onpolicy"] = "auto"
    """old log-probs of the PPO ratio: decoupled = the trainer's own, weighted by TIS; bypass = the engine's; onpolicy =
    no correction (max staleness 0 only); auto = decoupled if TIS or a rejection rule is on, bypass with
    --use-rollout-logprobs, else onpolicy"""
    use_rollout_logprobs: bool = False
    """bypass mode: the PPO ratio is against the engine's log-probs"""
    use_tis: bool | None = None
    """importance weights against the engine's log-probs; default: on if staleness > 0"""
    tis_level: Literal["token", "sequence", "geometric"] = "token"
    """importance weight of the token, product over the response, or its geometric mean"""
    tis_mode: Literal["clip", "icepop", "seq_mask"] = "clip"
    """weights outside the bounds: clip = moved to the bound (TIS), icepop = set to 0, seq_mask = clip, and responses
    whose geometric mean lies outside tis_seq_low .. tis_seq_high set to 0"""
    tis_clip: Positive = 2.0
    """upper bound of the importance weight"""
    tis_clip_low: NonNegative = 0.0
    """lower bound of the importance weight"""
    tis_seq_low: Annotated[NonNegative, ReadBy("--tis-mode seq_mask")] = 0.95
    """seq_mask: lower bound of the geometric mean"""
    tis_seq_high: Annotated[Positive, ReadBy("--tis-mode seq_mask")] = 1.05
    """seq_mask: upper bound of the geometric mean"""
    tis_clip_decay: Factor = 1.0
    """version-aware bound: a token s versions old has 1 + (tis_clip - 1) * decay^s"""
    tis_batch_normalize: bool = False
    """divide the weights by their mean over the whole step"""
    correction_ratio: Literal["old", "current"] = "old"
    """weights are of old / mu, or of current theta / mu"""
    custom_tis_function_path: Annotated[str | None, ReadBy("--use-tis")] = None
    """the importance weights, package.module:function, with slime's signature or (log_weight, tokens)"""
    rollout_rs: tuple[str, ...] = ()
    """rejection rules RULE=BOUND or RULE=LOW_HIGH; RULE is {token,seq_sum,seq_mean,seq_max}_{k1,k2,k3}, e.g.
    seq_mean_k1=0.99_1.01 token_k3=0.05"""
    rs_veto: Annotated[float, Meta(gt=0, lt=1)] | None = None
    """reject a response with a token whose old / mu is below this, e.g. 1e-4; default: off"""
    rs_unit: Annotated[Literal["sample", "rollout"], ReadBy("--rollout-rs or --rs-veto")] = "sample"
    """what a sequence rule tests and removes, if a rollout fanned out: each row, or all rows pooled"""
    renormalize_after_rejection: Annotated[bool, ReadBy("--rollout-rs or --rs-veto")] = False
    """divide by the remaining tokens, which then weigh more"""
    prox: Literal["recompute", "loglinear"] = "recompute"
    """old log-probs in decoupled mode: a forward pass, or interpolated between mu and theta (A-3PO)"""
    prox_alpha: Annotated[Literal["next_version", "areal"], ReadBy("--prox loglinear")] = "next_version"
    """weight of theta in the interpolation, s versions old: s/(s+1), or AReaL's (s-1)/s"""
    use_opsm: bool = False
    """off-policy sequence masking: drop negative responses that drifted from the sampler"""
    opsm_delta: Annotated[Positive, ReadBy("--use-opsm")] = 1e-4
    """opsm: bound of the mean of log mu - log theta"""
    mask_offpolicy_in_partial_rollout: bool = False
    """train only the tokens of the newest version of a response that spans several"""
    staleness_lr_decay: NonNegative = 0.0
    """learning rate divided by 1 + this * mean staleness of the step; 0 = off"""
    ess_lr_scale: bool = False
    """learning rate times the square root of the step's effective sample size, by weights of whole sequences (VCPO)"""
    ess_warn: Share = 0.5
    """warn when the effective sample size falls below this share; 0 = never"""
    allow_uncorrected: bool = False
    """train stale tokens without any correction, e.g. as the baseline of a comparison"""

    @property
    def rejects(self) -> bool:
        """Whether a rejection rule or the veto is on."""
        return bool(self.rollout_rs) or self.rs_veto is not None

    @property
    def loglinear(self) -> bool:
        """Whether the old log-probs are interpolated from theta, so that no forward pass is spent on it."""
        return self.policy_mode == "decoupled" and self.prox == "loglinear"

    @property
    def against_current(self) -> bool:
        """Whether D = log theta - log mu instead of log old - log mu.

        By the configuration, or because in bypass mode old is mu itself and log old - log mu is always 0.
        """
        return self.correction_ratio == "current" or self.policy_mode == "bypass"

    @property
    def recomputes(self) -> bool:
        """Whether old log-probs are those of a forward pass of the trainer, where it makes one; else the sampler's."""
        return self.policy_mode != "bypass" and not self.loglinear


class CriticConfig(Section, frozen=True, kw_only=True):
    """Critic of PPO."""

    READ_BY: ClassVar[str] = "--advantage-estimator ppo"

    critic_load: str | None = None
    """Hugging Face checkpoint of the critic's backbone; default: --hf-checkpoint"""
    critic_lr: NonNegative | None = None
    """learning rate of the critic; default: ten times --lr, at most 3e-4"""
    critic_lr_warmup_iters: Natural = 0
    """optimizer steps of the critic's linear warm-up"""
    num_critic_only_steps: Natural = 0
    """rollout batches at the start in which only the critic is trained"""
    value_clip: Positive = 0.2
    """a value may move this far from that of the batch's start within the loss"""


class DistillConfig(Section, frozen=True, kw_only=True):
    """On-policy distillation."""

    use_opd: bool = False
    """subtract the reverse KL to a teacher from the advantages (on-policy distillation)"""
    opd_kl_coef: Annotated[Positive, ReadBy("--use-opd")] = 1.0
    """weight of the reverse KL to the teacher"""
    opd_teacher: Annotated[tuple[str, ...], ReadBy("--use-opd")] = ()
    """frozen engines that teach, by the names of --frozen-engine; default: all of them"""
    opd_teacher_key: Annotated[str, ReadBy("--use-opd")] = "teacher"
    """metadata field that names a row's teacher; rows without it take the first"""


# What a batch needs before its first backward pass. The trainer and the estimate of its work read the same rules.


Need = Literal["none", "old", "current"]


def needs(algorithm: AlgorithmConfig, correction: CorrectionConfig) -> Need:
    """Which log-probs of the whole step must be known before its first backward pass.

    "old": `old_log_probs`, `log_probs` may hold anything; "current": `log_probs` under the weights of this very
    step, too.
    """
    if algorithm.policy_loss in ("m2po", "clip_cov", "kl_cov"):
        return "current"
    normalises = correction.use_tis and correction.tis_batch_normalize
    counts = correction.rejects and (correction.renormalize_after_rejection or correction.rs_unit == "rollout")
    if not (normalises or counts):
        return "none"
    own = normalises and correction.custom_tis_function_path is not None  # which may read any column
    return "current" if correction.against_current or correction.loglinear or own else "old"


def scores_old(
    algorithm: AlgorithmConfig, correction: CorrectionConfig, distill: DistillConfig, *, loss_type: str, steps: int
) -> bool:
    """Whether a batch of `steps` optimizer steps takes a forward pass for the log-probs at its start.

    With one step they are those of the pass that trains, unless something reads them before.
    """
    if loss_type != "policy_loss":
        return loss_type == "custom_loss" and correction.recomputes and steps > 1
    estimator = algorithm.advantage_estimator
    student = distill.use_opd or estimator == "on_policy_distillation"
    student |= algorithm.kl_coef > 0 and estimator in KL_IN_REWARD
    functions = (algorithm.custom_advantage_function_path, algorithm.rollout_data_postprocess_path)
    student |= functions != (None, None)
    return needs(algorithm, correction) != "none" or (correction.recomputes and (steps > 1 or student))
