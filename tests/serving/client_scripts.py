"""What each client of the server is asked to do: `python client_scripts.py CLIENT URL`, in the client's environment.

Everything is asked of the model `talker`, whose words mean nothing: what is checked is that requests are taken and
that answers are read, are equal where they must be, and fit their schemas.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

URL = sys.argv[2] if len(sys.argv) > 2 else ""
HELLO = [{"role": "user", "content": "Hello"}]
ZONES = ("utc", "cet")
Zone = Literal["utc", "cet"]
PARAMETERS = {
    "type": "object",
    "properties": {"zone": {"type": "string", "enum": ZONES}},
    "required": ["zone"],
    "additionalProperties": False,
}
SHORT = {"model": "talker", "max_tokens": 8, "temperature": 0}
LONG = {"model": "talker", "max_tokens": 60, "temperature": 0}


def clock_model():
    import pydantic

    return pydantic.create_model("Clock", __doc__="The zone of a clock.", zone=(Zone, ...))


def openai_client():
    import openai

    return openai.OpenAI(base_url=f"{URL}/v1", api_key="any", max_retries=0)


def plain_reply():
    """What the server answers to HELLO, asked without a client."""
    from urllib.request import Request, urlopen

    body = json.dumps({**SHORT, "messages": HELLO}).encode()
    with urlopen(Request(f"{URL}/v1/chat/completions", body, {"content-type": "application/json"})) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


# -- the clients of those whose APIs these are -------------------------------------------------------------------------


def use_openai():
    """Chats, streams, parsed replies, a loop of tools, and the same with responses."""
    import openai

    client, Clock = openai_client(), clock_model()
    chats, responses = client.chat.completions, client.responses
    whole = chats.create(**SHORT, messages=HELLO).choices[0].message.content
    stream = chats.create(**SHORT, messages=HELLO, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == whole
    parsed = chats.parse(**LONG, messages=HELLO, response_format=Clock)
    assert parsed.choices[0].message.parsed.zone in ZONES
    tool = {"type": "function", "function": {"name": "clock", "parameters": PARAMETERS}}
    message = chats.create(**LONG, messages=HELLO, tools=[tool], tool_choice="required").choices[0].message
    (call,) = message.tool_calls
    assert Clock.model_validate_json(call.function.arguments)
    answered = [*HELLO, message, {"role": "tool", "tool_call_id": call.id, "content": "Five."}]
    assert chats.create(**SHORT, messages=answered, tools=[tool]).choices
    typed = [openai.pydantic_function_tool(Clock)]
    with chats.stream(**LONG, messages=HELLO, tools=typed, tool_choice="required") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion().choices[0].message
    assert kinds.count("tool_calls.function.arguments.delta") > 3
    assert isinstance(final.tool_calls[0].function.parsed_arguments, Clock)

    short = {"model": "talker", "max_output_tokens": 8, "temperature": 0}
    long = {**short, "max_output_tokens": 60}
    response = responses.create(**short, input="Hello")
    assert response.output_text == whole, (response.output_text, whole)
    with responses.stream(**short, input="Hello") as stream:
        assert "".join(event.delta for event in stream if event.type == "response.output_text.delta") == whole
    assert responses.parse(**long, input="Hello", text_format=Clock).output_parsed.zone in ZONES
    item = {"type": "function", "name": "clock", "parameters": PARAMETERS, "strict": True}
    asked = responses.create(**long, input="Hello", tools=[item], tool_choice="required")
    call = next(each for each in asked.output if each.type == "function_call")
    assert json.loads(call.arguments)["zone"] in ZONES
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "Five."}
    for again in (
        {"input": [output], "previous_response_id": asked.id},
        {"input": [*HELLO, *asked.output, output], "store": False},
    ):
        assert responses.create(**short, tools=[item], **again).output
    assert responses.retrieve(response.id).output_text == whole
    responses.delete(response.id)


def use_anthropic():
    """Messages, streams, tools and their results, counts, errors."""
    import anthropic

    client = anthropic.Anthropic(base_url=URL, api_key="any", max_retries=0)
    tool = {"name": "clock", "description": "The time.", "input_schema": PARAMETERS}
    asked = {"model": "talker", "messages": HELLO, "max_tokens": 8, "system": "Be brief."}
    asked["extra_body"] = {"temperature": 0}
    whole = client.messages.create(**asked)
    assert whole.content[0].type == "text"
    assert whole.stop_reason in ("max_tokens", "stop_sequence")
    with client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        final = stream.get_final_message()
    assert (final.content[0].text, final.usage.output_tokens) == (whole.content[0].text, whole.usage.output_tokens)
    count = client.messages.count_tokens(model="talker", messages=HELLO, system="Be brief.").input_tokens
    assert count == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    forced = {"tools": [tool], "tool_choice": {"type": "any"}, "max_tokens": 60, "model": "talker"}
    with client.messages.stream(messages=HELLO, **forced) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        message = stream.get_final_message()
    assert len(pieces) > 3
    assert message.stop_reason == "tool_use"
    (use,) = message.content
    assert use.input["zone"] in ZONES
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "Five."}
    again = [*HELLO, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(model="talker", messages=again, tools=[tool], max_tokens=4).content
    kind = None
    try:
        client.messages.create(model="nothing", messages=HELLO, max_tokens=1)
    except anthropic.NotFoundError as problem:
        kind = problem.body["error"]["type"]
    assert kind == "not_found_error"


def use_ollama():
    """Chats, texts, schemas, embeddings, and what is asked about the models."""
    import ollama

    client, options = ollama.Client(host=URL), {"num_predict": 8, "temperature": 0}
    whole = client.chat(model="talker", messages=HELLO, options=options, keep_alive="5m")
    stream = client.chat(model="talker", messages=HELLO, options=options, stream=True)
    assert "".join(part.message.content for part in stream) == whole.message.content
    assert 0 < whole.eval_count <= 8
    zone = client.chat(model="talker", messages=HELLO, format=PARAMETERS, options={"num_predict": 60})
    assert json.loads(zone.message.content)["zone"] in ZONES

    def clock(zone: str) -> str:
        """The time.

        Args:
            zone: utc or cet
        """
        return "Five."

    assert client.chat(model="talker", messages=HELLO, tools=[clock], options={"num_predict": 4}).done
    assert client.generate(model="talker", prompt="Hello", options=options).response == whole.message.content
    assert client.generate(model="talker", prompt="Once", raw=True, options=options).response
    assert len(client.embed(model="talker", input=["a", "b"]).embeddings) == 2
    assert [each.model for each in client.list().models] == ["talker"]
    assert [each.model for each in client.ps().models] == ["talker"]
    assert "completion" in client.show("talker").capabilities
    status = None
    try:
        client.chat(model="nothing", messages=HELLO)
    except ollama.ResponseError as problem:
        status = problem.status_code
    assert status == 404


# -- agents and frameworks ---------------------------------------------------------------------------------------------


def use_agents():
    """openai-agents with its default, which is responses: a loop with one tool, whole and as a stream."""
    import asyncio

    os.environ |= {"OPENAI_BASE_URL": f"{URL}/v1", "OPENAI_API_KEY": "any"}
    from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)
    zones = []

    @function_tool
    def clock(zone: Zone) -> str:
        """The time in a zone."""
        zones.append(zone)
        return "Five."

    settings = ModelSettings(tool_choice="required", max_tokens=120, temperature=0)
    agent = Agent(name="Teller", instructions="Be brief.", model="talker", tools=[clock], model_settings=settings)

    async def main():
        result = await Runner.run(agent, "Hello", max_turns=4)
        assert result.final_output
        assert len(zones) == 1
        stream = Runner.run_streamed(agent, "Hello", max_turns=4)
        kinds = [event.type async for event in stream.stream_events()]
        assert "raw_response_event" in kinds
        assert stream.final_output

    asyncio.run(main())
    assert len(zones) == 2


def use_langchain():
    """ChatOpenAI: chats and responses, whole and as streams, with tools and a schema; embeddings."""
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    @tool
    def clock(zone: Zone) -> str:
        """The time in a zone."""
        return "Five."

    hello, Clock = [HumanMessage("Hello")], clock_model()
    made = {"base_url": f"{URL}/v1", "api_key": "any"}
    for use_responses in (False, True):
        short = ChatOpenAI(**made, **SHORT, use_responses_api=use_responses)
        forced = ChatOpenAI(**made, **LONG, use_responses_api=use_responses)
        whole = short.invoke(hello).text
        assert whole
        assert "".join(chunk.text for chunk in short.stream(hello)) == whole
        with_clock = forced.bind_tools([clock], tool_choice="required")
        asked = with_clock.invoke(hello)
        (call,) = asked.tool_calls
        assert call["args"]["zone"] in ZONES
        result = ToolMessage(clock.invoke(call["args"]), tool_call_id=call["id"])
        assert short.bind_tools([clock]).invoke([*hello, asked, result]).text
        streamed = None
        for chunk in with_clock.stream(hello):
            streamed = chunk if streamed is None else streamed + chunk
        assert streamed.tool_calls[0]["args"]["zone"] in ZONES
        assert isinstance(forced.with_structured_output(Clock).invoke(hello), Clock)
    embeddings = OpenAIEmbeddings(**made, model="talker", check_embedding_ctx_length=False)
    assert len(embeddings.embed_documents(["a", "b"])) == 2


def use_llama_index():
    """OpenAILike: texts, chats, streams, a call of a tool, a typed reply."""
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    def clock(zone: Zone) -> str:
        """The time in a zone."""
        return "Five."

    made = {"api_base": f"{URL}/v1", "api_key": "any", "is_chat_model": True, "is_function_calling_model": True}
    short, forced = OpenAILike(**made, **SHORT, max_retries=0), OpenAILike(**made, **LONG, max_retries=0)
    hello = [ChatMessage("Hello")]
    whole = short.chat(hello).message.content
    assert whole == plain_reply()
    assert "".join(piece.delta or "" for piece in short.stream_chat(hello)) == whole
    assert OpenAILike(**{**made, "is_chat_model": False}, **SHORT).complete("Once").text
    tool = FunctionTool.from_defaults(clock)
    asked = forced.chat_with_tools([tool], user_msg="Hello", tool_required=True)
    (call,) = forced.get_tool_calls_from_response(asked)
    assert call.tool_kwargs["zone"] in ZONES
    assert forced.as_structured_llm(clock_model()).chat(hello).raw.zone in ZONES


def use_pydantic_ai():
    """Typed outputs, by chats and by responses."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider, Clock = OpenAIProvider(base_url=f"{URL}/v1", api_key="any"), clock_model()
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model = kind("talker", provider=provider)
        settings = {"max_tokens": 60, "temperature": 0.0}
        assert Agent(model, model_settings={**settings, "max_tokens": 8}).run_sync("Hello").output
        assert isinstance(Agent(model, output_type=Clock, model_settings=settings).run_sync("Hello").output, Clock)


