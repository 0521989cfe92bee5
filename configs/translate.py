"""Options of slime and of Megatron-LM that are no flags here: each is renamed, taken because it asks for what happens
anyway, compared with the model's config.json, or refused in one sentence.

Invariants: a command line without such options passes unchanged; an option that is taken asks for what this run does,
else it is refused with the value; every fault names the option as the user wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from configs.flags import OVERRIDE
from configs.schema.data import EvalSet
from configs.slime_options import ALIASES, MODEL_ARGS, NOT_HERE, TAKEN

_SAMPLES: Final = "slime.rollout.sglang_rollout.generate_rollout"
_ASYNC: Final = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
_SFT: Final = "slime.rollout.sft_rollout.generate_rollout"
_NONZERO: Final = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
_TEACHER: Final = "slime.rollout.on_policy_distillation."
_SOURCE: Final = "slime.rollout.data_source.RolloutDataSource"
_FUSIONS: Final = {"rope-fusion": "apply-rope-fusion"}  # Megatron-LM's flag -> Megatron-core's field
_MEGATRON_MARK: Final = "latest_checkpointed_iteration.txt"

Given = Mapping[str, Sequence[str]]


class Answer(Struct, frozen=True):
    """What an option becomes; nothing at all if it asks for what happens anyway. `note`: how it is understood otherwise
    than it was written; `fault`: why it is refused."""

    argv: tuple[str, ...] = ()
    note: str = ""
    fault: str = ""


class Option(Struct, frozen=True):
    """One option as it was written, or ("", ...) any other token. `answer`: None if it is taken as it is."""

    name: str
    values: tuple[str, ...]
    tokens: tuple[str, ...]
    answer: Answer | None

    @property
    def argv(self) -> tuple[str, ...]:
        """In flags of this project."""
        return self.tokens if self.answer is None else self.answer.argv


class Translation(Struct, frozen=True):
    """A command line, option by option."""

    options: tuple[Option, ...]

    @property
    def argv(self) -> tuple[str, ...]:
        """In flags of this project."""
        return tuple(token for option in self.options for token in option.argv)

    @property
    def notes(self) -> tuple[str, ...]:
        """What is understood otherwise than it was written, a sentence each."""
        return tuple(dict.fromkeys(o.answer.note for o in self.options if o.answer is not None and o.answer.note))

    @property
    def faults(self) -> tuple[str, ...]:
        """One for each reason, with all options that it is for."""
        refused: dict[str, list[str]] = {}
        for option in self.options:
            if option.answer is not None and option.answer.fault:
                refused.setdefault(option.answer.fault, []).append(f"--{option.name}")
        return tuple(
            f"{', '.join(dict.fromkeys(names))} {'is no flag' if len(set(names)) == 1 else 'are no flags'}: {reason}; "
            "leave it out"
            for reason, names in refused.items()
        )


def grouped(argv: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """(Option without dashes, its values, the tokens as they stand); the option is "" for all that is none."""
    at = 0
    while at < len(argv):
        start, token = at, argv[at]
        at += 1
        if not token.startswith("--"):
            yield "", (), (token,)
            continue
        name, equals, attached = token[2:].partition("=")
        while not equals and at < len(argv) and not argv[at].startswith("--") and not OVERRIDE.match(argv[at]):
            at += 1
        values = (attached,) if equals else tuple(argv[start + 1 : at])
        yield name, values, tuple(argv[start:at])


def translate(argv: Sequence[str]) -> Translation:
    """The command line without options that only slime and Megatron-LM know."""
    groups = list(grouped(argv))
    given = {name: values for name, values, _ in groups if name}
    return Translation(
        tuple(Option(name, values, tokens, _answer(name, values, given)) for name, values, tokens in groups)
    )


def _answer(name: str, values: tuple[str, ...], given: Given) -> Answer | None:
    """None for an option that is not of slime or Megatron-LM alone."""
    if name in RULES:
        return RULES[name](values, given)
    if name in ALIASES:
        return Answer((f"--{ALIASES[name]}", *values))
    if name in MODEL_ARGS:
        return Answer((f"model.model_args.{name}={' '.join(values) or 'true'}",))
    if name in TAKEN:
        wanted, reason = TAKEN[name]
        if not wanted or (len(values) == 1 and _same(values[0], wanted)):
            return Answer()
        return Answer(fault=f"{reason}, so {' '.join(values) or 'it'} cannot be had")
    if name in NOT_HERE:
        return Answer(fault=NOT_HERE[name])
    bare = name.removeprefix("no-")
    if name.startswith("no-") and bare.endswith("-fusion"):
        option = _FUSIONS.get(bare, bare).replace("-", "_")
        return Answer((f"megatron.megatron_args.{option}=false",))
    return None


def _same(value: str, wanted: str) -> bool:
    try:
        return float(value) == float(wanted)
    except ValueError:
        return value == wanted


def _save(values: tuple[str, ...], given: Given) -> Answer:
    """Checkpoints lie in the run's directory. `--load` of the same place continues what is there."""
    if given.get("load") == values and _is_run(values):
        return Answer()
    return Answer() if "run-dir" in given else Answer(("--run-dir", *values))


