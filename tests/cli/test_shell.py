"""What commands share, in this process: streams, bars, values of options, workers; and commands that elsewhere run in a
process of their own."""

import io
import json
import logging
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import click
import numpy as np
import pytest
from cli_runs import BACKEND, PLAIN, PROMPT, invoke, invoke_json
from click.testing import CliRunner
from helpers import DATA, GOLDEN, model
from rich.console import Console

from bitnet_ref import benchmark, load
from bitnet_ref.backends import Backend
from bitnet_ref.cli import (
    cli,
    crossval_command,
    doctor_command,
    generate_command,
    generation_options,
    serve_command,
    shell,
    train_command,
    watch_command,
)
from bitnet_ref.cli.bench_shared import Subject
from bitnet_ref.cli.generate_command import parse_ids
from bitnet_ref.crossval.paths import PathCheck
from bitnet_ref.crossval.trace import write_trace
from bitnet_ref.errors import GenerationError
from bitnet_ref.generation.results import GenerationStats
from bitnet_ref.system import workers


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


def use_terminal(monkeypatch):
    """Standard output and error are terminals from now on; in a fixture pytest would replace them again."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, Terminal())


# -- streams -----------------------------------------------------------------------------------------------------------


def test_sizes_in_words():
    sizes = {
        0: "0 bytes",
        999: "999 bytes",
        1000: "1.0 KB",
        1536: "1.5 KB",
        102_300: "99.9 KB",
        102_400: "100 KB",
        1023 * 1024: "1.0 MB",
        5 << 20: "5.0 MB",
        3 << 29: "1.5 GB",
        7 << 40: "7.0 TB",
        5000 << 40: "5000 TB",
    }
    assert {size: shell.size_in_words(size) for size in sizes} == sizes


def test_a_terminal_gets_no_control_characters(monkeypatch):
    use_terminal(monkeypatch)
    every = "".join(map(chr, range(256)))
    shell.write_text(every)
    hidden = {*range(32), *range(127, 160)} - {9, 10}
    assert sys.stdout.getvalue() == "".join("\N{REPLACEMENT CHARACTER}" if ord(c) in hidden else c for c in every)


def test_a_pipe_gets_the_text_as_it_is(capsys):
    shell.write_text("a\x1b[1mb")
    assert capsys.readouterr().out == "a\x1b[1mb"


def test_json_on_one_line(monkeypatch):
    for encoding, line in (
        ("utf-8", '{"a": "é\\u001b\\u007f\\u2028", "b": [1.5, null]}\n'),
        ("latin-1", '{"a": "\\u00e9\\u001b\\u007f\\u2028", "b": [1.5, null]}\n'),
    ):
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
        monkeypatch.setattr(sys, "stdout", stream)
        shell.print_json({"a": "é\x1b\x7f\u2028", "b": [1.5, None]})
        written = stream.buffer.getvalue().decode(encoding)
        assert written == line
        assert json.loads(written) == {"a": "é\x1b\x7f\u2028", "b": [1.5, None]}


def test_colours_on_a_terminal_alone(monkeypatch):
    use_terminal(monkeypatch)
    assert shell.paint("x", sys.stdout, fg="red") == "\x1b[31mx\x1b[0m"
    assert shell.paint("x", io.StringIO(), fg="red") == "x"
    monkeypatch.setenv("NO_COLOR", "1")
    assert shell.paint("x", sys.stdout, fg="red") == "x"


def test_a_bar_on_a_terminal_that_waits_long_enough(monkeypatch):
    use_terminal(monkeypatch)
    clock = SimpleNamespace(now=10.0)
    monkeypatch.setattr(shell.time, "monotonic", lambda: clock.now)
    with shell.LoadingBar("loading x") as bar:
        clock.now = 10.5
        bar(1, 8)
        assert bar.bar is None
        clock.now = 10.6
        bar(2, 8)
        (task,) = bar.bar.tasks
        assert (task.description, task.completed, task.total) == ("loading x", 2, 8)
        bar(3, 9)
        bar.tell(3, 9, "the scale\x1b")
        assert len(bar.bar.tasks) == 1
        assert (bar.bar.tasks[0].completed, bar.bar.tasks[0].total) == (3, 9)
        assert bar.bar.tasks[0].description == "testing 4 of 9: the scale\\x1b"
        assert bar.bar.live.is_started
    assert not bar.bar.live.is_started
    assert sys.stdout.getvalue() == ""


def test_waiting_for_something_of_unknown_length(monkeypatch):
    use_terminal(monkeypatch)
    with shell.waiting("the engine"):
        pass
    assert "the engine" in sys.stderr.getvalue()
    assert "0:00:0" in sys.stderr.getvalue()


def test_no_bar_elsewhere(monkeypatch):
    monkeypatch.setattr(shell.LoadingBar, "PATIENCE_S", -1.0)
    with shell.LoadingBar("x") as bar:
        bar(1, 2)
        bar.tell(1, 2, "y")
    assert bar.bar is None


def test_the_progress_of_a_training(monkeypatch):
    use_terminal(monkeypatch)
    monkeypatch.setattr(train_command, "wants_json", lambda: False)
    row = SimpleNamespace(step=3, loss=2.5, tokens_per_s=1234.5, validation_loss=None)
    with train_command.TrainingBar(2, 12) as bar:
        (task,) = bar._bar.tasks
        assert (task.description, task.completed, task.total) == ("training", 2, 12)
        bar.show(row)
        assert (bar._bar.tasks[0].completed, bar._bar.tasks[0].fields) == (3, {"facts": "loss 2.500, 1,234 tok/s"})
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with train_command.TrainingBar(0, 21) as bar:
        for step in range(1, 22):
            bar.show(SimpleNamespace(**{**vars(row), "step": step, "validation_loss": 1.5 if step == 7 else None}))
    assert sys.stderr.getvalue().splitlines() == [
        "step 7: validation loss 1.5000",
        "step 20 of 21: loss 2.500, 1,234 tok/s",
        "step 21 of 21: loss 2.500, 1,234 tok/s",
    ]


def test_checks_below_the_name_of_their_backend(monkeypatch, capsys):
    monkeypatch.setattr(doctor_command, "wants_json", lambda: False)
    show_check = doctor_command.CheckRows()
    for backend, path in (("numpy", "ops"), ("numpy", "text"), ("cython", "ops")):
        show_check(backend, PathCheck(path, True, 7, "equal"))
    title, row = "{}: execution paths and known answers", "{:29}passed  7 compared: equal"
    assert capsys.readouterr().out.splitlines() == [
        *("", title.format("numpy"), row.format("ops"), row.format("text")),
        *("", title.format("cython"), row.format("ops")),
    ]


def test_one_row_for_a_backend_and_those_that_failed(monkeypatch, capsys):
    monkeypatch.setattr(doctor_command, "wants_json", lambda: False)
    with doctor_command.CheckRows(brief=True) as show_check:
        for backend, path, passed in (("numpy", "ops", True), ("numpy", "text", True), ("cython", "ops", False)):
            show_check(backend, PathCheck(path, passed, 7, "equal"))
    row, checks = "{:29}{}  {}", "checks: execution paths and known answers"
    assert capsys.readouterr().out.splitlines() == [
        *("", "Checks", row.format("numpy", "passed", f"2 {checks}")),
        *(row.format("ops", "FAILED", "7 compared: equal"), row.format("cython", "FAILED", f"1 of 1 {checks}")),
    ]


def test_on_a_terminal_the_last_line_counts_the_checks(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(doctor_command, "wants_json", lambda: False)
    monkeypatch.setattr(doctor_command, "console", lambda out: Console(file=out, force_terminal=True, width=80))
    monkeypatch.setattr(sys, "stdout", terminal)
    with doctor_command.CheckRows() as show_check:
        for path in ("ops", "text"):
            show_check("numpy", PathCheck(path, True, 7, "equal"))
    written = terminal.getvalue()
    assert "checks done: 2" in written
    assert written.count("passed") == 2
    assert written.endswith(("\x1b[2K", "\x1b[0K")), "the status line is cleared at the end"


# -- values of options -------------------------------------------------------------------------------------------------


def test_values_of_options(tmp_path):
    context = click.Context(cli)
    assert generation_options.read_numbers(context, None, "1, 17 5") == [1, 17, 5]
    assert generation_options.read_numbers(context, None, None) is None
    assert [generation_options._read_layers(context, None, text) for text in (None, "all", "12")] == [None, "all", 12]
    assert generation_options._read_biases(context, None, ("262=-5", "7=1.5")) == {"262": -5.0, "7": 1.5}
    assert generation_options._read_biases(context, None, ()) is None
    for read, value in (
        (generation_options.read_numbers, "1,x"),
        (generation_options._read_layers, "-1"),
        (generation_options._read_biases, ("262",)),
    ):
        with pytest.raises(click.BadParameter, match="expected"):
            read(context, None, value)
    (tmp_path / "t").write_text("é", encoding="utf-8-sig")
    assert generation_options.content_of(f"@{tmp_path / 't'}") == "é"
    assert generation_options.content_of("t@") == "t@"
    (tmp_path / "bad").write_bytes(b"\xff")
    with pytest.raises(click.BadParameter, match="bad: "):
        generation_options.content_of(f"@{tmp_path / 'bad'}")
    assert [parse_ids(text) for text in ("1 3797  537", "[1, 2]")] == [[1, 3797, 537], [1, 2]]
    with pytest.raises(GenerationError, match="expected token ids like"):
        parse_ids("1234567890")


def test_times_of_a_search():
    context = click.Context(cli)
    values = {"90": 90.0, " 60s ": 60.0, "2m": 120.0, "0.5": 0.5, "1.5m": 90.0}
    assert {text: crossval_command.seconds(context, None, text) for text in values} == values
    for text in ("", "2h", "-1", "1e3", "m"):
        with pytest.raises(click.BadParameter, match="expected seconds or minutes, such as 90, 60s or 2m; got"):
            crossval_command.seconds(context, None, text)


def test_the_name_of_a_served_model(tmp_path, monkeypatch):
    folder = tmp_path / "a=b"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((GOLDEN / "llama-dense" / name).read_bytes())
    monkeypatch.chdir(tmp_path)
    name_model = generation_options.name_model
    assert name_model("storyteller")[0] == "storyteller"
    assert name_model("mine=storyteller") == ("mine", name_model("storyteller")[1])
    assert name_model("a=b") == ("a=b", Path("a=b"))  # it is there
    assert name_model(str(folder)) == ("a=b", folder)
    folder.rename(tmp_path / "c")
    assert name_model(f"x={tmp_path / 'c'}") == ("x", tmp_path / "c")
    monkeypatch.chdir(tmp_path / "c")
    assert name_model(".") == ("c", Path("."))


def test_where_a_long_run_is_computed(monkeypatch):
    made = []

    class Dask:
        dashboard = "http://x"

        def __init__(self, *arguments):
            made.append(arguments)

    monkeypatch.setattr(workers, "DaskWorkers", Dask)
    opener = (dict,)
    assert isinstance(generation_options.spread(opener, None, None, "resource"), workers.Here)
    for count, address in ((2, None), (None, "tcp://x")):
        assert isinstance(generation_options.spread(opener, count, address, "resource"), Dask)
    assert made == [(opener, 2, None), (opener, None, "tcp://x")]
    options = {"workers": 2, "dask": None, "other": 1}
    assert generation_options.pop_workers(options) == (2, None)
    assert options == {"other": 1}
    with pytest.raises(click.UsageError, match="exclude each other"):
        generation_options.pop_workers({"workers": 2, "dask": "tcp://x"})


def test_how_a_worker_opens_the_model(monkeypatch, tmp_path):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.chdir(GOLDEN)
    function, options = generation_options.model_opener(
        {"model": "llama-dense", "backend": "numpy", "threads": None, "devices": [0, 1], "temperature": 1}, 2
    )
    assert function is generation_options.load_in_worker
    path = str((GOLDEN / "llama-dense").resolve())
    assert dict(options) == {"model": path, "backend": "numpy", "threads": 2, "devices": (0, 1)}
    assert dict(generation_options.model_opener({"model": "storyteller", "threads": None}, None)[1]) == {
        "model": "storyteller",
        "threads": None,
    }
    assert dict(generation_options.model_opener({"model": "x", "threads": 3}, 9)[1])["threads"] == 3


@pytest.mark.parametrize("options", [{"model": "adapter"}, {"model": "base", "adapter": "adapter"}])
def test_a_worker_opens_a_model_with_an_adapter(options, monkeypatch, tmp_path):
    monkeypatch.chdir(DATA / "adapters" / "alone")
    function, arguments = generation_options.model_opener({**options, "backend": "numpy", "threads": 1}, 1)
    monkeypatch.chdir(tmp_path)
    expected = load(DATA / "adapters" / "alone" / "adapter", backend="numpy").logits([1, 2, 3])
    assert np.array_equal(function(arguments).logits([1, 2, 3]), expected)


# -- generate ----------------------------------------------------------------------------------------------------------


def test_token_ids_in_and_out():
    story = model("storyteller", BACKEND, threads=1)
    ids = story.tokenizer.encode(PROMPT)
    out = story.generate(ids, max_tokens=5).token_ids
    text = " ".join(map(str, ids))
    assert invoke("generate", text, "--raw-ids", "--max-tokens", 5, *PLAIN).stdout.split() == list(map(str, out))
    for options in (["-n", 2, "--temperature", 1.0, "--seed", 3], ["--num-beams", 2]):
        params = {"n": 2, "temperature": 1.0, "seed": 3} if options[0] == "-n" else {"num_beams": 2}
        outs = story.generate(ids, max_tokens=5, **params)
        outs = outs if isinstance(outs, list) else [outs]
        lines = [" ".join(map(str, each.token_ids)) for each in outs]
        shown = invoke("generate", text, "--raw-ids", "--max-tokens", 5, *options, *PLAIN).stdout
        assert shown == "\n---\n".join(lines) + "\n"
        texts = [each.text for each in outs]
        assert invoke("generate", PROMPT, "--max-tokens", 5, *options, *PLAIN).stdout == "\n---\n".join(texts) + "\n"
        facts = invoke_json("generate", PROMPT, "--max-tokens", 5, *options, *PLAIN)
        assert [each["token_ids"] for each in facts["choices"]] == [each.token_ids for each in outs]


def test_what_overflowed_is_in_the_json():
    story = model("storyteller", BACKEND, threads=1)
    options = ("--overflow", "sliding", "--window", 9, "--max-tokens", 12)
    facts = invoke_json("generate", PROMPT, *options, *PLAIN)
    out = story.generate(PROMPT, overflow="sliding", window=9, max_tokens=12)
    assert len(facts["overflows"]) == len(out.overflows) > 0
    assert facts["token_ids"] == out.token_ids
    assert "overflows" not in invoke_json("generate", PROMPT, "--max-tokens", 2, *PLAIN)
    assert "oldest tokens dropped" in invoke("generate", PROMPT, *options, *PLAIN).stderr


def test_the_line_after_a_text(capsys, monkeypatch):
    monkeypatch.setattr(generate_command, "peak_memory_bytes", lambda: 3 << 20)
    stats = GenerationStats("numpy")
    stats.prompt_tokens, stats.prefill_s, stats.generated_tokens = 10, 0.5, 1
    generate_command.say_stats(stats)
    stats.generated_tokens, stats.decode_tokens, stats.decode_s = 5, 4, 2.0
    stats.cache_dtype, stats.cache_bytes_per_token, stats.dropped_tokens, stats.recomputed_tokens = "int8", 1536, 7, 3
    generate_command.say_stats(stats)
    stats.prefill_s, stats.recomputed_tokens, stats.cache_dtype = 0.0, 0, "float64"
    generate_command.say_stats(stats)
    assert capsys.readouterr().err.splitlines() == [
        "[numpy] 10 prompt tokens at 20.0 tok/s, 1 new token, peak memory 3.0 MB",
        "[numpy] 10 prompt tokens at 20.0 tok/s, 5 new tokens at 2.0 tok/s, int8 cache of 1.5 KB per token, "
        "7 oldest tokens dropped, 3 computed again, peak memory 3.0 MB",
        "[numpy] 5 new tokens at 2.0 tok/s, 7 oldest tokens dropped, peak memory 3.0 MB",
    ]


def test_a_profile_on_standard_error():
    result = invoke("generate", PROMPT, "--max-tokens", 2, "--profile", *PLAIN)
    assert result.exit_code == 0
    assert "linears" in result.stderr
    assert "linears" not in result.stdout


def test_the_space_before_a_continuation(monkeypatch):
    """SentencePiece drops it at the start of a text; a terminal shows the prompt before."""
    story = model("storyteller", BACKEND, threads=1)
    monkeypatch.setattr(generate_command, "wants_json", lambda: False)
    monkeypatch.setenv("NO_COLOR", "1")
    comma = {story.tokenizer.encode("Once upon,")[-1]: 100.0}
    for prompt, bias, shown in (
        ("Once upon", {}, "Once upon a time,\n"),
        ("Once upon a time", {}, "Once upon a time, I was\n"),
        (",", comma, ",,,,\n"),  # text like the prompt comes again
    ):
        terminal = Terminal()
        monkeypatch.setattr(sys, "stdout", terminal)
        ids = story.tokenizer.encode(prompt)
        generate_command.show_text(story, prompt, ids, {"max_tokens": 3, "logit_bias": bias}, raw_ids=False)
        assert terminal.getvalue() == shown


# -- the other commands ------------------------------------------------------------------------------------------------


def test_the_head_that_is_asked_for():
    for head in ("exact", "screened"):
        assert Subject(None, None, None, BACKEND, head, "stored", 1, None).open_backend().head == head


def test_a_console_shows_text_as_it_is():
    stream = io.StringIO()
    shell.console(stream).print(":smile: [bold]x[/bold] \x1b[1m 12")
    assert stream.getvalue() == ":smile: [bold]x[/bold] \\x1b[1m 12\n"


def test_random_weights_are_the_same_each_time(monkeypatch):
    from bench_runs import TINY

    monkeypatch.setitem(benchmark.SHAPES, "1b", TINY)
    loaded = Subject(None, "1b", 1, "numpy", "auto", "stored", 1, None).load()
    expected = benchmark.synthetic_model(TINY, Backend(threads=1), 0, None, 1, "stored")
    np.testing.assert_array_equal(loaded.logits([1, 2, 3]), expected.logits([1, 2, 3]))
    assert loaded.config.num_hidden_layers == 1


@pytest.fixture
def set_up(monkeypatch):
    """`serve` up to where it waits for requests. apps: what `create_app` got; servers: uvicorn's settings; logs."""
    app = pytest.importorskip("bitnet_ref.serving.http.app", reason="starlette is not installed")
    uvicorn, create = pytest.importorskip("uvicorn"), app.create_app
    seen = SimpleNamespace(apps=[], servers=[], logs=[])

    def create_app(shelf, limits, **options):
        seen.apps.append((shelf, limits, options))
        return create(shelf, limits, **options)

    def run(server, sockets):
        seen.servers.append(server.config)
        server.config.app.state.on_loaded(None)
        sockets[0].close()

    monkeypatch.setattr(app, "create_app", create_app)
    monkeypatch.setattr(uvicorn.Server, "run", run)
    monkeypatch.setattr(serve_command.signal, "signal", lambda *_: None)
    monkeypatch.setattr(serve_command.logging, "basicConfig", lambda **settings: seen.logs.append(settings))
    return seen