def use_dspy():
    """Texts, and a signature by JSON schema, which it sends to models of unknown names only if it is told."""
    import dspy

    made = {"api_base": f"{URL}/v1", "api_key": "any", "cache": False, "temperature": 0, "num_retries": 0}
    assert dspy.LM("openai/talker", **made, max_tokens=8)("Hello") == [plain_reply()]
    with dspy.context(lm=dspy.LM("openai/talker", **made, max_tokens=120), adapter=dspy.JSONAdapter()):
        signature = dspy.Signature({"text": (str, dspy.InputField()), "zone": (Zone, dspy.OutputField())})
        form = {"type": "json_schema", "json_schema": {"name": "zone", "schema": PARAMETERS}}
        assert dspy.Predict(signature)(text="Hello", config={"response_format": form}).zone in ZONES


# -- structured outputs ------------------------------------------------------------------------------------------------


def use_instructor():
    """Typed replies by tools and by JSON schema."""
    import instructor

    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai_client(), mode=mode)
        asked = {"messages": HELLO, "response_model": clock_model(), "max_retries": 0}
        assert client.chat.completions.create(**LONG, **asked).zone in ZONES


def use_outlines():
    """Typed replies and choices, asked as of OpenAI's server and as of vLLM's."""
    import outlines

    Clock = clock_model()
    options = {"max_tokens": 60, "temperature": 0}
    model = outlines.from_openai(openai_client(), "talker")
    assert model("Hello", max_tokens=8, temperature=0) == plain_reply()
    assert "".join(model.stream("Hello", max_tokens=8, temperature=0)) == plain_reply()
    assert Clock.model_validate_json(model("Hello", Clock, **options))
    model = outlines.from_vllm(openai_client(), "talker")
    assert Clock.model_validate_json(model("Hello", Clock, **options))
    assert model("Hello", Zone, **options) in ZONES
    assert model("Hello", outlines.regex("[a-c]{3}"), **options).strip("abc") == ""


