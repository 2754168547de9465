"""`bitnet-ref batch`: the server's answers from a file, interrupted and spread over workers that are killed."""

import hashlib
import json
import os
import shlex
import shutil
import signal

import pytest
from cli_runs import BACKEND, FAST, invoke, invoke_json
from helpers import DATA, model

from bitnet_ref.cli import batch_command
from bitnet_ref.cli.batch_command import hash_files, open_server, serve_lines
from bitnet_ref.cli.generation_options import model_opener
from bitnet_ref.errors import BackendUnavailable, FormatError, StorageError
from bitnet_ref.formats.open import ASSETS
from bitnet_ref.system.workers import DaskWorkers, Here

pytest.importorskip("fastjsonschema", reason="fastjsonschema is not installed")

from bitnet_ref.serving.http import batch as batch_module
from bitnet_ref.serving.http.batch import run_batch

STORY = ASSETS / "storyteller"
TOOL = {"type": "function", "function": {"name": "weigh", "parameters": {"type": "object"}}}
CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}"


def request(custom_id, url="/v1/completions", **body):
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


REQUESTS = [
    request("plain", prompt="Once upon a time"),
    request("many", prompt=["Alice", "The king"], n=2, logprobs=1, max_tokens=6, model="story"),
    request("greedy", prompt="The", temperature=0, max_tokens=20, seed=4, echo=True),
    request("vectors", "/v1/embeddings", input=["a king", "a wood"], encoding_format="base64"),
    request("chat", "/v1/chat/completions", messages=[{"role": "user", "content": "Once"}], max_tokens=8),
    request("ids", prompt=[5, 6, 7], max_tokens=4, seed=1, user="me"),
]
WRONG = [
    "nonsense",
    "[" * 200,
    '{"url": "/v1/completions"}',
    request("url", "/v1/files"),
    request("body", prompt=7),
    request("name", prompt="a", model="gpt"),
    request("stream", prompt="a", stream=True),
    request("long", prompt="a " * 500),
    request("dimensions", "/v1/embeddings", input="a", dimensions=300),
    json.dumps({"custom_id": "none", "url": "/v1/completions"}),
]


@pytest.fixture
def server():
    server = serve_lines(model(STORY, BACKEND, threads=1), "story", None, CHAT)
    yield server
    server.engine.close()


def write(path, lines):
    path.write_text("\n".join(lines) + "\n\n")
    return path


def run(tmp_path, server, lines=REQUESTS, name="out.jsonl", workers=None, **options):
    source = write(tmp_path / "in.jsonl", lines)
    summary = run_batch(source, tmp_path / name, workers or Here(server), {"model": "story"}, **options)
    return summary, (tmp_path / name).read_bytes()


def answers(data):
    return [json.loads(line) for line in data.splitlines()]


def test_answers_are_the_servers(tmp_path, server):
    pytest.importorskip("starlette", reason="starlette is not installed")
    pytest.importorskip("uvicorn", reason="uvicorn is not installed")
    from server_runs import RunningServer

    summary, data = run(tmp_path, server, REQUESTS + WRONG[3:9])
    assert (summary.lines, summary.failed, summary.reused) == (12, 6, 0)
    assert 0 < summary.seconds < 60
    assert run(tmp_path, server, REQUESTS + WRONG[3:9])[1] == data  # to the byte
    with RunningServer(
        {"story": STORY}, chat_template=CHAT, settings={"sampling": {}, "generation_defaults": "model"}
    ) as http:
        for line, answer in zip(REQUESTS + WRONG[3:9], answers(data), strict=True):
            entry = json.loads(line)
            seed = int(batch_module.digest_of(line.encode())[:15], 16)
            seeded = {} if entry["url"] == "/v1/embeddings" else {"seed": seed}
            status, _, body = http.post(entry["url"], {**seeded, **entry["body"]})
            assert answer["custom_id"] == entry["custom_id"]
            if entry["custom_id"] in ("url", "stream"):
                assert answer["response"]["status_code"] in (400, 404)
                continue
            assert answer["response"]["status_code"] == status, (line, answer, body)
            mine = answer["response"]["body"]
            for each in (body, mine):
                each.pop("id", None)
                each.pop("created", None)
                each.get("usage", {}).pop("prompt_tokens_details", None)
            assert mine == body


