"""litellm as a client: chats, streams, responses, Anthropic's and Ollama's forms, reranking."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm

url = os.environ["SERVER"]
HELLO = [{"role": "user", "content": "Hello"}]
asked = {"messages": HELLO, "max_tokens": 8, "temperature": 0}
plain = {"model": "openai/talker", "api_base": f"{url}/v1", "api_key": "any"}
whole = litellm.completion(**plain, **asked).choices[0].message.content
assert whole
stream = litellm.completion(**plain, **asked, stream=True)
assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole
response = litellm.responses(**plain, input="Hello", max_output_tokens=8, temperature=0)
assert response.output[0].content[0].text.startswith(whole)  # it asks for 16 tokens at least
anthropic = {"model": "anthropic/talker", "api_base": url, "api_key": "any"}
assert litellm.completion(**anthropic, **asked).choices[0].message.content == whole
ollama = {"model": "ollama_chat/talker", "api_base": url}
assert litellm.completion(**ollama, **asked).choices[0].message.content == whole
