"""The settings in the small files beside a vocabulary: special and added tokens, BOS, stop tokens, chat template.

Sources: Hugging Face `tokenizer_config.json`, `special_tokens_map.json`, `added_tokens.json`, `generation_config.json`,
`config.json` and `chat_template.jinja`, as transformers 4 and 5 write and read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import TokenizerError, errors_at
from ..system.json_file import decode_text
from .files import MAX_CONFIG_BYTES, TokenizerFiles, check_token_id, check_type, get_optional

_CONFIG, _SPECIAL, _ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_TEMPLATE = "chat_template.jinja"
TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"  # as transformers 5 writes named templates

NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_FLAGS = ("add_bos_token", "add_eos_token", "add_prefix_space", "legacy")
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
_PENALTIES = ("repetition_penalty",)  # of them, those that greedy decoding takes too


@dataclass(frozen=True)
class AddedToken:
    """A token that is cut out of the text before the model encodes it, and the characters it takes around it.

    `id` is None when a file only names the token; the token is then used only if it is in the vocabulary.
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
    """Everything a tokenizer needs that is not in its vocabulary file. The defaults mean that no file says it."""

    bos_token: str | None = None
    eos_token: str | None = None
    unk_token: str | None = None
    pad_token: str | None = None
    sep_token: str | None = None  # this and the next two: special tokens that chat templates may name
    cls_token: str | None = None
    mask_token: str | None = None
    add_bos: bool | None = None  # None: the vocabulary file or the kind of tokenizer decides
    add_eos: bool | None = None
    add_prefix_space: bool = True  # SentencePiece: false takes away the space that the model puts before a text
    legacy: bool = False  # SentencePiece: put a space before every text between special tokens, not only the first
    bos_id: int | None = None  # from generation_config.json or config.json: used when no bos_token is named
    pad_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    added_tokens: tuple[AddedToken, ...] = ()
    flags_count: bool = False  # those of added tokens with ids, before what tokenizer.json says of them
    listed: frozenset[str] = frozenset()  # special tokens in a list, which tokenizer.json may call not special
    chat_template: str | None = None
    tool_template: str | None = None  # the one named "tool_use": of conversations with tools
    template_names: tuple[str, ...] = ()  # of the templates in tokenizer_config.json
    sampling: Mapping[str, float] = field(default_factory=dict, hash=False)  # see `Tokenizer.recommended_sampling`
    bad_words: tuple[tuple[int, ...], ...] = ()  # generation_config.json's bad_words_ids
    path: str | None = field(default=None, compare=False)  # the folder, for messages


def read_settings(folder: Path | TokenizerFiles) -> TokenizerSettings:
    """Read every side file that exists. Raises TokenizerError naming the file and the wrong field."""
    files = folder if isinstance(folder, TokenizerFiles) else TokenizerFiles(folder)
    config, special_map = files.json_object(_CONFIG), files.json_object(_SPECIAL)
    added: dict[str, AddedToken] = {}
    named: dict[str, str | None] = {}
    listed = set[str]()
    for key in NAMED:
        token = None
        for name, table in ((_CONFIG, config), (_SPECIAL, special_map)):
            if token is None and table.get(key) not in (None, ""):
                with errors_at(files.path(name)):
                    # special, whatever its own flag says: it has a name
                    token = replace(_added_token(table[key], key, special=True), special=True)
        named[key] = token.content if token else None
        if token:
            added[token.content] = token
    for name, table in ((_SPECIAL, special_map), (_CONFIG, config)):
        with errors_at(files.path(name)):
            for token, has_name in _more_specials(table):
                if has_name:
                    listed.discard(token.content)
                elif token.content not in added:
                    listed.add(token.content)
                added.setdefault(token.content, token)
    with errors_at(files.path(_ADDED)):
        for content, value in files.json_object(_ADDED).items():
            special = added[content].special if content in added else False
            added[content] = AddedToken(content, check_token_id(value, content), special=special)
    with errors_at(files.path(_CONFIG)):
        for token in _added_tokens_decoder(config):  # last, because only this table has the ids and all the flags
            earlier = added.get(token.content)
            if earlier is not None and earlier.id not in (None, token.id):
                message = f"{token.content!r} is token {token.id} here and {earlier.id} in {_ADDED}"
                raise TokenizerError(message, field="added_tokens_decoder")
            is_named = earlier is not None and earlier.special and token.content not in listed
            added[token.content] = replace(token, special=token.special or is_named)
            listed.discard(token.content)
        flags = {key: get_optional(config, key, bool) for key in _FLAGS}
    tables = {name: files.json_object(name) for name in ("generation_config.json", "config.json")}
    bos_ids, pad_ids, eos_ids = (_config_ids(files, tables, f"{name}_token_id") for name in ("bos", "pad", "eos"))
    stated = {} if _TEMPLATE in files else config  # that file replaces all templates of the other, as in transformers
    with errors_at(files.path(_CONFIG)):
        templates = _templates(stated.get("chat_template"))
    return TokenizerSettings(
        **named,
        add_bos=flags["add_bos_token"],
        add_eos=flags["add_eos_token"],
        add_prefix_space=flags["add_prefix_space"] is not False,
        legacy=bool(flags["legacy"]),
        bos_id=next(iter(bos_ids), None),
        pad_id=next(iter(pad_ids), None),
        eos_ids=eos_ids,
        added_tokens=tuple(added.values()),
        flags_count="added_tokens_decoder" in config,
        listed=frozenset(listed),
        chat_template=_template(files, _TEMPLATE, templates.get("default")),
        tool_template=_template(files, TOOL_TEMPLATE, templates.get("tool_use")),
        template_names=tuple(templates),
        sampling=_sampling(tables["generation_config.json"]),
        bad_words=_bad_words(files, tables["generation_config.json"]),
        path=str(files.root),
    )