SECONDS = "expected a number above 0, at most 1e+09, got "


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("serve", "--idle-s", "nan"), f"'--idle-s': {SECONDS}nan"),
        (("serve", "--request-timeout-s", "nan"), f"'--request-timeout-s': {SECONDS}nan"),
        (("serve", "--drain-s", -5), "'--drain-s': -5 is not in the range x>=0"),
        (("convert", "a", "b", "--engine-timeout-s", "nan"), "expected a number from 1 to 1e+09, got nan"),
    ],
)
def test_times_have_ranges(arguments, words):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr


@pytest.mark.parametrize(
    ("arguments", "hosts", "warns"),
    [
        ((), ("localhost", "127.0.0.1", "::1"), False),
        (("--allow-host", "a.example"), ("a.example", "localhost", "127.0.0.1", "::1"), False),
        (("--host", "0.0.0.0"), ("*",), True),
        (("--host", "0.0.0.0", "--allow-host", "b"), ("b",), True),
        (
            ("--log-format", "json", "--default-model", "x", "--unknown-fields", "warn"),
            ("localhost", "127.0.0.1", "::1"),
            False,
        ),
        (("--host", "0.0.0.0", "--api-key", "k"), ("*",), False),
    ],
)
def test_what_serve_sets_up(set_up, arguments, hosts, warns):
    options = ("--port", 0, "--drain-s", 7, "--max-streams", 5, "--max-body", "2KiB", "--request-timeout-s", 1.5)
    more = ("--memory-budget", "1GiB", "--idle-s", 9.0, "--allow-origin", "https://a.example")
    result = invoke("serve", "x=storyteller", "storychat", *options, *more, *arguments)
    assert result.exit_code == 0, result.output
    ((handler,), level) = set_up.logs[0]["handlers"], set_up.logs[0]["level"]
    request = logging.makeLogRecord({"msg": "as words", "facts": {"status": 200}, "levelno": level, "name": "requests"})
    assert (level, '"status": 200}' in handler.format(request)) == (logging.INFO, "json" in arguments)
    assert ("as words" in handler.format(request)) == ("json" not in arguments)
    assert handler.filter(request)
    assert not handler.filter(logging.makeLogRecord({"levelno": level, "name": "bitnet_ref.serving.worker"}))
    from bitnet_ref.serving.http.admission import ServerLimits
    from bitnet_ref.serving.http.draining import GRACE_S

    (config,) = set_up.servers
    assert config.timeout_graceful_shutdown == 7 + GRACE_S
    ((shelf, limits, given),) = set_up.apps
    assert limits == ServerLimits(2048, 5, request_timeout_s=1.5)
    assert (shelf._budget, shelf._idle_s, list(shelf.places)) == (1 << 30, 9.0, ["x", "storychat"])
    assert (given["hosts"], given["origins"], given["chat_template"]) == (hosts, ("https://a.example",), None)
    assert (shelf.default, given["unknown_fields"]) == (("x", "warn") if "json" in arguments else (None, None))
    assert given["api_keys"] == (("k",) if "k" in arguments else ())
    assert ("anyone who reaches 0.0.0.0 can use this server" in result.stderr) == warns
    host = "0.0.0.0" if "--host" in arguments else "127.0.0.1"
    assert result.stdout.startswith(f"serving x, storychat at http://{host}:")
    assert "/v1, with a page at http://" in result.stdout


