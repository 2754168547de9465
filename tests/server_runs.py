"""A server of this process on a real socket, and raw HTTP to it."""

import contextlib
import functools
import http.client
import json
import socket
import threading
import time
from pathlib import Path

import pytest
from cli_runs import BACKEND
from helpers import model

from bitnet_ref.cli.serve_command import listen, uvicorn_config
from bitnet_ref.serving import EngineConfig, start_engines

pytest.importorskip("starlette", reason="starlette is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")

from bitnet_ref.serving.http.admission import ServerLimits
from bitnet_ref.serving.http.app import create_app
from bitnet_ref.serving.http.draining import DrainingServer
from bitnet_ref.serving.http.shelf import ModelShelf


class RunningServer:
    """uvicorn in a thread. `engines`: those that were opened, by path."""

    def __init__(
        self,
        sources,
        limits=None,
        *,
        budget=None,
        idle_s=None,
        settings=None,
        drain_s=10,
        adapters=None,
        default=None,
        **options,
    ):
        self.engines = {}
        self.hold = threading.Event()  # clear it to let models wait before they load
        self.hold.set()
        # Requests without a seed draw what they drew the time before: no test depends on luck.
        self.settings = {"max_batch": 8, "page_size": 4, "sampling": {"seed": 0}, **(settings or {})}
        self.shelf = ModelShelf(sources, self.open_engine, budget, idle_s, adapters or {}, default)
        self.app = create_app(self.shelf, limits or ServerLimits(), **options)
        self.socket = listen("127.0.0.1", 0)
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        end_requests = functools.partial(self.shelf.close, drain=False)
        self.uvicorn = DrainingServer(uvicorn_config(self.app), drain_s, end_requests)
        self.thread = threading.Thread(target=self.uvicorn.run, kwargs={"sockets": [self.socket]}, daemon=True)

    def open_engine(self, path, room):
        assert self.hold.wait(20)
        engine = self.engines[Path(path).name] = start_engines(
            model(path, backend=BACKEND, threads=1), EngineConfig(**self.settings), room
        )
        return engine

    def __enter__(self):
        self.thread.start()
        until(lambda: self.shelf.is_ready)
        return self

    def __exit__(self, *_):
        self.uvicorn.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()

    def get(self, path, **headers):
        return self.request("GET", path, None, headers)

    def post(self, path, body, **headers):
        """-> status, headers, JSON"""
        return self.request("POST", path, json.dumps(body), {"content-type": "application/json", **headers})

    def request(self, method, path, body, headers):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(connection):
            connection.request(method, path, body, {name.replace("_", "-"): v for name, v in headers.items()})
            answer = connection.getresponse()
            data = answer.read()
        is_json = answer.headers.get("content-type", "").startswith("application/json")
        return answer.status, answer.headers, json.loads(data) if is_json else data.decode()

    def open_request(self, path, body, receive_buffer=None):
        """A socket on which a request was sent."""
        connection = socket.socket()
        if receive_buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(30)
        connection.connect(("127.0.0.1", self.port))
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        connection.sendall(head.encode() + data)
        return connection


def until(condition, timeout_s=20.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "timeout"
        time.sleep(0.005)


def events(text):
    """The JSON of server-sent events, without [DONE], which is the last."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]
