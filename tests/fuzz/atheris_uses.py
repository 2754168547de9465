"""Coverage-guided fuzzing of what texts, traces and receipts of others do when they are used; see atheris_target.py.

python tests/fuzz/atheris_uses.py tokenizer -max_total_time=600    # or template, trace, receipt
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path

import atheris_target  # first, because it instruments what is imported
from json_mutants import change_json, dump, mutate_json, mutate_safetensors

sys.path.insert(0, str(Path(__file__).parent.parent / "campaigns"))

import hostile_texts
from hostile_uses import TOKENS, record

from bitnet_ref.crossval import cross_trace, make_receipt, verify_receipt
from bitnet_ref.crossval.receipt import receipt_hash, write_receipt
from bitnet_ref.crossval.report import write_html
from bitnet_ref.tokenizers import load_tokenizer_files
from bitnet_ref.tokenizers.templates.chat_template import ChatTemplate

MESSAGES = [{"role": role, "content": "Hello, lion \u00e9\n"} for role in ("system", "user", "assistant", "user")]
TEXTS = ("", "a", "Once upon a time, a lion said: I'm 12.\n\n", "aab" * 400, "\ufdfa\U0001f600<m> \u0130" * 30)
folder = Path(tempfile.mkdtemp())


def use_tokenizer(path: Path) -> None:
    tokenizer = load_tokenizer_files({"tokenizer.json": path.read_bytes()})
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert all(0 <= token < tokenizer.vocab_size for token in ids)
        tokenizer.decode(ids)
        decoder = tokenizer.stream_decoder(skip_special_tokens=False)
        _ = "".join(map(decoder.push, ids[:50])) + decoder.flush()


def use_template(path: Path) -> None:
    assert isinstance(ChatTemplate(path.read_bytes().decode("utf-8", "replace")).render(MESSAGES), str)


def use_trace(path: Path) -> None:
    crossing = cross_trace(model, path)
    write_html(folder / "page.html", "a trace", [crossing], {})


def use_receipt(path: Path) -> None:
    verify_receipt(path)


def change_template(dice: random.Random, data: bytes) -> bytes:
    """A statement of the campaign's grammar somewhere between the tags of the template."""
    text, more = data.decode("utf-8", "replace"), hostile_texts.statements(dice)
    places = [0, len(text), *(n + 2 for n in range(len(text)) if text.startswith(("}}", "%}"), n))]
    place = dice.choice(places)
    return (text[:place] + more + text[place:]).encode()


def change_receipt(dice: random.Random, data: bytes) -> bytes:
    """Changed and, mostly, sealed again."""
    value = json.loads(data)
    change_json(dice, value)
    if dice.randrange(4):
        value["sha256"] = receipt_hash(value)
    return dump(dice, value)


if __name__ == "__main__":
    kind = sys.argv.pop(1)
    if kind in ("trace", "receipt"):
        model = record(folder)
        good = folder / "receipt.json"
        trace = folder / "trace.safetensors"
        write_receipt(good, make_receipt("trace", str(folder / "m"), model, TOKENS, [cross_trace(model, trace)], trace))
    dice = random.Random(0)
    if kind == "tokenizer":
        tables = (hostile_texts.tokenizer_files(dice).get("tokenizer.json", b"{}") for _ in range(300))
        atheris_target.fuzz(lambda data: "tokenizer.json", lambda place: None, tables, mutate_json, use_tokenizer)
    elif kind == "template":
        sources = (hostile_texts.template_source(dice).encode() for _ in range(100))
        atheris_target.fuzz(lambda data: "t.jinja", lambda place: None, sources, change_template, use_template)
    elif kind == "trace":
        seeds = [trace.read_bytes()]
        atheris_target.fuzz(lambda data: "t.safetensors", lambda place: None, seeds, mutate_safetensors, use_trace)
    else:
        seeds = [good.read_bytes()]
        atheris_target.fuzz(lambda data: "r.json", lambda place: None, seeds, change_receipt, use_receipt)
