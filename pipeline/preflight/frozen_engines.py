"""Frozen engines before the run starts: are those that run already there, and do teachers share the policy's tokenizer.

A teacher scores the policy's token ids as they are, so every id of the policy must mean the same to it; a teacher may
know more. Checkpoints are compared by the vocabularies in their files, running engines by having them tokenize a text.

Invariant: what is wrong is one UsageError that names the engine, before any process is started.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from configs.graph import frozen_engines, is_address
from configs.schema import Config
from models.engines.client import EngineClient
from models.engines.token import Token, read_token
from models.errors import EngineError, EngineRefused, EngineUnauthorized
from pipeline.errors import UsageError
from stages.chat.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger("sluice.frozen")

HEALTH_S = 10.0
# Digits, words, code, other scripts: tokenizers that treat all of it alike are taken for equal.
PROBE: Final = "12 + 345 = 357\nwords and Words, don't\tdef f(x): return x**2  # Größe, 語, \U0001f642"


async def check_frozen(config: Config, tokenizer: Tokenizer) -> None:
    """Check what can be checked before the start. Raises `UsageError`."""
    distill = config.distill
    places = frozen_engines(config)
    teachers = (distill.opd_teacher or tuple(places)) if distill.use_opd else ()
    file = config.sglang.rollout_external_engine_token_file
    token = read_token(Path(file).expanduser()).token if file is not None else None
    for name, place in places.items():
        if is_address(place):
            await _check_running(name, place, tokenizer if name in teachers else None, token)
        elif name in teachers:
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
    if ours is None or theirs is None:  # no tokenizer.json: what transformers makes of the other files
        other = load_tokenizer(str(teacher))
        if other.vocab_size < tokenizer.vocab_size or other.encode(PROBE) != tokenizer.encode(PROBE):
            raise _differs(f"{name}={teacher}", f"{other.vocab_size} tokens, the policy has {tokenizer.vocab_size}")
        return
    wrong = sorted(token for token, text in ours.items() if theirs.get(token) != text)
    if wrong:
        token = wrong[0]
        there = repr(theirs[token]) if token in theirs else "nothing"
        how = (
            f"{len(wrong)} of {len(ours)} tokens differ, token {token} is {ours[token]!r} to the policy, there {there}"
        )
        raise _differs(f"{name}={teacher}", how)


def _differs(entry: str, how: str) -> UsageError:
    return UsageError(
        f"--frozen-engine {entry}: its tokenizer is not the policy's ({how}), but a teacher scores the policy's token "
        "ids; choose a teacher with the same tokenizer"
    )


def vocabulary(directory: Path) -> dict[int, str] | None:
    """Token id -> text as `tokenizer.json` has it, added tokens included; None without that file or of another form."""
    import tokenizers

    try:
        backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception:  # the binding raises bare Exception
        return None  # the loader of the policy's tokenizer has said so, or the teacher's engine will
    return {token: text for text, token in backend.get_vocab().items()}
