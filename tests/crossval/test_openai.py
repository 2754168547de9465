"""`crossval openai`: this package's own server agrees; a server with a planted mistake is named with its cause."""

import contextlib
import json
import shutil
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from cli_runs import BACKEND, invoke, invoke_json
from helpers import SENTENCES, first_where, model

from bitnet_ref.crossval.outputs.client import Client, TokenTexts, read_answer
from bitnet_ref.crossval.outputs.served import cross_server
from bitnet_ref.crossval.outputs.vectors import cross_vectors
from bitnet_ref.formats.open import ASSETS
from bitnet_ref.generation.embed import embed, token_rows
from bitnet_ref.generation.sampling import entry_of, log_probabilities
from bitnet_ref.reference.cache import TokenBatch

PROMPTS = ("She said", "The")


@pytest.fixture(scope="module")
def engine():
    return model("storyteller", backend=BACKEND, threads=1)


class Planted:
    """A thin server around the engine.   edit: of the prompt's ids.   options: of generate.   shows: what it offers."""

    def __init__(self, engine, edit=list, shows=(), vectors=None, status=200, **options):
        self.engine, self.edit, self.shows, self.vectors, self.status = engine, edit, shows, vectors, status
        self.options, self.keys = {"temperature": 0, **options}, []

    def answer(self, path, body):
        if self.status != 200:
            return self.status, {"error": {"message": "no"}}
        if path == "/v1/models":
            return 200, {"data": [{"id": "planted"}]}
        if path == "/v1/embeddings":
            rows = self.vectors(self.engine, body["input"])
            return 200, {"data": [{"index": i, "embedding": row.tolist()} for i, row in enumerate(rows)]}
        if "llama-cpp-python" in self.shows:
            return self.answer_as_llama_cpp_python(body["prompt"], body)
        if "llama.cpp" in self.shows:  # which takes all of these, and ignores all but the log probabilities
            body = {key: value for key, value in body.items() if key not in ("echo", "return_token_ids")}
        if any(key in body and key not in self.shows for key in ("echo", "logprobs", "return_token_ids")):
            return 400, {"error": {"message": "there is no such parameter"}}
        prompt = body["prompt"]
        if isinstance(prompt, list) and "ids" not in self.shows:
            return 400, {"error": {"message": "prompt: expected a string"}}
        ids = self.edit(self.engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        new = list(self.engine.generate(ids, max_tokens=body["max_tokens"], **self.options).token_ids)
        text = self.engine.tokenizer.decode([*ids, *new])[len(self.engine.tokenizer.decode(ids)) :]
        choice = {"text": text, "finish_reason": "length"}
        if "return_token_ids" in body:
            choice["token_ids"] = new
        if "logprobs" in body:
            rows = log_probabilities(self.engine.logits([*ids, *new])[len(ids) - 1 : -1])
            tops = [entry_of(row, int(row.argmax()), 5)[1] for row in rows]
            choice["logprobs"] = {
                "tokens": [f"token_id:{token}" for token in new],
                "token_logprobs": [top.get(token, -99.0) for top, token in zip(tops, new, strict=True)],
                "top_logprobs": [{f"token_id:{token}": value for token, value in top.items()} for top in tops],
            }
        if "llama.cpp" in self.shows:
            names = [
                {"id": t, "token": self.engine.tokenizer.decode([t]), "logprob": top[t]}
                for t, top in zip(new, tops, strict=True)
            ]
            choice["logprobs"] = {"content": names}
            return 200, {"choices": [choice], "usage": {"prompt_tokens": len(ids), "completion_tokens": len(new)}}
        return 200, {"choices": [choice]}

    def answer_as_llama_cpp_python(self, prompt, body):
        """It lists no BOS and no log probability of the first token listed, and ignores what it does not know."""
        if isinstance(prompt, list) or ("logprobs" in body and "logprobs" not in self.shows):
            return 500, {"error": {"message": "25 validation errors"}}
        m = self.engine
        ids = self.edit(m.tokenizer.encode(prompt))
        new = list(m.generate(ids, max_tokens=body["max_tokens"], **self.options).token_ids)
        text = m.tokenizer.decode([*ids, *new])[len(m.tokenizer.decode(ids)) :]
        choice = {"text": prompt * ("echo" in body) + text, "finish_reason": "length"}
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(new)}
        if "logprobs" in body:
            pairs = zip([*ids, *new][1:], log_probabilities(m.logits([*ids, *new])[:-1]), strict=True)
            listed = [(token, float(row[token])) for token, row in pairs if token != 1]
            names = [m.vocabulary.tokens[token].decode("utf-8", "replace") for token, _ in listed]
            values = [None, *(value for _, value in listed[1:])]
            tops = [None, *({name: value} for name, value in zip(names[1:], values[1:], strict=True))]
            choice["logprobs"] = {"tokens": names, "token_logprobs": values, "top_logprobs": tops, "text_offset": None}
        return 200, {"choices": [choice], "usage": usage}

    @contextlib.contextmanager
    def running(self):
        planted = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                planted.keys.append(self.headers.get("authorization"))
                data = self.rfile.read(int(self.headers.get("content-length", 0)))
                status, value = planted.answer(self.path, json.loads(data) if data else {})
                raw = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            do_GET = do_POST

            def log_message(self, *args):
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            thread = threading.Thread(target=server.serve_forever, daemon=True)
            thread.start()
            try:
                yield f"http://127.0.0.1:{server.server_port}"
            finally:
                server.shutdown()
                thread.join(10)