def _load(values: tuple[str, ...], given: Given) -> Answer:
    if _is_run(values):
        return Answer(("--resume", *values))
    place = " ".join(values)
    if (Path(place) / _MEGATRON_MARK).is_file():
        cure = f"python -m models.convert megatron-to-hf --megatron {place} --hf HF --out DIR, and --hf-checkpoint DIR"
        return Answer(note=f"--load {place} is a checkpoint of Megatron-LM; to begin with its weights: {cure}")
    if given.get("save") == values:  # as slime's scripts have it: continue if there is something
        return Answer()
    return Answer(note=f"--load {place} holds no run of Sluice; the run begins with the weights of --hf-checkpoint")


def _is_run(values: tuple[str, ...]) -> bool:
    return len(values) == 1 and (Path(values[0]) / "config.toml").is_file()


def _start(values: tuple[str, ...], given: Given) -> Answer:
    """0 is where a run begins that continues no other."""
    if values == ("0",) and not _is_run(tuple(given.get("load", ()))):
        return Answer()
    fault = "--resume goes on after the run's last checkpoint, and a new run begins with batch 0; to begin with other"
    return Answer(fault=f"{fault} weights give --hf-checkpoint RUN/checkpoints/step-N/hf")


def _ref_load(values: tuple[str, ...], given: Given) -> Answer | None:
    """A reference in Hugging Face's format is ours; Megatron's copy of the policy is where slime starts."""
    place = values[0].rstrip("/") if len(values) == 1 else ""
    if not (place.endswith("_torch_dist") or (place and (Path(place) / _MEGATRON_MARK).is_file())):
        return None
    return Answer(note=f"--ref-load {place} is a checkpoint of Megatron-LM; the reference is --hf-checkpoint instead")


def _kl_loss(values: tuple[str, ...], given: Given) -> Answer | None:
    """`--use-kl-loss --kl-loss-coef 0.00` asks for a loss of weight 0."""
    coefficient = given.get("kl-loss-coef", ())
    return Answer() if "use-kl-loss" in given and len(coefficient) == 1 and _same(coefficient[0], "0") else None


def _eval_prompt_data(values: tuple[str, ...], given: Given) -> Answer | None:
    """`NAME PATH NAME PATH`; a name has no slash, no dot and no equals sign, a path has one of the first two."""
    names, paths = values[::2], values[1::2]
    named = len(names) == len(paths) > 0 and not any(set("/.=") & set(name) for name in names)
    if not named or not all(set("/.") & set(path) for path in paths):
        return None
    return Answer(("--eval-prompt-data", *(f"{name}={path}" for name, path in zip(names, paths, strict=True))))


