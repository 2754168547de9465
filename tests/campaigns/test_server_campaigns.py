"""Campaigns against the HTTP server: pytest -m slow -n0 -s tests/campaigns/test_server_campaigns.py

SECONDS=600 in the environment is how long schemathesis (pip install schemathesis) goes on; by default a minute.
REQUESTS is what each of 64 clients sends, by default 500. LOCUST is the program `locust`, if it is not in the path.
"""

import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

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


def draw_cases(count=40):
    """[(body of a completion, the text that the model gives alone)]"""
    story, generator, cases = model(STORY, BACKEND, threads=1), random.Random(1), []
    for _ in range(count):
        params = {"seed": generator.randrange(3), "max_tokens": generator.randint(4, 24), "temperature": 0.8}
        out = story.generate(prompt := generator.choice(BEGINNINGS), echo=True, **params)
        text = out.text.removeprefix(story.tokenizer.decode(out.prompt_token_ids))
        cases.append(({"model": "storyteller", "prompt": prompt, **params}, text))
    return cases


def test_sixty_four_streams_equal_their_single_runs():
    """OpenAI's client. Every 16th request is abandoned in the middle. Memory stays flat after the first half."""
    openai = pytest.importorskip("openai")
    cases, counts, firsts_s, sizes = draw_cases(), Counter(), [], {}

    async def work(client, worker, total):
        for number in range(total):
            params, expected = cases[(worker * 7 + number) % len(cases)]
            start = time.perf_counter()
            if number % 4 == 3:
                answer = await client.completions.create(**params)
                assert answer.choices[0].text == expected, (worker, number)
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
            assert expected.startswith(text)
            assert is_left or text == expected, (worker, number)
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
    growth = (sizes[9] - sizes[4]) / 2**20
    print(f"\n{dict(counts)} of {STREAMS} x {REQUESTS} in {time.perf_counter() - started:.0f} s")
    print(f"{describe_times(firsts_s)}; RSS {growth:+.1f} MiB in the second half")
    assert sum(counts.values()) == STREAMS * (REQUESTS // 10) * 10
    assert growth < 20


def describe_times(first_s):
    p50, p99 = (sorted(first_s)[int(len(first_s) * share)] for share in (0.5, 0.99))
    return f"time to first token: p50 {p50 * 1000:.0f} ms, p99 {p99 * 1000:.0f} ms"


def test_locusts_users_get_the_texts_of_single_runs(tmp_path):
    """64 streams at a time from another process, to the command in one of its own."""
    locust = shutil.which(os.environ.get("LOCUST", "locust"))
    if locust is None:
        pytest.skip("locust is not installed")
    cases, config, out = tmp_path / "cases.json", tmp_path / "engine.toml", tmp_path / "out.json"
    cases.write_text(json.dumps(draw_cases()))
    config.write_text(f"max_batch = {STREAMS}\ntimeline_steps = 100\n")
    command = [sys.executable, "-m", "bitnet_ref", "serve", "--port", "0", "--json", "--config", str(config)]
    command += ["--backend", BACKEND, "--threads", "1"]
    sizes = []
    with (
        open(tmp_path / "log", "w") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as server,
    ):
        url, started = json.loads(server.stdout.readline())["url"], time.perf_counter()
        settings = {"CASES": cases, "OUT": out, "REQUESTS": REQUESTS, "USERS": STREAMS}
        command = [locust, "-f", str(Path(__file__).with_name("server_load.py")), "--headless", "--only-summary"]
        load = subprocess.Popen(
            [*command, "-u", str(STREAMS), "-r", str(STREAMS), "-H", url],
            stdout=log,
            stderr=log,
            env={**os.environ, **{k: str(v) for k, v in settings.items()}},
        )
        while load.poll() is None:
            pages = Path(f"/proc/{server.pid}/statm").read_text().split()[1]
            sizes.append(int(pages) * os.sysconf("SC_PAGE_SIZE") / 2**20)
            time.sleep(1)
        seconds = time.perf_counter() - started
        with urllib.request.urlopen(f"{url}/metrics") as reply:
            metrics = reply.read().decode()
        server.terminate()
    results = json.loads(out.read_text())
    growth = sizes[-1] - sizes[len(sizes) // 2]
    print(f"\n{results['right']} of {STREAMS} x {REQUESTS} streams right in {seconds:.0f} s")
    print(f"{describe_times(results['first_s'])}; RSS {sizes[-1]:.0f} MiB, {growth:+.1f} MiB in the second half")
    assert (results["right"], results["wrong"]) == (STREAMS * REQUESTS, [])
    assert growth < 20
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert f'bitnet_ref:{name}{{model_name="storyteller"}} 0.0' in metrics


def test_schemathesis_gets_no_fault(tmp_path):
    if find_spec("schemathesis") is None:
        pytest.skip("schemathesis is not installed")
    settings = {"request_timeout_s": 60.0}  # none is reached on a busy machine
    with RunningServer({"talker": chat_folder(tmp_path)}, settings=settings, default="talker", verify=True) as server:
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--seed", "77"]
        command += ["--checks", "not_a_server_error,content_type_conformance,response_schema_conformance"]
        command += ["--max-time", str(SECONDS), "--max-examples", "100000", "--continue-on-failure"]
        done = subprocess.run(
            [*command, "--request-timeout", "90"], capture_output=True, text=True, timeout=2 * SECONDS
        )
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