def test_what_is_wrong_with_a_line_is_its_answer(tmp_path, server, monkeypatch):
    monkeypatch.setattr(batch_module, "MAX_LINE_BYTES", 2000)
    summary, data = run(tmp_path, server, [*WRONG, "x" * 9000, REQUESTS[0], request("huge", prompt="y" * 3000)])
    codes = [answer["response"]["status_code"] for answer in answers(data)]
    assert codes == [400, 400, 400, 404, 400, 404, 400, 400, 400, 400, 413, 200, 413]
    assert (summary.lines, summary.failed) == (13, 12)
    assert all(answer["response"]["body"]["error"]["message"] for answer in answers(data)[:11])
    for size, code in ((2000, 200), (2001, 413)):
        _, data = run(tmp_path, server, [REQUESTS[0][:-1].ljust(size - 1) + "}"], f"{size}.jsonl")
        assert answers(data)[0]["response"]["status_code"] == code


def test_calls_of_tools_have_the_same_ids_each_time(tmp_path, server):
    line = request(
        *("tool", "/v1/chat/completions"),
        messages=[{"role": "user", "content": "a"}],
        tools=[TOOL],
        tool_choice="required",
        max_tokens=200,
        temperature=0,
    )
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    data = run(tmp_path, server, [line])[1]
    assert data == run(tmp_path, server, [line])[1]
    message = answers(data)[0]["response"]["body"]["choices"][0]["message"]
    assert all(call["id"].startswith("call_") for call in message.get("tool_calls", ()))


def read_journal(path, header=b'{"model": "m"}'):
    with path.open("a+b") as journal:
        return batch_module._read_journal(journal, path, header)


def test_the_journal_of_an_interrupted_run(tmp_path):
    """Whole answers stay with their places; those of a fault are computed again, and a torn line is cut off."""
    statuses = {"a": 200, "b": 503, "c": 404}
    jobs = [batch_module.BatchLine(digit * 64, custom_id="\u00e9", status=status) for digit, status in statuses.items()]
    lines = [job.line().encode() for job in jobs]
    assert [json.loads(line)["id"] for line in lines] == ["batch_req_" + digit * 32 for digit in "abc"]
    assert '"custom_id":"\u00e9"'.encode() in lines[0]  # as it was written
    path = tmp_path / "journal"
    assert read_journal(path) == ({}, 0)
    header = path.read_bytes()
    journal = [batch_module._checked(line) for line in lines]
    whole = header + b"".join(journal)
    path.write_bytes(whole + journal[0][:40])
    ends = [len(header) + sum(map(len, journal[:number])) for number in range(4)]
    places = {
        "batch_req_" + "a" * 32: (ends[0] + batch_module.CHECKSUM, len(lines[0])),
        "batch_req_" + "c" * 32: (ends[2] + batch_module.CHECKSUM, len(lines[2])),
    }
    assert read_journal(path) == (places, 0)
    assert path.read_bytes() == whole
    for content in (b"", b"{"):  # of a run that had not begun
        path.write_bytes(content)
        assert read_journal(path) == ({}, 0)
        assert path.read_bytes() == header
    with pytest.raises(FormatError, match="is of another run"):
        read_journal(path, b'{"model": "n"}')
    path.write_bytes(b'{"model": "m"}\n' + lines[0])  # as version 0.1 wrote it
    with pytest.raises(FormatError, match="is of another run"):
        read_journal(path)


def test_one_damaged_byte_anywhere_in_a_journal(tmp_path):
    """It is never taken for an answer: the line is computed again, or the file refused."""
    job = batch_module.BatchLine("a" * 64, custom_id="x", body={"choices": [{"text": "one day"}]})
    path, line = tmp_path / "journal", job.line().encode()
    read_journal(path)
    header = path.read_bytes()
    whole = header + batch_module._checked(line)
    for offset, byte in enumerate(whole):
        for other in (byte ^ 1, byte ^ 0x80, 10):
            if other == byte:
                continue
            path.write_bytes(whole[:offset] + bytes([other]) + whole[offset + 1 :])
            try:
                places, damaged = read_journal(path)
            except FormatError:
                assert offset < len(header)
                continue
            assert places == {}, offset
            assert damaged >= (offset < len(whole) - 1 and offset >= len(header))


def test_an_answer_that_is_no_text_is_its_lines_error():
    job = batch_module.BatchLine("a" * 64, custom_id="\ud800", body={"text": "\udfff"})
    answer = json.loads(job.line().encode())
    assert (answer["custom_id"], answer["response"]["status_code"]) == ("?", 500)
    job = batch_module.BatchLine("a" * 64, custom_id="x", body={"number": float("inf")})
    assert json.loads(job.line())["response"]["status_code"] == 500


