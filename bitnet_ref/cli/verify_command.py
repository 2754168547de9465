"""`bitnet-ref verify`: compute a served answer again, and say whether it is equal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import BackendUnavailable, FormatError, count_of, describe
from ..serving.engine_config import EngineConfig
from ..system.json_file import parse_json_object
from .generation_options import (
    INPUT_FILE,
    declared_option,
    load_model,
    loading_options,
    lora_option,
    name_model,
    read_adapters,
    read_template,
    read_text,
    section,
    server_config,
)
from .shell import SectionedCommand, common_options, report

if TYPE_CHECKING:
    from rich.console import Console

    from ..serving.http.batch import BatchServer
    from ..serving.http.first_token import OneToken
    from ..serving.http.verify import AnswerCheck

NEEDED = ("starlette", "fastjsonschema")
EXIT_CODES = {"equal": 0, "differs": 1, "unchecked": 2}
WORDS = {"equal": "EQUAL", "differs": "DIFFERS", "unchecked": "CANNOT BE CHECKED"}
NEAR = 1e-3  # of two probabilities, relative: another backend's rounding may choose either token


@click.command(cls=SectionedCommand, short_help="Compute a served answer again, and compare.")
@click.argument("request", metavar="REQUEST", type=INPUT_FILE)
@click.argument("answer", metavar="ANSWER", type=INPUT_FILE)
@section("Model")("--model", help="Shipped model, folder, or file.  [default: the one that the answer names]")
@loading_options
@click.option("--config", type=click.Path(path_type=Path, exists=True), help="The server's engine settings.")
@click.option("--chat-template", metavar="JINJA", help="The server's, if it has one; @FILE reads it.")
@declared_option(EngineConfig, "generation_defaults")
@lora_option
@common_options
def verify(
    request: Path,
    answer: Path,
    model: str | None,
    config: Path | None,
    chat_template: str | None,
    generation_defaults: str | None,
    adapters: tuple[str, ...],
    **options: Any,
) -> None:
    """Compute ANSWER again, alone, and compare it with what REQUEST asks for: the text, the calls, why it ended, the
    counts of tokens, the log probabilities.

    REQUEST and ANSWER are JSON files, as they were sent to and came from /v1/chat/completions, /v1/completions,
    /v1/responses or /v1/messages of `bitnet-ref serve`; or files of `bitnet-ref batch`, whose lines are checked one by
    one. The exit code is 0 for equal, 1 for an answer that differs, 2 for one that cannot be checked.
    """
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise BackendUnavailable(f"verify needs {', '.join(missing)}: pip install 'bitnet-ref[server]'")
    from ..serving.http.batch import BatchServer

    asked, answered = read_text(request), read_text(answer)
    lines = lines_of(answered)
    is_batch = bool(lines) and custom_id_of(lines[0]) is not None
    first = parse_json_object((lines[0] if is_batch else answered).encode(), FormatError, answer)
    told = name_in(first)
    base, _, adapter = told.rpartition(":")
    if any(text.startswith((f"{adapter}=", f"{told}=")) for text in adapters):
        told = base
    source = model or told
    if not source:
        raise click.UsageError("the answer names no model; give --model")
    name, path = name_model(source)
    is_named = model is not None and "=" in model and not Path(model).exists()
    served_as = name if is_named or not told else told
    folders = {adapter: folder for (_, adapter), folder in read_adapters(adapters, [served_as]).items()}
    settings = replace(server_config(config, generation_defaults=generation_defaults), prefix_sharing=False)
    loaded = load_model({**options, "model": str(path)})
    with loaded.engine(config=settings) as engine:
        for adapter, folder in folders.items():
            engine.add_adapter(adapter, folder)
        server = BatchServer(engine, served_as, read_template(chat_template), adapters=tuple(folders))
        if is_batch:
            checks = list(check_lines(server, asked, lines))
        else:
            entry = parse_json_object(asked.encode(), FormatError, request)
            checks = [("", check_alone(server, entry, first, is_named))]
    verdicts = [check.verdict for _, check in checks]
    facts: dict[str, Any] = {"backend": loaded.backend.name}
    if is_batch:
        facts["lines"] = {word: verdicts.count(word) for word in EXIT_CODES}
        facts["checks"] = [{"custom_id": each, **check.to_dict()} for each, check in checks if check.verdict != "equal"]
    else:
        facts |= checks[0][1].to_dict()
    worst = next((word for word in ("differs", "unchecked") if word in verdicts), "equal")
    report(facts, lambda out: draw(checks, loaded.backend.name, out), EXIT_CODES[worst])


def lines_of(text: str) -> list[str]:
    return [line.strip() for line in text.split("\n") if line.strip()]


def custom_id_of(line: str) -> str | None:
    """Of a line of a batch; None for any other text."""
    from ..serving.http import schemas

    try:
        entry = schemas.parse_json(line.encode())
    except schemas.RequestError:
        return None
    custom_id = entry.get("custom_id") if isinstance(entry, dict) else None
    return custom_id if isinstance(custom_id, str) else None


def name_in(answer: dict[str, Any]) -> str:
    """The model that an answer, or a line of a batch's answers, names; "" for none."""
    response = answer.get("response")
    body = response.get("body") if isinstance(response, dict) else answer
    told = body.get("model") if isinstance(body, dict) else None
    return told if isinstance(told, str) else ""