def test_serve_refuses_beams_for_all(set_up, tmp_path):
    """They would make an error of each request: a stream has none."""
    (tmp_path / "engine.toml").write_text("[sampling]\nnum_beams = 3\n")
    result = invoke("serve", "--port", 0, "--config", tmp_path / "engine.toml")
    assert (result.exit_code, set_up.apps) == (2, [])
    assert "sampling.num_beams: is a request's own: leave it out, and send use_beam_search and n" in result.stderr


def test_serve_reads_weights_as_it_is_told(set_up):
    """By llama.cpp's rule; `serve` and `load` give the same logits, which are not those of the plain rule."""
    path = DATA / "gguf" / "tq2_0.gguf"
    result = invoke("serve", path, "--port", 0, "--activations", "blocks", "--backend", "numpy")
    assert result.exit_code == 0, result.output
    ((shelf, _, _),) = set_up.apps
    with shelf._open(path, None) as engine:
        served = engine.model.logits([1, 444, 300])
    rules = [load(path, backend="numpy", activations=each).logits([1, 444, 300]) for each in ("blocks", "auto")]
    np.testing.assert_array_equal(served, rules[0])
    assert not np.array_equal(*rules)


def test_serve_makes_engines_as_it_is_told(set_up, monkeypatch, tmp_path):
    """Options come before the file of settings."""
    made = []
    monkeypatch.setattr("bitnet_ref.api.load_engine", lambda *values, **options: made.append((*values, options)))
    (tmp_path / "c.toml").write_text("page_size = 32\nreplicas = 3\n")
    chosen = ("--backend", "numpy", "--replicas", 2, "--generation-defaults", "plain", "--threads", 1)
    for options in (chosen, ()):
        assert invoke("serve", "--port", 0, "--config", tmp_path / "c.toml", *options).exit_code == 0
        set_up.apps[-1][0]._open(Path("m"), 10**9)
    (path, config, room, rest), (_, of_file, *_) = made
    assert (path, room, config.page_size, config.backend, config.replicas) == (Path("m"), 10**9, 32, "numpy", 2)
    assert (config.generation_defaults, rest["threads"]) == ("plain", 1)
    assert (of_file.replicas, of_file.generation_defaults) == (3, "model")


