"""instructor: typed replies by tools and by JSON schema."""

import os
from typing import Literal

import instructor
import openai
import pydantic


class Clock(pydantic.BaseModel):
    """The zone of a clock."""

    zone: Literal["utc", "cet"]


HELLO = [{"role": "user", "content": "Hello"}]
plain = openai.OpenAI(base_url=f"{os.environ['SERVER']}/v1", api_key="any", max_retries=0)
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(plain, mode=mode)
    clock = client.chat.completions.create(
        model="talker", messages=HELLO, response_model=Clock, max_tokens=60, max_retries=0
    )
    assert clock.zone in ("utc", "cet")