def cross(planted, engine, prompts=PROMPTS, **options):
    with planted.running() as url:
        return cross_server(engine, Client(url), prompts=prompts, max_tokens=24, **options)


def confirmed(result):
    return [cause.name for cause in result.causes if cause.confirmed]


@pytest.mark.thorough
def test_our_own_server_agrees():
    pytest.importorskip("uvicorn", reason="uvicorn is not installed")
    from server_runs import RunningServer

    with RunningServer({"storyteller": ASSETS / "storyteller"}) as server:
        said = invoke_json("crossval", "openai", server.url, "storyteller", "--max-tokens", "12")
        vectors = invoke_json("crossval", "openai", f"{server.url}/v1", "storyteller", "--embeddings")
    assert said["agrees"], said["verdict"]
    assert said["offers"] == "prompts of ids, log probabilities, those of the prompt, token ids"
    assert all(each["logprobs"]["agrees"] and each["greedy"]["agrees"] for each in said["exchanges"])
    assert {each["sent"] for each in said["exchanges"]} == {"ids", "text"}
    assert vectors["agrees"], vectors["verdict"]


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    "shows", [(), ("ids",), ("ids", "return_token_ids"), ("ids", "logprobs"), ("ids", "logprobs", "llama.cpp")], ids=str
)
def test_a_right_server_agrees_whatever_it_shows(engine, shows):
    result = cross(Planted(engine, shows=shows), engine)
    assert result.agrees, result.verdict
    assert list(result.causes) == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("shows", "offers"), [(("logprobs",), "log probabilities, those of the prompt"), ((), "text")], ids=str
)
def test_llama_cpp_python(engine, shows, offers):
    shows = ("llama-cpp-python", *shows)
    right = cross(Planted(engine, shows=shows), engine, ("She said, and ran", "The"))
    assert (right.agrees, list(right.causes), right.offers) == (True, [], offers), right.verdict
    penalised = cross(Planted(engine, shows=shows, repetition_penalty=1.3), engine)
    assert penalised.causes[0].name.startswith("repetition_penalty"), penalised.causes
    twice = cross(Planted(engine, lambda ids: [1, *ids], shows=shows), engine)
    assert "BOS twice" in twice.verdict if "logprobs" in shows else "counts" in twice.verdict
    template = cross(Planted(engine, lambda ids: [1, 5, 6, *ids[1:], 7, 8], shows=shows), engine)
    assert not template.agrees
    assert [cause.name for cause in template.causes] == ["prompt_ids" if "logprobs" in shows else "other_prompt"]


def test_ids_end_before_a_token_that_the_server_left_out(engine):
    """llama.cpp's server writes the bytes of a part of a character before the text of the next token."""
    first, second = engine.tokenizer.encode("rabbit hill")[-2:]
    both = ((first, " rabbit", -1.0), (second, "\ufffd hill", -2.0))
    content = [{"id": token, "token": text, "logprob": value} for token, text, value in both]
    given = {"choices": [{"text": "", "finish_reason": "stop", "logprobs": {"content": content}}]}
    answer = read_answer(engine, TokenTexts(engine), given, [1, 5], False, "url")
    assert (answer.ids, answer.finish, answer.is_cut) == ([first], "length", True)
    assert list(answer.logprobs) == [2]


@pytest.mark.thorough
def test_a_prompt_mistake_is_named_by_log_probabilities(engine):
    """BOS twice, which changes few tokens."""
    result = cross(Planted(engine, lambda ids: [ids[0], *ids], shows=("ids", "logprobs")), engine)
    assert not result.agrees
    assert [cause.name for cause in result.causes] == ["bos_twice"]
    assert confirmed(result) == ["bos_twice"]


