"""Hostile files and names in the playground, in Chromium:
pytest -m slow -n0 -s tests/campaigns/test_hostile_pages.py

Each file that is dropped on the page must give a text, or one line that says what is wrong with it; the tab lives,
takes less than a gigabyte more, and no name becomes an element. test_crafted_files is in the thorough suite.
"""

import contextlib
import functools
import http.server
import json
import os
import random
import re
import shutil
import struct
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from chromium import Chromium, needs_chromium
from helpers import DATA
from test_site import DOCS

from bitnet_ref.formats.open import ASSETS

sys.path.append(str(Path(__file__).parent.parent / "fuzz"))
from checkpoint_mutants import mutate_native
from gguf_mutants import mutate_gguf
from json_mutants import cut_out, flip_bytes, insert_bytes, mutate_json, mutate_safetensors, truncate

pytestmark = needs_chromium
STORY, GOLDEN, FAMILIES = ASSETS / "storyteller", DATA / "golden", DATA / "families"
NAME = "<img src=x onerror=bad=1>"
HOSTILE = [
    NAME,
    "'\"><script>bad=1</script>",
    "<svg/onload=bad=1>",
    "</p></textarea></pre><iframe srcdoc='<script>parent.bad=1</script>'>",
    "<a href=javascript:bad=1>",
    "&lt;img src=x onerror=bad=1&gt;",
    "${bad=1}",
    "__proto__",
    "constructor",
    "\x00\x1b[2J\u202e\u2028",
    "x" * 3000,
]
# What JavaScript says of itself. Of memory that is short it may.
RAW = (
    r"Cannot |is not a (func|cons)|not iterable|undefined|not defined|call stack|Invalid |Unexpected token"
    r"|\[object|are damaged \("
)
PROMPT = "3 4"  # in all these vocabularies; without one, ids
MAX_S, MAX_BYTES = 30, 1 << 30
DOM = """[typeof bad, document.querySelectorAll(
    'iframe, svg[onload], img, script:not([src]), [onerror], a[href^=java]').length,
    document.documentElement.scrollWidth <= innerWidth]"""


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """The page without its runtime: a reader's own model needs none."""
    folder = tmp_path_factory.mktemp("site")
    for path in (*(DOCS / "playground").iterdir(), ASSETS / "page" / "parts.js", ASSETS / "page" / "page.css"):
        shutil.copy(path, folder)
    (folder / "facts.json").write_text('{"vocabulary": {"pieces": [], "scores": [], "types": []}, "bos": 1}')
    with serve(folder) as url:
        yield url


@contextlib.contextmanager
def serve(folder):
    handler = functools.partial(QuietHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}/index.html"
        server.shutdown()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


class OwnModel:
    """The page's part for a model of one's own. `bytes_taken`: the most memory that all of Chromium had."""

    def __init__(self, browser, address):
        self.browser, self.page, self.bytes_taken = browser, browser.page(address), 0
        self.page.until("typeof playground !== 'undefined' && !!$('own-files').onchange")
        self.page.problems.clear()  # facts.json is not the page's

    def use(self, files):
        """(what the page says, its text or None)"""
        document = self.page.call("DOM.getDocument")["root"]["nodeId"]
        node = self.page.call("DOM.querySelector", nodeId=document, selector="#own-files")["nodeId"]
        self.page.call("DOM.setFileInputFiles", nodeId=node, files=[str(path) for path in files])
        self.wait()
        if self.page.run("$('own-form').hidden"):
            return self.page.text("#own-facts"), None
        self.page.run(f"$('own-prompt').value = {PROMPT!r}; $('max_tokens').value = 4; $('own-form').requestSubmit()")
        self.wait()
        return self.page.text("#own-facts"), self.page.text("#own-text")

    def wait(self):
        end = time.monotonic() + MAX_S
        while self.page.run("$('own-files').disabled"):
            self.bytes_taken = max(self.bytes_taken, memory_of_group(self.browser.process.pid))
            assert self.bytes_taken < self.first_bytes + MAX_BYTES, "memory that the file does not justify"
            assert time.monotonic() < end, "a file keeps the page busy"
            time.sleep(0.01)

    @functools.cached_property
    def first_bytes(self):
        return memory_of_group(self.browser.process.pid)

    def check(self, facts, text):
        assert self.page.problems == []
        assert self.page.run(DOM) == ["undefined", 0, True], facts
        assert len(facts) < 1000
        assert text is not None or self.page.run("$('own-facts').className.includes('problem')")
        assert not re.search(RAW, facts), facts
        assert facts.isprintable() or text is None