def check_alone(server: BatchServer, request: dict[str, Any], answer: dict[str, Any], is_named: bool) -> AnswerCheck:
    from ..serving.http.verify import AnswerCheck, CannotCheck, Recomputation, engine_for

    try:
        name, engine = engine_for(server, request)
        again = Recomputation(engine, server.chat_template, request, answer, name=name if is_named else None)
        choices = again.submit()
    except CannotCheck as error:
        return AnswerCheck.unchecked(error.message)
    return again.judge([choice.result() for choice in choices])


def check_lines(server: BatchServer, asked: str, answers: list[str]) -> Iterator[tuple[str, AnswerCheck]]:
    """(custom_id, check) of each line of the answers. Either file may be a part of what the batch had."""
    from ..serving.http.verify import AnswerCheck, check_line

    requests = {custom_id_of(line): line.encode() for line in lines_of(asked)}
    for line in answers:
        custom_id = custom_id_of(line)
        if custom_id is not None and custom_id in requests:
            yield custom_id, check_line(server, requests[custom_id], line.encode())
        else:
            yield str(custom_id), AnswerCheck.unchecked("there is no request with this custom_id")


def draw(checks: list[tuple[str, AnswerCheck]], backend: str, out: Console) -> None:
    if len(checks) > 1:
        counts = [f"{sum(check.verdict == word for _, check in checks)} {word}" for word in EXIT_CODES]
        out.print(f"{len(checks)} answers: {', '.join(counts)}")
    for custom_id, check in checks:
        if len(checks) == 1 or check.verdict != "equal":
            draw_check(custom_id, check, backend, out)


def draw_check(custom_id: str, check: AnswerCheck, backend: str, out: Console) -> None:
    def write(text: str) -> None:
        out.print(text, markup=False, highlight=False, soft_wrap=True)

    before = f"{custom_id}: " if custom_id else ""
    write(f"{before}{WORDS[check.verdict]}: {check.reason}")
    if check.tokens:
        write(f"  {count_of(check.tokens, 'token')} computed again on {backend}")
    if check.largest_logprob_error is not None:
        write(f"  log probabilities differ by at most {check.largest_logprob_error:.2g}")
    if (token := check.first_token) is not None:
        place = f" of choice {token.choice}" if token.choice else ""
        write(f"  token {token.position}{place} is the first that differs:")
        write(f"    computed  {describe_token(token.computed)}")
        write(f"    answer    {describe_token(token.answered)}")
        mine, theirs = (each.p if each is not None else None for each in (token.computed, token.answered))
        if mine and theirs and abs(mine - theirs) <= NEAR * max(mine, theirs):
            write("    They are equally likely, up to rounding: another backend may choose either")
    for each in check.differences:
        write(f"  {each.field}: computed {describe(each.computed)}, the answer has {describe(each.answered)}")
    if check.fingerprint is not None:
        write(f"  fingerprint {check.fingerprint}")


def describe_token(token: OneToken | None) -> str:
    if token is None:
        return "nothing, it has ended"
    number = "" if token.id is None else f", token {token.id}"
    return f"{token.text!r}{number}" + ("" if token.p is None else f", p {token.p:.3g}")
