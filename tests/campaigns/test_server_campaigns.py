"""Campaigns against the HTTP server: pytest -m slow -n0 -s tests/campaigns/test_server_campaigns.py

SECONDS=600 in the environment makes schemathesis (pip install schemathesis) as long; by default it takes a minute.
"""

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from importlib.util import find_spec

import pytest
from cli_runs import BACKEND
from engine_checks import check
from helpers import chat_folder, model
from server_runs import RunningServer

from bitnet_ref.formats.open import ASSETS
from bitnet_ref.generation.sampling import log_probability
from bitnet_ref.system.memory import memory_bytes

pytestmark = pytest.mark.slow
STORY, SECONDS = ASSETS / "storyteller", int(os.environ.get("SECONDS", "60"))
STREAMS, REQUESTS = 64, int(os.environ.get("REQUESTS", "500"))
BEGINNINGS = ["Alice", "The old man", "It was a dark night", "Once upon a time", "The rabbit ran", "She", "In the wood"]


def test_sixty_four_streams_equal_their_single_runs():
    """Every 16th request is abandoned in the middle. Memory stays flat after the first half."""
    openai = pytest.importorskip("openai")
    story, counts, firsts_s, sizes = model(STORY, BACKEND, threads=1), Counter(), [], {}
    generator = random.Random(1)
    cases = [(generator.choice(BEGINNINGS), generator.randrange(3), generator.randint(4, 24)) for _ in range(40)]
    expected = {}
    for prompt, seed, tokens in set(cases):
        out = story.generate(prompt, echo=True, temperature=0.8, seed=seed, max_tokens=tokens)
        expected[prompt, seed, tokens] = out.text.removeprefix(story.tokenizer.decode(out.prompt_token_ids))

    async def work(client, worker, total):
        for number in range(total):
            prompt, seed, tokens = case = cases[(worker * 7 + number) % len(cases)]
            start = time.perf_counter()
            params = {"model": "storyteller", "prompt": prompt, "seed": seed, "temperature": 0.8, "max_tokens": tokens}
            if number % 4 == 3:
                answer = await client.completions.create(**params)
                assert answer.choices[0].text == expected[case], (worker, number)
                counts["whole"] += 1
                continue
            text, is_left = "", number % 16 == 5
            async with await client.completions.create(stream=True, **params) as stream:
                async for chunk in stream:
                    if not text:
                        firsts_s.append(time.perf_counter() - start)
                    text += chunk.choices[0].text
                    if is_left and len(text) > 8:
                        break
            assert expected[case].startswith(text)
            assert is_left or text == expected[case], (worker, number)
            counts["abandoned" if is_left else "streams"] += 1

    async def run(url):
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", timeout=120, max_retries=0) as client:
            for part in range(10):
                await asyncio.gather(*(work(client, worker, REQUESTS // 10) for worker in range(STREAMS)))
                sizes[part] = memory_bytes()

    started = time.perf_counter()
    with RunningServer({"storyteller": STORY}, settings={"max_batch": 64, "page_size": 16}) as server:
        asyncio.run(run(server.url))
        engine = server.engines["storyteller"]
    check(engine)
    p50, p99 = (sorted(firsts_s)[int(len(firsts_s) * share)] for share in (0.5, 0.99))
    growth = (sizes[9] - sizes[4]) / 2**20
    print(f"\n{dict(counts)} of {STREAMS} x {REQUESTS} in {time.perf_counter() - started:.0f} s; time to first token: ")
    print(f"p50 {p50 * 1000:.0f} ms, p99 {p99 * 1000:.0f} ms; RSS {growth:+.1f} MiB in the second half")
    assert sum(counts.values()) == STREAMS * (REQUESTS // 10) * 10
    assert growth < 20


def test_schemathesis_gets_no_fault(tmp_path):
    if find_spec("schemathesis") is None:
        pytest.skip("schemathesis is not installed")
    settings = {"request_timeout_s": 5.0}
    with RunningServer({"talker": chat_folder(tmp_path)}, settings=settings) as server:
        for number in range(max(1, SECONDS // 60)):
            command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"]
            command += ["--checks", "not_a_server_error,content_type_conformance,response_schema_conformance"]
            command += ["--max-examples", "150", "--seed", str(number), "--request-timeout", "20"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
            print(done.stdout[-2500:])
            assert done.returncode == 0, done.stdout[-6000:]
        assert server.get("/health")[0] == 200
        status, _, answer = server.post("/v1/completions", {"prompt": "Alice", "max_tokens": 4})
        assert (status, answer["usage"]["completion_tokens"]) == (200, 4)


@pytest.mark.filterwarnings("default")  # litellm's types warn
def test_litellm(tmp_path):
    litellm = pytest.importorskip("litellm")
    with RunningServer({"talker": chat_folder(tmp_path)}) as server:
        given = {"api_base": f"{server.url}/v1", "api_key": "x", "model": "openai/talker"}
        messages = [{"role": "user", "content": "Hello"}]
        whole = litellm.completion(messages=messages, max_tokens=9, temperature=0, **given)
        chunks = litellm.completion(messages=messages, max_tokens=9, temperature=0, stream=True, **given)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
        text = litellm.text_completion(
            prompt="Alice", max_tokens=5, **{**given, "model": "text-completion-openai/talker"}
        )
        assert text.usage.completion_tokens == 5
        vector = litellm.embedding(input=["Alice"], **given).data[0]["embedding"]
        assert len(vector) == 256
        with pytest.raises(litellm.ContextWindowExceededError):
            litellm.completion(messages=messages, temperature=1.9, max_tokens=10_000, **given)
        print(json.dumps({"litellm": whole.usage.total_tokens}))


def test_lm_eval_scores_what_the_model_scores():
    """lm-eval's local-completions, with the server's own tokenizer (/tokenizer_info, /tokenize); it adds no BOS."""
    completions = pytest.importorskip("lm_eval.models.openai_completions")
    from lm_eval.api.instance import Instance

    story = model(STORY, BACKEND, threads=1)
    pairs = [("Once upon a time", " there was"), ("The little boy looked", " at her"), ("Alice", " was a king")]
    with RunningServer({"storyteller": STORY}) as server:
        lm = completions.LocalCompletionsAPI(
            model="storyteller", base_url=f"{server.url}/v1/completions", tokenizer_backend="remote", max_length=256
        )
        scores = lm.loglikelihood([Instance("loglikelihood", {}, pair, n) for n, pair in enumerate(pairs)])
    for (context, ending), (score, is_greedy) in zip(pairs, scores, strict=True):
        start = len(story.tokenizer.encode(context, False))
        ids = story.tokenizer.encode(context + ending, False)
        logits = story.logits(ids)
        places = range(start, len(ids))
        assert score == sum(log_probability(logits[place - 1], ids[place]) for place in places)
        assert is_greedy == all(logits[place - 1].argmax() == ids[place] for place in places)