def memory_of_group(group):
    """Bytes that no other process shares with those of this process group."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[2]) == group:
                pages = stat.with_name("statm").read_text().split()
                total += (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE")
        except OSError:  # it has ended
            continue
    return total


# -- files that no mutation makes --------------------------------------------------------------------------------------


def text_of(value):
    data = value.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data


def typed(value):
    """A value of GGUF's metadata, after its type."""
    if isinstance(value, bytes):  # as it is
        return value
    if isinstance(value, str):
        return struct.pack("<I", 8) + text_of(value)
    if isinstance(value, list):
        first = value[0] if value else 0
        items = b"".join(typed(each)[4:] for each in value)
        return struct.pack("<I", 9) + typed(first)[:4] + struct.pack("<Q", len(value)) + items
    kind, form = (7, "<?") if isinstance(value, bool) else (5, "<i") if isinstance(value, int) else (6, "<f")
    return struct.pack("<I", kind) + struct.pack(form, value)


SIZES = {"block_count": 1, "embedding_length": 32, "feed_forward_length": 32, "context_length": 64, "vocab_size": 8}
SIZES |= {"attention.head_count": 2, "attention.layer_norm_rms_epsilon": 1e-5}
PIECES = ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "3", "4"]
WORDS = {"model": "llama", "tokens": PIECES, "scores": [0.0] * 8, "token_type": [2, 3, 3, 1, 1, 1, 1, 1]}


