"""One admission for every route: count, bytes and time; and /health beside whatever the others do."""

import asyncio
import socket
import threading
import time
from types import SimpleNamespace

import pytest
from server_runs import RunningServer, ServerLimits, until

from bitnet_ref.formats.open import ASSETS
from bitnet_ref.serving.http.admission import Admission, _current, _Intake
from bitnet_ref.serving.http.choices import Asked
from bitnet_ref.serving.http.schemas import RequestError

STORY = ASSETS / "storyteller"
KINDS = {"content-type": "application/json"}
WITHOUT_WORK = {"/v1/responses/{id}/cancel"}  # reads no body


@pytest.fixture(scope="module")
def server():
    limits = ServerLimits(max_body_bytes=1 << 20, max_streams=2, request_timeout_s=30)
    with RunningServer({"storyteller": STORY}, limits) as running:
        yield running


def admission(server):
    """The one that the application's middleware has."""
    return next(each.kwargs["admission"] for each in server.app.user_middleware if "admission" in each.kwargs)


def test_every_route_that_reads_a_body_is_admitted(server):
    """From the router: a new route that does its work without admission fails here."""
    count = admission(server)
    count.running += 2
    try:
        paths = [route.path for route in server.app.routes if "POST" in route.methods]
        assert len(paths) >= 15
        for path in sorted(set(paths) - WITHOUT_WORK):
            status, _, answer = server.request("POST", path.replace("{id}", "x"), "{}", KINDS)
            assert status == 429, (path, status, answer)
        for path in ("/health", "/metrics", "/v1/models"):
            assert server.get(path)[0] == 200
    finally:
        count.running -= 2


def test_bodies_are_bounded_together(server):
    count = admission(server)
    count.running, count.nbytes = 1, 16 << 20
    try:
        status, headers, answer = server.post("/tokenize", {"prompt": "x"})
        assert (status, headers["retry-after"]) == (429, "1"), answer
    finally:
        count.running = count.nbytes = 0


def test_the_last_request_and_the_last_byte_that_are_admitted():
    count = Admission(ServerLimits(max_body_bytes=10, max_streams=2))
    one, two, three = (_Intake(is_read=True) for _ in range(3))
    count._enter(one, 150)
    with pytest.raises(RequestError, match="hold 150 bytes; this one of 11 has to wait"):
        count._enter(two, 11)
    count.leave(two)
    count._enter(two, 10)  # 16 times the largest body
    with pytest.raises(RequestError, match="2 requests are running"):
        count._enter(three, 0)
    count.leave(three)
    assert (count.running, count.nbytes) == (2, 160)
    count.leave(one)
    assert (count.running, count.nbytes) == (1, 10)


def test_a_body_that_is_late_is_waited_for_once():
    """Not again before the answer, as the rest of one that is refused."""

    async def never():
        await asyncio.Event().wait()
        yield b""

    intake = _Intake(is_read=False)
    _current.set(intake)
    count = Admission(ServerLimits(body_timeout_s=0))
    with pytest.raises(RequestError, match="the body did not arrive within 0 s") as caught:
        asyncio.run(count.read(SimpleNamespace(headers={}, stream=never)))
    assert caught.value.status == 408
    assert intake.is_read


def test_large_bodies_are_read_in_a_thread_of_their_own():
    async def read(nbytes):
        count = Admission(ServerLimits())
        _current.set(_Intake(is_read=True, nbytes=nbytes))
        name = await count.work(lambda: threading.current_thread().name)
        return count.is_small, name.startswith("large-body")

    kinds = {4096: (True, False), 4097: (False, False), 65536: (False, False), 65537: (False, True)}
    assert {nbytes: asyncio.run(read(nbytes)) for nbytes in kinds} == kinds


