"""The graders that run in the reward stage, without a grader process: `remote` and `judge`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from configs.schema import Config
from stages.graders.grade import Grade, GradeRequest, failed
from stages.graders.registry import outside
from stages.ports import Topic

if TYPE_CHECKING:  # both bring an HTTP client, which most runs do not need
    from stages.reward.judge import Judge
    from stages.reward.remote import RemoteReward


class Outside:
    """Makes the clients at their first use, or at `open` where the configuration names them."""

    def __init__(self, config: Config) -> None:
        self._whole, self._config = config, config.reward
        self._names = tuple(entry.partition("=")[0] for entry in config.engine.frozen_engine)
        self._remote: RemoteReward | None = None
        self._judge: Judge | None = None

    def open(self) -> None:
        """Raises UnknownGraderError if the judge's prompt cannot be used."""
        if self._names or self._config.judge_engine is not None:
            from stages.reward.judge import Judge
            from stages.sampling.sampler import Sampler

            named = () if self._config.judge_engine is None else (self._config.judge_engine,)
            policies = tuple(dict.fromkeys((*named, *self._names)))
            self._judge = Judge(Sampler(self._whole, replica="judge", policies=policies), self._config)

    async def close(self) -> None:
        if self._remote is not None:
            await self._remote.close()
        if self._judge is not None:
            await self._judge.sampler.close()

    async def follow(self, topic: Topic) -> None:
        """Waits for the judges' addresses; runs until cancelled, or ends at once without judges."""
        if self._judge is not None:
            await self._judge.sampler.follow(topic)

    async def grade(self, request: GradeRequest, prompt: str, sample_id: str) -> Grade:
        """The grade of one response by the grader that the request names."""
        base, argument = outside(request.grader) or ("", None)
        if base == "remote":
            return await self._grade_remote(request, prompt, sample_id, argument)
        name = argument or self._config.judge_engine or (self._names[0] if len(self._names) == 1 else "")
        if self._judge is None or not name:
            return failed(
                f"rm_type {request.grader!r} has no engine; name one with --frozen-engine name=CHECKPOINT and "
                "--judge-engine name"
            )
        return await self._judge.grade(name, prompt, request.response, request.label, request.seed)

    async def _grade_remote(self, request: GradeRequest, prompt: str, sample_id: str, url: str | None) -> Grade:
        from stages.reward.remote import Question, RemoteReward

        if self._remote is None:
            self._remote = RemoteReward(self._config, request.reward_key)
        question = Question(sample_id, prompt, request.response, request.label, request.metadata, url)
        return await self._remote.grade(question)
