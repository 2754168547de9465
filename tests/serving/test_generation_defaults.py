"""The model's own sampling (generation_config.json) as the default of every route, of batch, and of the shell."""

import json

import pytest
from cli_runs import BACKEND, FAST, invoke, invoke_json
from helpers import chat_folder, model
from server_runs import RunningServer

import bitnet_ref
from bitnet_ref.cli.generation_options import server_config
from bitnet_ref.errors import GenerationError

OWN = {"temperature": 0.6, "top_k": 7, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.3}
HELLO = [{"role": "user", "content": "Hello"}]
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = chat_folder(tmp_path_factory.mktemp("defaults"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "do_sample": True, **OWN}))
    return folder


@pytest.fixture(scope="module")
def running(folder):
    with RunningServer({"talker": folder}, settings={"sampling": {}, "generation_defaults": "model"}) as server:
        yield server


@pytest.fixture(scope="module")
def story(folder):
    return model(folder, BACKEND, threads=1)


def reply_to_hello(story, **params):
    ids = story.tokenizer.apply_chat_template(HELLO, tokenize=True)
    return story.generate(ids, max_tokens=12, seed=5, **params).text


def chat(server, **body):
    status, _, answer = server.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 12, "seed": 5, **body})
    assert status == 200, answer
    return answer["choices"][0]["message"]["content"]


def test_chats_and_completions_take_them(running, story):
    assert chat(running) == reply_to_hello(story, **OWN)
    assert chat(running) != reply_to_hello(story, temperature=1.0)
    body = {"prompt": PROMPT, "max_tokens": 12, "seed": 5}
    _, _, answer = running.post("/v1/completions", body)
    assert answer["choices"][0]["text"].strip() == story.generate(PROMPT, max_tokens=12, seed=5, **OWN).text.strip()


@pytest.mark.parametrize("given", [{"temperature": 1.4}, {"top_p": 1.0, "min_p": 0}, {"repetition_penalty": 1}])
def test_a_request_goes_before_them_one_by_one(running, story, given):
    assert chat(running, **given) == reply_to_hello(story, **{**OWN, **given})
    nothing = dict.fromkeys(given)
    assert chat(running, **nothing) == reply_to_hello(story, **OWN)  # null says nothing


def test_greedy_requests_keep_the_penalty_alone(running, story):
    assert chat(running, temperature=0) == reply_to_hello(story, repetition_penalty=1.3)


def test_beams_are_not_sampled(running, story):
    body = {"prompt": PROMPT, "max_tokens": 6, "use_beam_search": True, "n": 2}
    _, _, answer = running.post("/v1/completions", body)
    best = story.generate(PROMPT, max_tokens=6, num_beams=2, n=2, repetition_penalty=1.3)
    assert [each["text"].strip() for each in answer["choices"]] == [each.text.strip() for each in best]


def test_the_other_apis_take_them(running, story):
    expected = reply_to_hello(story, **OWN)
    options = {"num_predict": 12, "seed": 5}
    _, _, answer = running.post("/api/chat", {"messages": HELLO, "stream": False, "options": options})
    assert answer["message"]["content"] == expected
    _, _, answer = running.post("/completion", {"prompt": PROMPT, "n_predict": 12, "seed": 5})
    assert answer["content"].strip() == story.generate(PROMPT, max_tokens=12, seed=5, **OWN).text.strip()
    _, _, answer = running.post("/v1/responses", {"input": "Hello", "max_output_tokens": 12})
    assert (answer["temperature"], answer["top_p"]) == (0.6, 0.9)


def test_servers_say_what_their_defaults_are(running):
    _, _, props = running.get("/props")
    own = {name: value for name, value in OWN.items() if name != "repetition_penalty"}
    assert props["default_generation_settings"]["params"] == {**own, "repeat_penalty": 1.3}
    _, _, shown = running.post("/api/show", {"model": "talker"})
    lines = shown["parameters"].splitlines()
    assert lines == ["temperature 0.6", "top_k 7", "top_p 0.9", "min_p 0.02", "repeat_penalty 1.3"]


