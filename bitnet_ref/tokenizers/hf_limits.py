"""How much the steps of a tokenizer.json may do: how far they lengthen a text, and how long its model may search.

The library bounds neither, and aborts the process when memory ends. So each step of the normalizer, the pre-tokenizer
and the decoder has a factor here: the maximum bytes that it makes of one byte, or of the start of a segment. A file
whose factors multiply to too much is refused when it is loaded; so is a step of a kind that is not listed. A text that
would become too long is refused before the library sees it. `regex_cost` bounds the regular expressions.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import TokenizerError
from .files import check_type, read_prefixes
from .regex_cost import SearchLimit
from .sentencepiece_model import charsmap_growth

MAX_STEPS = 64  # of a normalizer, pre-tokenizer or decoder; published ones have under 12
MAX_GROWTH = {"normalizer": 1 << 15, "pre_tokenizer": 64, "decoder": 64}  # the largest published: about 6,000, 8 and 3
_SPARE_BYTES, _BYTES_PER_BYTE = 1 << 23, 16  # what a normalized text may have
_MAX_AFFIX_BYTES = 64  # of a prefix or suffix that the model writes at pieces
_MAX_WORD = 200  # characters; WordPiece looks up every part of a word, and BERT's limit is 100
_INNER = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}
_FACTORS: dict[str, dict[str, int]] = {  # 0: computed from the step's fields. Unicode's forms make 11 bytes of one
    "normalizer": {
        "Nmt": 1,
        "Strip": 1,
        "StripAccents": 1,
        "Lowercase": 2,
        "ByteLevel": 2,
        "BertNormalizer": 12,
        "NFC": 3,
        "NFD": 3,
        "NFKC": 11,
        "NFKD": 11,
        "Precompiled": 0,
        "Prepend": 0,
        "Replace": 0,
    },
    "pre_tokenizer": {
        **dict.fromkeys(("BertPreTokenizer", "CharDelimiterSplit", "Digits", "FixedLength", "Punctuation"), 1),
        **dict.fromkeys(("Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit"), 1),
        "ByteLevel": 4,
        "Metaspace": 8,  # these also put a character before each piece
    },
    "decoder": {
        "ByteFallback": 1,
        "Fuse": 1,
        "Metaspace": 1,
        "Strip": 1,
        "ByteLevel": 3,
        "Replace": 0,
        "BPEDecoder": 3,
        "CTC": 3,
        "WordPiece": 2,
    },
}


@dataclass
class _Step:
    field: str
    json: dict[str, Any]
    factor: int
    search: SearchLimit | None
    old: str = ""  # of a Replace, without a regular expression
    new_bytes: int = 0
    added: int = 0  # bytes that it may add to each segment of a text, of the factor


def read_steps(part: Any, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(field, step) of a normalizer, pre_tokenizer or decoder, also inside Sequences. Raises TokenizerError for a kind
    that is not known: the library takes a step without a type for anything that its other fields fit."""
    todo = [] if part is None else [(name, part)]
    while todo:
        field, step = todo.pop()
        kind = check_type(step, dict, field).get("type")
        if kind == "Sequence":
            inner = check_type(step.get(_INNER[name]), list, f"{field}.{_INNER[name]}")
            todo += [(f"{field}.{_INNER[name]}[{n}]", inner[n]) for n in reversed(range(len(inner)))]
        elif not isinstance(kind, str) or kind not in _FACTORS[name]:
            raise TokenizerError(f"{kind!r:.60} is no kind of {name} that is known here", field=f"{field}.type")
        else:
            yield field, step


