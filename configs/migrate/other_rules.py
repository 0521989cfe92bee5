"""Keys of verl, TRL and prime-rl whose values must be counted: sizes of batches, lengths, devices.

A rule stands under all keys that it reads and is asked once, if one of them is there. It answers with flags, a note, or
a fault. Facts: each project's configuration classes (versions in `projects/`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

import msgspec
from msgspec import Struct

from configs.schema.notation import as_number
from configs.translate import Answer


class Unclear(Exception):
    """A value that a rule cannot count with. The text is the fault."""


class Given(Struct, frozen=True):
    """What a file says, by dotted key, over the project's defaults. `written`: the name that the file has for a key."""

    values: Mapping[str, object]
    written: Mapping[str, str] = {}

    def get(self, *keys: str, default: object = None) -> object:
        """The value of the first of these keys that is there."""
        return next((self.values[key] for key in keys if key in self.values), default)

    def whole(self, *keys: str, default: float | None = None) -> int:
        """Raises `Unclear`."""
        number = as_number(self.get(*keys, default=default))
        if number is None or not number.is_integer():
            name = next((self.written[key] for key in keys if key in self.written), keys[0])
            raise Unclear(f"{name} is {self.get(*keys)}, but must be a whole number; give the flag behind the file")
        return int(number)


Rule = Callable[[Given], Answer]


def _sizes(**flags: object) -> tuple[str, ...]:
    """`rollout_batch_size=8` -> `--rollout-batch-size 8`; None is left out."""
    given = {name.replace("_", "-"): value for name, value in flags.items() if value is not None}
    return tuple(word for name, value in given.items() for word in (f"--{name}", str(value)))


def _divided(number: int, by: int, what: str) -> int:
    if by < 1 or number % by:
        raise Unclear(f"{what} would be {number} / {by}, but must be a whole number; change one of them")
    return number // by


# ---------------------------------------------------------------------- verl


def _verl_batch(given: Given) -> Answer:
    """Both sizes count prompts."""
    groups, mini = given.whole("data.train_batch_size"), given.whole("actor_rollout_ref.actor.ppo_mini_batch_size")
    steps = _divided(groups, mini, "optimizer steps of a batch")
    return Answer(_sizes(rollout_batch_size=groups, num_steps_per_rollout=steps))


def _verl_devices(given: Given) -> Answer:
    """Trainer and engines have the same devices, where they are on one machine."""
    each, nodes = given.whole("trainer.n_gpus_per_node"), given.whole("trainer.nnodes", default=1)
    sizes = _sizes(actor_num_gpus_per_node=each, rollout_num_gpus=each * nodes)
    if nodes == 1:
        return Answer((*sizes, "--colocate"))
    note = f"verl's trainer and engines share {nodes} machines; here they share one at most, so the engines get others"
    return Answer((*sizes, *_sizes(actor_num_nodes=nodes, runner="ray")), note=note)


# ---------------------------------------------------------------------- TRL


def _trl_batch(given: Given) -> tuple[int, int]:
    """Groups of a generation, and the optimizer steps on them. All sizes of TRL count completions."""
    devices = given.whole("per_device_train_batch_size") * given.whole("num_processes", default=1)
    passes = given.whole("gradient_accumulation_steps", default=1)
    together = given.whole(
        "generation_batch_size", default=devices * given.whole("steps_per_generation", default=passes)
    )
    steps = _divided(together, devices * passes, "optimizer steps of a generation")
    return _divided(together, given.whole("num_generations"), "groups of a generation"), steps


def _trl_sizes(given: Given) -> Answer:
    (groups, steps), processes = _trl_batch(given), given.whole("num_processes", default=1)
    many = _sizes(actor_num_gpus_per_node=processes, train_backend="fsdp") if processes > 1 else ()
    note = "" if "num_processes" in given.values else "the number of processes is not in the file, and one was counted"
    return Answer((*_sizes(rollout_batch_size=groups, num_steps_per_rollout=steps), *many), note=note)


def _trl_steps(key: str, flag: str, *strategy: str) -> Rule:
    """TRL counts optimizer steps, and we count batches."""

    def rule(given: Given) -> Answer:
        kind, steps = given.get(*strategy, default="steps"), as_number(given.get(key, default=-1)) or 0
        if steps <= 0 or kind in ("no", False):
            return Answer()
        if steps < 1 or kind != "steps":
            return Answer(fault=f"it is counted in batches; write --{flag} N")
        return Answer((f"--{flag}", str(max(1, round(steps / _trl_batch(given)[1])))))

    return rule


