"""The proof of the policy: an engine that is about to serve a version must score canary sequences as the trainer does.

A label and a digest say which bytes were sent. Neither shows that the engine computes with them: an engine may load a
stale directory, leave out a layer, reuse keys and values of earlier weights, or name itself after weights that it never
took. The trainer therefore scores a few fixed sequences with the weights that it has just written, and announces the
log-probs with the version. After the load, each engine is asked for the log-probs of the same sequences, by one request
to its own address, and gets no requests before the two agree.

The canaries are random tokens: most are improbable, so that their log-probs move with every weight of the model. Only
their second half is compared. The first half may come from the engine's prefix cache, under the key that rollouts use,
so that keys and values of earlier weights are found as well.

Invariants:
- the trainer computes one forward pass of at most 100 tokens for each version, by the path that scores log-probs for
  training, on all its ranks;
- an engine that disagrees is paused, gets all weights once more, is then restarted by its supervisor, and ends the run
  if it disagrees again; a version that agrees resets this count;
- the limits follow the coarsest type of trainer, slot and engine. What is smaller than its rounding stays unseen, with
  one exception: an engine whose scores stand still while the trainer's move, which needs no comparison of kernels.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from models.engines.client import EngineClient
from models.engines.protocol import ServerInfo
from models.errors import EngineAborted, EngineError, EngineProtocolError, EngineRefused, NotVerified
from stages.errors import UnprovenPolicy
from stages.messages import PolicyProof, WeightsAnnouncement
from stages.ports import Topic
from stages.topic_values import PolicyDifference

log = logging.getLogger("sluice.policy_proof")

FIRST_SCORED: Final = 13  # the tokens before it may come from the prefix cache, but for the last of them

Scores = npt.NDArray[np.float64]
Precision = Literal["float32", "half", "quantised"]
THRESHOLDS: Final[dict[Precision, float]] = {"float32": 1e-4, "half": 2.0, "quantised": 6.0}  # nats
MEAN_SHARE: Final = 1 / 4  # of the threshold: the limit of the mean difference
MOVED_SHARE: Final = 1 / 20  # of the threshold: how far the trainer moves before an engine that stands still is seen
STANDS_STILL: Final = 3.0  # an engine moved so many times less than it is away from where the trainer moved
KEPT: Final = 8  # earlier versions to compare with: the first, and the newest ones
RESTARTS_AT: Final = 2  # disagreements in a row; the next one ends the run


class PolicyDiffers(NotVerified):
    """An engine does not score as the trainer does. `again`: also after all weights were loaded a second time."""

    again = False


class PolicyProver:
    """Proves the weights of one engine, through all its incarnations."""

    def __init__(self, engine: str, threshold: float | None) -> None:
        self.engine, self.threshold = engine, threshold
        self.disagreements = 0  # in a row
        self._agreed: list[tuple[int, Scores, Scores]] = []  # version, the trainer's scores, the engine's
        self._facts: tuple[EngineClient, ServerInfo] | None = None  # of the incarnation that the client talks to

    async def prove(
        self, topic: Topic, client: EngineClient, announcement: WeightsAnnouncement
    ) -> PolicyDifference | None:
        """Compare the engine that has just loaded these weights, and is not paused; None if it is not to be proven.

        Waits for one answer, which may queue behind running requests. Pauses the engine before it raises PolicyDiffers,
        an EngineError, or UnprovenPolicy, which ends the run.
        """
        if announcement.proof is None:
            return None
        try:
            if self._facts is None or self._facts[0] is not client:
                self._facts = client, await client.server_info()
                if (reason := _unable(self._facts[1], announcement.proof)) is not None:
                    log.info("%s is not proven: %s", self.engine, reason)
            facts = self._facts[1]
            if _unable(facts, announcement.proof) is not None:
                return None
            return await self._compare(client, facts, announcement, announcement.proof)
        except (EngineError, PolicyDiffers, UnprovenPolicy) as error:
            if isinstance(error, EngineAborted) and topic.get("drain") is not None:  # which ends all requests
                return None
            # It generates no more: its running requests end with the tokens that they have.
            with contextlib.suppress(EngineError):  # one that does not answer is not served either
                await client.pause("abort")
            raise

    async def _compare(
        self, client: EngineClient, facts: ServerInfo, announcement: WeightsAnnouncement, proof: PolicyProof
    ) -> PolicyDifference:
        started = time.perf_counter()
        precision = precision_of(facts, announcement.element_bytes)
        limit = self.threshold or THRESHOLDS[precision]
        tokens, wanted = np.array(proof.tokens, dtype=np.int32), np.array(proof.log_probs)[:, FIRST_SCORED - 1 :]
        try:
            scores = await client.score(tokens, FIRST_SCORED, extra_key=announcement.label)
        except (EngineProtocolError, EngineRefused) as error:
            raise self._differs(f"{self.engine} does not score at version {announcement.version}: {error}") from error
        found = scores.astype(np.float64)
        apart = np.abs(found - wanted)
        largest, mean = float(apart.max()), float(apart.mean())
        if not (largest <= limit and mean <= MEAN_SHARE * limit):  # true for NaN
            raise self._differs(
                f"{self.engine} does not sample with version {announcement.version}: of {apart.size} canary tokens its "
                f"log-probs differ from the trainer's by {largest:.3g} at most and by {mean:.3g} on average; the "
                f"limits ({precision}) are {limit:.3g} and {MEAN_SHARE * limit:.3g}"
            )
        self._check_movement(announcement.version, wanted, found, MOVED_SHARE * limit)
        self.disagreements = 0
        self._agreed.append((announcement.version, wanted, found))
        del self._agreed[1:-KEPT]
        return PolicyDifference(largest, mean, proof.seconds + time.perf_counter() - started)

    def _check_movement(self, version: int, wanted: Scores, found: Scores, least: float) -> None:
        """Raise PolicyDiffers if the trainer's scores moved since an earlier version by more than `least`, and the
        engine's stayed where they were: it serves that version still, though the two are closer than the limits."""
        for earlier, trainers, engines in self._agreed:
            moved, engine_moved = wanted - trainers, found - engines
            stays = np.linalg.norm(engine_moved - moved) > STANDS_STILL * np.linalg.norm(engine_moved)
            if stays and (most := float(np.abs(moved).max())) > least:
                raise self._differs(
                    f"{self.engine} does not sample with version {version}: since version {earlier} the trainer's "
                    f"log-probs of canary tokens moved by {most:.3g} (limit {least:.3g}), and the engine's by "
                    f"{np.abs(engine_moved).max():.3g}, not with them"
                )

    def _differs(self, reason: str) -> PolicyDiffers:
        """Count a disagreement. Raises UnprovenPolicy after the last that is allowed."""
        self.disagreements += 1
        if self.disagreements > RESTARTS_AT:
            raise UnprovenPolicy(
                f"{reason}, also after all weights were loaded again and after a restart. If engine and trainer differ "
                "from the first version on, check that both have the same checkpoint and the same options of rope and "
                "precision, or raise --policy-proof-threshold; --no-policy-proof turns the proof off"
            )
        error = PolicyDiffers(reason)
        error.again = self.disagreements == RESTARTS_AT
        return error


def precision_of(facts: ServerInfo, element_bytes: int) -> Precision:
    """The coarsest of the engine's weights and cache and of the weights' bytes.

    What is not known counts as half, and so does float32 on a GPU, whose kernels may round to TF32.
    """
    if facts.quantization or element_bytes == 1 or (facts.kv_cache_dtype or "").startswith(("fp8", "fp4", "int8")):
        return "quantised"
    exact = facts.dtype == "float32" and facts.device == "cpu" and element_bytes >= 4
    return "float32" if exact else "half"


def _unable(facts: ServerInfo, proof: PolicyProof) -> str | None:
    """Why an engine cannot be asked for log-probs, None if it can."""
    if facts.dtype == "none":
        return "it is simulated"
    if facts.disaggregation_mode != "null":
        return f"it does {facts.disaggregation_mode} only, and answers no request by itself"
    if facts.context_length is not None and facts.context_length <= (length := len(proof.tokens[0])):
        return f"its context of {facts.context_length} tokens has no room for sequences of {length}"
    return None
