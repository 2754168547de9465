"""A server with LoRA adapters: "base:adapter" is a model in every API, and answers as the model with it."""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from cli_runs import BACKEND, invoke, invoke_json
from helpers import model

import bitnet_ref
from bitnet_ref.formats.open import ASSETS
from bitnet_ref.training.lora import LoraTrainer

pytest.importorskip("starlette", reason="starlette is not installed")
from server_runs import RunningServer

BASE = ASSETS / "storyteller"
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two adapters of a ternary model, drawn."""
    made = {}
    for seed, name in enumerate(("one", "two")):
        trainer = LoraTrainer(model(BASE), rank=3, targets=("q_proj", "down_proj"), backend="numpy")
        dice = np.random.default_rng(seed)
        for factor in trainer.masters.values():
            factor[:] = dice.standard_normal(factor.shape) * 0.2
        made[name] = tmp_path_factory.mktemp(name)
        trainer.save(made[name])
    return made


@pytest.fixture(scope="module")
def server(folders):
    adapters = {("m", name): folder for name, folder in folders.items()}
    template = "{% for each in messages %}{{ each.content }}{% endfor %}"
    with RunningServer({"m": BASE}, adapters=adapters, verify=True, chat_template=template) as running:
        yield running


@pytest.fixture(scope="module")
def loaded(folders):
    whole = {name: bitnet_ref.load(BASE, backend=BACKEND, adapter=folder) for name, folder in folders.items()}
    return {**whole, None: model(BASE, BACKEND)}


def ask(server, name, **body):
    body = {"model": name, "prompt": PROMPT, "max_tokens": 6, "temperature": 0, **body}
    status, _, answer = server.post("/v1/completions", body)
    assert status == 200, answer
    return answer


def test_each_request_has_its_own(server, loaded):
    """At the same time, in one batch; twice, so that the second finds pages."""
    names = [None, "one", "two", "one", None, "two"] * 2
    with ThreadPoolExecutor(len(names)) as pool:
        answers = list(pool.map(lambda name: ask(server, "m" if name is None else f"m:{name}"), names))
    assert len({answer["choices"][0]["text"] for answer in answers}) == 3
    prints = {}
    for name, answer in zip(names, answers, strict=True):
        expected = loaded[name].generate(PROMPT, max_tokens=6)
        assert answer["choices"][0]["text"].lstrip() == expected.text
        assert answer["model"] == ("m" if name is None else f"m:{name}")
        prints.setdefault(name, set()).add(answer["system_fingerprint"])
    assert [len(each) for each in prints.values()] == [1, 1, 1]
    first = {name: min(each).split("-") for name, each in prints.items()}
    assert len({each[1] for each in first.values()}) == 3  # the weights' part
    assert len({(each[2], each[3]) for each in first.values()}) == 1


def test_other_apis(server, loaded):
    """Ollama's, and embeddings; the same place as the name without the adapter."""
    options = {"num_predict": 6, "temperature": 0}
    body = {"model": "m:one", "prompt": PROMPT, "raw": True, "stream": False, "options": options}
    status, _, answer = server.post("/api/generate", body)
    assert (status, answer["model"]) == (200, "m:one")
    assert answer["response"].lstrip() == loaded["one"].generate(PROMPT, max_tokens=6).text
    vectors = [server.post(path, {"model": "m:two", "input": PROMPT})[2] for path in ("/v1/embeddings", "/api/embed")]
    expected = loaded["two"].embed(PROMPT).tolist()
    assert vectors[0]["data"][0]["embedding"] == vectors[1]["embeddings"][0] == expected
    assert server.post("/tokenize", {"model": "m:one", "prompt": PROMPT})[0] == 200


def test_chats(server):
    """Of OpenAI, Anthropic and Responses, with one template: the same text, which is not the model's without."""
    texts = {}
    for name in ("m:one", "m"):
        said = [{"role": "user", "content": PROMPT}]
        chat = {"model": name, "messages": said, "temperature": 0, "max_tokens": 6}
        answers = [
            server.post("/v1/chat/completions", chat)[2],
            server.post("/v1/messages", chat)[2],
            server.post("/v1/responses", {"model": name, "input": PROMPT, "temperature": 0, "max_output_tokens": 6})[2],
        ]
        assert {answer["model"] for answer in answers} == {name}
        openai, anthropic, responses = answers
        texts[name] = openai["choices"][0]["message"]["content"]
        assert anthropic["content"][0]["text"] == responses["output"][0]["content"][0]["text"] == texts[name]
    assert texts["m:one"] != texts["m"]