def use_guidance():
    """A reply in a role, and a JSON object by a schema."""
    from guidance import assistant, gen, models, user
    from guidance import json as gen_json

    model = models.OpenAI("talker", base_url=f"{URL}/v1", api_key="any", echo=False)
    with user():
        model += "Hello"
    with assistant():
        replied = model + gen("text", max_tokens=8, temperature=1e-4)  # it leaves out a zero
    assert replied["text"] == plain_reply()
    with assistant():
        typed = model + gen_json("clock", schema=clock_model(), max_tokens=60)
    assert json.loads(typed["clock"])["zone"] in ZONES


# -- tools for many models ---------------------------------------------------------------------------------------------


def use_litellm():
    """Chats, streams, responses, Anthropic's and Ollama's forms."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import litellm

    asked = {"messages": HELLO, "max_tokens": 8, "temperature": 0}
    plain = {"model": "openai/talker", "api_base": f"{URL}/v1", "api_key": "any"}
    whole = litellm.completion(**plain, **asked).choices[0].message.content
    assert whole
    stream = litellm.completion(**plain, **asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole
    response = litellm.responses(**plain, input="Hello", max_output_tokens=8, temperature=0)
    assert response.output[0].content[0].text.startswith(whole)  # it asks for 16 tokens at least
    anthropic = {"model": "anthropic/talker", "api_base": URL, "api_key": "any"}
    assert litellm.completion(**anthropic, **asked).choices[0].message.content == whole
    ollama = {"model": "ollama_chat/talker", "api_base": URL}
    assert litellm.completion(**ollama, **asked).choices[0].message.content == whole


def use_llm():
    """`llm`: an OpenAI model with another base, whole and as a stream, and a schema."""
    home = Path(tempfile.mkdtemp())
    os.environ["LLM_USER_PATH"] = str(home)
    lines = ("- model_id: talker", "model_name: talker", f"api_base: {URL}/v1", "api_key_name: none")
    (home / "extra-openai-models.yaml").write_text("\n  ".join([*lines, "supports_schema: true\n"]))
    (home / "keys.json").write_text('{"none": "any"}')
    import llm

    model, asked = llm.get_model("talker"), {"max_tokens": 8, "temperature": 0}
    whole = model.prompt("Hello", stream=False, **asked).text()
    assert whole
    assert "".join(model.prompt("Hello", **asked)) == whole
    assert json.loads(model.prompt("Hello", schema=PARAMETERS, max_tokens=60).text())["zone"] in ZONES


def use_lm_eval():
    """lm-eval's local-chat-completions, several requests at a time."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalChatCompletion

    os.environ["OPENAI_API_KEY"] = "any"
    model = LocalChatCompletion(model="talker", base_url=f"{URL}/v1/chat/completions", num_concurrent=4)
    options = {"until": ["\n\n\n"], "max_gen_toks": 8, "temperature": 0}
    asked = [Instance("generate_until", {}, (model.apply_chat_template(HELLO), options), n) for n in range(8)]
    assert model.generate_until(asked) == [plain_reply()] * 8


