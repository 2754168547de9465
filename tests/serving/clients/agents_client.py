"""openai-agents with its default, which is responses: a loop with one tool, whole and as a stream."""

import asyncio
import os

os.environ["OPENAI_BASE_URL"] = f"{os.environ['SERVER']}/v1"
os.environ["OPENAI_API_KEY"] = "any"

from typing import Literal

from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)
calls = []


@function_tool
def clock(zone: Literal["utc", "cet"]) -> str:
    """The time in a zone."""
    calls.append(zone)
    return "Five."


settings = ModelSettings(tool_choice="required", max_tokens=120, temperature=0)
agent = Agent(name="Teller", instructions="Be brief.", model="talker", tools=[clock], model_settings=settings)


async def main() -> None:
    result = await Runner.run(agent, "Hello", max_turns=4)
    assert result.final_output
    assert calls
    stream = Runner.run_streamed(agent, "Hello", max_turns=4)
    kinds = [event.type async for event in stream.stream_events()]
    assert "raw_response_event" in kinds
    assert stream.final_output


asyncio.run(main())
assert len(calls) >= 2
