"""A GGUF vocabulary of the model "gpt2" (byte-level BPE) <-> tokenizer.json.

A GGUF only names the pre-tokenizer, which cuts a text before merging: `tokenizer.ggml.pre`. The patterns here are those
of the tokenizer.json files that the names stand for.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..errors import TokenizerError
from ..system.json_file import parse_json_object
from .base import Tokenizer
from .gguf_keys import PREFIX, GgufVocabulary
from .hf_limits import read_steps
from .hf_tokenizer import HfTokenizer
from .regex_cost import DEEPSEEK_V3, GPT2, LLAMA3, QWEN2, QWEN35
from .sentencepiece_model import CONTROL, NORMAL, UNUSED, USER_DEFINED

log = logging.getLogger(__name__)

_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_DIGITS = (r"\p{N}", GPT2)
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", GPT2.removesuffix(r"|\s+"), "[0-9][0-9][0-9]")
# Letters with a case, as DeepSeek's tokenizer.json lists them.
_CASED = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-"
    "\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-"
    "\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-"
    "\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-"
    "\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2"
    "\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-"
    "\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80"
    "-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_MARKS = "[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_DEEPSEEK = (r"[\r\n]", rf"\s?[{_CASED}]+", rf"\s?{_MARKS}", r"\s+$", _CJK, r"\p{N}+")
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
_GEMMA4 = (r"[^\n]+|[\n]+",)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_MINICPM5 = (r"\p{N}{1,3}", LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}+"))

# pre -> (patterns, applied in order; ignore_merges: a whole piece that is a token is not merged; BOS by default).
# Of names with the same meaning, the first is written.
_PRE: dict[str, tuple[tuple[str, ...], bool, bool]] = {
    "llama-bpe": ((LLAMA3,), True, True),
    **dict.fromkeys(("llama3", "llama-v3", "falcon3", "falcon_e", "falcon-h1"), ((LLAMA3,), True, True)),
    **dict.fromkeys(("pixtral", "midm-2.0", "lfm2", "jina-v5-nano"), ((LLAMA3,), True, True)),
    **dict.fromkeys(("smaug-bpe", "dbrx", "glm4", "chatglm-bpe"), ((LLAMA3,), False, False)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), ((QWEN2,), False, False)),
    **dict.fromkeys(("kormo", "f2llmv2", "megrez", "hunyuan", "solar-open", "grok-2"), ((QWEN2,), False, False)),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling"), ((GPT2,), False, False)),
    **dict.fromkeys(("gigachat", "a.x-4.0", "mellum", "modern-bert", "exaone4"), ((GPT2,), False, False)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), (_DIGITS, False, False)),
    **dict.fromkeys(("exaone", "minerva-7b", "mellum2"), (_DIGITS, False, False)),
    "tekken": (_TEKKEN, True, True),
    "minicpm5": (_MINICPM5, True, False),
    "qwen35": ((QWEN35,), False, False),
    "falcon": (_FALCON, False, False),
    "deepseek-llm": (_DEEPSEEK, False, False),
    "deepseek-coder": (_DEEPSEEK_CODER, False, False),
    **dict.fromkeys(("hunyuan-dense", "deepseek-v3", "joyai-llm", "hy_v4"), (DEEPSEEK_V3, False, False)),
    "default": (_DEFAULT, False, False),
}
SPACE = "\u2581"  # SentencePiece's
_PIECES_TO_TEXT = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ],
}
_LLAMA3_SIZE = 128256  # of Llama 3's vocabulary, which BitNet 2B-4T uses; its published GGUF has no `pre`


def adds_bos(vocabulary: GgufVocabulary) -> bool:
    """Whether llama.cpp puts BOS before a text when the file does not say it."""
    return vocabulary.model in ("llama", "gemma4") or _PRE[_pre(vocabulary)][2]


def json_from_bpe(vocabulary: GgufVocabulary, named: Iterable[int], bos: int | None, eos: int | None) -> bytes:
    """tokenizer.json. named: ids of special tokens, which are control tokens when the file has no token types.
    bos, eos: the ids around a text."""
    in_bytes = vocabulary.model == "gpt2"  # gemma4's tokens are texts, with SentencePiece's sign for a space
    patterns, ignore_merges, _ = _PRE[_pre(vocabulary)] if in_bytes else (_GEMMA4, False, True)
    tokens, types = vocabulary.tokens, vocabulary.types
    if vocabulary.numbers("token_type", int, None) is None:
        special = set(named)
        types = [CONTROL if n in special else NORMAL for n in range(len(tokens))]
    added = [n for n, kind in enumerate(types) if kind in (CONTROL, USER_DEFINED)]
    known = [n for n, kind in enumerate(types) if kind not in (CONTROL, USER_DEFINED, UNUSED)]
    if added != list(range(len(known), len(known) + len(added))):
        # The library numbers a token that is not in the vocabulary after the last one, whatever the file says.
        known = [n for n, kind in enumerate(types) if kind != UNUSED]
    vocab = {tokens[n]: n for n in known}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    table = {
        "version": "1.0",
        **dict.fromkeys(("truncation", "padding")),
        "added_tokens": [{"id": n, "content": tokens[n], **flags, "special": types[n] == CONTROL} for n in added],
        "normalizer": None if in_bytes else {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        "pre_tokenizer": _pre_tokenizer(patterns, bool(vocabulary.flag("add_space_prefix")), in_bytes),
        "post_processor": _post_processor(tokens, bos, eos),
        "decoder": _byte_level(add_prefix_space=True, use_regex=True) if in_bytes else _PIECES_TO_TEXT,
        "model": {
            "type": "BPE",
            **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")),
            **dict.fromkeys(("fuse_unk", "byte_fallback"), not in_bytes),
            "ignore_merges": ignore_merges,
            "vocab": vocab,
            "merges": _merges(vocabulary, vocab),
        },
    }
    return json.dumps(table, ensure_ascii=False).encode("utf-8")


def _pre(vocabulary: GgufVocabulary) -> str:
    name = vocabulary.text("pre")
    if name is None and len(vocabulary.tokens) == _LLAMA3_SIZE:
        log.warning("%spre is missing; taking llama-bpe, whose vocabulary has these %d tokens", PREFIX, _LLAMA3_SIZE)
        return "llama-bpe"
    if name not in _PRE:
        got = "it is missing" if name is None else f"got {name[:40]!r}"
        raise TokenizerError(f"expected one of {', '.join(_PRE)}: {got}", field=PREFIX + "pre")
    return name


def _merges(vocabulary: GgufVocabulary, vocab: dict[str, int]) -> list[list[str]]:
    merges = []
    for n, line in enumerate(vocabulary.required("merges", vocabulary.strings("merges"))):
        at = line.find(" ", 1)  # a token may begin with a space
        left, right = (line[:at], line[at + 1 :]) if at > 0 else ("", "")
        if not (left in vocab and right in vocab and left + right in vocab):
            missing = next(part for part in (left, right, left + right) if part not in vocab)
            what = f"{missing[:40]!r} is not in the vocabulary" if left and right else "expected two tokens"
            raise TokenizerError(f"{line[:80]!r}: {what}", field=f"{PREFIX}merges[{n}]")
        merges.append([left, right])
    return merges


def _byte_level(add_prefix_space: bool, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": True, "use_regex": use_regex}


def _pre_tokenizer(patterns: tuple[str, ...], add_prefix_space: bool, in_bytes: bool = True) -> dict[str, Any]:
    if patterns == (GPT2,):
        return _byte_level(add_prefix_space, True)
    steps: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    ]
    last = [_byte_level(add_prefix_space, False)] if in_bytes else []
    return {"type": "Sequence", "pretokenizers": [*steps, *last]}


def _post_processor(tokens: list[str], bos: int | None, eos: int | None) -> dict[str, Any] | None:
    """BOS and EOS for other readers of the file; ours takes them from tokenizer_config.json."""
    ids = [n for n in (bos, eos) if n is not None]
    if not ids:
        return None

    def single(letter: str, kind: int) -> list[dict[str, Any]]:
        before, after = (
            [] if n is None else [{"SpecialToken": {"id": tokens[n], "type_id": kind}}] for n in (bos, eos)
        )
        return [*before, {"Sequence": {"id": letter, "type_id": kind}}, *after]

    return {
        "type": "TemplateProcessing",
        "single": single("A", 0),
        "pair": single("A", 0) + single("B", 1),
        "special_tokens": {tokens[n]: {"id": tokens[n], "ids": [n], "tokens": [tokens[n]]} for n in ids},
    }


def bpe_from_json(tokenizer: Tokenizer, data: bytes) -> dict[str, Any]:
    """The metadata of a byte-level tokenizer.json; an id without a token becomes an unused [PADn], as in llama.cpp."""
    assert isinstance(tokenizer, HfTokenizer)
    path = tokenizer.path or "tokenizer.json"
    table = parse_json_object(data, TokenizerError, path)
    model, decoder = table["model"], table.get("decoder") or {}
    normalizers = [step["type"] for _, step in read_steps(table.get("normalizer"), "normalizer")]
    if model.get("type", "BPE") != "BPE" or decoder.get("type") != "ByteLevel" or {*normalizers} - {"NFC"}:
        raise TokenizerError(
            "GGUF holds byte-level BPE without a normalizer, and this tokenizer.json is another kind; if it was made "
            "from a SentencePiece model, give that tokenizer.model",
            path=path,
            field="model",
        )
    if normalizers:  # of Qwen, which llama.cpp leaves out too
        log.warning("GGUF cannot hold that a text is normalized (NFC) first; it is left out")
    pre, prefix = _pre_of(table.get("pre_tokenizer"), bool(model.get("ignore_merges")), path)
    added = tokenizer._tokenizer.get_added_tokens_decoder()
    tokens, types = [], []
    for n in range(tokenizer.vocab_size):
        token = tokenizer._token(n)
        tokens.append(f"[PAD{n}]" if token is None else token)
        kind = USER_DEFINED if n in added else UNUSED if token is None else NORMAL
        types.append(CONTROL if tokenizer._is_special(n) else kind)
    merges = [line if isinstance(line, str) else " ".join(line) for line in model["merges"]]
    for n, line in enumerate(merges):
        if line.count(" ") != 1:  # a token with a space, which is not in the byte alphabet
            raise TokenizerError(f"{line[:80]!r} cannot be written into a GGUF", path=path, field=f"model.merges[{n}]")
    return {
        PREFIX + "model": "gpt2",
        PREFIX + "pre": pre,
        PREFIX + "tokens": tokens,
        PREFIX + "token_type": np.array(types, dtype=np.int32),
        PREFIX + "merges": merges,
        PREFIX + "add_space_prefix": prefix,
    }


def _pre_of(pre_tokenizer: Any, ignore_merges: bool, path: Any) -> tuple[str, bool]:
    """llama.cpp's name for a pre-tokenizer, and whether it puts a space before the text."""
    inner = pre_tokenizer or {}
    steps = inner["pretokenizers"] if inner.get("type") == "Sequence" else [inner]
    last = steps[-1] if steps else {}
    patterns = []
    for step in steps[:-1]:
        pattern = step.get("pattern", {}).get("Regex") if step.get("type") == "Split" else None
        plain = step.get("behavior") == "Isolated" and not step.get("invert")
        patterns.append(pattern if plain else None)
    if last.get("use_regex", True):
        patterns.append(GPT2)
    if last.get("type") == "ByteLevel":
        for name, (known, ignores, _) in _PRE.items():
            if list(known) == patterns and ignores == ignore_merges:
                return name, bool(last.get("add_prefix_space"))
    kind = f"this pre-tokenizer (with ignore_merges {str(ignore_merges).lower()})"
    raise TokenizerError(f"GGUF has no name for {kind}; it knows {', '.join(_PRE)}", path=path, field="pre_tokenizer")
