"""The ollama client: chats, texts, schemas, embeddings, and what is asked about the models."""

import json
import os

import ollama

client = ollama.Client(host=os.environ["SERVER"])
HELLO = [{"role": "user", "content": "Hello"}]
OPTIONS = {"num_predict": 8, "temperature": 0}
PARAMETERS = {"type": "object", "properties": {"zone": {"enum": ["utc", "cet"]}}, "required": ["zone"]}
PARAMETERS["additionalProperties"] = False

whole = client.chat(model="talker", messages=HELLO, options=OPTIONS, keep_alive="5m")
stream = client.chat(model="talker", messages=HELLO, options=OPTIONS, stream=True)
assert "".join(part.message.content for part in stream) == whole.message.content
assert 0 < whole.eval_count <= 8
zone = client.chat(model="talker", messages=HELLO, format=PARAMETERS, options={"num_predict": 60})
assert json.loads(zone.message.content)["zone"] in ("utc", "cet")


def clock(zone: str) -> str:
    """The time.

    Args:
        zone: utc or cet
    """
    return "Five."


assert client.chat(model="talker", messages=HELLO, tools=[clock], options={"num_predict": 4}).done
assert client.generate(model="talker", prompt="Hello", options=OPTIONS).response == whole.message.content
assert client.generate(model="talker", prompt="Once", raw=True, options=OPTIONS).response
assert len(client.embed(model="talker", input=["a", "b"]).embeddings) == 2
assert [each.model for each in client.list().models] == ["talker"]
assert [each.model for each in client.ps().models] == ["talker"]
assert "completion" in client.show("talker").capabilities
error = None
try:
    client.chat(model="nothing", messages=HELLO)
except ollama.ResponseError as problem:
    error = problem
assert error.status_code == 404
