"""The parts of a SentencePiece model file that decoding and GGUF need, read straight from its protobuf wire format.

Not a protobuf library: it reads the few fields named below, skips all others, and trusts no length. It runs before the
C++ library reads the file, so that a damaged file is reported with the offset of the damage.
Source: `sentencepiece_model.proto` of google/sentencepiece.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ..errors import TokenizerError, errors_at
from .files import AnyPath

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # ModelProto.SentencePiece.Type
UNIGRAM, BPE = 1, 2  # TrainerSpec.ModelType
MAX_PIECES = 1_000_000
MAX_CHARSMAP_BYTES = 64  # Unicode's compatibility forms make at most 33 bytes of a character
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types
# NormalizerSpec: field number -> attribute of SentencePieceModel
_NORMALIZER_FLAGS = {3: "add_dummy_prefix", 4: "remove_extra_whitespaces", 5: "escape_whitespaces"}
BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")

# `normalizer_spec { add_dummy_prefix: false }`: protobuf merges a message that is written twice, so a model with this
# appended is the same model, without the space in front of the text.
NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"


@dataclass
class SentencePieceModel:
    """Piece texts, their scores and types, and how spaces are treated."""

    pieces: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    model_type: int = UNIGRAM
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    escape_whitespaces: bool = True
    charsmap: bytes = b""  # the normalizer's precompiled_charsmap

    def piece_bytes(self, n: int) -> bytes:
        """The bytes that piece `n` stands for: a byte piece's byte, else its text with real spaces."""
        if self.types[n] == BYTE:
            return bytes([int(self.pieces[n][3:5], 16)])
        return self.pieces[n].replace("\u2581", " ").encode("utf-8")


def read_model(data: bytes, path: AnyPath) -> SentencePieceModel:
    """Read a serialized ModelProto. Raises TokenizerError with the byte offset of the first thing that is wrong."""
    with errors_at(path):
        model = SentencePieceModel()
        for number, wire, start, length in _fields(data, 0, len(data)):
            if number not in (1, 2, 3, 5):
                continue
            if wire != _BYTES:
                raise TokenizerError("not a SentencePiece model: a message is missing", offset=start)
            if number == 1:
                _read_piece(model, data, start, start + length)
                continue
            for inner, inner_wire, where, value in _fields(data, start, start + length):
                if number == 3 and inner == 2 and inner_wire == _BYTES:
                    model.charsmap = data[where : where + value]
                elif number == 3 and inner in _NORMALIZER_FLAGS and inner_wire == _VARINT:
                    setattr(model, _NORMALIZER_FLAGS[inner], bool(value))
                elif number == 2 and inner == 3 and inner_wire == _VARINT:
                    model.model_type = value
                elif number == 2 and inner == 24 and inner_wire == _VARINT and value:
                    raise TokenizerError("treat_whitespace_as_suffix is not supported", offset=where)
                elif number == 5 and inner == 2 and value:  # its precompiled_charsmap
                    raise TokenizerError("a denormalizer is not supported", offset=where)
        if (growth := charsmap_growth(model.charsmap)) > MAX_CHARSMAP_BYTES:
            message = f"makes {growth} bytes of one character, and at most {MAX_CHARSMAP_BYTES} are accepted"
            raise TokenizerError(message, field="normalizer_spec.precompiled_charsmap")
        if not model.pieces:
            raise TokenizerError("not a SentencePiece model: it has no pieces")
        if len(set(model.pieces)) != len(model.pieces):
            seen: dict[str, int] = {}
            n = next(n for n, text in enumerate(model.pieces) if seen.setdefault(text, n) != n)
            raise TokenizerError(f"{model.pieces[n][:40]!r} stands twice", field=f"pieces[{n}]")
        return model


def charsmap_growth(charsmap: bytes) -> int:
    """The maximum bytes that a charsmap makes of a character: its longest text, of those after its trie."""
    start = 4 + int.from_bytes(charsmap[:4], "little")
    return max(1, *map(len, charsmap[start:].split(b"\0")))


