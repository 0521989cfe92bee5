"""Pack: unmodified agents of the OpenAI Agents SDK, with their handoffs, tools and guardrails.

    [[environment]]
    name = "openai_agents"
    python = ".venv-agents/bin/python"
    options = { agent = "my_project.support:triage" }

Needs `pip install openai-agents`, here or in a separate environment (`make agents-env`). The policy answers for every
model that an agent names. Rollouts are graded by the text of their last turn.
"""

from __future__ import annotations

from typing import Any, Literal

from agents import Agent, MaxTurnsExceeded, OpenAIChatCompletionsModel, OpenAIResponsesModel, RunConfig, Runner

from models.import_path import import_path
from stages.agents.environment import Endpoint, Outcome, Task
from stages.agents.packs.openai_client import client_of

_MODELS: dict[str, Any] = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}


class OpenaiAgents:
    """One run of an agent."""

    def __init__(self, agent: str = "", api: Literal["chat", "responses"] = "chat", max_turns: int = 10) -> None:
        """
        Args:
            agent: import path of an `agents.Agent`; without it, the row's messages go to the policy unchanged.
            api: `chat` or `responses`, the interface of the agent's models.
            max_turns: limit of one run; a longer run is graded as it is then.
        """
        if api not in _MODELS:
            raise ValueError(f"api is {api!r}, but must be chat or responses")
        self._agent: Any = import_path(agent) if agent else Agent(name="policy")
        self._model, self._max_turns = _MODELS[api], max_turns

    async def run(self, task: Task, endpoint: Endpoint) -> Outcome:
        """Waits for the agent's end."""
        model = self._model(model=endpoint.model, openai_client=client_of(endpoint))
        conversation: Any = [{"role": message.role, "content": message.content} for message in task.messages]
        settings = RunConfig(model=model, tracing_disabled=True)
        try:
            await Runner.run(self._agent, conversation, max_turns=self._max_turns, run_config=settings)
        except MaxTurnsExceeded:
            return Outcome(metrics={"ended": 0.0})
        return Outcome(metrics={"ended": 1.0})