class TextLimits:
    """The limits of one tokenizer.json: checked for the file when it is loaded, then for each text."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        """Raises TokenizerError naming the step that makes too much, or what makes the model slow."""
        self.growth = dict.fromkeys(MAX_GROWTH, 1)
        steps: dict[str, list[_Step]] = {name: [] for name in MAX_GROWTH}
        for name, limit in MAX_GROWTH.items():
            for field, raw in read_steps(table.get(name), name):
                step = _measure_step(name, field, raw)
                steps[name].append(step)
                self.growth[name] *= step.factor
                if len(steps[name]) > MAX_STEPS:
                    raise TokenizerError(f"has more than {MAX_STEPS} steps", field=name)
                if self.growth[name] > limit:
                    message = (
                        f"{raw['type']}: with the steps before it, it makes up to {self.growth[name]} bytes of one"
                    )
                    raise TokenizerError(f"{message}, and at most {limit} are accepted", field=field)
                if name == "decoder" and step.search is not None and step.search.degree:
                    raise TokenizerError("this regular expression may take too long", field=field)
        self._normalizer = steps["normalizer"]
        self._searches = [step.search for step in steps["pre_tokenizer"] if step.search is not None]
        rewrites = [step.factor > 1 for step in steps["pre_tokenizer"]]
        self._cut_as_read = not any(rewrites[:-1])  # the patterns see the normalized text, not a rewritten one
        self._all_searches = self._searches + [step.search for step in self._normalizer if step.search is not None]
        _check_model(table["model"])

    def check_text(self, text: str, field: str | None = None) -> None:
        """Raise TokenizerError for a text that would become too long, or take too long to cut."""
        size = len(text.encode("utf-8"))
        limit, longest = _SPARE_BYTES + _BYTES_PER_BYTE * size, self.growth["normalizer"] * (size + 1)
        if longest <= limit and all(search.is_cheap(longest) for search in self._all_searches):
            return
        unseen = 0  # bytes that the library adds at segments of the text, where here the text is one
        for step in self._normalizer:
            if step.search is not None:
                step.search.check(text)
            before = len(text.encode("utf-8"))
            if step.old:
                growth, accepted = step.new_bytes - len(step.old.encode("utf-8")), limit
                after = before + text.count(step.old) * growth
            else:
                after, accepted = step.factor * before, 4 * limit
            if after <= accepted:
                text = _normalize(step, text)
                after = len(text.encode("utf-8"))
            unseen = step.factor * unseen + step.added * size // 2
            if after + unseen > limit:
                message = f"{step.json['type']} would make more than {limit} bytes of a text of {size}"
                raise TokenizerError(message, field=field or step.field)
        for search in self._searches:
            if self._cut_as_read:
                search.check(text)
            elif not search.is_cheap(len(text)):
                search.refuse(text)


def _normalize(step: _Step, text: str) -> str:
    from tokenizers import normalizers

    normalizer = normalizers.NFC()
    normalizer.__setstate__(json.dumps(step.json).encode())  # the library's way to read one from JSON
    return normalizer.normalize_str(text)


def _measure_step(name: str, field: str, step: dict[str, Any]) -> _Step:
    kind, pattern = step["type"], step.get("pattern")
    table = pattern if isinstance(pattern, dict) else {}
    regex = table.get("Regex")
    search = None if regex is None else SearchLimit(check_type(regex, str, f"{field}.pattern.Regex"), field)
    measured = _Step(field, step, _FACTORS[name][kind], search)
    if kind == "Prepend":
        measured.added = _bytes_of(step, "prepend", field)
        measured.factor = 1 + measured.added
    elif kind == "Replace":
        measured.new_bytes = _bytes_of(step, "content", field)
        if table.get("String"):
            measured.old = check_type(table["String"], str, f"{field}.pattern.String")
            measured.factor = max(1, -(-measured.new_bytes // len(measured.old.encode("utf-8"))))
        else:  # it may match nothing, which is everywhere
            measured.added, measured.factor = measured.new_bytes, 1 + 2 * measured.new_bytes
    elif kind == "Precompiled":
        measured.factor = charsmap_growth(_charsmap(step, f"{field}.precompiled_charsmap"))
    return measured


def _bytes_of(step: dict[str, Any], key: str, field: str) -> int:
    return len(check_type(step.get(key), str, f"{field}.{key}").encode("utf-8"))


def _charsmap(step: dict[str, Any], field: str) -> bytes:
    try:
        return base64.b64decode(check_type(step.get("precompiled_charsmap"), str, field), validate=True)
    except ValueError as error:  # binascii.Error, or characters beyond ASCII
        raise TokenizerError(f"is not base64: {error}", field=field) from error


def _check_model(model: Mapping[str, Any]) -> None:
    """Refuse settings and vocabularies that take the library far longer for a character than published ones do."""
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        affix = model.get(key)
        if affix is not None and len(check_type(affix, str, f"model.{key}").encode("utf-8")) > _MAX_AFFIX_BYTES:
            raise TokenizerError(f"has more than {_MAX_AFFIX_BYTES} bytes", field=f"model.{key}")
    word = model.get("max_input_chars_per_word")
    if word is not None and check_type(word, int, "model.max_input_chars_per_word") > _MAX_WORD:
        raise TokenizerError(f"expected at most {_MAX_WORD}, got {word}", field="model.max_input_chars_per_word")
    if isinstance(model["vocab"], list):
        read_prefixes((entry[0] for entry in model["vocab"] if len(entry[0]) > 16), "model.vocab")