def test_any_error_of_a_line_is_that_lines(tmp_path, server, monkeypatch):
    """Whatever is raised: the lines beside it are answered."""
    good, bad = (
        {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"prompt": name, "max_tokens": 2}}
        for name in ("good", "bad")
    )
    read = batch_module.read_completion

    def fail(body, *rest):
        if body["prompt"] == "bad":
            raise UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates")
        return read(body, *rest)

    monkeypatch.setattr(batch_module, "read_completion", fail)
    lines = batch_module.answer_lines(server, [json.dumps(line).encode() for line in (bad, good)])
    assert [json.loads(line)["response"]["status_code"] for line in lines] == [500, 200]


def test_lines_of_a_file(tmp_path, monkeypatch):
    """Of a long one, what shows that it is too long."""
    monkeypatch.setattr(batch_module, "MAX_LINE_BYTES", 4)
    path = tmp_path / "lines"
    path.write_bytes(b"ab\n\n  \nabcd\n cd \nabcde\nabcd efgh ijkl\nabc\nlast!")
    with path.open("rb") as file:
        expected = [b"ab", b"abcd", b"cd", b"abcde", b"abcd", b"abc", b"last!"]
        assert list(batch_module.read_lines(file)) == expected
        lines, others = batch_module.read_lines(file), batch_module.read_lines(file)
        assert [next(lines), next(others), next(lines)] == [b"ab", b"ab", b"abcd"]
    assert list(batch_module.in_groups([b"a", b"b", b"c"], 2)) == [[b"a", b"b"], [b"c"]]


class Interrupted(Here):
    def __init__(self, resource, items):
        super().__init__(resource)
        self.items = items

    def map(self, function, items):
        for index, result in super().map(function, items):
            yield index, result
            if index + 1 == self.items:
                raise KeyboardInterrupt


@pytest.mark.parametrize("torn", [b"", b'{"id":"batch_req_12'])
def test_an_interrupted_run_goes_on(tmp_path, server, monkeypatch, torn):
    monkeypatch.setattr(batch_module, "LINES_AT_A_TIME", 2)
    lines = REQUESTS + WRONG
    whole = run(tmp_path, server, lines, "whole.jsonl")[1]
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, server, lines, workers=Interrupted(server, 2))
    partial = tmp_path / "out.jsonl.partial"
    assert len(partial.read_bytes().splitlines()) == 5
    assert not (tmp_path / "out.jsonl").exists()
    with partial.open("ab") as file:
        file.write(torn)
    with pytest.raises(FormatError, match="another run"):
        run_batch(tmp_path / "in.jsonl", tmp_path / "out.jsonl", Here(server), {"model": "other"})
    steps = []
    summary, data = run(tmp_path, server, lines, progress=lambda *at: steps.append(at))
    assert (summary.reused, steps[0], data) == (4, (4, len(lines)), whole)
    assert not partial.exists()


def test_the_bar_of_hashing_reaches_its_end(tmp_path, monkeypatch):
    steps, files = [], [tmp_path / "a", tmp_path / "b"]
    monkeypatch.setattr(batch_command.LoadingBar, "__call__", lambda bar, *at: steps.append(at))
    for file, size in zip(files, (5, (1 << 20) + 1), strict=True):
        file.write_bytes(bytes(size))
    assert hash_files(files) == [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    total = (1 << 20) + 6
    assert steps == [(5, total), (total - 1, total), (total, total)]


def test_an_interrupted_command_says_how_to_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(batch_module, "LINES_AT_A_TIME", 2)
    monkeypatch.setattr(batch_command, "spread", lambda *given: Interrupted(given[-1], 2))
    source, target = write(tmp_path / "in put.jsonl", REQUESTS), tmp_path / "out.jsonl"
    command = ["batch", source, target, "--model", f"story={STORY}", *FAST]
    result = invoke(*command)
    assert result.exit_code == 130
    note, line = result.stderr.strip().splitlines()[-2:]
    assert note == f"4 of 6 answers are kept in {target}.partial; this goes on with the others:"
    monkeypatch.undo()
    again = invoke_json(*shlex.split(line)[1:])
    assert (again["reused"], again["lines"], target.exists()) == (4, 6, True)


def test_answers_of_a_fault_are_not_reused(tmp_path, server, monkeypatch):
    monkeypatch.setattr(batch_module, "LINES_AT_A_TIME", 1)
    with monkeypatch.context() as broken:
        broken.setattr(batch_module, "embed", lambda *_: (_ for _ in ()).throw(BackendUnavailable("gone")))
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, server, REQUESTS, workers=Interrupted(server, 5))
    summary, data = run(tmp_path, server, REQUESTS)
    assert (summary.reused, summary.failed) == (4, 0)
    assert data == run(tmp_path, server, REQUESTS, "again.jsonl")[1]