_ACCURACY: Final = "accuracy=math"
_TRL_GRADERS: Final = {
    **dict.fromkeys(("accuracy_reward", "reasoning_accuracy_reward", "accuracy"), _ACCURACY),
    **dict.fromkeys(("think_format_reward", "format"), "format=format:<think>.*</think>.*"),
}


def _trl_rewards(given: Given) -> Answer:
    """The weights stand in the order of the functions; all are 1 without them."""
    graders = [_TRL_GRADERS.get(str(name).lower()) for name in listed(given.get("reward_funcs", default=[]))]
    weights = listed(given.get("reward_weights", default=[1] * len(graders)))
    if not graders or None in graders:
        return Answer(
            fault="such functions take lists of completions; wrap them as docs/migration.md#rewards-of-trl shows, and "
            "give all of reward_funcs as --reward-component NAME=GRADER@WEIGHT"
        )
    if len(weights) != len(graders):
        raise Unclear(f"{len(weights)} weights for {len(graders)} functions; give one for each")
    components = [f"{grader}@{words(weight)[0]}" for grader, weight in zip(graders, weights, strict=True)]
    labels = ("--label-key", "solution") if _ACCURACY in graders else ()
    return Answer((*(word for one in components for word in ("--reward-component", one)), *labels))


# ---------------------------------------------------------------------- prime-rl

_O: Final = "orchestrator"


def _prime_batch(given: Given) -> Answer:
    """Both sizes count rollouts."""
    samples = given.whole(f"{_O}.group_size", default=1)
    groups = _divided(given.whole(f"{_O}.batch_size"), samples, "groups of a batch")
    return Answer(_sizes(rollout_batch_size=groups, n_samples_per_prompt=samples))


def _prime_ahead(given: Given) -> Answer:
    """Rollouts in flight are batches ahead; tokens are never older than prime-rl lets them be."""
    batch, bound = given.whole(f"{_O}.batch_size"), given.whole(f"{_O}.max_off_policy_steps", default=8)
    flying = batch * (as_number(given.get(f"{_O}.oversampling_factor")) or 1)
    flying = given.whole(f"{_O}.max_inflight_rollouts", default=math.ceil(flying))
    ahead = min(bound, given.whole("max_async_level", default=math.ceil(flying / batch)))
    note = f"tokens are at most {ahead} versions old; with --max-staleness {bound} generation would run as far ahead"
    return Answer(_sizes(async_buffer_size=ahead), note=note if ahead < bound else "")


def _prime_lengths(given: Given) -> Answer:
    """Without a limit of its own a response may fill the context."""
    context = given.whole(f"{_O}.seq_len", "seq_len", "inference.model.max_model_len", default=2048)
    packed = max(context, given.whole("trainer.model.seq_len", "seq_len", default=context))
    most = min(context - 1, given.whole(f"{_O}.train.sampling.max_completion_tokens", default=context))
    return Answer(_sizes(rollout_max_context_len=context, rollout_max_response_len=most, max_tokens_per_gpu=packed))


def listed(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def words(value: object) -> list[str]:
    """A value, or a list of values, as the words of a flag."""
    if isinstance(value, dict):
        return [msgspec.json.encode(value).decode()]
    items = value if isinstance(value, list) else [value]
    return [f"{item:.12g}" if isinstance(item, float) else str(item) for item in items]


RULES: Final[Mapping[str, Mapping[tuple[str, ...], Rule]]] = {
    "verl": {
        ("data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"): _verl_batch,
        ("trainer.n_gpus_per_node", "trainer.nnodes"): _verl_devices,
    },
    "TRL": {
        ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size",
         "num_processes"): _trl_sizes,
        ("reward_funcs", "reward_weights"): _trl_rewards,
        ("max_steps",): _trl_steps("max_steps", "num-rollout"),
        ("save_steps", "save_strategy"): _trl_steps("save_steps", "save-interval", "save_strategy"),
        ("eval_steps", "eval_strategy"): _trl_steps("eval_steps", "eval-interval", "eval_strategy"),
        ("logging_steps",): _trl_steps("logging_steps", "log-interval"),
    },
    "prime-rl": {
        (f"{_O}.batch_size", f"{_O}.group_size"): _prime_batch,
        ("max_async_level", f"{_O}.max_off_policy_steps", f"{_O}.oversampling_factor", f"{_O}.max_inflight_rollouts"):
            _prime_ahead,
        ("seq_len", f"{_O}.seq_len", "trainer.model.seq_len", "inference.model.max_model_len",
         f"{_O}.train.sampling.max_completion_tokens"): _prime_lengths,
    },
}  # fmt: skip