def test_settings_go_before_them_and_plain_takes_none(folder, story):
    for settings, expected in (
        ({"generation_defaults": "plain"}, {"temperature": 1.0}),
        ({}, {"temperature": 1.0}),  # engines in Python
        ({"generation_defaults": "model", "sampling": {"top_k": 2}}, {**OWN, "top_k": 2}),
    ):
        with RunningServer({"talker": folder}, settings=settings) as server:
            assert chat(server) == reply_to_hello(story, **expected)


def test_the_setting_of_a_length_is_for_every_path(folder):
    settings = {"sampling": {"max_tokens": 5, "ignore_eos": True}}
    bodies = {
        "/v1/completions": {"prompt": PROMPT},
        "/v1/chat/completions": {"messages": HELLO},
        "/v1/responses": {"input": "Hello"},
        "/completion": {"prompt": PROMPT},
        "/api/chat": {"messages": HELLO, "stream": False},
        "/api/generate": {"prompt": PROMPT, "raw": True, "stream": False},
    }
    with RunningServer({"talker": folder}, settings=settings) as server:
        for path, body in bodies.items():
            answer = server.post(path, body)[2]
            counts = {**answer, **answer.get("usage", {})}
            names = ("completion_tokens", "output_tokens", "tokens_predicted", "eval_count")
            assert [counts[name] for name in names if name in counts] == [5], path


@pytest.mark.parametrize("body", [{}, {"temperature": 0}, {"use_beam_search": True, "n": 2}])
def test_bad_words_ids_are_texts_that_no_reply_has(story, tmp_path, body):
    """bad_words_ids of transformers are tokens; here other tokens of the same text do not pass either."""
    folder = chat_folder(tmp_path)
    text = story.generate(PROMPT, max_tokens=3).text
    ids, special = story.tokenizer.encode(text)[1:], story.tokenizer.bos_id
    generation = {"eos_token_id": 2, "do_sample": True, "top_k": 1, "bad_words_ids": [ids, [special]]}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    own = bitnet_ref.load(folder, backend="numpy").tokenizer.recommended_sampling
    assert own["bad_words"] == (story.tokenizer.decode(ids),)
    assert own["logit_bias"] == {special: -100.0}
    with RunningServer({"talker": folder}, settings={"generation_defaults": "model"}) as server:
        _, _, answer = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 12, **body})
        _, _, props = server.get("/props")
    for choice in answer["choices"]:
        assert own["bad_words"][0] not in choice["text"]
    assert "bad_words" not in props["default_generation_settings"]["params"]
    done = invoke_json("generate", PROMPT, "--model", folder, "--max-tokens", 12, *FAST)
    assert text not in done["text"]


@pytest.mark.parametrize("name", ["storyteller", "storychat"])
def test_the_shipped_models_keep_insults_out(name):
    tokenizer = model(name, BACKEND).tokenizer
    words = tokenizer.recommended_sampling["bad_words"]
    assert len(words) == 4
    assert all(word.lower().startswith(tokenizer.decode([298, 484])) for word in words)


def test_python_is_greedy_unless_it_is_told(story):
    assert story.generate(PROMPT, max_tokens=12).text == story.generate(PROMPT, max_tokens=12, temperature=0).text
    own = story.tokenizer.recommended_sampling
    assert own == OWN
    assert story.generate(PROMPT, max_tokens=12, seed=5, **own).text != story.generate(PROMPT, max_tokens=12).text


def test_serve_and_batch_take_them_unless_a_file_says_plain(tmp_path, monkeypatch):
    config = tmp_path / "engine.toml"
    config.write_text('generation_defaults = "plain"\n')
    assert server_config(None).generation_defaults == "model"
    assert server_config(config).generation_defaults == "plain"
    assert server_config(config, generation_defaults="model").generation_defaults == "model"
    monkeypatch.setenv("BITNET_REF_ENGINE_GENERATION_DEFAULTS", "plain")
    assert server_config(None).generation_defaults == "plain"