ENGINE = "import shutil, sys\nshutil.copyfile(sys.argv[1] + {which!r}, sys.argv[2])\n"


def test_watch_shows_each_round(tmp_path, monkeypatch):
    """The engine is edited between the rounds, and the third is ended as by Ctrl-C."""
    case, ids = str(GOLDEN / "bitnet-packed-offline"), [1, 5, 9]
    seen, name = model(case).run_with_cache(ids)[1], "blocks.1.mlp.hook_post"
    write_trace(tmp_path / "right", seen, ids, engine="theirs")
    write_trace(tmp_path / "wrong", {**seen, name: seen[name] * np.float32(1.5)}, ids, engine="theirs")
    engine, rounds = tmp_path / "engine.py", iter(["wrong", "right"])
    engine.write_text(ENGINE.format(which="wrong"))

    def edit(sources):
        assert engine in sources
        which = next(rounds, None)
        if which is None:
            raise KeyboardInterrupt
        engine.write_text(ENGINE.format(which=which))

    monkeypatch.setattr(watch_command, "_wait_for_change", edit)
    monkeypatch.setattr(watch_command.time, "strftime", lambda _: "12:34:56")
    words = [sys.executable, str(engine), f"{tmp_path}/", str(tmp_path / "run.safetensors")]
    result = CliRunner().invoke(cli, ["crossval", "watch", "--model", case, "--no-causes", "--", *words])
    assert result.exit_code == 0
    assert result.stdout.count("DIFFERS") == 2
    assert result.stdout.count("AGREES") == 1
    lines = result.stdout.splitlines()
    assert sum(line.startswith(f"as before: {name} (") for line in lines) == 1
    (before,) = [index for index, line in enumerate(lines) if line.startswith(f"first wrong op before: {name} (")]
    assert lines[before + 1] == "                  now: nothing, it agrees"
    (last,) = [line for line in lines[before:] if line.startswith("12:34:56, the engine ran ")]
    assert "waiting for a change of python" in last or "engine.py" in last
    assert result.stdout.endswith("(Ctrl-C ends)\n\n")
    assert result.stderr == "\n"  # behind ^C


