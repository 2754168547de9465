"""pydantic-ai: typed outputs by chats and by responses, and a stream."""

import os
from typing import Literal

import pydantic
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Clock(pydantic.BaseModel):
    """The zone of a clock."""

    zone: Literal["utc", "cet"]


provider = OpenAIProvider(base_url=f"{os.environ['SERVER']}/v1", api_key="any")
for kind in (OpenAIChatModel, OpenAIResponsesModel):
    model = kind("talker", provider=provider)
    settings = {"max_tokens": 60, "temperature": 0.0}
    assert Agent(model, model_settings={**settings, "max_tokens": 8}).run_sync("Hello").output
    assert isinstance(Agent(model, output_type=Clock, model_settings=settings).run_sync("Hello").output, Clock)