def test_models(server):
    data = server.get("/v1/models")[2]["data"]
    assert [(each["id"], each.get("parent"), each["loaded"]) for each in data] == [
        ("m", None, True),
        ("m:one", "m", True),
        ("m:two", "m", True),
    ]
    assert [each["name"] for each in server.get("/api/tags")[2]["models"]] == ["m", "m:one", "m:two"]
    status, _, answer = server.post("/v1/completions", {"model": "m:three", "prompt": PROMPT})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert server.post("/v1/completions", {"prompt": PROMPT})[2]["model"] == "m"


def test_answers_can_be_verified(server):
    request = {"model": "m:one", "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    answer = ask(server, "m:one", max_tokens=4)
    check = server.post("/v1/verify", {"request": request, "answer": answer})[2]
    assert check["verdict"] == "equal", check
    other = server.post("/v1/verify", {"request": {**request, "model": "m:two"}, "answer": answer})[2]
    assert other["verdict"] == "differs"


def test_two_names_of_one_model(folders, loaded):
    """Each has its own adapter of the name."""
    adapters = {(model, "x"): folder for model, folder in zip("mn", folders.values(), strict=True)}
    with RunningServer({"m": BASE, "n": BASE}, adapters=adapters) as server:
        for name, adapter in (("m:x", "one"), ("n:x", "two"), ("m", None)):
            text = loaded[adapter].generate(PROMPT, max_tokens=6).text
            assert ask(server, name)["choices"][0]["text"].lstrip() == text
        answers = [server.post("/v1/completions", {"model": name, "prompt": PROMPT}) for name in ("m:y", "n:m:x", "x")]
        assert [(status, answer["error"]["code"]) for status, _, answer in answers] == [(404, "model_not_found")] * 3


def test_one_name_means_one_model(folders):
    models = (f"m={BASE}", f"m:one={BASE}")
    done = invoke("serve", *models, "--lora", f"m:one={folders['one']}")
    assert done.exit_code == 2
    assert "m:one would be the name of two models" in done.output


@pytest.mark.parametrize(
    "workers", [(), pytest.param(("--workers", 1), marks=pytest.mark.thorough)], ids=["here", "dask"]
)
def test_a_line_of_a_batch_names_one(workers, folders, loaded, tmp_path):
    if workers:
        pytest.importorskip("distributed", reason="distributed is not installed: pip install 'bitnet-ref[dask]'")
    bodies = [{"model": name, "prompt": PROMPT, "max_tokens": 6, "temperature": 0} for name in ("m", "m:one", "m:x")]
    line = {"method": "POST", "url": "/v1/completions"}
    lines = [json.dumps({**line, "custom_id": body["model"], "body": body}) for body in bodies]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    options = ("--model", f"m={BASE}", "--backend", BACKEND, "--lora", f"one={folders['one']}")
    done = invoke("batch", tmp_path / "in.jsonl", tmp_path / "out.jsonl", *options, *workers)
    assert done.exit_code == 0, done.output
    answers = [json.loads(each)["response"] for each in (tmp_path / "out.jsonl").read_text().splitlines()]
    for answer, adapter, body in zip(answers, (None, "one"), bodies, strict=False):
        assert answer["body"]["choices"][0]["text"].lstrip() == loaded[adapter].generate(PROMPT, max_tokens=6).text
        assert answer["body"]["model"] == body["model"]
    assert answers[2]["status_code"] == 404
    assert answers[2]["body"]["error"]["message"].endswith("there are: m, m:one")
    files = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    assert invoke_json("verify", *files, *options)["lines"] == {"equal": 3, "differs": 0, "unchecked": 0}
    without = invoke_json("verify", *files, *options[:-2], code=1)
    assert without["lines"] == {"equal": 1, "differs": 1, "unchecked": 1}
    assert "the request names the adapter 'one'; give its folder with --lora" in str(without["checks"])
    for path, content in zip(files, (bodies[1], answers[1]["body"]), strict=True):
        path.write_text(json.dumps(content))
    alone = invoke_json("verify", *files, *options)
    assert (alone["verdict"], alone["tokens"]) == ("equal", 6)


@pytest.mark.parametrize("command", ["serve", "batch"])
@pytest.mark.parametrize("text", ["x", "=x", "a:b=x", "x="])
def test_the_option(text, command, tmp_path):
    (tmp_path / "in.jsonl").touch()
    arguments = (BASE,) if command == "serve" else (tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    done = invoke(command, *arguments, "--lora", text)
    assert done.exit_code == 2
    assert "--lora: expected NAME=FOLDER" in done.output.replace("\n", " ")
