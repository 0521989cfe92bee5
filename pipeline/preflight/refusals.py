"""What a run, or `--dry-run`, refuses before it starts anything, beside the faults of the configuration.

Names of graders and filters are looked up where they are implemented, options of Megatron-core in its source. Functions
and environments of the user are imported in a process of their own, which checks signatures, and writes the tasks of an
environment with the interpreter of its workers; this process imports neither their modules nor a framework. The
environment of SGLang is probed only if a server or router of this run uses it.

Invariant: only tasks of environments are written, and the network is left to the run (a hub's checkpoint, engines).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from configs.graph import engine_count, evaluation_engines, frozen_engines, is_address
from configs.schema import Config, EnvironmentConfig, generates, router_kind
from configs.schema.rejection_rules import parse_rules
from configs.sources import parse_source, source_fault
from models.disk import write_whole
from models.engines.launch.command import require_router, tensor_parallel
from models.engines.launch.environment import Installed, Part, find_python, probe
from models.engines.launch.options import dashed, router_faults, server_faults
from models.errors import EnvironmentMissing, LaunchError
from models.train.megatron.options import option_faults
from pipeline.errors import NotHere, Refused, UsageError, user_error
from pipeline.facts.run_log import show_line
from pipeline.hosts.machine import ROOT, child_environment, shared_gpu_faults, visible_gpus
from stages.agents.worker import Hosted
from stages.chat.tokenizer import Tokenizer, load_tokenizer
from stages.data.prepare import Preparer, render_of
from stages.data.prompt_set import NO_TEMPLATE, PromptSet, eval_data, refuse_long
from stages.data.rows import trusted_functions
from stages.errors import DataError, FilterNameError
from stages.graders.grade import UnknownGraderError
from stages.graders.registry import listed_grader, outside, refusal
from stages.group.filters import parse_filters
from stages.reward.components import Selection
from stages.reward.judge import load_template
from stages.user_functions import functions_of, graders_of

LIMIT_S = 120.0  # to import modules of the user, as a grader process has
AUTO = "auto"  # a grader that is decided when the labels are known
Check = Callable[[Config], object]


def check_environments(config: Config) -> None:
    """All environments can be imported and made with their options. Raises Refused."""
    if config.train.loss_type == "sft_loss":
        return
    faults = []
    requested = {bare(entry) for entry in entries(config)}
    for table in config.environment:
        options = msgspec.json.encode(table.options).decode()
        try:
            lines = _ask(table, "check", table.class_path, options)
            (line,) = lines or (msgspec.Raw(b'"its process printed nothing"'),)
            hosted = msgspec.json.decode(line, type=Hosted)
            if table.name in requested and not hosted.tasks:
                faults.append(
                    f"--prompt-data {table.name}: the environment's class {table.class_path} makes no tasks; give it a "
                    "class method tasks(split, seed), or give a file of rows"
                )
        except msgspec.ValidationError:
            faults.append(f"environment.{table.name}: {msgspec.json.decode(line)}")
        except UsageError as error:
            faults.append(str(error))
    if faults:
        raise Refused(faults)


def write_tasks(
    config: Config, table: EnvironmentConfig, split: Literal["train", "heldout"], count: int, path: Path
) -> None:
    """Rows of an environment's own tasks. Each is the row's metadata, and its keys are the row's as well, so that
    `label_key`, `input_key` and `warm_start_label_key` may name them. Raises UsageError."""
    options = msgspec.json.encode(table.options).decode()
    lines = _ask(table, "tasks", table.class_path, options, split, str(config.run.seed), str(count))
    rows = []
    for line in lines:
        try:
            task = msgspec.json.decode(line, type=dict[str, object])
        except msgspec.ValidationError:
            raise UsageError(f"environment.{table.name}: tasks({split!r}): {msgspec.json.decode(line)}") from None
        row = {config.data.input_key: table.name, **task, config.data.metadata_key: {**task, "environment": table.name}}
        rows.append(msgspec.json.encode(row))
    if not rows:
        raise UsageError(f"environment.{table.name}: tasks({split!r}) gives none; yield at least one, or give a file")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, b"".join(row + b"\n" for row in rows))


def entries(config: Config) -> tuple[str, ...]:
    """All sources of data."""
    return (*config.data.prompt_data, *config.eval.eval_prompt_data, *config.warm_start.warm_start_data)


def bare(entry: str) -> str:
    """`name=path@[slice]` -> path."""
    return entry.split("=", 1)[-1].split("@[", 1)[0]


def _ask(table: EnvironmentConfig, *arguments: str) -> list[bytes]:
    """The lines that the environment's process prints. Raises UsageError."""
    environment = child_environment(1)  # another interpreter gets the project and the user's modules only
    environment["PYTHONPATH"] = os.pathsep.join([environment["PYTHONPATH"], os.getcwd()])
    command = [table.python or sys.executable, "-P", "-m", "stages.agents.worker"]
    what = f"environment.{table.name}: importing {table.class_path}"
    return _output(command, environment, what, "what is large in reset", arguments).splitlines()


