"""Hostile tokenizers and chat templates that load: what they do when they are used.

    python tests/campaigns/hostile_texts.py tokenizer 0 1000    # or template; each seed in a child of its own (Linux)

A seed makes a tokenizer.json of random steps of every kind, or a SentencePiece model, with hostile parameters; then
texts are encoded and decoded. Or it makes a template from a grammar of everything that is costly. The outcome must be a
result or a TokenizerError. Death by a signal, another exception, memory beyond SPARE_BYTES, an operation beyond
TOKENIZER_S or TEMPLATE_S of processor time is an escape: printed with its seed, and the campaign goes on. The last
line is a JSON object with the counts; the exit status is 1 if there were escapes.
"""

from __future__ import annotations

import base64
import gc
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # no threads: a forked child would wait for them
os.environ["RUST_BACKTRACE"] = "0"
sys.path.insert(0, str(Path(__file__).parent.parent / "fuzz"))

from forked import run_in_child

from bitnet_ref.errors import TokenizerError
from bitnet_ref.tokenizers import load_tokenizer_files
from bitnet_ref.tokenizers.sentencepiece_model import SentencePieceModel, write_model
from bitnet_ref.tokenizers.templates import filters
from bitnet_ref.tokenizers.templates.chat_template import ChatTemplate

SPARE_BYTES = 1 << 30
TOKENIZER_S, TEMPLATE_S, CHILD_S = 5.0, 3.0, 60
LETTERS = ["a", "b", "A", "1", " ", "\n", "\u2581", "\u0120", "é", "\u0130", "\ufdfa", "日", "\U0001f600", "'", "_"]
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
Json = dict[str, Any]


# -- tokenizers --------------------------------------------------------------------------------------------------------


def word(dice: random.Random) -> str:
    """A short text, now and then empty or long."""
    size = dice.choice([0, 3, 8, 8, 60, 60, 1000, 16_000]) if dice.random() < 0.25 else dice.choice([1, 1, 1, 2])
    return dice.choice(LETTERS) * size if dice.random() < 0.5 else "".join(dice.choices(LETTERS, k=size))


def regex(dice: random.Random, depth: int = 0) -> str:
    def piece() -> str:
        kind = dice.random()
        if kind < 0.1 and depth < 3:
            return dice.choice(["(?:", "(", "(?=", "(?!", "(?<!", "(?>", "(?i:"]) + regex(dice, depth + 1) + ")"
        atoms = ["a", "b", " ", ".", r"\s", r"\S", r"\p{L}", r"\p{N}", "[ab]", "[^a]", r"[^\s\p{L}]", r"\w"]
        return dice.choice([*atoms, "$", "^", r"\b"])

    def repeated() -> str:
        kinds = ["", "", "", "?", "*", "+", "+", "{1,3}", "{2,}", "{0,64}", "{500}", "*?", "++", "{,9}"]
        return piece() + dice.choice(kinds)

    rows = ["".join(repeated() for _ in range(dice.choice([1, 1, 2, 3]))) for _ in range(dice.choice([1, 1, 1, 3]))]
    return "|".join(rows)


def pattern(dice: random.Random) -> Json:
    return {"Regex": regex(dice)} if dice.random() < 0.5 else {"String": word(dice)}


def charsmap(dice: random.Random) -> str:
    units = [dice.getrandbits(32) if dice.random() < 0.3 else dice.getrandbits(10) << 10 | 97 for _ in range(256)]
    data = (4 * len(units)).to_bytes(4, "little") + b"".join(unit.to_bytes(4, "little") for unit in units)
    return base64.b64encode(data + b"x\0yy\0" * dice.choice([1, 9]) + b"z" * dice.choice([1, 30, 3000])).decode()