def test_files_that_are_watched(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.py", "b.txt", "old.safetensors"):
        Path(name).write_text(name)
    sources = watch_command._sources(["sh", "a.py", "no.py", "x" * 5000], [Path("b.txt")])
    assert [path.name for path in sources] == ["sh", "a.py", "b.txt"]
    assert watch_command._sources(["./no"], []) == [Path("./no")]
    before = watch_command._candidates(["x", "new.safetensors"], None)
    assert before[Path("new.safetensors")] is None
    assert before[Path("old.safetensors")][1] == 15
    assert list(watch_command._candidates(["x.safetensors"], Path("t"))) == [Path("t")]
    Path("new.safetensors").write_text("1")
    assert watch_command._find_trace("x", None, before) == Path("new.safetensors")
    stamps = watch_command._stamps([Path("a.py"), Path("gone")])
    assert stamps[Path("gone")] is None
    monkeypatch.setattr(watch_command, "_POLL_S", 0.01)
    ended = threading.Event()

    def wait():
        watch_command._wait_for_change(watch_command._stamps([Path("a.py")]))
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    assert not ended.is_set()
    Path("a.py").unlink()
    time.sleep(0.05)
    assert not ended.is_set()  # it is being written
    Path("a.py").write_text("another")
    assert ended.wait(10)
    thread.join()
