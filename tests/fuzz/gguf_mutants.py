"""Small GGUFs of every kind, with and without a vocabulary, and mutations: well-formed but other, and damaged."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from pathlib import Path

from checkpoint_mutants import base
from helpers import BITNET, TINY, tiny_tensors, write_checkpoint
from json_mutants import cut_out, flip_bytes, insert_bytes, poison, truncate

from bitnet_ref.formats.gguf.export import TensorToWrite, write_gguf, write_gguf_model
from bitnet_ref.formats.gguf.file import ARRAY, SCALARS, STRING, GgufFile, Typed
from bitnet_ref.formats.open import open_checkpoint

GGUF_FILE = "model.gguf"
GGUF_KINDS = ("i2_s", "tq1_0", "tq2_0", "tl1", "tl2", "f16", "f32", "q8_0")
TILES_FILE = "kernel_config.ini"
TILES = {"tl1": (128, 64, 32), "tl2": (128, 192, 32)}
VOCAB = 320
HOSTILE_TYPED: list[Typed] = [
    *(Typed("uint32", n) for n in (0, 1, 2, 3, 7, 255, 2**20, 2**31, 2**32 - 1)),
    *(Typed("uint64", n) for n in (0, 4, 2**40, 2**63, 2**64 - 1)),
    *(Typed("int32", n) for n in (-1, -(2**31), 5)),
    *(Typed("float32", x) for x in (0.0, -1.0, 1e-38, 1e30, float("nan"), float("inf"), 0.5)),
    *(
        Typed("string", x)
        for x in ("", "llama", "bitnet", "bitnet-25", "bitnet-b1.58", "yarn", "linear", "\0", "x" * 999)
    ),
    *(Typed("bool", True), Typed("[uint32]", []), Typed("[uint32]", [1, 2]), Typed("[float32]", [1.0])),
    *(Typed("[string]", ["a", "<|eot_id|>"]), Typed("[string]", ["x"] * 50), Typed("[bool]", [True])),
]


def vocabulary(model: str) -> dict[str, Typed]:
    """A tokenizer's metadata for VOCAB tokens: SentencePiece with bytes, or byte-level BPE."""
    letters = [f"{a}{b}" for a in "abcdefgh\u2581" for b in "aeiou"]
    if model == "llama":
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        tokens += ["\u2581", *"abcdefgh", "\u2581a", "bc", *(f"\u2581{pair}" for pair in letters)]
        tokens = [*tokens[: VOCAB - 1], "<extra>"]
        types = [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 260) + [4]
        more = {"scores": Typed("[float32]", [-float(n) for n in range(len(tokens))])}
    else:
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        byte_letters = [chr(byte) for byte in printable] + [chr(256 + n) for n in range(256 - len(printable))]
        tokens = [*byte_letters, "th", "the", "\u0120the", "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
        types = [1] * (len(tokens) - 3) + [3] * 3
        more = {"merges": Typed("[string]", ["t h", "th e", "\u0120 the"]), "pre": Typed("string", "llama-bpe")}
    out = {"model": Typed("string", model), "tokens": Typed("[string]", tokens), "token_type": Typed("[int32]", types)}
    out |= more | {"bos_token_id": Typed("uint32", 1), "eos_token_id": Typed("uint32", 2)}
    out["add_bos_token"] = Typed("bool", True)
    named = {f"tokenizer.ggml.{key}": value for key, value in out.items()}
    return named | {"tokenizer.chat_template": Typed("string", "{% for m in messages %}{{ m.content }}{% endfor %}")}


def write_gguf_base(folder: Path, dice: random.Random) -> Path:
    kind, tokenizer = dice.choice(GGUF_KINDS), dice.choice([None, None, "llama", "gpt2"])
    dense = kind in ("f16", "f32", "q8_0") and dice.randrange(2) == 0
    scaling = dice.choice([None, {"type": "yarn", "factor": 4.0}, {"type": "linear", "factor": 2.0}]) if dense else None

    def make(folder: Path) -> None:
        width = 256 if kind in ("tq1_0", "tq2_0", *TILES) else 64  # whole blocks, and as little as that to read
        wide = {"hidden_size": width, "intermediate_size": width, "num_hidden_layers": 1, "rope_scaling": scaling}
        wide |= {"num_key_value_heads": 4} if kind in TILES else {}
        wide |= {"vocab_size": VOCAB} if tokenizer else {}
        config = {**(TINY if dense else BITNET), **wide}
        tiles = None
        if kind in TILES:
            tiles, (big_m, big_k, small_m) = folder / TILES_FILE, TILES[kind]
            tiles.write_text(f"[all]\nm = 256\nk = 256\nbm = {big_m}\nbk = {big_k}\nbmm = {small_m}\n")
        source = write_checkpoint(folder / "source", config, tiny_tensors(config))
        words = vocabulary(tokenizer) if tokenizer else None
        with open_checkpoint(source) as checkpoint:
            write_gguf_model(checkpoint, folder / GGUF_FILE, kind, tokenizer=words, tl_tiles=tiles)

    base(folder, ("gguf", kind, tokenizer, dense, str(scaling)), make)
    if dice.randrange(3) == 0:  # then the tile sizes are searched for
        (folder / TILES_FILE).unlink(missing_ok=True)
    return folder / GGUF_FILE


def change_gguf(dice: random.Random, path: Path) -> None:
    """Well-formed, but other: metadata replaced or dropped, tensors renamed, reshaped, retyped, dropped or cut."""
    with GgufFile(path) as file:
        typed = dict(file.typed)
        tensors = [[t.name, t.shape, t.type.name, file.read_raw(t.name)] for t in file.tensors.values()]
    for _ in range(dice.choice([1, 1, 1, 2, 4])):
        action, chosen = dice.randrange(11), dice.choice(tensors)
        key = dice.choice(list(typed))
        if action == 0:
            del typed[key]
        elif action <= 3:
            arch = typed.get("general.architecture", Typed("string", "llama")).value
            more = ("rope.scaling.type", "rope.scaling.factor", "attention.key_length", "attention.sliding_window")
            extra = [f"{arch}.{name}" for name in more]
            extra += ["tokenizer.ggml.tokens", "tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"]
            typed[dice.choice([key, key, *extra])] = dice.choice(HOSTILE_TYPED)
        elif action == 4:
            chosen[0] = dice.choice(
                ["x", "output.weight", "rope_freqs.weight", "blk.0.attn_q.scale", "blk.0.attn_q.bias"]
            )
        elif action == 5:
            chosen[1] = dice.choice(
                [chosen[1][::-1], (*chosen[1], 1), (chosen[3].size // 4,), (1, 256), (4, 64), (64, 256)]
            )
        elif action == 6:
            names = "F32 F16 BF16 F64 I8 I32 I2_S TQ1_0 TQ2_0 TL1 TL2/MXFP4 Q8_0 Q4_0 Q6_K Q4_K"
            chosen[2] = dice.choice(names.split())
        elif action == 7 and len(tensors) > 1:
            tensors.remove(chosen)
        elif action == 8:
            tensors.append([*chosen]) if dice.randrange(2) else dice.shuffle(tensors)
        elif action == 9:  # one element of an array
            lists = [name for name, value in typed.items() if value.type.startswith("[") and len(value.value)]
            if lists:
                key = dice.choice(lists)
                kind, elements = typed[key].type, list(typed[key].value)
                texts = [elements[0], "", "<0xZZ>", "<0x-1>", "a b", "\0", "x" * 3000, "\u2581\u2581"]
                numbers = [0, 1, 2, 3, 4, 5, 6, 7, -1] + [float("nan"), float("inf"), 1e30] * ("float" in kind)
                elements[dice.randrange(len(elements))] = dice.choice(texts if kind == "[string]" else numbers)
                if dice.randrange(3) == 0:
                    elements = elements[: dice.randrange(len(elements))]
                if "uint" not in kind or min(elements, default=0) >= 0:
                    typed[key] = Typed(kind, elements)
        else:
            at = dice.randrange(chosen[3].size)
            chosen[3] = chosen[3].copy()
            chosen[3][at] = dice.randrange(256)
            if dice.randrange(3) == 0:
                chosen[3][-64:] = dice.randrange(256)
    if typed.get("general.alignment") is not None:
        del typed["general.alignment"]  # not by this way: the writer refuses a wrong one
    written = [TensorToWrite(n, shape, kind, lambda d=d: d, d.size) for n, shape, kind, d in tensors]
    write_gguf(path, typed, written)


def numbers_of_header(data: bytes) -> Iterator[tuple[int, int]]:
    """(offset, bytes) of every count, length, type, dimension and offset in the header of a good file.

    ValueError, or an error of `struct`: it is none.
    """
    at = 4

    def number(size: int) -> tuple[int, int]:
        nonlocal at
        at += size
        if at > len(data):
            raise ValueError("the header goes on beyond the file")
        return at - size, size

    def text() -> Iterator[tuple[int, int]]:
        nonlocal at
        yield number(8)
        at += struct.unpack_from("<Q", data, at - 8)[0]

    def value(code: int) -> Iterator[tuple[int, int]]:
        nonlocal at
        if code == STRING:
            yield from text()
        else:
            yield number(struct.calcsize(SCALARS[code][1]))

    yield number(4)
    yield number(8)
    yield number(8)
    n_tensors, n_values = struct.unpack_from("<QQ", data, 8)
    for _ in range(n_values):
        yield from text()
        yield number(4)
        code, count = struct.unpack_from("<I", data, at - 4)[0], 1
        if code == ARRAY:
            yield number(4)
            yield number(8)
            code, count = struct.unpack_from("<IQ", data, at - 12)
        for _ in range(count):
            yield from value(code)
    for _ in range(n_tensors):
        yield from text()
        yield number(4)
        for _ in range(struct.unpack_from("<I", data, at - 4)[0]):
            yield number(8)
        yield number(4)
        yield number(8)


def change_numbers(dice: random.Random, data: bytes) -> bytes:
    """Some numbers of the header replaced by hostile ones, or by their neighbours."""
    out, numbers = bytearray(data), list(numbers_of_header(data))
    for _ in range(dice.choice([1, 1, 1, 2, 3])):
        at, size = dice.choice(numbers)
        old = int.from_bytes(data[at : at + size], "little")
        near = [old + 1, old - 1, old * 2, old ^ 32, old + 2**32]
        wild = [0, 1, 2, 8, 9, 2**16, 2**31, 2**32 - 1, 2**61, 2**62 + 8, 2**63, 2**64 - 1, 2**64 - 32, len(data)]
        new = dice.choice([dice.choice(near), dice.choice(wild)]) % 2 ** (8 * size)
        out[at : at + size] = new.to_bytes(size, "little")
    return bytes(out)


def mutate_gguf(dice: random.Random, folder: Path) -> Path:
    path = write_gguf_base(folder, dice)
    action = dice.randrange(11)
    if action <= 4:
        change_gguf(dice, path)
    data = path.read_bytes()
    if action == 5:  # in the header, mostly
        path.write_bytes(flip_bytes(dice, data, within=dice.choice([24, 700, 2000, 20000])))
    elif action == 6:
        path.write_bytes(dice.choice([truncate, insert_bytes, cut_out])(dice, data[:2500]) + data[2500:])
    elif action in (7, 8):
        path.write_bytes(change_numbers(dice, data))
    elif action == 9:
        path.write_bytes(truncate(dice, data) if dice.randrange(2) else flip_bytes(dice, data))
    elif action == 10:
        path.write_bytes(poison(dice, data, start=(len(data) // dice.choice([2, 20])) & ~1))
    return path