def step(dice: random.Random, part: str) -> Json:
    replace = {"type": "Replace", "pattern": pattern(dice), "content": word(dice)}
    flag, size = dice.random() < 0.5, dice.choice([0, 1, 2, 7, 2**31, 2**63])
    metaspace = {"type": "Metaspace", "replacement": dice.choice(LETTERS), "split": flag}
    metaspace |= {"prepend_scheme": dice.choice(["always", "never", "first"])}
    byte_level = {"type": "ByteLevel", "add_prefix_space": flag, "trim_offsets": flag, "use_regex": dice.random() < 0.5}
    behaviors = ["Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous"]
    behavior = {"behavior": dice.choice(behaviors), "invert": flag}
    bert = dict.fromkeys(("clean_text", "handle_chinese_chars", "strip_accents", "lowercase"), flag)
    if part == "normalizer":
        plain = [
            {"type": kind} for kind in ("NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "StripAccents", "ByteLevel")
        ]
        strip = {"type": "Strip", "strip_left": flag, "strip_right": flag}
        precompiled = {"type": "Precompiled", "precompiled_charsmap": charsmap(dice)}
        own = [{"type": "Prepend", "prepend": word(dice)}, {"type": "BertNormalizer", **bert}, strip, precompiled]
        return dice.choice([*plain, *own, replace, replace, replace])
    if part == "pre_tokenizer":
        kinds = "BertPreTokenizer Whitespace WhitespaceSplit UnicodeScripts"
        plain = [{"type": kind} for kind in kinds.split()]
        split = {"type": "Split", "pattern": pattern(dice), **behavior}
        own: list[Json] = [{"type": "Digits", "individual_digits": flag}]
        own += [{"type": "Punctuation", "behavior": behavior["behavior"]}]
        own += [
            {"type": "CharDelimiterSplit", "delimiter": dice.choice(LETTERS)},
            {"type": "FixedLength", "length": size},
        ]
        return dice.choice([*plain, *own, metaspace, byte_level, split, split, split])
    own = [{"type": "WordPiece", "prefix": word(dice), "cleanup": flag}, {"type": "BPEDecoder", "suffix": word(dice)}]
    own += [{"type": "CTC", "pad_token": word(dice), "word_delimiter_token": word(dice), "cleanup": flag}]
    stop = dice.choice([0, 0, 1, 2**31, 2**63])
    own += [{"type": "Strip", "content": dice.choice(LETTERS), "start": size, "stop": stop}]
    return dice.choice([*own, {"type": "Fuse"}, {"type": "ByteFallback"}, metaspace, byte_level, replace, replace])


def part_of(dice: random.Random, part: str) -> Json | None:
    if dice.random() < 0.25:
        return None
    inner = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}[part]
    items = [step(dice, part) for _ in range(dice.choice([1, 1, 1, 1, 2, 2, 3, 5, 40]))]
    if dice.random() < 0.1:
        items.append({"type": "Sequence", inner: [step(dice, part)]})
    return items[0] if len(items) == 1 else {"type": "Sequence", inner: items}


def pieces(dice: random.Random) -> list[str]:
    size = dice.choice([3, 10, 30, 100, 140])
    row = ["<unk>", *LETTERS, *("a" * n for n in range(2, size)), *(word(dice) for _ in range(size)), "##a", "a</w>"]
    row += [f"<0x{byte:02X}>" for byte in range(256)] if dice.random() < 0.3 else []
    return [piece for piece in dict.fromkeys(row) if piece and len(piece) < dice.choice([100, 100, 16_384])] or ["a"]