def use_guidellm():
    """A run of chats, two streams at a time."""
    folder = Path(tempfile.mkdtemp())
    (folder / "prompts.csv").write_text("prompt\nHello\nWho are you?\nTell me a story\n")
    backend = f"kind=openai_http,target={URL},model=talker"
    command = [str(Path(sys.executable).with_name("guidellm")), "run", "--backend", backend]
    command += ["--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=3"]
    command += ["--data", f"kind=csv_file,path={folder / 'prompts.csv'}", "--disable-console"]
    subprocess.run([*command, "--output", f"kind=json,path={folder / 'out.json'}"], check=True, timeout=500)
    (bench,) = json.loads((folder / "out.json").read_text())["benchmarks"]
    requests = bench["requests"]
    assert (len(requests["successful"]), len(requests["errored"])) == (3, 0)
    assert all(each["output"] for each in requests["successful"])


def use_open_webui():
    """Its own backend, which downloads nothing: the list of models, chats whole and as a stream, embeddings."""
    import urllib.error
    import urllib.request

    folder = tempfile.mkdtemp()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {"OPENAI_API_BASE_URL": f"{URL}/v1", "OPENAI_API_KEY": "any", "ENABLE_OLLAMA_API": "False"}
    settings |= {"RAG_EMBEDDING_ENGINE": "openai", "RAG_EMBEDDING_MODEL": "talker", "RAG_OPENAI_API_KEY": "any"}
    settings |= {"RAG_OPENAI_API_BASE_URL": f"{URL}/v1", "OFFLINE_MODE": "True", "HF_HUB_OFFLINE": "1"}
    settings |= {"WEBUI_AUTH": "False", "WEBUI_SECRET_KEY": "any", "DATA_DIR": folder}
    token = ""

    def ask(path, body=None):
        headers = {"content-type": "application/json", "authorization": f"Bearer {token}"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
        with urllib.request.urlopen(request, timeout=120) as reply:
            return reply.read().decode()

    command = [str(Path(sys.executable).with_name("open-webui")), "serve", "--host", "127.0.0.1", "--port", str(port)]
    log = Path(folder, "log")
    output = {"stdout": log.open("w"), "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, env={**os.environ, **settings}, cwd=folder, **output) as program:
        try:
            end = time.monotonic() + 400
            while True:
                try:
                    ask("/health")
                    break
                except (urllib.error.URLError, OSError):
                    assert program.poll() is None, log.read_text()[-2000:]
                    assert time.monotonic() < end
                    time.sleep(1)
            token = json.loads(ask("/api/v1/auths/signin", {"email": "", "password": ""}))["token"]
            assert [each["id"] for each in json.loads(ask("/api/models"))["data"]] == ["talker"]
            asked = {"model": "talker", "messages": HELLO, "temperature": 0, "max_tokens": 8}
            whole = json.loads(ask("/api/chat/completions", {**asked, "stream": False}))
            assert whole["choices"][0]["message"]["content"] == plain_reply()
            lines = ask("/api/chat/completions", {**asked, "stream": True}).split("\n")
            chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            deltas = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]
            assert "".join(deltas) == plain_reply()
            vectors = json.loads(ask("/api/embeddings", {"model": "talker", "input": ["a boat", "a ship"]}))
            assert len(vectors["data"]) == 2
        finally:
            program.terminate()


if __name__ == "__main__":
    globals()[f"use_{sys.argv[1]}"]()
