"""What the small files beside a vocabulary say: special tokens, added tokens, BOS, stop tokens, chat template.

Sources: Hugging Face `tokenizer_config.json`, `special_tokens_map.json`, `added_tokens.json`, `generation_config.json`,
`config.json` and `chat_template.jinja`, as transformers 4 and 5 write and read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import TokenizerError
from .files import (
    MAX_CONFIG_BYTES,
    TokenizerFiles,
    check_unicode,
    optional,
    token_id,
    typed,
)


@dataclass(frozen=True)
class AddedToken:
    """A token that is found in the text before the model sees it, and what it eats around it.

    `id` is None when a file only names the token; it must then be in the vocabulary to count.
    """

    content: str
    id: int | None = None
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


@dataclass(frozen=True)
class TokenizerSettings:
    """Everything a tokenizer needs to know that is not in its vocabulary file. The default is "nothing was said"."""

    bos_token: str | None = None
    eos_token: str | None = None
    unk_token: str | None = None
    pad_token: str | None = None
    add_bos: bool | None = None  # None: not said; the vocabulary file or the tokenizer kind decides
    add_eos: bool | None = None
    legacy: bool = False  # SentencePiece: prefix every piece of text between special tokens, not only the first
    bos_id: int | None = None  # from generation_config.json or config.json: used when no bos_token is named
    pad_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    added_tokens: tuple[AddedToken, ...] = ()
    chat_template: str | None = None
    path: str | None = field(default=None, compare=False)  # the folder, for messages


def read_settings(folder: Path | TokenizerFiles) -> TokenizerSettings:
    """Read every side file that is there. Raises TokenizerError naming the file and the field that is wrong."""
    files = folder if isinstance(folder, TokenizerFiles) else TokenizerFiles(folder)
    config_path = files.path("tokenizer_config.json")
    map_path = files.path("special_tokens_map.json")
    config, special_map = files.json_object("tokenizer_config.json"), files.json_object("special_tokens_map.json")

    added: dict[str, AddedToken] = {}
    named: dict[str, str | None] = {}
    for key in ("bos_token", "eos_token", "unk_token", "pad_token"):
        found = _special(config, key, config_path) or _special(special_map, key, map_path)
        named[key] = found.content if found else None
        if found:
            added[found.content] = found
    for table, path in ((special_map, map_path), (config, config_path)):
        for token in _more_specials(table, path):
            added.setdefault(token.content, token)
    for content, number in files.json_object("added_tokens.json").items():
        number = token_id(number, path=files.path("added_tokens.json"), field=content)
        special = added[content].special if content in added else False
        added[content] = AddedToken(content, number, special=special)
    # Last, because it alone carries the ids and all the flags.
    for token in _added_tokens_decoder(config, config_path):
        earlier = added.get(token.content)
        if earlier is not None and earlier.id not in (None, token.id):
            raise TokenizerError(
                f"{token.content!r} is token {token.id} here and {earlier.id} in added_tokens.json",
                path=config_path,
                field="added_tokens_decoder",
            )
        special = token.special or (earlier is not None and earlier.special)
        added[token.content] = replace(token, special=special)

    ids = _Ids(files)
    return TokenizerSettings(
        **named,
        add_bos=optional(config, "add_bos_token", bool, path=config_path),
        add_eos=optional(config, "add_eos_token", bool, path=config_path),
        legacy=bool(optional(config, "legacy", bool, path=config_path)),
        bos_id=ids.first("bos_token_id"),
        pad_id=ids.first("pad_token_id"),
        eos_ids=ids.all("eos_token_id"),
        added_tokens=tuple(added.values()),
        chat_template=_chat_template(files, config, config_path),
        path=str(files.root),
    )


def _added_token(value: Any, path: Path, where: str, *, special: bool, number: int | None = None) -> AddedToken:
    """A token as these files write it: a string, or an object with `content` and flags."""
    if isinstance(value, str):
        value = {"content": value}
    typed(value, dict, path=path, field=where, what="a string or an object with 'content'")
    content = typed(value.get("content"), str, path=path, field=f"{where}.content")
    if not content:
        raise TokenizerError("a token cannot be empty", path=path, field=f"{where}.content")
    flags = {}
    for flag in ("lstrip", "rstrip", "single_word", "normalized"):
        flags[flag] = typed(value.get(flag, False), bool, path=path, field=f"{where}.{flag}")
    special = typed(value.get("special", special), bool, path=path, field=f"{where}.special")
    return AddedToken(content, number, special, **flags)


def _special(table: Mapping[str, Any], key: str, path: Path) -> AddedToken | None:
    value = table.get(key)
    if value is None or value == "":
        return None
    token = _added_token(value, path, key, special=True)
    return replace(token, special=True)  # it is named as bos, eos, unk or pad, whatever its own flag says


def _more_specials(table: Mapping[str, Any], path: Path) -> list[AddedToken]:
    """`additional_special_tokens` (transformers 4: a list) and `extra_special_tokens` (5: a list or an object)."""
    tokens = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        values = table.get(key) or []
        if isinstance(values, dict):
            values = list(values.values())
        for n, value in enumerate(typed(values, list, path=path, field=key)):
            tokens.append(_added_token(value, path, f"{key}[{n}]", special=True))
    return tokens


def _added_tokens_decoder(config: Mapping[str, Any], path: Path) -> list[AddedToken]:
    tokens, seen = [], set[int | str]()
    for key, value in (optional(config, "added_tokens_decoder", dict, path=path) or {}).items():
        where = f"added_tokens_decoder.{key}"
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise TokenizerError(f"expected a token id as the key, got {key[:40]!r}", path=path, field=where)
        number = token_id(int(key), path=path, field=where)
        token = _added_token(value, path, where, special=False, number=number)
        if number in seen or token.content in seen:
            raise TokenizerError(f"{token.content!r} or its id stands here twice", path=path, field=where)
        seen.update((number, token.content))
        tokens.append(token)
    return tokens


class _Ids:
    """Token ids of generation_config.json and config.json; the first of the two wins where only one can."""

    def __init__(self, files: TokenizerFiles) -> None:
        names = ("generation_config.json", "config.json")
        self._files = [(files.path(name), files.json_object(name)) for name in names]

    def all(self, key: str) -> tuple[int, ...]:
        found: list[int] = []
        for path, table in self._files:
            value = table.get(key)
            values = value if isinstance(value, list) else [] if value is None else [value]
            for number in values:
                if number == -1 and not isinstance(number, bool):  # old LLaMA configs write -1 for "none"
                    continue
                found.append(token_id(number, path=path, field=key))
        return tuple(dict.fromkeys(found))

    def first(self, key: str) -> int | None:
        return next(iter(self.all(key)), None)


def _chat_template(files: TokenizerFiles, config: Mapping[str, Any], config_path: Path) -> str | None:
    """The template in chat_template.jinja, else in tokenizer_config.json (a string, or a list: take "default")."""
    if "chat_template.jinja" in files:
        try:
            return files.read("chat_template.jinja", MAX_CONFIG_BYTES).decode("utf-8")
        except UnicodeDecodeError as error:
            jinja_path = files.path("chat_template.jinja")
            raise TokenizerError("not UTF-8 text", path=jinja_path, offset=error.start) from error
    value = config.get("chat_template")
    if isinstance(value, list):
        templates: dict[str, Any] = {}
        for n, entry in enumerate(value):
            where = f"chat_template[{n}]"
            typed(entry, dict, path=config_path, field=where, what="an object with 'name' and 'template'")
            name = typed(entry.get("name"), str, path=config_path, field=f"{where}.name")
            if name in templates:
                raise TokenizerError(f"two templates are named {name!r}", path=config_path, field=where)
            templates[name] = entry.get("template")
        value = templates.get("default")
        if value is None and templates:
            raise TokenizerError(
                f"none of the templates is named 'default': {', '.join(sorted(templates))[:200]}",
                path=config_path,
                field="chat_template",
            )
    if value is None:
        return None
    typed(value, str, path=config_path, field="chat_template", what="a string, or a list of {name, template}")
    check_unicode(value, path=config_path, field="chat_template")
    return value