def _output(
    command: Sequence[str], environment: Mapping[str, str], what: str, later: str, arguments: Sequence[str] = ()
) -> bytes:
    """What a process prints that imports modules of the user. It reads `arguments` from its standard input.

    `what`, `later`: the words of its errors, which are UsageErrors.
    """
    given, out = json.dumps(arguments).encode(), subprocess.PIPE
    try:
        done = subprocess.run(command, input=given, stdout=out, env=environment, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"{what} takes longer than {LIMIT_S:g} s; let the module define things only, and load {later}"
        ) from None
    if done.returncode:
        raise UsageError(f"{what} ended its process (exit status {done.returncode}); its error output stands above")
    return done.stdout


def check_trainer(config: Config) -> None:
    """What the chosen framework needs is installed and knows its options. Raises UsageError."""
    if config.train.train_backend == "megatron" and (faults := option_faults(config.megatron.megatron_args)):
        raise Refused(faults)


def check_names(config: Config) -> None:
    """Filters, components and graders of the flags. Raises UsageError with every fault."""
    if config.train.loss_type == "sft_loss":
        return
    faults = []
    try:
        parse_filters(config.filter.dynamic_sampling_filter)
        load_template(config.reward.judge_prompt_path)
    except (FilterNameError, UnknownGraderError) as error:
        faults.append(str(error))
    for rule in parse_rules(config.correction.rollout_rs):
        show_line(f"rejection: {rule.meaning}")  # the bounds of k1 are easily read the wrong way round
    named = Selection(config.reward).configured()
    faults += _name_faults(config, named)
    if not faults:
        check_functions(functions_of(config), config)
    if faults:
        raise Refused(faults)


def check_graders(config: Config, names: Iterable[str]) -> None:
    """Graders named by rows of the data: they exist, can be called, and have a process if they need one.

    Raises UsageError.
    """
    named = tuple(names)
    if faults := [*_name_faults(config, named)]:
        raise Refused(faults)
    known = functions_of(config)  # functions of the flags were checked before the data
    found = tuple(function for function in graders_of(named, config) if function not in known)
    check_functions(found, config)


def _name_faults(config: Config, names: Iterable[str]) -> Iterator[str]:
    for name in dict.fromkeys(names):
        if name == AUTO:
            continue
        reason = refusal(name)
        if reason is not None:
            yield reason
        elif config.reward.reward_workers == 0 and _needs_process(name):
            yield (
                f"--reward-workers is 0, but the grader {name!r} may hang or take memory and runs only in a grader "
                "process; set --reward-workers to 1 or more"
            )


def _needs_process(name: str) -> bool:
    grader = listed_grader(name)
    return outside(name) is None and (grader is None or not grader.in_stage)


def check_functions(functions: tuple[str, ...], config: Config) -> None:
    """Raises UsageError with all faults. Imports in another process, with the environment of the stages; with
    `--try-functions`, calls each function there."""
    if not functions:
        return
    tries = config.run.try_functions
    command = [sys.executable, "-P", "-m", "stages.user_functions", "try" if tries else "import", *functions]
    arguments = (msgspec.msgpack.encode(config).hex(),) if tries else ()
    what = f"importing {', '.join(functions)}"
    output = _output(command, child_environment(1), what, "models or data at the first call", arguments)
    try:
        faults, warnings = msgspec.json.decode(output, type=tuple[list[str], list[str]])
    except msgspec.DecodeError:
        raise UsageError(f"{what} ended its process without an answer; its error output stands above") from None
    for warning in warnings:
        show_line(f"warning: {warning}; the run starts all the same")
    if faults:
        raise Refused(faults)


def tokenizer_here(config: Config) -> Tokenizer | None:
    """None for a name of the hub, and for a built-in model. Raises TokenizerError."""
    name = config.train.hf_checkpoint
    return load_tokenizer(name, config.data.chat_template_path) if Path(name).expanduser().is_dir() else None


def check_rows(config: Config) -> None:
    """The rows of the prompt files as they stand: lengths are not known, and the first row alone is rendered.

    Raises DataError and TokenizerError.
    """
    data, evaluation = config.data, config.eval
    supervised = config.train.loss_type == "sft_loss"
    own = None if config.environment else tokenizer_here(config)
    render = render_of(data, own) if own is not None else lambda *_: "a chat"
    if data.apply_chat_template and render is None:  # of built-in data too, which is not read here
        raise DataError(NO_TEMPLATE)
    wanted = [(data, () if data.data_source_path is not None else data.prompt_data, False)]
    for name, path in evaluation.data_sets:
        grader = evaluation.own(name).rm_type
        wanted.append((eval_data(config, name, path), (path,), True))
        check_graders(config, {grader: 1} if grader is not None else {})
    for keys_of_rows, sources, held_out in wanted:
        files = [text for text in sources if not parse_source(text).built_in and source_fault("", text) is None]
        if files:
            rows = msgspec.structs.replace(keys_of_rows, rollout_max_prompt_len=None)
            labels = supervised and not held_out
            prepare = Preparer(rows.apply_chat_template, lambda _: (0,), lambda _: (0,), render, (), labels)
            checked = PromptSet(files, rows, prepare, trusted=trusted_functions(config))
            check_graders(config, checked.report.rm_types)
            if own is not None:
                refuse_long(config, keys_of_rows, checked, own)


