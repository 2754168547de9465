"""Every field of OpenAI's chats, completions and embeddings is used, ignored or refused by its own name."""

import json
from pathlib import Path

import pytest
from helpers import chat_folder
from server_runs import RunningServer

from bitnet_ref.serving.http.schemas import BODIES, REFUSED

NAMES = json.loads((Path(__file__).parents[1] / "data" / "serving" / "openai_properties.json").read_text())
NAMES.pop("source")
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with RunningServer({"talker": chat_folder(tmp_path_factory.mktemp("fields"))}) as running:
        yield running


@pytest.mark.parametrize("path", NAMES)
def test_every_name_of_openai_is_known(path):
    assert set(NAMES[path]) <= set(BODIES[path][1]["properties"])


def ask(server, **body):
    return server.post(CHAT, {"messages": HELLO, "max_tokens": 4, "temperature": 0, **body})


def test_fields_without_a_meaning_change_nothing(server):
    _, _, plain = ask(server)
    ignored = {"verbosity": "low", "prediction": {"type": "content", "content": "x"}, "moderation": {}, "audio": None}
    ignored |= {"prompt_cache_retention": "24h", "prompt_cache_options": {}, "modalities": ["text"], "functions": []}
    for name, value in ignored.items():
        status, _, answer = ask(server, **{name: value})
        assert status == 200, (name, answer)
        assert answer["choices"] == plain["choices"]


@pytest.mark.parametrize("name", REFUSED)
def test_fields_with_a_meaning_are_refused_by_their_name(server, name):
    status, _, answer = ask(server, **{name: {"name": "x"}})
    assert (status, answer["error"]["param"]) == (400, name)
    assert REFUSED[name] in answer["error"]["message"]


def test_other_modalities_and_parts(server):
    status, _, answer = ask(server, modalities=["text", "audio"])
    assert (status, "audio is not supported" in answer["error"]["message"]) == (400, True)
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    status, _, answer = ask(server, messages=[{"role": "user", "content": [image]}])
    assert (status, answer["error"]["param"]) == (400, "messages.0.content[0]")
    assert "image_url is not supported; the models read text only" in answer["error"]["message"]
    status, _, answer = ask(server, messages=[{"role": "user", "content": [{"type": "text"}]}])
    assert status == 400


def test_parts_of_text(server):
    _, _, plain = ask(server)
    cached = [{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}]
    refusal = [{"type": "refusal", "refusal": "Hello"}]
    for parts in (cached, refusal):
        status, _, answer = ask(server, messages=[{"role": "user", "content": parts}])
        assert status == 200, answer
        assert answer["choices"] == plain["choices"]
