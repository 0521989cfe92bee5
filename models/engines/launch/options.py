"""Checks the options that a user passes on to SGLang or its router against the installed version.

Invariants: the answer comes from the installed program's own argument list, not from a table of ours; all faults are
reported at once, each in one sentence with the option, the value, the rule and the cure; accepted options render to an
argument list that the program's parser accepts (`rendered`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from configs.schema.notation import cure, nearest
from models.engines.launch.environment import Installed, Option, Part

# --------------------------------------------------------------------------------------------------
# Options of the server and of the router that a user may not pass on, each with the reason and the cure.
#
# Invariant: Sluice sets the option from a flag of its own, or the option would break an assumption of Sluice.
# A name is the option's first spelling in the installed version's own list.


_LOOPBACK = "Sluice chooses where engines listen: on the loopback address unless the run has other hosts; leave it out"
_WORKERS = "Sluice adds an engine when it carries the published weights, and takes it out when it is lost; leave it out"
_RETRIES = "the generate stage alone repeats a request, from its partial output; see --max-retries, and leave it out"
_PROTOCOL = "the generate stage uses plain HTTP with JSON; leave it out"
_KEYS = "each run makes a token of its own, which no command line shows; leave it out"

_OF_SERVER: Final[Mapping[str, str]] = {
    "model-path": "Sluice serves the checkpoint that it trains; use --hf-checkpoint",
    "load-format": "an update would be loaded in that format too, but Sluice writes safetensors; leave it out",
    "weight-version": "versions of the weights are the trainer's to give; leave it out",
    "host": _LOOPBACK,
    "port": "use --engine-port",
    "tp-size": "it follows from --rollout-num-gpus-per-engine (divided by --sglang-pp-size); use that",
    "dp-size": "a replica is an engine here, so that its weights are updated alone; raise --rollout-num-gpus",
    "nnodes node-rank dist-init-addr": "an engine that Sluice starts stays on one machine; leave it out",
    "base-gpu-id gpu-id-step": "each engine sees its own GPUs only; leave it out",
    "context-length": "use --rollout-max-context-len",
    "random-seed": "use --seed",
    "stream-interval": "use --stream-interval, which the generate stage reads too",
    "incremental-streaming-output": "it follows from --stream-interval; use that",
    "skip-tokenizer-init": "samples carry their text, and stop strings need it; leave it out",
    "is-embedding": "an engine must generate; leave it out",
    "api-key admin-api-key": _KEYS,
    "ssl-keyfile ssl-certfile grpc-mode smg-grpc-mode fastapi-root-path": _PROTOCOL,
    "use-ray": "Sluice starts and ends the processes of an engine itself; leave it out",
    "config": "a file of options would get round their check; give them one by one",
}

_OF_ROUTER: Final[Mapping[str, str]] = {
    "host": "the router answers on the loopback address only; leave it out",
    "port": "Sluice chooses a free port and announces it; leave it out",
    "worker-urls service-discovery remove-unhealthy-workers": _WORKERS,
    "policy": "use --router-policy",
    "prometheus-port": "Sluice chooses a free port and collects the metrics; leave it out",
    "prometheus-host": "the metrics are collected over the loopback address; leave it out",
    "disable-retries": "it is always given; leave it out",
    "retry-max-retries retry-initial-backoff-ms retry-max-backoff-ms": _RETRIES,
    "retry-backoff-multiplier retry-jitter-factor": _RETRIES,
    "backend": "the engines are SGLang's; leave it out",
    "api-key tenant-api-key control-plane-api-keys": _KEYS,
    "tls-cert-path tls-key-path": _PROTOCOL,
    "mini-lb": "it is for debugging and lacks the workers' interface that Sluice uses; leave it out",
}
SERVER_RESERVED: Final = {name: reason for names, reason in _OF_SERVER.items() for name in names.split()}
ROUTER_RESERVED: Final = {name: reason for names, reason in _OF_ROUTER.items() for name in names.split()}


def _size(text: str) -> None:
    if re.fullmatch(r"-?\d+|\d+(\.\d+)?[kMGT]|\d+(Ki|Mi|Gi|Ti)", text, re.ASCII) is None:
        raise ValueError(text)


# What an option takes: its reader, which raises ValueError for another text, the rule in words, and an example.
_TAKES: Final[Mapping[str, tuple[Callable[[str], object], str, str]]] = {
    "int": (int, "a whole number", "1"),
    "float": (float, "a number", "0.5"),
    "size": (_size, "a whole number, or one with k, M, Ki or Mi behind it", "64k"),
    "json": (json.loads, "JSON", "{}"),
    "text": (str, "text", "x"),
}


def server_faults(args: Mapping[str, Any], installed: Installed) -> list[str]:
    """The faults of `sglang.sglang_args`, one sentence each."""
    reserved = dict(SERVER_RESERVED)
    if _given(args, "enable-dp-attention"):
        del reserved["dp-size"]  # parts of one engine's attention then, which are updated together
    faults = list(_faults(args, installed, "server", "--sglang-", f"SGLang {installed.sglang}", reserved))
    if not installed.cuda and _given(args, "enable-return-routed-experts"):
        faults.append(
            "--sglang-enable-return-routed-experts ends the server at its start where there is no GPU; leave it out"
        )
    return faults


def router_faults(args: Mapping[str, Any], installed: Installed, part: Part = "router") -> list[str]:
    """The faults of `router.router_args`, for sglang-router or (part "smg") its successor."""
    program = f"smg {installed.smg}" if part == "smg" else f"sglang-router {installed.router}"
    return list(_faults(args, installed, part, "--router-", program, ROUTER_RESERVED))


def dashed(name: str) -> str:
    """`mem_fraction_static` -> `mem-fraction-static`: both spellings are read, the later one counts."""
    return name.replace("_", "-")


def rendered(args: Mapping[str, Any], options: Sequence[Option]) -> list[str]:
    """The argument list of checked options: `{"max_total_tokens": 4096}` -> `["--max-total-tokens", "4096"]`.

    True gives the name alone, False nothing (or the no- form of a switch), a list several values, an object JSON. An
    option that may be repeated takes a list of texts, each the values of one repetition.
    """
    known = {name: option for option in options for name in option.names}
    argv: list[str] = []
    for name, value in {dashed(name): value for name, value in args.items()}.items():
        option = known.get(name)
        if _is_true(value, option):
            argv.append(f"--{name}")
        elif _is_false(value, option):
            argv += [f"--no-{name}"] if option is not None and option.kind == "switch" else []
        elif option is not None and option.kind == "append":
            for item in _items(value):
                argv += [f"--{name}", *str(item).split()]
        elif isinstance(value, list | tuple):
            argv += [f"--{name}", *map(_text, value)]
        else:
            text = _text(value)
            argv += [f"--{name}={text}"] if text.startswith("-") else [f"--{name}", text]
    return argv


def _faults(
    args: Mapping[str, Any], installed: Installed, part: Part, prefix: str, program: str, reserved: Mapping[str, str]
) -> Iterator[str]:
    spellings: dict[str, str] = {}
    for key, value in args.items():
        name = dashed(key)
        option = installed.option(part, name)
        label = f"{prefix}{name}"
        if option is None:
            yield _unknown(name, prefix, program, installed, part)
            continue
        other = spellings.setdefault(option.names[0], name)
        reason = next((reserved[alias] for alias in option.names if alias in reserved), None)
        if reason is not None:
            yield f"{label} cannot be passed on: {reason}"
        elif other != name:
            yield f"{label} and {prefix}{other} are the same option of {program}; leave one of them out"
        else:
            fault = _value_fault(option, value)
            if fault is not None:
                yield f"{label} {fault}"


def _unknown(name: str, prefix: str, program: str, installed: Installed, part: Part) -> str:
    positive = name.removeprefix("no-")
    option = installed.option(part, positive) if positive != name else None
    if option is not None:
        toml = "sglang.sglang_args" if part == "server" else "router.router_args"
        hint = f"write {toml}.{positive.replace('-', '_')}=false" if option.kind == "switch" else "leave it out"
        return f"{prefix}{name} is the negative of an option, which is not passed on as a flag; {hint}"
    names = [known for option in installed.options.get(part, ()) for known in option.names]
    hint = cure(name, names, "see the help of that program", form=f"{prefix}{{}}")
    return f"{prefix}{name} is no option of {program}; {hint}"


def _value_fault(option: Option, value: Any) -> str | None:
    """The rule that a value breaks, with the cure; None if it breaks none."""
    if option.kind in ("flag", "switch"):
        if _is_true(value, option) or _is_false(value, option):
            return None
        return f"is {_shown(value)}, but it takes no value; write it alone"
    if value is True or value is False or value is None or value in ("", [], ()):
        return f"has no value, but must be {_rule(option)}; give one"
    if option.kind in ("list", "append"):
        wrong = [item for item in _items(value) if not _fits(option, item)]
        return f"holds {_shown(wrong[0])}, but its values must be {_rule(option)}; correct it" if wrong else None
    if isinstance(value, list | tuple):
        return f"is {_shown(value)}, but it takes one value, {_rule(option)}; give one"
    if _fits(option, value):
        return None
    near = nearest(str(value), option.choices)
    hint = f"did you mean {near}?" if near else f"give for example {_example(option)}"
    return f"is {_shown(value)}, but must be {_rule(option)}; {hint}"


def _fits(option: Option, value: Any) -> bool:
    text = _text(value)
    if option.choices:
        return text in option.choices
    try:
        _TAKES[option.takes][0](text)
    except ValueError:
        return False
    return True


def _is_true(value: Any, option: Option | None) -> bool:
    return value is True or (value == "true" and option is not None and option.kind in ("flag", "switch"))


def _is_false(value: Any, option: Option | None) -> bool:
    return value is False or (value == "false" and option is not None and option.kind in ("flag", "switch"))


def _items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else (value,)


def _text(value: Any) -> str:
    """A value in the notation of the program's command line."""
    return json.dumps(value) if isinstance(value, dict) else str(value)


def _rule(option: Option) -> str:
    if not option.choices:
        return _TAKES[option.takes][1]
    shown = option.choices[:12]
    return f"one of {', '.join(shown)}" + (" and others" if len(option.choices) > len(shown) else "")


def _example(option: Option) -> str:
    if option.choices:
        return option.choices[0]
    fitting = option.default is not None and _fits(option, option.default)
    return str(option.default) if fitting else _TAKES[option.takes][2]


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, str) else _text(value)


def _given(args: Mapping[str, Any], name: str) -> bool:
    return any(dashed(key) == name and value not in (False, "false") for key, value in args.items())
