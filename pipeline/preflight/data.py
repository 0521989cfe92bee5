"""What a run needs before it starts: its prompts, built-in models and data, engines with the policy's tokenizer.

Built-in names (nothing is downloaded): checkpoints `tiny` (byte-level tokenizer) and `tiny-arithmetic` (characters);
data `arithmetic` (two-digit sums) and `arithmetic-tools` (products with a calculator), and the name of an environment
that makes tasks of its own.

Frozen engines: a teacher scores the policy's token ids as they are, so each id of the policy must mean the same to it;
a teacher may know more. Checkpoints are compared by the vocabularies in their files, running engines by having them
tokenize a text. A fault is one UsageError that names the engine, before any process is started.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

from configs.graph import frozen_engines, is_address
from configs.layers import build, value_at
from configs.resolve import num_rollout_for
from configs.schema import Config
from configs.sources import model_config
from models.arithmetic import ArithmeticFiles, write_arithmetic
from models.engines.access_token import Token, read_token
from models.engines.client import EngineClient
from models.errors import EngineError, EngineRefused, EngineUnauthorized
from models.families.source import context_limit
from pipeline.errors import UsageError
from pipeline.facts.run_directory import RunDir
from pipeline.preflight.refusals import bare, check_graders, entries, write_tasks
from stages.chat.messages import TokenizerError
from stages.chat.tokenizer import Tokenizer, load_tokenizer, locate
from stages.data.prompt_set import PromptSet, load_eval_prompts, load_train_prompts, row_preparer
from stages.graders.registry import choose_auto
from stages.prompts.prompt_sources import DrawnPrompts

BUILT_IN_MODELS: dict[str, Literal["bytes", "arithmetic"]] = {"tiny": "bytes", "tiny-arithmetic": "arithmetic"}
BUILT_IN_DATA: dict[str, Literal["add", "tools"]] = {"arithmetic": "add", "arithmetic-tools": "tools"}
TRAIN_ROWS, HELDOUT_ROWS = 8000, 256
# Standard deviation of the first weights. 0.02 is for models eight times as wide: sums are learned in 240 supervised
# steps from 0.06, in 350 to 600 from 0.02.
_SPREAD = {"bytes": 0.02, "arithmetic": 0.06}


def prepare(config: Config, directory: Path) -> Config:
    """Make built-in models and data under `directory`, and return the configuration with paths in place of names."""
    seed, names = config.run.seed, {*BUILT_IN_DATA, *(table.name for table in config.environment)}
    files = {name: _data(config, name, directory) for name in names.intersection(map(bare, entries(config)))}
    values: dict[str, object] = {
        key: _model(value_at(config, key), directory, seed)
        for key in ("train.hf_checkpoint", "train.ref_load", "critic.critic_load", "engine.engine_checkpoint")
        if value_at(config, key) is not None
    }
    values["engine.frozen_engine"] = tuple(_frozen(entry, directory, seed) for entry in config.engine.frozen_engine)
    for key in ("data.prompt_data", "eval.eval_prompt_data", "warm_start.warm_start_data"):
        heldout = key.startswith("eval.")
        values[key] = tuple(_path(entry, files, heldout=heldout) for entry in value_at(config, key))
    return build(values, config)


def _frozen(entry: str, directory: Path, seed: int) -> str:
    """`name=CHECKPOINT` with the checkpoint as a path; an address stays."""
    name, _, place = entry.partition("=")
    if is_address(place):
        return entry
    try:
        return f"{name}={_model(place, directory, seed)}"
    except TokenizerError as error:
        words = str(error).replace("hf_checkpoint is ", "the checkpoint is ")
        raise UsageError(f"--frozen-engine {entry}: {words}") from error


def _path(entry: str, files: dict[str, ArithmeticFiles], *, heldout: bool) -> str:
    source = bare(entry)
    if source not in files:
        return entry
    file = files[source].heldout if heldout else files[source].train
    name, separator, rest = entry.partition("=")
    if not separator:
        name, rest = (("heldout" if source in BUILT_IN_DATA else source) if heldout else "train"), entry
    path = rest.replace(source, str(file), 1)
    return f"{name}={path}" if heldout else path


def _data(config: Config, name: str, directory: Path) -> ArithmeticFiles:
    for table in config.environment:
        if table.name == name:
            home = directory / "data"
            files = ArithmeticFiles(home / f"{name}-train.jsonl", home / f"{name}-heldout.jsonl")
            write_tasks(config, table, "train", TRAIN_ROWS, files.train)
            if name in map(bare, config.eval.eval_prompt_data):
                write_tasks(config, table, "heldout", HELDOUT_ROWS, files.heldout)
            return files
    kind = BUILT_IN_DATA[name]
    return write_arithmetic(directory / "data", kind=kind, train=TRAIN_ROWS, heldout=HELDOUT_ROWS, seed=0)


def _model(name: str, directory: Path, seed: int) -> str:
    if name not in BUILT_IN_MODELS:
        return str(locate(name))
    from models.tiny import TinyCheckpointError, TinyRecipe, make_tiny_checkpoint

    path, kind = directory / name, BUILT_IN_MODELS[name]
    try:
        make_tiny_checkpoint(path, TinyRecipe(tokenizer=kind, seed=seed, initializer_range=_SPREAD[kind]))
    except TinyCheckpointError as error:  # of a run that another version began
        raise UsageError(f"--hf-checkpoint {name}: {error}, or start a new run") from error
    return str(path)


def training_prompts(config: Config, tokenizer: Tokenizer, rundir: RunDir) -> PromptSet | DrawnPrompts:
    """Of the files, or of `--data-source-path`; of the first held-out set in a run that only evaluates. Raises
    DataError."""
    if config.rollout.num_rollout == 0:
        return load_eval_prompts(config, *config.eval.data_sets[0])
    if config.data.data_source_path is None or config.train.loss_type == "sft_loss":
        return load_train_prompts(config, tokenizer)
    context = context_limit(config)
    limits = (config.data.rollout_max_prompt_len, None if context is None else context - 1)
    return DrawnPrompts(
        config,
        rundir.path / "data_source",
        row_preparer(config, tokenizer),
        tokenizer.encode,
        min((limit for limit in limits if limit is not None), default=None),
    )


def with_data(config: Config, prompts: PromptSet | DrawnPrompts, report: Callable[[str], None]) -> Config:
    """Fill in what only the data knows: the number of rollouts of an epoch, the grader. `report`: takes lines about
    rows and the choice of the grader."""
    for line in prompts.report.lines(graded=not config.environment):
        report(line)
    config = build({"rollout.num_rollout": num_rollout_for(config, len(prompts))}, config)
    supervised = config.train.loss_type == "sft_loss"
    if not supervised or config.warm_start.warm_start_steps:  # before a warm start is spent on data that fails later
        check_graders(config, prompts.report.rm_types)
    if supervised:
        return config
    reward = config.reward
    chosen = reward.custom_rm_path is not None or reward.reward_component or prompts.report.rm_types
    if reward.rm_type == "auto" and not chosen and (prompts.report.labels or not config.environment):
        grader, why = choose_auto(prompts.report.labels)
        only = ", of rollouts to which their environment gives no reward" if config.environment else ""
        report(f"grader {grader}{only}: {why}")
        config = build({"reward.rm_type": grader}, config)
    return config


log = logging.getLogger("sluice.frozen")

HEALTH_S = 10.0
# Digits, words, code, other scripts: tokenizers that treat all of it alike are taken for equal.
PROBE: Final = "12 + 345 = 357\nwords and Words, don't\tdef f(x): return x**2  # Größe, 語, \U0001f642"


def external_token(config: Config) -> Token | None:
    """What requests to engines that run already must bring."""
    file = config.sglang.rollout_external_engine_token_file
    return read_token(Path(file).expanduser()).token if file is not None else None


async def check_frozen(config: Config, tokenizer: Tokenizer | None) -> None:
    """Check what can be checked before the start; without a tokenizer, whether they answer. Raises `UsageError`."""
    distill = config.distill
    places = frozen_engines(config)
    teachers = (distill.opd_teacher or tuple(places)) if distill.use_opd else ()
    token = external_token(config)
    for name, place in places.items():
        if is_address(place):
            await _check_running(name, place, tokenizer if name in teachers else None, token)
        elif name in teachers and tokenizer is not None and Path(place).is_dir():  # a plan asks no hub
            _check_checkpoint(name, Path(place), Path(config.train.hf_checkpoint), tokenizer)


async def _check_running(name: str, url: str, tokenizer: Tokenizer | None, token: Token | None) -> None:
    """Is it well, and (with a tokenizer) does it split text as the policy does."""
    async with EngineClient(
        url, timeout_s=HEALTH_S, control_timeout_s=HEALTH_S, connect_timeout_s=HEALTH_S, token=token
    ) as client:
        if not await client.health():
            raise UsageError(
                f"--frozen-engine {name}={url}: no healthy engine answers there; start it first, or give a checkpoint, "
                "which starts with the run"
            )
        if tokenizer is None:
            return
        try:
            theirs = await client.tokenize(PROBE)
        except EngineUnauthorized as error:
            raise UsageError(f"--frozen-engine {name}={url}: {error}") from error
        except EngineRefused as error:
            log.warning("the tokenizer of the frozen engine %s cannot be compared with the policy's: %s", name, error)
            return
        except EngineError as error:
            raise UsageError(f"--frozen-engine {name}={url}: it is healthy but does not score: {error}") from error
    ours = tokenizer.encode(PROBE)
    if ours != theirs[-len(ours) :] or len(theirs) - len(ours) > 1:  # a beginning-of-text token may come first
        raise _differs(f"{name}={url}", f"it splits a text into {theirs[:8]}..., the policy into {ours[:8]}...")


def _check_checkpoint(name: str, teacher: Path, policy: Path, tokenizer: Tokenizer) -> None:
    theirs, ours = vocabulary(teacher), vocabulary(policy)
    if ours is None or theirs is None:  # no tokenizer.json: transformers reads the other files
        loaded = load_tokenizer(str(teacher))
        if loaded.vocab_size < tokenizer.vocab_size or loaded.encode(PROBE) != tokenizer.encode(PROBE):
            raise _differs(f"{name}={teacher}", f"{loaded.vocab_size} tokens, the policy has {tokenizer.vocab_size}")
        return
    wrong = sorted(token for token, text in ours.items() if theirs.get(token) != text)
    if wrong:
        token = wrong[0]
        text = repr(theirs[token]) if token in theirs else "nothing"
        how = f"{len(wrong)} of {len(ours)} tokens differ, token {token} is {ours[token]!r} to the policy, there {text}"
        raise _differs(f"{name}={teacher}", how)


def check_vocabularies(config: Config) -> None:
    """The model has a row for each token of its tokenizer. Reference and critic read the policy's token ids: none may
    mean another text to them. Raises UsageError."""
    policy, size = config.train.hf_checkpoint, (model_config(config.train.hf_checkpoint) or {}).get("vocab_size")
    last = max(vocabulary(Path(policy).expanduser(), added=False) or [0])
    if isinstance(size, int) and last >= size:
        raise UsageError(
            f"--hf-checkpoint {policy}: its tokenizer has tokens up to {last}, but its config.json says vocab_size "
            f"{size}; give the tokenizer that was published with the model"
        )
    ours = vocabulary(Path(policy).expanduser()) or {}
    for flag, place in (("--ref-load", config.train.ref_load), ("--critic-load", config.critic.critic_load)):
        theirs = vocabulary(Path(place).expanduser()) or {} if place is not None else {}
        wrong = [token for token, text in ours.items() if theirs.get(token, text) != text]
        if wrong:
            token = min(wrong)
            raise UsageError(
                f"{flag} is {place!r}, whose token {token} is {theirs[token]!r}, and the policy's is {ours[token]!r}; "
                "choose a checkpoint with the policy's tokenizer"
            )


def _differs(entry: str, how: str) -> UsageError:
    return UsageError(
        f"--frozen-engine {entry}: its tokenizer is not the policy's ({how}), but a teacher scores the policy's token "
        "ids; choose a teacher with the same tokenizer"
    )


def vocabulary(directory: Path, *, added: bool = True) -> dict[int, str] | None:
    """Token id -> text as `tokenizer.json` has it, with `added` tokens or without; None without that file or of another
    form."""
    import tokenizers

    try:
        backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception:  # the binding raises bare Exception
        return None  # the loader of the policy's tokenizer reported it, or the teacher's engine will
    return {token: text for text, token in backend.get_vocab(added).items()}
