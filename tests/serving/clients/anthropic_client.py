"""The anthropic client: messages, streams, tools and their results, counts."""

import os

import anthropic

client = anthropic.Anthropic(base_url=os.environ["SERVER"], api_key="any", max_retries=0)
HELLO = [{"role": "user", "content": "Hello"}]
PARAMETERS = {"type": "object", "properties": {"zone": {"enum": ["utc", "cet"]}}, "required": ["zone"]}
PARAMETERS["additionalProperties"] = False
CLOCK = {"name": "clock", "description": "The time.", "input_schema": PARAMETERS}

asked = {"model": "talker", "messages": HELLO, "max_tokens": 8, "system": "Be brief.", "extra_body": {"temperature": 0}}
whole = client.messages.create(**asked)
assert whole.content[0].type == "text"
assert whole.stop_reason in ("max_tokens", "stop_sequence")
with client.messages.stream(**asked) as stream:
    assert "".join(stream.text_stream) == whole.content[0].text
    final = stream.get_final_message()
assert (final.content[0].text, final.usage.output_tokens) == (whole.content[0].text, whole.usage.output_tokens)
count = client.messages.count_tokens(model="talker", messages=HELLO, system="Be brief.").input_tokens
assert count == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)

tools = {"tools": [CLOCK], "tool_choice": {"type": "any"}, "max_tokens": 60, "model": "talker"}
with client.messages.stream(messages=HELLO, **tools) as stream:
    pieces = [event.partial_json for event in stream if event.type == "input_json"]
    message = stream.get_final_message()
assert len(pieces) > 3
assert message.stop_reason == "tool_use"
use = message.content[0]
assert use.input["zone"] in ("utc", "cet")
result = {"type": "tool_result", "tool_use_id": use.id, "content": "Five."}
again = [*HELLO, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
assert client.messages.create(model="talker", messages=again, tools=[CLOCK], max_tokens=4).content
error = None
try:
    client.messages.create(model="nothing", messages=HELLO, max_tokens=1)
except anthropic.NotFoundError as problem:
    error = problem
assert error.body["error"]["type"] == "not_found_error"
