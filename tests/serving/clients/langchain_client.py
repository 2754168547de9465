"""LangChain's ChatOpenAI: chats and responses, whole and as streams, with tools and a schema."""

import os
from typing import Literal

import pydantic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings


class Clock(pydantic.BaseModel):
    """The zone of a clock."""

    zone: Literal["utc", "cet"]


@tool
def clock(zone: Literal["utc", "cet"]) -> str:
    """The time in a zone."""
    return "Five."


HELLO = [HumanMessage("Hello")]
url = f"{os.environ['SERVER']}/v1"
for use_responses in (False, True):
    made = {"base_url": url, "api_key": "any", "model": "talker", "temperature": 0, "use_responses_api": use_responses}
    short, model = ChatOpenAI(**made, max_tokens=8), ChatOpenAI(**made, max_tokens=60)
    whole = short.invoke(HELLO)
    assert whole.text, whole
    assert "".join(chunk.text for chunk in short.stream(HELLO)) == whole.text
    asked = model.bind_tools([clock], tool_choice="required").invoke(HELLO)
    (call,) = asked.tool_calls
    assert call["args"]["zone"] in ("utc", "cet")
    result = ToolMessage(clock.invoke(call["args"]), tool_call_id=call["id"])
    assert short.bind_tools([clock]).invoke([*HELLO, asked, result]).text
    streamed = None
    for chunk in model.bind_tools([clock], tool_choice="required").stream(HELLO):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed.tool_calls[0]["args"]["zone"] in ("utc", "cet")
    assert isinstance(model.with_structured_output(Clock).invoke(HELLO), Clock)
embeddings = OpenAIEmbeddings(base_url=url, api_key="any", model="talker", check_embedding_ctx_length=False)
assert len(embeddings.embed_documents(["a", "b"])) == 2