def _read_piece(model: SentencePieceModel, data: bytes, start: int, end: int) -> None:
    text, score, kind, n = "", 0.0, NORMAL, len(model.pieces)
    field = f"pieces[{n}]"
    if n == MAX_PIECES:
        raise TokenizerError(f"has more than {MAX_PIECES} pieces", offset=start)
    for number, wire, where, value in _fields(data, start, end):
        if number == 1 and wire == _BYTES:
            try:
                text = data[where : where + value].decode("utf-8")
            except UnicodeDecodeError as error:
                raise TokenizerError("a piece is not UTF-8", offset=where + error.start, field=field) from error
        elif number == 2 and wire == _FIXED32:
            score = struct.unpack("<f", struct.pack("<I", value))[0]
            if not math.isfinite(score):
                raise TokenizerError("a piece's score is not finite", offset=where, field=f"{field}.score")
        elif number == 3 and wire == _VARINT:
            kind = value
    if not text:
        raise TokenizerError("a piece is empty", offset=start, field=field)
    if not NORMAL <= kind <= BYTE:
        raise TokenizerError(f"{kind} is no piece type", offset=start, field=f"{field}.type")
    if kind == BYTE and not BYTE_PIECE.fullmatch(text):
        message = f"a byte piece must be written <0x00> to <0xFF>, got {text[:40]!r}"
        raise TokenizerError(message, offset=start, field=field)
    model.pieces.append(text)
    model.scores.append(score)
    model.types.append(kind)


def _fields(data: bytes, pos: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """(field number, wire type, offset of the value, value) of a message; for bytes the value is their length."""
    while pos < end:
        # Nearly all integers have one byte: calling _varint for each would take half the time of a vocabulary.
        key, pos = (data[pos], pos + 1) if data[pos] < 0x80 else _varint(data, pos, end)
        number, wire = key >> 3, key & 7
        if number == 0 or wire not in (_VARINT, _FIXED64, _BYTES, _FIXED32):
            raise TokenizerError(f"not a SentencePiece model: bad field tag {key}", offset=pos)
        where = pos
        if wire in (_VARINT, _BYTES):
            value, pos = (data[pos], pos + 1) if pos < end and data[pos] < 0x80 else _varint(data, pos, end)
            if wire == _BYTES:
                where, pos = pos, pos + value
        else:
            width = 4 if wire == _FIXED32 else 8
            value, pos = int.from_bytes(data[pos : pos + width], "little"), pos + width
        if pos > end:
            raise TokenizerError("truncated: a field runs past its end", offset=where)
        yield number, wire, where, value


def _varint(data: bytes, pos: int, end: int) -> tuple[int, int]:
    """A little-endian base-128 integer of at most 10 bytes, and the offset after it."""
    value, first = 0, pos
    for shift in range(0, 70, 7):
        if pos >= end:
            raise TokenizerError("truncated inside an integer", offset=first)
        byte = data[pos]
        pos += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, pos
    raise TokenizerError("not a SentencePiece model: an integer of more than 10 bytes", offset=first)


def write_model(model: SentencePieceModel, specials: Mapping[str, int]) -> bytes:
    """The ModelProto of a model. specials: "unk", "bos", "eos" and "pad" -> id, for those that exist.

    Fields that `read_model` does not read (training options, self-test) are left out; encoding needs none of them.
    """
    pieces = b"".join(
        _message(1, _message(1, text.encode("utf-8")) + b"\x15" + struct.pack("<f", score) + _number(3, kind))
        for text, score, kind in zip(model.pieces, model.scores, model.types, strict=True)
    )
    trainer = _number(3, model.model_type) + _number(4, len(model.pieces)) + _number(35, int(BYTE in model.types))
    for n, name in enumerate(("unk", "bos", "eos", "pad")):
        number = specials.get(name, -1)
        trainer += _number(40 + n, number)
        if number >= 0:
            trainer += _message(45 + n, model.pieces[number].encode("utf-8"))
    normalizer = _message(1, b"custom" if model.charsmap else b"identity") + _message(2, model.charsmap)
    normalizer += _number(3, model.add_dummy_prefix) + _number(4, model.remove_extra_whitespaces)
    return pieces + _message(2, trainer) + _message(3, normalizer + _number(5, model.escape_whitespaces))


def _message(number: int, payload: bytes) -> bytes:
    return _encoded(number << 3 | _BYTES) + _encoded(len(payload)) + payload


def _number(number: int, value: int) -> bytes:
    return _encoded(number << 3 | _VARINT) + _encoded(value & (1 << 64) - 1)


def _encoded(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