def _added_token(value: Any, where: str, *, special: bool, number: int | None = None) -> AddedToken:
    """A token as these files write it: a string, or an object with `content` and flags."""
    if isinstance(value, str):
        value = {"content": value}
    check_type(value, dict, where, "a string or an object with 'content'")
    content = check_type(value.get("content"), str, f"{where}.content")
    if not content:
        raise TokenizerError("a token cannot be empty", field=f"{where}.content")
    flags = {
        flag: check_type(value.get(flag, flag == "special" and special), bool, f"{where}.{flag}")
        for flag in ("lstrip", "rstrip", "single_word", "normalized", "special")
    }
    return AddedToken(content, number, **flags)


def _more_specials(table: Mapping[str, Any]) -> list[tuple[AddedToken, bool]]:
    """`additional_special_tokens` (transformers 4: a list) and `extra_special_tokens` (5: a list or an object), and
    whether each has a name. As in transformers, a list only adds tokens: it changes no flag of one that is there."""
    tokens = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        values = table.get(key) or []
        each = list(values.values()) if isinstance(values, dict) else check_type(values, list, key)
        specials = [_added_token(value, f"{key}[{n}]", special=True) for n, value in enumerate(each)]
        tokens += [(token, isinstance(values, dict)) for token in specials]
    return tokens


def _added_tokens_decoder(config: Mapping[str, Any]) -> list[AddedToken]:
    tokens, seen = [], set[int | str]()
    for key, value in (get_optional(config, "added_tokens_decoder", dict) or {}).items():
        where = f"added_tokens_decoder.{key}"
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise TokenizerError(f"expected a token id as the key, got {key[:40]!r}", field=where)
        number = check_token_id(int(key), where)
        token = _added_token(value, where, special=False, number=number)
        if number in seen or token.content in seen:
            raise TokenizerError(f"{token.content!r} or its id stands here twice", field=where)
        seen.update((number, token.content))
        tokens.append(token)
    return tokens


def _config_ids(files: TokenizerFiles, tables: Mapping[str, Mapping[str, Any]], key: str) -> tuple[int, ...]:
    """The token ids under a key of each table (file name -> its JSON), in their order."""
    ids: list[int] = []
    for name, table in tables.items():
        value = table.get(key)
        values = value if isinstance(value, list) else [] if value is None else [value]
        with errors_at(files.path(name)):
            numbers = [check_type(value, int, key, "a token id") for value in values]
        ids += [number for number in numbers if number >= 0]  # old LLaMA configs write -1 for "none"
    return tuple(dict.fromkeys(ids))


def _sampling(generation: Mapping[str, Any]) -> dict[str, float]:
    """The parameters of `SamplingParams` that generation_config.json gives.

    `do_sample` means what it means to transformers: false is greedy, whatever the temperature beside it, and true takes
    transformers' temperature, 1, and top_k, 50, for those that are not given. A file that has a temperature and no
    `do_sample` means to sample, as vLLM and llama.cpp read it; transformers warns, and is greedy.
    """
    numbers = {key: generation[key] for key in _SAMPLING if type(generation.get(key)) in (int, float)}
    if numbers.get("top_k", 0) < 0:  # vLLM's "no limit"
        numbers["top_k"] = 0
    if generation.get("do_sample") is False:
        return {"temperature": 0.0} | {key: numbers[key] for key in numbers if key in _PENALTIES}
    return ({"temperature": 1.0, "top_k": 50} if generation.get("do_sample") is True else {}) | numbers


def _bad_words(files: TokenizerFiles, generation: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    key, words = "bad_words_ids", []
    with errors_at(files.path("generation_config.json")):
        for number, ids in enumerate(get_optional(generation, key, list) or []):
            if not check_type(ids, list, f"{key}[{number}]", "a list of token ids"):
                raise TokenizerError("expected token ids, got an empty list", field=f"{key}[{number}]")
            words.append(tuple(check_token_id(token, f"{key}[{number}]") for token in ids))
    return tuple(words)


def _template(files: TokenizerFiles, name: str, stated: Any) -> str | None:
    """The template in the file `name`, else what tokenizer_config.json states."""
    if name in files:
        return decode_text(files.read(name, MAX_CONFIG_BYTES), TokenizerError, files.path(name))
    if stated is None:
        return None
    with errors_at(files.path(_CONFIG)):
        text: str = check_type(stated, str, "chat_template", "a string, or a list of {name, template}")
        return text


def _templates(value: Any) -> dict[str, Any]:
    """The templates of tokenizer_config.json by name: those of a list, or a string, which is the default one."""
    if not isinstance(value, list):
        return {} if value is None else {"default": value}
    templates: dict[str, Any] = {}
    for n, entry in enumerate(value):
        where = f"chat_template[{n}]"
        check_type(entry, dict, where, "an object with 'name' and 'template'")
        title = check_type(entry.get("name"), str, f"{where}.name")
        if title in templates:
            raise TokenizerError(f"two templates are named {title!r}", field=where)
        templates[title] = entry.get("template")
    return templates
