"""Real clients of model servers, each for one task: `python clients.py CLIENT BASE_URL KEY MODEL` prints JSON.

Run by an interpreter that has the client; nothing of the project is imported. The policy behind the server calls the
tool `add` (or what else it is offered first), and says "It is 3." when it has the result.
"""

from __future__ import annotations

import asyncio
import json
import sys
from functools import partial
from typing import Any

PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
QUESTION = "What is 1 + 2?"


def openai_chat(url: str, key: str, model: str) -> Any:
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    first = client.chat.completions.create(model=model, messages=messages, tools=tools).choices[0]
    assert first.finish_reason == "tool_calls", first
    [call] = first.message.tool_calls
    assert json.loads(call.function.arguments) == {"a": 1, "b": 2}
    messages += [first.message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
    with client.chat.completions.stream(model=model, messages=messages, tools=tools) as stream:
        for _ in stream:
            pass
        return stream.get_final_completion().choices[0].message.content


def openai_responses(url: str, key: str, model: str) -> Any:
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    tools: Any = [{"type": "function", "name": "add", "parameters": PARAMETERS, "strict": True}]
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    first = client.responses.create(model=model, input=items, tools=tools)
    [call] = [item for item in first.output if item.type == "function_call"]
    items += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": "3"}]
    with client.responses.stream(model=model, input=items, tools=tools) as stream:
        for _ in stream:
            pass
        return stream.get_final_response().output_text


def anthropic_messages(url: str, key: str, model: str) -> Any:
    from anthropic import Anthropic

    client = Anthropic(base_url=url, api_key=key, max_retries=0)
    requested: Any = {"model": model, "max_tokens": 200, "tools": [{"name": "add", "input_schema": PARAMETERS}]}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    assert client.messages.count_tokens(model=model, messages=messages).input_tokens > 0
    first = client.messages.create(messages=messages, **requested)
    [call] = [block for block in first.content if block.type == "tool_use"]
    assert (first.stop_reason, call.input) == ("tool_use", {"a": 1, "b": 2})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "3"}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    with client.messages.stream(messages=messages, **requested) as stream:
        for _ in stream:
            pass
        return stream.get_final_text()


def _openai_agents(url: str, key: str, model: str, kind: str) -> Any:
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    models: Any = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}

    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    served = models[kind](model=model, openai_client=client)
    agent = agents.Agent(name="adder", instructions="Add.", tools=[agents.function_tool(add)], model=served)

    async def run() -> Any:
        plain = await agents.Runner.run(agent, QUESTION)
        streamed = agents.Runner.run_streamed(agent, QUESTION)
        async for _ in streamed.stream_events():
            pass
        assert plain.final_output == streamed.final_output, (plain.final_output, streamed.final_output)
        return plain.final_output

    return asyncio.run(run())


openai_agents_chat = partial(_openai_agents, kind="chat")
openai_agents_responses = partial(_openai_agents, kind="responses")


def smolagents(url: str, key: str, model: str) -> Any:
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    @tool  # type: ignore[misc]
    def add(a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: one
            b: the other
        """
        return a + b

    served = OpenAIServerModel(model_id=model, api_base=f"{url}/v1", api_key=key)
    return ToolCallingAgent(tools=[add], model=served, verbosity_level=0).run(QUESTION)


def mini_swe_agent(url: str, key: str, model: str) -> Any:
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    served = LitellmModel(
        model_name=f"openai/{model}",
        model_kwargs={"api_base": f"{url}/v1", "api_key": key},
        cost_tracking="ignore_errors",
    )
    agent = DefaultAgent(served, LocalEnvironment(), system_template="Use bash.", instance_template="{{task}}")
    return agent.run(QUESTION)["submission"].strip()


def openenv(url: str, key: str, model: str) -> Any:
    from openenv.core.harness.capture.validate_llm import validate_llm

    report = validate_llm(url, model, api_key=key)
    return [report.ok, report.capture_level, report.tool_support, report.findings]


def verifiers(url: str, key: str, model: str) -> Any:
    import os

    from verifiers.v1.clients.train import TrainClient
    from verifiers.v1.configs.client import TrainClientConfig
    from verifiers.v1.dialects import ChatDialect
    from verifiers.v1.types import SamplingConfig

    os.environ["CLIENT_KEY"] = key
    config = TrainClientConfig(
        base_url=f"{url}/v1", api_key_var="CLIENT_KEY", renderer_model_name=os.environ["CHECKPOINT"]
    )

    async def run() -> Any:
        client = TrainClient(config)
        body = {"model": model, "messages": [{"role": "user", "content": QUESTION}]}
        answer = await client.get_response(ChatDialect(), body, SamplingConfig(max_tokens=100))
        tokens = answer.tokens
        return [answer.message.content, tokens.prompt_ids, tokens.completion_ids, tokens.completion_logprobs]

    return asyncio.run(run())


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))  # noqa: T201