def test_what_is_refused(tmp_path, server):
    with pytest.raises(FormatError, match=r"line 7.*plain|plain.*answers apart"):
        run(tmp_path, server, [*REQUESTS, REQUESTS[0]])
    with pytest.raises(FormatError, match="no line"):
        run(tmp_path, server, [])
    from bitnet_ref.system.atomic import lock_file

    with (tmp_path / "out.jsonl.partial").open("ab") as file:
        lock_file(file.fileno())
        with pytest.raises(StorageError, match="another process"):
            run(tmp_path, server)


def test_command(tmp_path):
    source = write(tmp_path / "in.jsonl", [*REQUESTS[:3], WRONG[0]])
    facts = invoke_json("batch", source, tmp_path / "out.jsonl", "--model", "story=storyteller", *FAST)
    assert (facts["lines"], facts["failed"]) == (4, 1)
    assert answers((tmp_path / "out.jsonl").read_bytes())[1]["response"]["body"]["model"] == "story"
    assert "4 answers" in invoke("batch", source, tmp_path / "o", "--model", "story=storyteller", *FAST).stdout
    assert invoke("batch", source, tmp_path / "o", "--workers", 1, "--dask", "x").exit_code == 2


def test_without_dask(monkeypatch):
    monkeypatch.setattr("bitnet_ref.system.workers.find_spec", lambda name: None)
    with pytest.raises(BackendUnavailable, match=r"pip install 'bitnet-ref\[dask\]'"):
        DaskWorkers((print,), 1)


@pytest.mark.parametrize(
    "option",
    [
        "--dtype=float64",
        "--cache-dtype=int8",
        "--activations=float",
        "--rotation=folded",
        "--dense=int8",
        "--allow-unquantized",
        "--generation-defaults=plain",
        "--unknown-fields=warn",
        "--chat-template=x",
    ],
)
def test_a_journal_is_of_the_options_that_change_answers(tmp_path, monkeypatch, option):
    runs = []
    monkeypatch.setattr(batch_command, "load_model", lambda options: None)
    monkeypatch.setattr(batch_command, "serve_lines", lambda *settings: None)
    monkeypatch.setattr(batch_module, "run_batch", lambda source, target, workers, run, note: runs.append(run))
    (tmp_path / "in").write_text("")
    for options in ([], [option]):
        invoke("batch", tmp_path / "in", tmp_path / "out", *options)
    monkeypatch.setenv("BITNET_REF_ENGINE_SAMPLING_TEMPERATURE", "0")
    invoke("batch", tmp_path / "in", tmp_path / "out", option)
    assert len({json.dumps(run, sort_keys=True) for run in runs}) == 3


@pytest.mark.parametrize("options", [(), ("--lora", f"one={DATA / 'adapters' / 'beside'}")], ids=["", "lora"])
def test_a_worker_keeps_what_it_has_opened(options, tmp_path, monkeypatch):
    """By its opener, which is hashed there."""
    openers = []
    monkeypatch.setattr(batch_command, "spread", lambda opener, *rest: openers.append(hash(opener)))
    (tmp_path / "in").write_text("")
    invoke("batch", tmp_path / "in", tmp_path / "out", "--workers", 1, *options)
    assert len(openers) == 1


def test_a_journal_names_the_models_files_by_their_content(tmp_path, monkeypatch):
    """And an adapter's: a byte of any of them makes another run, though sizes and times are the same."""
    folder = shutil.copytree(DATA / "adapters" / "beside", tmp_path / "m")
    adapter = shutil.copytree(DATA / "adapters" / "beside", tmp_path / "a")
    runs = []
    monkeypatch.setattr(batch_command, "load_model", lambda options: None)
    monkeypatch.setattr(batch_command, "serve_lines", lambda *settings: None)
    monkeypatch.setattr(batch_module, "run_batch", lambda source, target, workers, run, note: runs.append(run))
    (tmp_path / "in").write_text("")
    for path in (None, folder / "model.safetensors", folder / "config.json", adapter / "adapter_model.safetensors"):
        if path is not None:
            times, data = path.stat(), bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        invoke("batch", tmp_path / "in", tmp_path / "out", "--model", folder, "--lora", f"one={adapter}")
    for own in (adapter, "none"):  # not the adapter beside the model
        options = ("--model", folder, "--lora", f"one={adapter}", "--adapter", own)
        invoke("batch", tmp_path / "in", tmp_path / "out", *options)
    assert len({json.dumps(run, sort_keys=True) for run in runs}) == 6