def sglang_parts(config: Config) -> tuple[Part, ...]:
    """The programs that this run starts from that environment."""
    if not generates(config):
        return ()
    own = engine_count(config) > 0 and not config.sglang.rollout_external_engine_addrs
    own = own or "" in evaluation_engines(config)
    frozen = any(not is_address(place) for place in frozen_engines(config).values())
    server = config.engine.engine == "sglang" and (own or frozen)
    kind = router_kind(config) if config.router.router_address is None else "none"
    parts: dict[str, tuple[Part, ...]] = {"none": (), "smg": ("smg",)}
    return (*(("server",) if server else ()), *parts.get(kind, ("router",)))


def prepare_sglang(config: Config, *, warn: bool = True) -> Installed:
    """Find the environment, list its versions, check the options for SGLang; with `warn`, print unwise settings.

    A run that starts no program of SGLang probes nothing, and gets an account without versions. Blocks for 0.1 s, or
    for the 5 to 15 s of SGLang's imports after an installation. Raises UsageError with every fault, or what is missing.
    """
    wanted = sglang_parts(config)
    if not wanted:
        nothing = find_python(config.sglang, ROOT) if config.sglang.sglang_python else Path()
        return Installed(python=str(nothing), python_version="")
    try:
        installed = probe(find_python(config.sglang, ROOT), wanted)
    except LaunchError as error:
        raise NotHere(f"SGLang's environment: {error}") from error
    faults, missing = list[str](), list[str]()
    for part in wanted:
        try:
            faults += _sglang_faults(config, installed, part)
        except EnvironmentMissing as error:
            missing.append(str(error))
    if faults or missing:
        raise Refused(faults) if faults else NotHere("; ".join(missing))
    for line in sglang_warnings(config, installed) if warn and "server" in wanted else ():
        show_line(f"warning: {line}")
    return installed


def sglang_warnings(config: Config, installed: Installed) -> Iterator[str]:
    """Settings whose effect on this run's servers the user may not want."""
    off = any(dashed(key) == "disable-overlap-schedule" and value for key, value in config.sglang.sglang_args.items())
    generates = not config.sglang.rollout_external_engine_addrs
    if installed.cuda and generates and config.engine.pause_generation_mode == "in_place" and not off:
        yield (
            "--pause-generation-mode is in_place, and SGLang's overlap scheduling is on: the first token of a prefill "
            "under way at an update is of the older weights and labelled with the newer; use --pause-generation-mode "
            "retract, or --sglang-disable-overlap-schedule"
        )


def _sglang_faults(config: Config, installed: Installed, part: Part) -> list[str]:
    """All faults of this run's options for a program of the environment. Raises LaunchError."""
    if part != "server":
        require_router(part, installed)
        return router_faults(config.router.router_args, installed, part)
    if not (faults := server_faults(config.sglang.sglang_args, installed)):
        tensor_parallel(config, installed)
    return [*faults, *(shared_gpu_faults(config) if installed.cuda else ())]


def check_devices(config: Config) -> None:
    """GPUs that are named are there, by the files of NVIDIA's driver; WSL and ROCm have others. Raises UsageError."""
    devices = {"--train-device": config.train.train_device, "--engine-device": config.engine.engine_device}
    others = config.run.runner == "ray" or Path("/dev/dxg").exists() or Path("/dev/kfd").exists()
    for flag, device in devices.items() if not others else ():
        if device.startswith("cuda") and int(device.partition(":")[2] or 0) >= (found := len(visible_gpus())):
            raise UsageError(f"{flag} is {device}, but a run has {found} GPUs on this machine; set {flag} auto or cpu")
    if config.debug.record_memory_history and not others and not visible_gpus():
        raise UsageError("--record-memory-history is of a GPU's memory, and this machine has no GPU; leave it out")


_ALWAYS: Final[Sequence[Check]] = (check_devices, check_names, check_trainer, check_environments, prepare_sglang)


def refuse(config: Config) -> None:
    """The checks before a run. Raises Refused; after a first fault, the data is checked as well."""
    if faults := _faults(config, _ALWAYS):
        raise Refused([*faults, *_faults(config, (check_rows,))])


def refusals(config: Config, machine: Sequence[Check], left_out: list[str]) -> list[str]:
    """The faults of a plan, one sentence each. `left_out` takes what needs another machine, or the network."""
    return _faults(config, (*_ALWAYS, check_rows, *machine), left_out)


def _faults(config: Config, checks: Sequence[Check], left_out: list[str] | None = None) -> list[str]:
    faults: list[str] = []
    for check in checks:
        try:
            check(config)
        except Exception as error:
            sentence = str(error) if isinstance(error, UsageError) else user_error(error)
            if sentence is None:
                raise
            found = left_out if isinstance(error, NotHere) and left_out is not None else faults
            found.extend(getattr(error, "faults", (sentence,)))
    return faults