def tokenizer_files(dice: random.Random) -> dict[str, bytes]:
    row = pieces(dice)
    if dice.random() < 0.15:
        row = [piece for piece in row if len(piece) < 400]
        types = [2, *(6 if piece.startswith("<0x") else dice.choice([1, 1, 1, 4]) for piece in row[1:])]
        model = SentencePieceModel(row, [dice.uniform(-9, 9) for _ in row], types, dice.choice([1, 2, 3, 4]))
        model.add_dummy_prefix, model.remove_extra_whitespaces = dice.random() < 0.5, dice.random() < 0.5
        model.charsmap = base64.b64decode(charsmap(dice)) if dice.random() < 0.1 else b""
        return {"tokenizer.model": write_model(model, {"unk": 0})}
    vocab = {piece: n for n, piece in enumerate(row)}
    runs = {n for n in range(1, 400) if "a" * n in vocab}
    merges = [["a" * (n - k), "a" * k] for n in runs for k in (1, n // 2) if {k, n - k} <= runs]
    affix = {"continuing_subword_prefix": dice.choice(["##", "", word(dice)])}
    models: list[Json] = [
        {"type": "BPE", "vocab": vocab, "merges": merges, "unk_token": dice.choice([None, "<unk>"])},
        {"type": "Unigram", "unk_id": 0, "vocab": [[piece, dice.uniform(-9, 9)] for piece in row]},
        {"type": "WordPiece", "vocab": vocab, "unk_token": "<unk>", **affix},
        {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
    ]
    model_json = dice.choice([models[0], *models])
    if model_json["type"] == "BPE":
        model_json |= {"byte_fallback": dice.random() < 0.5, "fuse_unk": dice.random() < 0.5}
        model_json |= {"ignore_merges": dice.random() < 0.3, "dropout": dice.choice([None, 0.5])}
        model_json |= {"end_of_word_suffix": dice.choice([None, "</w>", word(dice)])} if dice.random() < 0.3 else {}
    if model_json["type"] == "WordPiece":
        model_json["max_input_chars_per_word"] = dice.choice([1, 100, 200, 200, 10**9])
    first = len(row)
    contents = dict.fromkeys(word(dice) or "<m>" for _ in range(dice.choice([0, 0, 1, 3])))
    added = [
        {"id": vocab.get(content, first + n), "content": content, **{flag: dice.random() < 0.5 for flag in FLAGS}}
        for n, content in enumerate(sorted(contents, key=lambda content: content in vocab))
    ]
    size = dice.choice([0, 1, 512, 2**40])
    padding = {"strategy": {"Fixed": size}, "direction": "Left", "pad_id": 0, "pad_type_id": 0, "pad_token": "a"}
    truncation = {"direction": "Left", "max_length": size, "strategy": "OnlyFirst", "stride": dice.choice([0, 9])}
    special = {"SpecialToken": {"id": row[0], "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "single": [special] * dice.choice([0, 1, 2, 2, 100]) + [text] * dice.choice([1, 1, 1, 1, 1, 2]),
        "pair": [text, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {row[0]: {"id": row[0], "ids": [0] * dice.choice([1, 9]), "tokens": [row[0]]}},
    }
    post = [None, {"type": "BertProcessing", "sep": [row[0], 0], "cls": [row[0], 0]}, template]
    table = {
        "version": "1.0",
        "truncation": truncation if dice.random() < 0.2 else None,
        "padding": padding | {"pad_to_multiple_of": dice.choice([None, 8])} if dice.random() < 0.2 else None,
        "added_tokens": added,
        **{part: part_of(dice, part) for part in ("normalizer", "pre_tokenizer", "decoder")},
        "post_processor": dice.choice(post),
        "model": model_json,
    }
    return {"tokenizer.json": json.dumps(table).encode("utf-8")}


def use_tokenizer(seed: int) -> str:
    dice = random.Random(f"tokenizer {seed}")
    files = tokenizer_files(dice)
    try:
        tokenizer = timed("load", TOKENIZER_S, lambda: load_tokenizer_files(files))
    except TokenizerError:
        return "refused"
    size = dice.choice([300, 3000, 20_000])
    texts = ["", "a", *(letter * size for letter in dice.sample(LETTERS, 3)), "a" * size, "a b1\n" * (size // 5)]
    texts += ["".join(dice.choices(LETTERS, k=size))]
    texts += ["Once upon a time, a lion said: I'm 12 years old.\n\n" * (size // 48)]
    texts += ["".join(dice.choice(LETTERS) * dice.choice([1, 3, 100]) for _ in range(size // 30)), "<m> " * (size // 4)]
    refusals = 0
    for number, text in enumerate(texts):
        try:
            ids = timed(f"encode texts[{number}]", TOKENIZER_S, lambda text=text: tokenizer.encode(text))
            assert all(0 <= token < tokenizer.vocab_size for token in ids)
            timed(f"decode texts[{number}]", TOKENIZER_S, lambda ids=ids: tokenizer.decode(ids))
            few = ids[:200]
            decoder = tokenizer.stream_decoder(skip_special_tokens=False)
            streamed = "".join(map(decoder.push, few)) + decoder.flush()
            if "tokenizer.model" in files:  # of tokenizer.json, only the usual decoders stream as they decode
                assert streamed == tokenizer.decode(few, skip_special_tokens=False), "the stream differs"
            for token in few[:20]:
                tokenizer.token_bytes(token)
        except TokenizerError:
            refusals += 1
    return "used" if not refusals else "a text refused" if refusals < len(texts) else "every text refused"


# -- templates ---------------------------------------------------------------------------------------------------------

STRINGS = ["'a'", "'ab'", "''", "'b' ~ 'a' * 9999", "ns.x", "m.content", "'x.y'", "'x.' * 50", "'\\n'", "x", "y"]
LISTS = ["messages", "range(99999)", "[1, 2]", "ns.l", "(ns.x | list)", "ns.x.split('a')", "[x, y]", "l"]
SCALARS = ["0", "3", "99999", "2.5", "none", "true", "dict(a=x)", "loop.index"]
FILTERS = sorted(filters.FILTERS_ALLOWED)
METHODS = sorted({name for names in filters.METHODS.values() for name in names})
TESTS = ["defined", "divisibleby(3)", "eq(x)", "in(ns.l)", "iterable", "lower", "mapping", "none", "sequence", "string"]


def expression(dice: random.Random, depth: int = 0) -> str:
    kind = dice.random() if depth < 5 else 0.0
    if kind < 0.3:
        return dice.choice([*STRINGS, *STRINGS, *LISTS, *SCALARS])
    inner = expression(dice, depth + 1)
    if kind < 0.5:
        name = dice.choice(FILTERS)
        value = dice.choice([inner, *LISTS, *STRINGS]) if depth < 2 else inner
        usual = {"replace": "x, y", "join": "x", "map": "attribute=x", "sort": "attribute='x,y'", "tojson": "indent=4"}
        usual |= {"selectattr": "'x'", "rejectattr": "x", "select": "'in', ns.x", "trim": "ns.x", "unique": "true, 'x'"}
        given = ", ".join(expression(dice, depth + 2) for _ in range(dice.choice([1, 1, 2])))
        arguments = dice.choice(["*range(99999)", given]) if dice.random() < 0.2 else usual.get(name, "")
        return f"({value} | {name}({arguments}))"
    if kind < 0.7:
        given = ", ".join(expression(dice, depth + 2) for _ in range(dice.choice([0, 1, 1, 1, 2])))
        value = dice.choice(["ns.x", "m.content", "('a' * 99999)", inner])
        given = given if dice.random() < 0.4 else dice.choice(["", "x", "ns.x", "ns.x[1:]"])
        return f"{value}.{dice.choice(METHODS)}({given})"
    if kind < 0.9:
        operator = dice.choice(["~", "~", "+", "*", "in", "==", "==", "and", "or", "not in", "<", "%"])
        return f"({inner} {operator} {expression(dice, depth + 1)})"
    if kind < 0.94:
        return f"({inner} is {dice.choice(TESTS)})"
    part = dice.choice(["1:", "::-1", "0", "-1", ":9999"])
    return dice.choice([f"({inner})[{part}]", f"f({inner})", f"({inner} if x else y)"])


def statements(dice: random.Random, depth: int = 0) -> str:
    rows = []
    for _ in range(dice.choice([1, 2, 3])):
        kind, value = dice.random(), expression(dice)
        body = "" if depth > 3 else statements(dice, depth + 1)
        name = dice.choice(["x", "y", "l", "ns.x", "ns.l"])
        if kind < 0.25:
            rows.append(f"{{{{ {value} }}}}")
        elif kind < 0.5:
            rows.append(f"{{% set {name} = {value} %}}")
        elif kind < 0.75:
            rows.append(f"{{% for i in {dice.choice([*LISTS, 'range(99999)', value])} %}}{body}{{% endfor %}}")
        elif kind < 0.85:
            rows.append(f"{{% if {value} %}}{body}{{% else %}}{body if len(body) < 500 else ''}{{% endif %}}")
        elif kind < 0.9:
            rows.append(f"{{% set {name.split('.')[0]} %}}{body}{{% endset %}}")
        elif kind < 0.95:
            rows.append(f"{{% filter {dice.choice(FILTERS)} %}}{body}{{% endfilter %}}")
        else:
            rows.append(f"{{% call f(x) %}}{body}{{% endcall %}}")
    return "".join(rows)


def template_source(dice: random.Random) -> str:
    growth = dice.choice(["ns.x ~ ns.x", "ns.x + ns.x", "(ns.x ~ ' ') * 2"])
    start = f"{{% for i in range({dice.choice([0, 10, 17, 19])}) %}}{{% set ns.x = {growth} %}}{{% endfor %}}"
    calls = dice.choice(["", "{% if caller %}{{ caller() }}{% endif %}", "{{ f(x) }}"])
    macro = f"{{% macro f(x) %}}{calls}{expression(dice)}{{% endmacro %}}"
    opening = "{% set ns = namespace(x='ab', l=['a'] * 999) %}{% set x = 'a' %}{% set y = 'b' %}{% set l = [1] %}"
    return f"{opening}{start}{macro}{{% for m in messages %}}{statements(dice)}{{% endfor %}}"


def use_template(seed: int) -> str:
    """Twenty templates, because most end at a mistake of their own."""
    outcomes = Counter[str]()
    for number in range(20):
        dice = random.Random(f"template {seed} {number}")
        outcomes[run_template(template_source(dice), dice, number)] += 1
    return " ".join(f"{outcome}={count}" for outcome, count in sorted(outcomes.items()))


def run_template(source: str, dice: random.Random, number: int) -> str:
    content = dice.choice(["Hello", "a" * 100, "word " * 4000, "a" * 1_000_000])
    messages = [{"role": "user", "content": content}] * dice.choice([1, 3, 200 if len(content) < 1000 else 2])
    try:
        template = timed(f"compile [{number}]", TEMPLATE_S, lambda: ChatTemplate(source))
        text = timed(f"render [{number}]", TEMPLATE_S, lambda: template.render(messages))
        assert isinstance(text, str)
        return "rendered"
    except TokenizerError as error:
        limits = ("more work", "more text", "grows past", "works for more", "deep", "63 bits", "more than")
        return "stopped" if any(part in str(error) for part in limits) else "mistaken"


def timed(doing: str, seconds: float, action: Callable[[], Any]) -> Any:
    start = time.process_time()
    try:
        return action()
    finally:
        took = time.process_time() - start
        if took > seconds:
            raise TimeoutError(f"{doing} took {took:.1f} s")


def main(kind: str, first: int, last: int) -> int:
    started, counts, escapes = time.perf_counter(), Counter[str](), []
    use = {"tokenizer": use_tokenizer, "template": use_template}[kind]
    null = os.open(os.devnull, os.O_WRONLY)

    def job(seed: int) -> str:
        os.dup2(null, 2)  # the library prints its panics
        return use(seed)

    use_template(0)  # what the children need is imported here, once
    load_tokenizer_files({"tokenizer.json": b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}'}).encode("a")
    gc.freeze()
    for seed in range(first, last):
        outcome, detail = run_in_child(lambda seed=seed: job(seed), SPARE_BYTES, CHILD_S)
        for word in outcome.split() if kind == "template" and "=" in outcome else [outcome + "=1"]:
            name, _, count = word.rpartition("=")
            counts[name] += int(count)
        if detail or outcome.startswith(("died", "exit", "timeout")):
            escapes.append(seed)
            print(json.dumps({"seed": seed, "escape": outcome, "detail": detail[-600:]}), flush=True)
    seconds = round(time.perf_counter() - started, 1)
    line = {"kind": kind, "done": last - first, "outcomes": dict(counts), "escapes": escapes, "seconds": seconds}
    print(json.dumps(line), flush=True)
    return int(bool(escapes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