def refuses_strangers(address):
    """A scheduler runs code: no other process may connect, be it without TLS or with a key of its own."""
    from distributed import Client
    from distributed.security import Security

    for stranger in (address.replace("tls://", "tcp://"), address):
        with pytest.raises(OSError, match=r"TLS|closed|tcp|handshake|connect"):
            Client(stranger, timeout=3, security=Security.temporary() if stranger == address else None)


def test_an_address_with_tls_and_no_certificate():
    pytest.importorskip("distributed", reason="distributed is not installed: pip install 'bitnet-ref[dask]'")
    with pytest.raises(BackendUnavailable, match=r"no Dask scheduler at tls://127\.0\.0\.1:1"):
        DaskWorkers((print,), address="tls://127.0.0.1:1")


@pytest.mark.thorough
def test_workers_that_are_killed_change_no_byte(tmp_path, server, monkeypatch):
    """kill -9 of a worker, twice; the nanny starts another, and its items are computed again."""
    pytest.importorskip("distributed", reason="distributed is not installed: pip install 'bitnet-ref[dask]'")
    monkeypatch.setattr(batch_module, "LINES_AT_A_TIME", 2)
    folder = shutil.copytree(STORY, tmp_path / "story")
    lines = [request(f"r{n}", prompt=f"The king {n}", max_tokens=16) for n in range(60)]
    serial = run(tmp_path, server, lines, "serial.jsonl")[1]
    _, loading = model_opener({"model": str(folder), "backend": BACKEND, "threads": 1}, 2)
    killed = []

    def kill(done, total):
        if done >= 10 * (len(killed) + 1) and len(killed) < 2:
            killed.append(next(iter(workers.client.run(os.getpid).values())))
            os.kill(killed[-1], signal.SIGKILL)

    with DaskWorkers((open_server, loading, "story", None, CHAT), 2) as workers:
        refuses_strangers(workers.client.scheduler.address)
        summary, data = run(tmp_path, server, lines, workers=workers, progress=kill)
    assert len(set(killed)) == 2
    assert (summary.lines, summary.failed) == (60, 0)
    assert data == serial
    if BACKEND == "cython":
        assert list((folder / ".bitnet_ref").iterdir())  # one copy for all workers


def kill_workers(_server, _line):
    """An item that ends its worker, whose followers end before they begin: what lack of memory does."""
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.thorough
def test_workers_that_do_not_start_again(monkeypatch):
    """Dask gives a worker up that dies while it starts; a run that has none left must not wait for ever."""
    pytest.importorskip("distributed", reason="distributed is not installed: pip install 'bitnet-ref[dask]'")
    monkeypatch.setattr("bitnet_ref.system.workers.ALONE_S", 1.0)
    with DaskWorkers((dict,), 1) as workers:
        monkeypatch.setenv("PYTHONHOME", "/nowhere")  # no interpreter starts with this
        with pytest.raises(BackendUnavailable, match="all workers have ended"):
            list(workers.map(kill_workers, [b"line"]))


@pytest.mark.thorough
def test_unknown_fields(tmp_path, caplog):
    """Lines with one are errors, or with `warn` the answers of lines without it; then one warning is logged."""
    lines = [
        request("a", prompt="The", max_tokens=2, seed=1, colour="red"),
        request("b", prompt="The", max_tokens=2, seed=1),
    ]
    source = write(tmp_path / "in.jsonl", lines)
    texts = {}
    for rule in ("refuse", "warn"):
        target = tmp_path / f"{rule}.jsonl"
        summary = invoke_json("batch", source, target, "--model", STORY, "--unknown-fields", rule, *FAST)
        assert summary["failed"] == (rule == "refuse")
        texts[rule] = [json.loads(line)["response"] for line in target.read_text().splitlines()]
    verdict = invoke("verify", source, tmp_path / "warn.jsonl", "--model", STORY, *FAST)
    assert verdict.exit_code == 0, verdict.output
    refused, plain = texts["refuse"]
    assert (refused["status_code"], refused["body"]["error"]["param"]) == (400, "colour")
    assert [each["body"]["choices"] for each in texts["warn"]] == [plain["body"]["choices"]] * 2
    assert caplog.text.count("'colour'") == 2  # one of the batch, one of verify