def test_what_was_given_up_computes_beside_nothing():
    """The thread goes on with the first; those that had not begun are dropped."""
    running, most, done, ends = 0, 0, [], threading.Event()

    def compute(number):
        nonlocal running, most
        running += 1
        most = max(most, running)
        ends.wait(20)
        running -= 1
        done.append(number)

    async def give_up():
        count = Admission(ServerLimits())
        _current.set(_Intake(is_read=True))
        tasks = [asyncio.create_task(count.compute(compute, number)) for number in range(6)]
        while not running:
            await asyncio.sleep(0.001)
        for task in tasks[:5]:
            task.cancel()
        await asyncio.sleep(0.01)  # until they are
        ends.set()
        await tasks[5]

    asyncio.run(give_up())
    assert (most, done) == (1, [0, 5])


@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions", "/nothing"])
def test_a_request_leaves_when_it_has_ended(server, path):
    for body in ({"prompt": "Alice"}, {"prompt": 7}, {}):
        server.post(path, body)
        until(lambda: (admission(server).running, admission(server).nbytes) == (0, 0))


REFUSED = {
    413: ("POST", "/tokenize", KINDS),
    404: ("POST", "/nothing", KINDS),
    405: ("PUT", "/v1/models", KINDS),
    415: ("POST", "/tokenize", {"content-type": "text/plain"}),
    400: ("POST", "/tokenize", {**KINDS, "host": "example.com"}),
    401: ("POST", "/tokenize", {**KINDS, "authorization": "Bearer wrong"}),
}


def test_a_client_that_sends_too_much_reads_why_it_is_refused():
    """Many times the largest body, in its own time: the server reads on, and closes when the client has the answer."""
    limits = ServerLimits(max_body_bytes=1 << 20)
    with RunningServer({"storyteller": STORY}, limits, api_keys=("right",), hosts=("127.0.0.1",)) as running:
        for status, (method, path, headers) in REFUSED.items():
            fields = {"host": "127.0.0.1", "authorization": "Bearer right", "content-length": 12 << 20, **headers}
            with socket.create_connection(("127.0.0.1", running.port), timeout=30) as client:
                lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
                client.sendall("\r\n".join(lines).encode())
                time.sleep(0.1)  # the answer could be there
                for _ in range(12):
                    client.sendall(b"x" * (1 << 20))
                assert client.recv(1 << 10).startswith(f"HTTP/1.1 {status} ".encode()), status


@pytest.mark.thorough
def test_long_work_ends_in_time_and_leaves_the_others_alone():
    limits = ServerLimits(request_timeout_s=0.2)
    text = "Once upon a time there was a fox of 7 years. " * 80_000
    with RunningServer({"storyteller": STORY}, limits) as running:
        assert running.post("/tokenize", {"prompt": text})[0] == 504
        statuses, worst = [], 0.0
        threads = [
            threading.Thread(target=lambda: statuses.append(running.post("/tokenize", {"prompt": text})[0]))
            for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            started = time.monotonic()
            assert running.get("/health")[0] == 200
            worst = max(worst, time.monotonic() - started)
        assert running.post("/tokenize", {"prompt": "a short one"})[0] == 200  # not behind them
        assert statuses == [504] * 6
        assert worst < 5  # it took as long as all of them


def test_what_takes_time_is_not_submitted_in_the_event_loop():
    plain, words = SimpleNamespace(config=SimpleNamespace(sampling={})), [f"word {n}" for n in range(65)]
    for params, is_quick in (
        ({}, True),
        ({"bad_words": words[:64]}, True),
        ({"bad_words": words}, False),  # the whole vocabulary is searched for them
        ({"bad_words": "x" * 100}, True),
        ({"guided_regex": "a"}, False),
        ({"n": 2}, False),
        ({"n": 1}, True),
    ):
        assert Asked("m", [[1]], params, False).is_quick(plain) == is_quick, params
    assert not Asked("m", [[1], [2]], {}, False).is_quick(plain)
    both = SimpleNamespace(config=SimpleNamespace(sampling={"n": 2}))
    assert not Asked("m", [[1]], {}, False).is_quick(both)