_EVAL_KEYS: Final = {  # of slime's data sets -> of `eval.eval_sets`
    "n_samples_per_eval_prompt": "n_samples",
    "prompt_key": "input_key",
    **{name: name for name in EvalSet.__struct_fields__},
}


def _eval_config(values: tuple[str, ...], given: Given) -> Answer:
    """A YAML file: `eval: {defaults: {...}, datasets: [{name, path, ...}]}`."""
    try:
        tables = msgspec.yaml.decode(Path(" ".join(values)).read_bytes())["eval"]
        defaults, sets = tables.get("defaults") or {}, {table.pop("name"): table for table in tables["datasets"]}
        paths = [f"{name}={table.pop('path')}" for name, table in sets.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, msgspec.MsgspecError) as error:
        wanted = "eval: with datasets:, each with name and path"
        return Answer(fault=f"{' '.join(values)} cannot be read as {wanted} ({type(error).__name__}: {error})")
    settings = {name: defaults | table for name, table in sets.items()}
    unknown = sorted({key for table in settings.values() for key in table} - set(_EVAL_KEYS))
    if unknown:
        return Answer(fault=f"{', '.join(unknown)} cannot be set for a single data set; see docs/evaluation.md")
    own = {name: {_EVAL_KEYS[key]: one for key, one in table.items()} for name, table in settings.items()}
    return Answer(("--eval-prompt-data", *paths, "--eval-sets", msgspec.json.encode(own).decode()))


def _custom_config(values: tuple[str, ...], given: Given) -> Answer:
    """A YAML file whose keys become attributes of args; null is written none, as settings have it."""
    try:
        found = msgspec.yaml.decode(Path(" ".join(values)).read_bytes(), type=dict[str, Any])
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        return Answer(fault=f"{' '.join(values)} cannot be read as YAML with names and values ({error})")
    values_of = {name: "none" if value is None else value for name, value in found.items()}
    return Answer(("--custom-args", msgspec.json.encode(values_of).decode()))


def _router(values: tuple[str, ...], given: Given) -> Answer:
    address = [" ".join(given.get(f"sglang-router-{part}", ())) for part in ("ip", "port")]
    if not all(address):
        return Answer(fault="an address has two parts; give --sglang-router-ip and --sglang-router-port")
    return Answer(("--router-address", f"http://{':'.join(address)}"))


def _router_port(values: tuple[str, ...], given: Given) -> Answer:
    return Answer() if "sglang-router-ip" in given else _router(values, given)


def _update_mode(values: tuple[str, ...], given: Given) -> Answer:
    known = {("full",): (), ("delta",): ("--update-weight-transport", "delta")}
    if values in known:
        return Answer(known[values])
    return Answer(fault="versions are sent in full, or as differences; write --update-weight-transport")


def _update_transport(values: tuple[str, ...], given: Given) -> Answer | None:
    return Answer() if given.get("update-weight-mode") == ("delta",) else None


def _rollout_function(values: tuple[str, ...], given: Given) -> Answer | None:
    match values:
        case (path,) if path == _SAMPLES:
            return Answer()
        case (path,) if path == _ASYNC:
            return Answer(() if "mode" in given else ("--mode", "async"))
        case (path,) if path == _SFT:
            return Answer(() if "loss-type" in given else ("--loss-type", "sft_loss"))
    return None


def _source_class(values: tuple[str, ...], given: Given) -> Answer | None:
    """slime's own, which give the rows of `--prompt-data`."""
    return Answer() if values in ((_SOURCE,), (f"{_SOURCE}WithBuffer",)) else None


def _sampling_filter(values: tuple[str, ...], given: Given) -> Answer | None:
    return Answer(("--dynamic-sampling-filter", "nonzero_std")) if values == (_NONZERO,) else None


