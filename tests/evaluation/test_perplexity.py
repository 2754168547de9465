"""Each protocol against a plain text of its source, the state file, and the command."""

import hashlib
import json
import math
import os
import re
import sys

import numpy as np
import pytest
from cli_runs import BACKEND, FAST, invoke, invoke_json
from helpers import GOLDEN, golden, model

from bitnet_ref.errors import ConfigError, FormatError, GenerationError, TokenizerError
from bitnet_ref.evaluation import PROTOCOLS, perplexity
from bitnet_ref.evaluation.perplexity import sum_windows
from bitnet_ref.formats.open import ASSETS
from bitnet_ref.generation.sampling import log_probability
from bitnet_ref.system.workers import Here

TEXT = (
    "The Girl and the Cock\n\nOnce upon a time there was a little girl. She had a cock, and he was red.\n"
    "The wind blew hard.\nThen the king came, and said: Why do you cry? She told him.\n\nThe end\n"
) * 3
LENGTH = 32


def story():
    return model(ASSETS / "storyteller", BACKEND)


def nlls(ids, first):
    logits = story().logits(ids[:-1])
    return [-log_probability(logits[at - 1], ids[at]) for at in range(first, len(ids))]


def llama_cpp(tokenizer):
    """tools/perplexity/perplexity.cpp"""
    tokens = tokenizer.encode(TEXT.removesuffix("\n"))
    found = []
    for start in range(0, len(tokens) // LENGTH * LENGTH, LENGTH):
        chunk = [tokenizer.bos_id, *tokens[start + 1 : start + LENGTH]]
        found += nlls(chunk, LENGTH // 2 + 1)
    return found


def gptq(tokenizer):
    """The mean of the blocks' mean losses, over shifted labels."""
    tokens = tokenizer.encode(TEXT)
    return [x for n in range(len(tokens) // LENGTH) for x in nlls(tokens[n * LENGTH : (n + 1) * LENGTH], 1)]


def sentences(tokenizer):
    """eval_utils.get_test_dataset and eval_ppl.py"""
    data, doc = [], [tokenizer.bos_id]
    for item in TEXT.split("\n"):
        if item == "":
            continue
        sentence = [*tokenizer.encode(item, False), 2]
        if len(sentence) > LENGTH:
            continue
        if len(doc) + len(sentence) > LENGTH:
            data.append(doc)
            doc = [tokenizer.bos_id]
        doc.extend(sentence)
    data.append(doc)
    return [x for pack in data for x in nlls(pack, 1)]


def rolling(tokenizer):
    """get_rolling_token_windows with context_len 1"""
    tokens = tokenizer.encode(TEXT, False)
    found = nlls([tokenizer.bos_id, *tokens[:LENGTH]], 1)
    at = LENGTH
    while at < len(tokens):
        count = min(len(tokens) - at, LENGTH)
        end = at + count
        found += nlls(tokens[end - LENGTH - 1 : end], LENGTH + 1 - count)
        at = end
    assert len(found) == len(tokens)
    return found


SOURCES = {"llama.cpp": llama_cpp, "gptq": gptq, "1bitllm": sentences, "lm-eval": rolling}


@pytest.mark.parametrize("name", ["bitnet-bf16-online", "llama-packed-bitlinear", "onebitllm-silu", "llama-dense"])
def test_a_models_score_is_that_of_transformers(name):
    """Where no activation lies near a rounding boundary; docs/evaluation.md says what one int8 does."""
    answers = golden(name)
    ids, logits = answers["tokens"].tolist(), answers["logits"]
    theirs = sum(log_probability(logits[at], token) for at, token in enumerate(ids[1:]))
    ((nll, _, count),) = sum_windows(model(GOLDEN / name, BACKEND), [(ids, 1)])
    assert (count, nll) == (len(ids) - 1, pytest.approx(-theirs, rel=1e-5))


@pytest.mark.sample(2)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_protocol(protocol):
    found = perplexity(story(), TEXT, protocol, LENGTH)
    expected = SOURCES[protocol](story().tokenizer)
    assert found.tokens == len(expected) > 60
    assert found.perplexity == pytest.approx(math.exp(np.mean(expected)), rel=1e-12)
    deviation = math.sqrt(np.var(expected) / (len(expected) - 1))
    assert found.stderr == pytest.approx(found.perplexity * deviation, rel=1e-9)
    windows = PROTOCOLS[protocol].cut(story().tokenizer, [TEXT], LENGTH)
    assert (found.protocol, found.length, found.backend) == (protocol, LENGTH, BACKEND)
    assert (found.windows, found.read) == (len(windows), sum(len(ids) - 1 for ids, _ in windows))
    assert 0 < found.seconds < 60
    assert found.tokens_per_s == found.read / found.seconds
    assert found.nats_per_token == pytest.approx(np.mean(expected), rel=1e-12)
    assert found.bits_per_byte == pytest.approx(sum(expected) / math.log(2) / found.bytes)
    if protocol == "lm-eval":
        assert found.bytes == len(TEXT.encode())
        assert found.word_perplexity == pytest.approx(math.exp(sum(expected) / len(re.split(r"\s+", TEXT))))
        windows = perplexity(story(), [TEXT, TEXT], protocol, LENGTH)
        assert (windows.tokens, windows.nats_per_token) == (2 * found.tokens, pytest.approx(found.nats_per_token))
    else:
        assert found.word_perplexity is None
        assert abs(found.bytes / len(TEXT.encode()) - found.tokens / len(story().tokenizer.encode(TEXT))) < 0.1


def test_of_two_tokens():
    """The standard error has one degree of freedom left; the bytes are those of the scored tokens, or of the text."""
    ids = [1, 262, 577]
    nll = nlls(ids, 1)
    tokenizer = story().tokenizer
    text = tokenizer.decode(ids[1:])
    assert tokenizer.encode(text) == ids
    found = perplexity(story(), text, "lm-eval", 4)
    assert (found.tokens, found.windows, found.read, found.bytes) == (2, 1, 2, len(text.encode()))
    assert found.perplexity == pytest.approx(math.exp(np.mean(nll)), rel=1e-12)
    assert found.stderr == pytest.approx(found.perplexity * np.std(nll), rel=1e-9)
    letter = perplexity(story(), "I", "lm-eval", 4)
    assert letter.bytes == 1
    assert letter.bits_per_byte == pytest.approx(letter.nats_per_token * letter.tokens / math.log(2), rel=1e-12)
    whole = perplexity(story(), TEXT, "gptq", LENGTH)
    scored = [token for ids, first in PROTOCOLS["gptq"].cut(tokenizer, [TEXT], LENGTH) for token in ids[first:]]
    assert whole.bytes == sum(len(tokenizer.token_bytes(int(token))) for token in scored)


class Interrupted(Here):
    """Stops after so many items."""

    def __init__(self, resource, items):
        super().__init__(resource)
        self.items = items

    def map(self, function, items):
        for index, result in super().map(function, items):
            if index == self.items:
                raise KeyboardInterrupt
            yield index, result


@pytest.mark.thorough
def test_a_run_goes_on_where_it_was_interrupted(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[perplexity.__module__], "WINDOWS_AT_A_TIME", 1)
    state, whole = tmp_path / "state.json", perplexity(story(), TEXT, "gptq", LENGTH)
    for items in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            perplexity(story(), TEXT, "gptq", LENGTH, state=state, workers=Interrupted(story(), items))
    assert len(json.loads(state.read_text())["done"]) == 3
    steps = []
    rest = perplexity(story(), TEXT, "gptq", LENGTH, state=state, progress=lambda *at: steps.append(at))
    assert steps == [(done, whole.windows) for done in range(3, whole.windows + 1)]
    assert rest.read == whole.read - 3 * (LENGTH - 1)
    again = perplexity(story(), TEXT, "gptq", LENGTH, state=state)  # nothing is left to do
    assert (again.read, again.tokens_per_s, again.perplexity) == (0, 0.0, whole.perplexity)
    same = ("perplexity", "stderr", "tokens", "bits_per_byte", "nats_per_token")
    assert [getattr(rest, name) for name in same] == [getattr(whole, name) for name in same]
    for other, names in (
        ({"length": 16}, "length, windows_sha256"),
        ({"protocol": "lm-eval"}, "protocol, windows_sha256"),
        ({"texts": "And" + TEXT}, "windows_sha256"),
    ):
        with pytest.raises(FormatError, match=f"the state of another run: {names} differs; delete it"):
            perplexity(story(), **{"texts": TEXT, "protocol": "gptq", "length": LENGTH, "state": state, **other})
    good = json.loads(state.read_text())
    del good["sha256"]  # as states were before
    state.write_text(json.dumps({**good, "run": 1}))
    with pytest.raises(FormatError, match=r"the state of another run: config_sha256, weights_sha256, .* differs"):
        perplexity(story(), TEXT, "gptq", LENGTH, state=state)
    assert list(good["run"]) == [
        *("config_sha256", "weights_sha256", "backend", "dtype", "cache_dtype", "protocol", "length"),
        "windows_sha256",
    ]
    for damage in ({"done": {"0": [1.0]}}, {"done": [1]}, {"done": {"x": [1, 2, 3]}}, {"done": {"0": [1, 2, None]}}):
        state.write_text(json.dumps({**good, **damage}))
        with pytest.raises(FormatError, match="damaged"):
            perplexity(story(), TEXT, "gptq", LENGTH, state=state)
    os.truncate(state, (256 << 20) + 1)  # of a sparse file
    with pytest.raises(FormatError, match="more than 268435456 bytes"):
        perplexity(story(), TEXT, "gptq", LENGTH, state=state)


def test_one_damaged_byte_anywhere_in_a_state(tmp_path):
    """The sums are those that were written, or the file is refused."""
    module, path, key = sys.modules[perplexity.__module__], tmp_path / "state.json", {"length": 8}
    with module._Journal(path, key) as journal:
        journal.add([(0, [1.5, 2.25, 3.0]), (1, [0.125, 1e-7, 4.0])])
    whole, done, refused = path.read_bytes(), journal.done, 0
    for offset, byte in enumerate(whole):
        for other in (byte ^ 1, byte ^ 0x80, 32):
            path.write_bytes(whole[:offset] + bytes([other]) + whole[offset + 1 :])
            try:
                assert module._Journal(path, key).done == done, offset
            except FormatError:
                refused += 1
    assert refused > 2 * len(whole)


def test_the_state_is_written_every_few_seconds(tmp_path, monkeypatch):
    module, state, done = sys.modules[perplexity.__module__], tmp_path / "state.json", []
    monkeypatch.setattr(module, "WINDOWS_AT_A_TIME", 1)

    def look(*_):
        done.append(len(json.loads(state.read_text())["done"]) if state.exists() else None)

    whole = perplexity(story(), TEXT, "gptq", LENGTH, state=state, progress=look)
    assert done == [None] * (whole.windows + 1)  # it is done before 5 s are over
    state.unlink()
    done.clear()
    monkeypatch.setattr(module, "SAVE_S", 0.0)
    perplexity(story(), TEXT, "gptq", LENGTH, state=state, progress=look)
    assert done == [None, *range(1, whole.windows + 1)]


class Letters:
    """A tokenizer of letters: a is 10, b is 11."""

    def __init__(self, bos_id=1, eos_ids=(2, 3), adds_bos=False):
        self.bos_id, self.eos_ids, self.adds_bos = bos_id, eos_ids, adds_bos

    def encode(self, text, add_special_tokens=True):
        return [self.bos_id] * (self.adds_bos and add_special_tokens) + [10 + "ab\n".index(letter) for letter in text]

    def encode_batch(self, texts, add_special_tokens=True):
        return [self.encode(text, add_special_tokens) for text in texts]


@pytest.mark.parametrize(
    ("protocol", "tokenizer", "texts", "windows"),
    [
        ("llama.cpp", Letters(), ["aaaa", "bb\n"], [([10, 10, 10, 10], 3), ([12, 12, 11, 11], 3)]),
        ("llama.cpp", Letters(adds_bos=True), ["aaabbbaaa"], [([1, 10, 10, 10], 3), ([1, 11, 11, 10], 3)]),
        ("gptq", Letters(), ["a", "ba"], [([10, 12, 12, 11], 1)]),
        ("gptq", Letters(adds_bos=True), ["abababa"], [([1, 10, 11, 10], 1), ([11, 10, 11, 10], 1)]),
        ("1bitllm", Letters(), ["a\n\nb", "aaaa\nbb"], [([1, 10, 2], 1), ([1, 11, 2], 1), ([1, 11, 11, 2], 1)]),
        ("1bitllm", Letters(), ["aa\nb"], [([1, 10, 10, 2], 1), ([1, 11, 2], 1)]),
        ("1bitllm", Letters(), ["aaa\nbbb\na"], [([1, 10, 10, 10, 2], 1), ([1, 11, 11, 11, 2], 1), ([1, 10, 2], 1)]),
        ("1bitllm", Letters(), ["a\nbbb"], [([1, 10, 2], 1)]),
        ("lm-eval", Letters(), ["aabba"], [([1, 10, 10, 11, 11], 1), ([10, 10, 11, 11, 10], 4)]),
        ("lm-eval", Letters(), ["aabb", "b"], [([1, 10, 10, 11, 11], 1), ([1, 11], 1)]),
        ("lm-eval", Letters(None, (2,)), ["aabbab"], [([2, 10, 10, 11, 11], 1), ([10, 11, 11, 10, 11], 3)]),
        ("lm-eval", Letters(), [""], []),
    ],
)
def test_windows_of_four_tokens(protocol, tokenizer, texts, windows):
    assert [(ids.tolist(), first) for ids, first in PROTOCOLS[protocol].cut(tokenizer, texts, 4)] == windows


def test_lines_that_just_fit():
    cut = PROTOCOLS["1bitllm"].cut
    windows = [ids.tolist() for ids, _ in cut(Letters(), ["a\nbb\nab"], 5)]
    assert windows == [[1, 10, 2], [1, 11, 11, 2], [1, 10, 11, 2]]  # 3 and 3 are more than 5
    windows = [ids.tolist() for ids, _ in cut(Letters(), ["a\nbb\nab"], 6)]
    assert windows == [[1, 10, 2, 11, 11, 2], [1, 10, 11, 2]]
    assert cut(Letters(), ["\naaaa\n"], 4) == []  # no BOS by itself
    empty = Letters()
    empty.encode_batch = lambda texts, add_special_tokens: [[] if text == "-" else [10] * len(text) for text in texts]
    assert [ids.tolist() for ids, _ in cut(empty, ["-\naaa"], 4)] == [[1, 2]]  # EOS is scored too


@pytest.mark.parametrize(
    ("protocol", "tokenizer", "texts", "error"),
    [
        ("1bitllm", Letters(None), ["a"], ConfigError),
        ("1bitllm", Letters(1, ()), ["a"], ConfigError),
        ("lm-eval", Letters(None, ()), ["a"], TokenizerError),
        ("llama.cpp", Letters(), ["aaaabbb\n"], GenerationError),
        ("gptq", Letters(), ["aaa"], GenerationError),
    ],
)
def test_what_cannot_be_cut(protocol, tokenizer, texts, error):
    with pytest.raises(error):
        PROTOCOLS[protocol].cut(tokenizer, texts, 4)


def test_what_is_refused():
    with pytest.raises(ConfigError, match=r"length: expected 4 to 256 \(the model's context\), got 512$"):
        perplexity(story(), TEXT, "gptq", 512)
    with pytest.raises(ConfigError, match=r"length: expected 4 to 256 \(the model's context\), got 3$"):
        perplexity(story(), TEXT, "gptq", 3)
    assert perplexity(story(), TEXT[:60], "gptq", 4).length == 4
    assert [PROTOCOLS[name].length for name in SOURCES] == [512, 2048, 2048, 2048]
    with pytest.raises(ConfigError, match="protocol"):
        perplexity(story(), TEXT, "wikitext")
    with pytest.raises(GenerationError, match="longer text"):
        perplexity(story(), "Once", "llama.cpp", LENGTH)
    with pytest.raises(GenerationError, match="no token"):
        perplexity(story(), "", "lm-eval", LENGTH)
    with pytest.raises(TokenizerError):
        perplexity(model(GOLDEN / "llama-dense"), TEXT, "gptq", 8)


def test_command(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    args = ("perplexity", "storyteller", "--text", path, "--length", LENGTH, *FAST)
    result = invoke_json(*args, "--protocol", "gptq", "--protocol", "lm-eval")
    expected = perplexity(model(ASSETS / "storyteller", BACKEND), TEXT, "gptq", LENGTH)
    assert result["results"][0]["perplexity"] == expected.perplexity
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert result["texts"] == [{"path": str(path), "bytes": path.stat().st_size, "sha256": digest}]
    table = invoke(*args).stdout
    assert "llama.cpp" in table
    assert "bits per byte" in table
    assert invoke(*args, "--protocol", "gptq", "--protocol", "lm-eval", "--state", tmp_path / "s").exit_code == 2
    path.write_text(TEXT * 3)
    usual = invoke("perplexity", "--text", path, *FAST)  # 512 tokens do not fit the storyteller
    assert "llama.cpp: windows of 256 tokens, the model's context, instead of 512" in usual.stderr
    assert usual.stdout.split()[:9] == invoke("perplexity", "--text", path, "--length", 256, *FAST).stdout.split()[:9]
    path.write_bytes(b"\xff\xfe")
    assert invoke(*args).exit_code == 3