@pytest.mark.thorough
def test_a_mistake_is_named_by_tokens(engine):
    shows = ("ids", "return_token_ids")
    ended = cross(Planted(engine, lambda ids: [*ids, 2], shows=shows), engine)
    assert confirmed(ended) == ["eos_appended"], ended.causes

    def is_named_alone(prompts):  # by the tokens of some prompts another penalty is possible, too
        penalised = cross(Planted(engine, shows=shows, repetition_penalty=1.3), engine, prompts)
        assert not penalised.agrees
        named = [cause.name.startswith("repetition_penalty") for cause in penalised.causes]
        assert any(named), penalised.causes
        return all(named)

    pairs = (PROMPTS, *zip(SENTENCES[::2], SENTENCES[1::2], strict=True))
    first_where(pairs, is_named_alone, "prompts by whose tokens only a repetition penalty is possible")


@pytest.mark.thorough
def test_sampling_is_noticed(engine):
    result = cross(Planted(engine, shows=("ids", "return_token_ids"), temperature=1.0), engine)
    assert confirmed(result) == ["sampling"]


def states(engine, ids):
    return np.asarray(engine.run_hidden(TokenBatch.of([(0, 0, ids)]), engine.new_cache(1, len(ids))))


@pytest.mark.parametrize(
    ("vectors", "cause"),
    [
        (lambda m, texts: np.stack([states(m, row).mean(axis=0) for row in token_rows(m, texts)]), "pooling_mean"),
        (lambda m, texts: np.stack([states(m, row[1:])[-1] for row in token_rows(m, texts)]), "bos_missing"),
        (lambda m, texts: np.stack([states(m, [*row, 2])[-1] for row in token_rows(m, texts)]), "end_added"),
        (lambda m, texts: embed(m, texts) * 3, "not_normalised"),
    ],
    ids=["mean", "BOS missing", "end added", "not normalised"],
)
def test_embeddings(engine, vectors, cause):
    with Planted(engine, vectors=vectors).running() as url:
        result = cross_vectors(engine, Client(url))
    assert not result.agrees
    assert cause in confirmed(result), result.causes


@pytest.mark.thorough
def test_embeddings_that_the_model_shortens(engine, tmp_path):
    """By `truncate_dim`, of a server that reads it and of one that does not."""
    folder = shutil.copytree(ASSETS / "storyteller", tmp_path / "m")
    (folder / "config_sentence_transformers.json").write_text('{"truncate_dim": 8}')
    m = model(folder)
    for vectors, causes in ((embed, []), (partial(embed, dimensions=256), []), (ended, ["end_added"])):
        with Planted(engine, vectors=lambda _, texts, vectors=vectors: vectors(m, texts)).running() as url:
            result = cross_vectors(m, Client(url))
        assert (result.agrees, confirmed(result)) == (not causes, causes), result.verdict


def ended(m, texts):
    """The first eight numbers of each vector, with an end token after each text."""
    vectors = np.stack([states(m, [*row, 2])[-1] for row in token_rows(m, texts)])[:, :8]
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_failures_are_one_line(engine, tmp_path):
    with Planted(engine, status=401).running() as url:
        refused = invoke("crossval", "openai", url, "storyteller", "--api-key", "k")
    assert refused.exit_code == 4
    assert "answers 401: no; give its key with --api-key" in refused.output
    gone = invoke("crossval", "openai", url, "storyteller")
    assert gone.exit_code == 4
    assert f"Error: {url} cannot be reached" in gone.output
    assert invoke("crossval", "openai", "localhost:8000", "storyteller").exit_code == 2
    with Planted(engine).running() as url:
        long = invoke("crossval", "openai", url, "storyteller", "--prompt", "The cat. " * 200)
    assert (long.exit_code, "tokens, and the context 256: shorten it" in long.output) == (2, True)
    for result in (refused, gone):
        assert len(result.output.strip().splitlines()) == 1


def test_fields_of_each_request(engine, monkeypatch):
    """A server that penalises repetitions unless a request says otherwise."""
    planted = Planted(engine)
    answer = planted.answer

    def answer_by_field(path, body):
        planted.options["repetition_penalty"] = body.get("repeat_penalty", 1.3)
        return answer(path, body)

    monkeypatch.setattr(planted, "answer", answer_by_field)
    with planted.running() as url:
        assert invoke("crossval", "openai", url, "storyteller", "--prompt", "The").exit_code == 1
        told = invoke("crossval", "openai", url, "storyteller", "--prompt", "The", "--body", '{"repeat_penalty": 1}')
        assert told.exit_code == 0, told.output
        for body in ("[1]", "x"):
            wrong = invoke("crossval", "openai", url, "storyteller", "--body", body)
            assert (wrong.exit_code, "expected a JSON object" in wrong.output) == (2, True)


def test_the_key_is_sent(engine):
    planted = Planted(engine)
    with planted.running() as url:
        Client(url, key="secret").ask("/v1/models")
    assert planted.keys == ["Bearer secret"]