def _supervised(values: tuple[str, ...], given: Given) -> Answer | None:
    """Supervised training has no rollouts and no advantages."""
    sft = given.get("loss-type") == ("sft_loss",) or given.get("rollout-function-path") == (_SFT,)
    return Answer() if sft else None


def _no_advantages(values: tuple[str, ...], given: Given) -> Answer:
    return _supervised(values, given) or Answer(fault="a policy loss needs advantages; it is for --loss-type sft_loss")


def _teacher_function(values: tuple[str, ...], given: Given) -> Answer | None:
    return Answer() if len(values) == 1 and values[0].startswith(_TEACHER) else None


def _teacher_address(values: tuple[str, ...], given: Given) -> Answer | None:
    """Of a grader, unless slime's function asks a teacher there."""
    if not _teacher_function(tuple(given.get("custom-rm-path", ())), given):
        return None
    return Answer(("--frozen-engine", f"teacher={' '.join(values).removesuffix('/generate')}"))


def _teacher_load(values: tuple[str, ...], given: Given) -> Answer:
    place = " ".join(values)
    note = f"--opd-teacher-load {place} becomes a frozen engine, which reads a checkpoint in Hugging Face's format"
    return Answer(("--frozen-engine", f"teacher={place.removesuffix('_torch_dist')}"), note=note)


def _rm_type(values: tuple[str, ...], given: Given) -> Answer | None:
    return Answer(("--rm-type", "remote")) if values == ("remote_rm",) else None


def _dump(values: tuple[str, ...], given: Given) -> Answer:
    if len(values) != 1:
        return Answer(fault="it takes one directory")
    rollouts, trained = (f"{values[0]}/{name}/{{rollout_id}}" for name in ("rollout_data", "train_data"))
    return Answer(("--save-debug-rollout-data", f"{rollouts}.msgpack", "--save-debug-train-data", f"{trained}.parquet"))


def _per_token(values: tuple[str, ...], given: Given) -> Answer:
    return Answer(() if "loss-aggregation" in given else ("--loss-aggregation", "token_mean"))


RULES: Final[Mapping[str, Callable[[tuple[str, ...], Given], Answer | None]]] = {
    "save": _save,
    "load": _load,
    "start-rollout-id": _start,
    "strict-data": lambda values, given: Answer(("--max-bad-rows", "0")),
    "ref-load": _ref_load,
    "use-kl-loss": _kl_loss,
    "kl-loss-coef": _kl_loss,
    "kl-loss-type": _kl_loss,
    "eval-prompt-data": _eval_prompt_data,
    "eval-config": _eval_config,
    "custom-config-path": _custom_config,
    "sglang-router-ip": _router,
    "sglang-router-port": _router_port,
    "update-weight-mode": _update_mode,
    "update-weight-transport": _update_transport,
    "rollout-function-path": _rollout_function,
    "data-source-path": _source_class,
    "dynamic-sampling-filter-path": _sampling_filter,
    "debug-train-only": _supervised,
    "disable-compute-advantages-and-returns": _no_advantages,
    "custom-rm-path": _teacher_function,
    "custom-reward-post-process-path": _teacher_function,
    "rm-url": _teacher_address,
    "opd-teacher-load": _teacher_load,
    "opd-type": lambda values, given: Answer(),
    "rm-type": _rm_type,
    "dump-details": _dump,
    "use-flash-attn": lambda values, given: Answer(("--megatron-attention-backend", "flash")),
    "use-wandb": lambda values, given: Answer(("--report-to", "wandb")),
    "use-mlflow": lambda values, given: Answer(("--report-to", "mlflow")),
    "calculate-per-token-loss": _per_token,
    "bf16": lambda values, given: Answer(() if "train-dtype" in given else ("--train-dtype", "bfloat16")),
    "router-policy": lambda values, given: (
        Answer(("--router-policy", "cache_aware")) if values == ("prefix_affinity",) else None
    ),
}