def test_batch(folder, story, tmp_path):
    body = {"messages": HELLO, "max_tokens": 12, "seed": 5}
    line = {"custom_id": "1", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    for flags, expected in (((), OWN), (("--generation-defaults", "plain"), {"temperature": 1.0})):
        done = invoke("batch", tmp_path / "in.jsonl", tmp_path / "out.jsonl", "--model", folder, *flags, *FAST)
        assert done.exit_code == 0, done.output
        answer = json.loads((tmp_path / "out.jsonl").read_text())["response"]["body"]
        assert answer["choices"][0]["message"]["content"] == reply_to_hello(story, **expected)


@pytest.mark.thorough
def test_generate_in_the_shell(folder, story):
    args = ("generate", PROMPT, "--max-tokens", 12, "--model", folder, *FAST)
    facts = invoke_json(*args)
    assert facts["token_ids"] == story.generate(PROMPT, max_tokens=12, seed=0, **OWN).token_ids
    assert facts["sampling"] == {**OWN, "seed": 0}
    assert invoke_json(*args, "--seed", 5)["sampling"]["seed"] == 5
    greedy = story.generate(PROMPT, max_tokens=12)
    for flags, expected in (
        (("--generation-defaults", "plain"), greedy),
        (("--temperature", 0, "--repetition-penalty", 1), greedy),
        (("--num-beams", 2), story.generate(PROMPT, max_tokens=12, num_beams=2, repetition_penalty=1.3)),
    ):
        facts = invoke_json(*args, *flags)
        facts = facts if "token_ids" in facts else facts["choices"][0]
        assert facts["token_ids"] == expected.token_ids
        assert "sampling" not in facts
    shown = invoke(*args)
    assert "temperature 0.6, top-k 7, top-p 0.9, min-p 0.02, repetition-penalty 1.3, seed 0" in shown.stderr


def test_inspect_shows_them(folder):
    words = "temperature 0.6, top-k 7, top-p 0.9, min-p 0.02, repetition-penalty 1.3"
    assert words in invoke("inspect", folder).stdout.replace("\n", " ").replace("  ", " ")
    assert invoke_json("inspect", folder)["tokenizer"]["sampling"] == OWN


def test_what_no_request_may_ask_for(tmp_path):
    folder = chat_folder(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "top_p": 7}))
    wrong = bitnet_ref.load(folder, backend="numpy")
    with pytest.raises(GenerationError, match=r"generation_config.json recommends .* at most 1, got 7"):
        wrong.engine(generation_defaults="model")
    for name, args in (("generate", (PROMPT,)), ("chat", ())):
        failed = invoke(name, *args, "--model", folder, *FAST)
        assert failed.exit_code == 2
        assert "generation_config.json" in failed.stderr
        assert "plain" in failed.stderr
    fine = invoke("generate", PROMPT, "--max-tokens", 2, "--model", folder, "--generation-defaults", "plain", *FAST)
    assert fine.exit_code == 0
    assert "recommends what no request may ask for" in " ".join(invoke("inspect", folder).stdout.split())
    (folder / "generation_config.json").write_text('{"temperature": 1e999}')
    assert invoke_json("inspect", folder)["tokenizer"]["sampling"] == {"temperature": "inf"}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "recommended",
    [
        {"do_sample": True, **OWN},
        {"do_sample": True},
        {"do_sample": False, "repetition_penalty": 1.1},
        {"bad_words_ids": [[356, 510], [1]]},
        {},
    ],
)
def test_a_gguf_keeps_them(recommended, tmp_path):
    """Under llama.cpp's keys, as its converter writes them."""
    folder = chat_folder(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, **recommended}))
    assert invoke("convert", folder, tmp_path / "model.gguf", "--to", "gguf-tq2_0").exit_code == 0
    own = bitnet_ref.load(folder, backend="numpy").tokenizer.recommended_sampling
    assert bool(own) == bool(recommended)
    assert bitnet_ref.load(tmp_path / "model.gguf", backend="numpy").tokenizer.recommended_sampling == own
