"""The openai client: chats, streams, parsed replies, a loop of tools, and the same with responses."""

import json
import os
from typing import Literal

import openai
import pydantic

client = openai.OpenAI(base_url=f"{os.environ['SERVER']}/v1", api_key="any", max_retries=0)
PARAMETERS = {"type": "object", "properties": {"zone": {"enum": ["utc", "cet"]}}, "required": ["zone"]}
PARAMETERS["additionalProperties"] = False
HELLO = [{"role": "user", "content": "Hello"}]


class Clock(pydantic.BaseModel):
    zone: Literal["utc", "cet"]


chat = {"model": "talker", "messages": HELLO, "max_tokens": 8, "temperature": 0}
whole = client.chat.completions.create(**chat).choices[0].message.content
pieces = [c.choices[0].delta.content or "" for c in client.chat.completions.create(**chat, stream=True) if c.choices]
assert "".join(pieces) == whole, (pieces, whole)
parsed = client.chat.completions.parse(model="talker", messages=HELLO, max_tokens=60, response_format=Clock)
assert parsed.choices[0].message.parsed.zone in ("utc", "cet")

tool = {"type": "function", "function": {"name": "clock", "parameters": PARAMETERS}}
asked = client.chat.completions.create(
    model="talker", messages=HELLO, tools=[tool], tool_choice="required", max_tokens=60
)
message = asked.choices[0].message
call = message.tool_calls[0]
assert Clock.model_validate_json(call.function.arguments)
answered = [*HELLO, message, {"role": "tool", "tool_call_id": call.id, "content": "Five."}]
assert client.chat.completions.create(model="talker", messages=answered, tools=[tool], max_tokens=4).choices
with client.chat.completions.stream(
    model="talker", messages=HELLO, tools=[openai.pydantic_function_tool(Clock)], tool_choice="required", max_tokens=60
) as stream:
    kinds = [event.type for event in stream]
    final = stream.get_final_completion().choices[0].message
assert kinds.count("tool_calls.function.arguments.delta") > 3
assert isinstance(final.tool_calls[0].function.parsed_arguments, Clock)

response = client.responses.create(model="talker", input="Hello", max_output_tokens=8, temperature=0)
assert response.output_text == whole, (response.output_text, whole)
with client.responses.stream(model="talker", input="Hello", max_output_tokens=8, temperature=0) as stream:
    text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
assert text == whole
parsed = client.responses.parse(model="talker", input="Hello", text_format=Clock, max_output_tokens=60)
assert parsed.output_parsed.zone in ("utc", "cet")
item = {"type": "function", "name": "clock", "parameters": PARAMETERS, "strict": True}
asked = client.responses.create(
    model="talker", input="Hello", tools=[item], tool_choice="required", max_output_tokens=60
)
call = next(each for each in asked.output if each.type == "function_call")
assert json.loads(call.arguments)["zone"] in ("utc", "cet")
output = {"type": "function_call_output", "call_id": call.call_id, "output": "Five."}
for again in (
    {"input": [output], "previous_response_id": asked.id},
    {"input": [*HELLO, *asked.output, output], "store": False},
):
    assert client.responses.create(model="talker", tools=[item], max_output_tokens=4, **again).output
assert client.responses.retrieve(response.id).output_text == whole
client.responses.delete(response.id)
