"""Whether what is trained is what engines were given and made, token by token, and what their weights make of it.

Two records are compared that share no code: samples as the trainer gets them, and what each engine noted itself
(tests/engine_record.py). The third witness is a forward pass of the published weights by transformers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from msgspec import Struct

from stages.messages import Sample
from stages.rollouts import rollout_fault, trained_masks
from tests.engine_record import Made
from tests.models.engines.forward_reference import by_one, by_pieces
from tests.stages.engine_rig import Exchange

TOLERANCE = 1e-5


def of_exchanges(exchanges: Iterable[Exchange]) -> list[Made]:
    """What clients sent over HTTP and were answered; of a lost request what was certain: for engines not ours."""
    return [
        Made(
            exchange.request.prompts[0],
            output.output_ids,
            output.output_log_probs,
            [span.version for span in output.version_spans for _ in range(span.start, span.end)],
            output.meta_info.finish_reason.type if output.meta_info.finish_reason else "",
        )
        for exchange in exchanges
        for output in exchange.outputs
    ]


class Checked(Struct, frozen=True):
    """What a look at a rollout saw."""

    answers: tuple[int, ...]  # which of the record its tokens are put together of
    boundaries: int  # changes of the weights between two tokens that engines made


def check_identity(
    parts: Sequence[Sample],
    made: Sequence[Made],
    checkpoints: Mapping[int, Path],
    *,
    temperature: float = 1.0,
    keeps_cache: bool = False,
    lost: bool = False,
) -> Checked:
    """Fails unless the sequences of a rollout are what engines were given and made.

    Args:
        made: the engines' record.
        checkpoints: the published weights by their version.
        keeps_cache: an update leaves the keys and values of requests in flight as they are (in_place).
        lost: an engine was lost, so that the end of an answer may not have arrived.
    """
    wrong = rollout_fault(parts) if len(parts) > 1 else parts[0].fault()
    assert wrong is None, wrong
    answers: list[int] = []
    boundaries = tokens = 0
    for part in parts:
        begin = 0
        if part.prefix is not None:
            begin = part.prefix.length
            _check_shared(parts[part.prefix.sequence], part, begin)
        policy = part.versions >= 0
        assert np.array_equal(np.asarray(part.loss_mask) > 0, policy), "trained is what engines made, and that alone"
        assert not np.asarray(part.log_probs)[~policy].any()
        pieces: list[tuple[int, int]] = []
        for start, end in _stretches(policy, begin):
            found, spans = _put_together(part, start, end, made, lost)
            answers += found
            pieces += spans
            tokens += end - start
            boundaries += int(np.count_nonzero(np.diff(part.versions[start:end])))
        _check_forward(part, pieces, checkpoints, temperature, keeps_cache)
    check_once(answers, made)
    assert sum(int(mask.sum()) for mask in trained_masks(parts)) == tokens, "a token is trained twice, or left out"
    return Checked(tuple(answers), boundaries)


def check_once(answers: Sequence[int], made: Sequence[Made]) -> None:
    """Fails if an answer is trained more often than it was given: the same few tokens may have been drawn again."""
    written = [msgspec.json.encode((one.prompt, one.ids, one.log_probs, one.versions)) for one in made]
    given = Counter(written)
    for answer, times in Counter(written[answer] for answer in answers).items():
        assert times <= given[answer], f"an answer is trained {times} times: {answer.decode()}"


def _stretches(policy: np.ndarray, begin: int) -> list[tuple[int, int]]:
    """Neighbouring tokens that engines made, [start, end), from `begin` on."""
    news = policy.copy()
    news[:begin] = False
    edges = np.flatnonzero(np.diff(news, prepend=False, append=False)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _check_shared(first: Sample, second: Sample, length: int) -> None:
    for name in ("token_ids", "loss_mask", "log_probs", "versions"):
        assert np.array_equal(getattr(first, name)[:length], getattr(second, name)[:length]), f"{name} of a branch"


def _put_together(
    part: Sample, start: int, end: int, made: Sequence[Made], lost: bool
) -> tuple[list[int], list[tuple[int, int]]]:
    """The answers that tokens [start, end) are, one behind the other, and which tokens are of which."""
    ids, log_probs, versions = part.token_ids.tolist(), np.asarray(part.log_probs), part.versions.tolist()
    answers: list[int] = []
    spans: list[tuple[int, int]] = []
    at = start
    while at < end:
        longest, answer = 0, -1
        for number, one in enumerate(made):
            if one.prompt != ids[:at]:
                continue
            n = min(len(one.ids), end - at)
            same = np.array(one.ids[:n]) == ids[at : at + n]
            same &= np.array(one.versions[:n]) == versions[at : at + n]
            same &= np.float32(one.log_probs[:n]) == log_probs[at : at + n]
            n = n if same.all() else int(same.argmin())
            if n > longest and (lost or not one.whole or n == len(one.ids)):
                longest, answer = n, number
        assert longest, (
            f"no engine made tokens {at} to {end} of rollout {part.index}, {ids[at:end]} of {versions[at:end]}; "
            f"asked with these before them were {[one for one in made if one.prompt == ids[:at]]}"
        )
        answers.append(answer)
        spans.append((at, at + longest))
        at += longest
    return answers, spans


def _check_forward(
    part: Sample,
    pieces: Sequence[tuple[int, int]],
    checkpoints: Mapping[int, Path],
    temperature: float,
    keeps_cache: bool,
) -> None:
    """Log-probs are those of the weights that are named. `pieces`: tokens by the request that made them."""
    ids, versions = part.token_ids.tolist(), part.versions.tolist()
    for start, end in pieces:
        recorded = torch.tensor(np.array(part.log_probs[start:end]))
        if keeps_cache:
            found = by_pieces(_reads(versions, start, end, checkpoints), ids[:end])[start - 1 :]
        else:
            by_version = {
                v: by_one(checkpoints[v], ids[:start], ids[start:end], temperature) for v in versions[start:end]
            }
            found = torch.stack([by_version[v][place] for place, v in enumerate(versions[start:end])])
        away = (found - recorded).abs()
        assert away.max() < TOLERANCE, f"tokens {start} to {end} of versions {versions[start:end]}: {away}"


def _reads(versions: Sequence[int], start: int, end: int, checkpoints: Mapping[int, Path]) -> list[tuple[Path, int]]:
    """How many tokens each version reads, where none computes again what another left: the first one the context."""
    reads: list[tuple[Path, int]] = []
    for at in range(start, end):
        path, count = checkpoints[versions[at]], start if at == start else 1
        if reads and reads[-1][0] == path:
            count += reads.pop()[1]
        reads.append((path, count))
    return reads