def gguf(keys=(), words=(), tensors=(), rows=8):
    """A file of llama's architecture whose numbers are 0.01, with these changes."""
    metadata = {"general.architecture": "llama", **{f"llama.{key}": value for key, value in SIZES.items()}}
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in {**WORDS, **dict(words)}.items() if value is not None}
    metadata = {key: value for key, value in {**metadata, **dict(keys)}.items() if value is not None}
    shapes = {"token_embd.weight": (rows, 32), "output_norm.weight": (32,)}
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        shapes[f"blk.0.{name}.weight"] = (32, 32)
    shapes |= {"blk.0.attn_norm.weight": (32,), "blk.0.ffn_norm.weight": (32,)}
    shapes |= dict(tensors)
    at, infos, size = 0, b"", 0
    for name, shape in shapes.items():
        infos += text_of(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), 0, at)
        size = 4 * functools.reduce(int.__mul__, shape, 1) if name not in dict(tensors) else 0
        at += size
    head = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(metadata))
    head += b"".join(text_of(key) + typed(value) for key, value in metadata.items()) + infos
    return head + bytes(-len(head) % 32) + struct.pack("<f", 0.01) * (at // 4)


def safetensors(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def in_list(count, depth):
    """A list in a list in a list ..."""
    return struct.pack("<I", 9) + struct.pack("<IQ", 9, count) * depth + struct.pack("<IQ", 4, 0)


TENSOR = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
# name of the file: (bytes, what the page says)
CRAFTED = {
    "good.gguf": (gguf(), "GGUF, llama: 1 layers"),
    "more-rows-than-pieces.gguf": (gguf({"llama.vocab_size": 4000}, rows=4000), "GGUF, llama"),
    "align0.gguf": (gguf({"general.alignment": 0}), "general.alignment"),
    "align-text.gguf": (gguf({"general.alignment": NAME}), "general.alignment"),
    "huge.gguf": (gguf({"general.alignment": 0}, tensors={"token_embd.weight": (1 << 40, 32)}), "general.alignment"),
    "prototype.gguf": (gguf({"general.architecture": "constructor"}), "general.architecture"),
    "proto.gguf": (gguf({"general.architecture": "__proto__", "__proto__": ["a"]}), "general.architecture"),
    "pre.gguf": (gguf(words={"model": "gpt2", "pre": "constructor", "merges": ["a b"]}), "no tokenizer"),
    "deep.gguf": (gguf({"x": in_list(1, 100_000)}), "lists in lists"),
    "wide.gguf": (gguf({"x": struct.pack("<IIQ", 9, 4, 1 << 60)}), "damaged or cut off"),
    "no-eps.gguf": (gguf({"llama.attention.layer_norm_rms_epsilon": None}), "eps"),
    "text-eps.gguf": (gguf({"llama.attention.layer_norm_rms_epsilon": NAME}), "eps"),
    "nan-theta.gguf": (gguf({"llama.rope.freq_base": float("nan")}), "theta"),
    "ends.gguf": (gguf({"tokenizer.ggml.eos_token_id": [1, 2]}), "eos_token_id"),
    "empty-piece.gguf": (
        gguf(words={"tokens": ["<unk>", "<s>", "", *PIECES[3:]], "token_type": [2, 3, 4, *[1] * 5]}),
        "GGUF",
    ),
    "empty-control.gguf": (gguf(words={"tokens": ["", "", "</s>", *PIECES[3:]]}), "GGUF, llama"),
    "no-control.gguf": (gguf(words={"token_type": [1] * 8}), "GGUF, llama"),
    "numbers.gguf": (gguf(words={"tokens": [1, 2, 3]}), "tokens: expected a list of texts"),
    "text.gguf": (gguf(words={"tokens": NAME}), "tokens: expected a list of texts"),
    "scores.gguf": (gguf(words={"scores": [0.0]}), "1 scores or types for 8 tokens"),
    "no-scores.gguf": (gguf(words={"scores": None}), "no tokenizer"),
    "types.gguf": (gguf(words={"token_type": NAME}), "token_type: expected a list of numbers"),
    "merges.gguf": (gguf(words={"model": "gpt2", "pre": "qwen2", "merges": NAME}), "merges: expected a list of texts"),
    "bos.gguf": (gguf(words={"bos_token_id": [1]}), "bos_token_id"),
    "long-piece.gguf": (gguf(words={"tokens": [*PIECES[:7], "x" * 5_000_000]}), "token 7 has 5000000 characters"),
    "pieces.gguf": (gguf(words={"tokens": [*HOSTILE[:3], *PIECES[3:]]}), "GGUF, llama"),
    "name.gguf": (gguf(tensors={"x" * 1_000_000: (1,)}), "name.gguf: xxx"),
    "html.gguf": (gguf(tensors={NAME: (1,)}), "goes beyond the end of the file"),
    "rank5.gguf": (gguf(tensors={"y": (1, 1, 1, 1, 1)}), "y: goes beyond the end of the file"),
    "null.safetensors": (safetensors(b"null"), "is not a safetensors file"),
    "list.safetensors": (safetensors([1]), "is not a safetensors file"),
    "metadata.safetensors": (safetensors({"__metadata__": None}), "__metadata__: expected an object"),
    "tensor.safetensors": (safetensors({NAME: None}), "expected an object, got null"),
    "shape.safetensors": (safetensors({"x": {**TENSOR, "shape": "1"}}, bytes(4)), "expected a list of whole numbers"),
    "minus.safetensors": (safetensors({"x": {**TENSOR, "shape": [-1, -1]}}, bytes(4)), "expected a list of whole"),
    "texts.safetensors": (
        safetensors({"x": {**TENSOR, "data_offsets": ["0", "4"]}}, bytes(4)),
        "expected a list of whole",
    ),
    "three.safetensors": (safetensors({"x": {**TENSOR, "data_offsets": [0, 4, 4]}}, bytes(4)), "bytes 0 to 4"),
    "dtype.safetensors": (safetensors({"x": {**TENSOR, "dtype": "constructor"}}, bytes(4)), "does not read"),
    "html.safetensors": (safetensors({"x": {**TENSOR, "dtype": {"a": NAME}}}, bytes(4)), "does not read"),
    "deep.safetensors": (safetensors(b'{"a":' * 600_000), "is not JSON"),
    "x.bitnet.safetensors": (safetensors({"__metadata__": {"format": NAME}}), "expected a native file"),
}
CONFIG = {"format": "bitnet_ref", "format_version": "2"}
for name, own in {
    "none": "null",
    "text": NAME,
    "empty": "{}",
    "rope": '{"model_type": "bitnet", "rope": null}',
}.items():
    CRAFTED[f"{name}.bitnet.safetensors"] = (safetensors({"__metadata__": {**CONFIG, "config": own}}), ": ")


@pytest.mark.thorough
def test_crafted_files(address, tmp_path):
    """Each was a hang, a loop that eats memory, an error of JavaScript, or another text, before the page checked it."""
    with Chromium() as browser:
        own = OwnModel(browser, address)
        for name, (data, words) in CRAFTED.items():
            (tmp_path / name).write_bytes(data)
            facts, text = own.use([tmp_path / name])
            assert words in facts, (name, facts)
            own.check(facts, text)
            (tmp_path / name).unlink()
    assert own.bytes_taken < own.first_bytes + (400 << 20)


# -- mutants -----------------------------------------------------------------------------------------------------------


def mutate_folder(dice, folder):
    """A folder of the hub: storyteller with its tokenizer.model, or small ones; any of its files is changed."""
    names = ("bitnet-bf16-online", "bitnet-packed-offline", "llama-packed-bitlinear", "llama-packed-skips")
    source = dice.choice([STORY, *(GOLDEN / name for name in names)])
    files = [
        path for path in source.iterdir() if path.suffix in (".json", ".model") or path.name == "model.safetensors"
    ]
    for path in files:
        shutil.copy(path, folder)
    if source != STORY and dice.randrange(2):
        pieces = dict.fromkeys([*map(chr, range(33, 127)), *HOSTILE, "\u0120a"])
        model = {
            "type": "BPE",
            "vocab": {piece: id for id, piece in enumerate(pieces)},
            "merges": ["\u0120 a", ["a", "b"]],
        }
        added = [{"id": 5, "content": NAME, "special": True}]
        whole = {"model": model, "added_tokens": added, "pre_tokenizer": {"type": "ByteLevel"}, "normalizer": None}
        (folder / "tokenizer.json").write_text(json.dumps(whole))
    path = dice.choice(sorted(folder.iterdir()))
    data = path.read_bytes()
    if path.suffix == ".json":
        path.write_bytes(mutate_json(dice, data))
    elif path.suffix == ".safetensors":
        path.write_bytes(mutate_safetensors(dice, data))
    else:
        path.write_bytes(dice.choice([flip_bytes, truncate, insert_bytes, cut_out])(dice, data))


def mutate_crafted(dice, folder):
    """A small GGUF with hostile values of its own names and words."""
    values = [*HOSTILE, 0, -1, 1 << 30, 1.5, float("nan"), True, [], [0], ["a"], HOSTILE[:8], [0.5] * 8, None]
    keys = [f"llama.{key}" for key in SIZES] + ["general.alignment", "general.architecture", "general.name"]
    words = [*WORDS, "merges", "pre", "bos_token_id", "eos_token_id", "add_bos_token"]
    metadata = {dice.choice(keys): dice.choice(values) for _ in range(dice.randrange(3))}
    changed = {dice.choice(words): dice.choice(values) for _ in range(dice.randrange(3))}
    tensors = {dice.choice(HOSTILE[:10]): (1,) for _ in range(dice.randrange(4) == 0)}
    data = gguf(metadata, changed, tensors)
    if dice.randrange(3) == 0:
        head = data[:3000]
        data = dice.choice([flip_bytes, truncate, insert_bytes, cut_out])(dice, head) + data[3000:]
    (folder / "model.gguf").write_bytes(data)


MUTATORS = {"gguf": mutate_gguf, "native": mutate_native, "folder": mutate_folder, "crafted": mutate_crafted}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MUTATORS)
def test_mutated_files(kind, address, tmp_path):
    count = 150
    outcomes, folder = Counter(), tmp_path / "files"
    with Chromium() as browser:
        own = OwnModel(browser, address)
        for seed in range(count):
            dice = random.Random(f"page {kind} {seed}")
            folder.mkdir()
            MUTATORS[kind](dice, folder)
            files = sorted(folder.iterdir())
            if dice.randrange(4) == 0:  # with a hostile name
                name = dice.choice(HOSTILE[:7]).replace("/", "\u2215") + "".join(files[-1].suffixes[-2:])
                files[-1] = files[-1].rename(folder / name)
            try:
                facts, text = own.use([path for path in files if path.suffix != ".ini"])
                own.check(facts, text)
            except AssertionError as error:
                raise AssertionError(f"{kind} {seed}: {error}") from error
            finished = text is not None and "problem" not in own.page.run("$('own-facts').className")
            outcomes["wrote" if finished else "stopped" if text is not None else "refused"] += 1
            shutil.rmtree(folder)
    print(f"\n{kind}: {dict(outcomes)} of {count}, {(own.bytes_taken - own.first_bytes) >> 20} MiB")
    assert min(outcomes["wrote"], outcomes["refused"]) > count // 20
