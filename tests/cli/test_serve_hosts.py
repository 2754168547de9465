"""Names under which a server may be called: those of the address it says, and no name that a web page gives it."""

import socket

import pytest

pytest.importorskip("starlette")

from starlette.requests import Request

from bitnet_ref.cli.serve_command import allowed_hosts, is_loopback, listen
from bitnet_ref.serving.http.app import check_host
from bitnet_ref.serving.http.schemas import RequestError


def is_allowed(hosts, header):
    headers = [] if header is None else [(b"host", header.encode("latin-1"))]
    try:
        check_host(hosts, Request({"type": "http", "headers": headers}))
    except RequestError:
        return False
    return True


USUAL = ["localhost:8000", "LOCALHOST", "127.0.0.1:8000", "127.0.0.1", "[::1]:8000", "[::1]", "[0:0:0:0:0:0:0:1]:1"]
FOREIGN = [
    "evil.example:8000",
    "localhost.evil.example",
    "evil.localhost.example",
    "",
    "[::2]:8000",
    "127.0.0.1.nip.io",
]


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("localhost", "127.0.0.1"),
        ("::1", "::1"),
        ("127.0.0.2", "127.0.0.2"),
        ("0", "::ffff:127.0.0.1"),
    ],
)
def test_loopback_addresses_have_their_own_names_only(host, address):
    hosts = allowed_hosts(host, address, ("models.home",))
    assert is_loopback(address)
    for name in [*USUAL, f"[{address}]:80" if ":" in address else f"{address}:80", "models.home"]:
        assert is_allowed(hosts, name), name
    for name in [*FOREIGN, None, "127.0.0.3"]:
        assert not is_allowed(hosts, name), name


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "192.168.1.5", "fe80::1%eth0"])
def test_other_addresses_have_any_name_unless_some_are_given(address):
    assert not is_loopback(address)
    assert is_allowed(allowed_hosts(address, address, ()), "anything.example")
    assert not is_allowed(allowed_hosts(address, address, ("mine.example",)), "anything.example")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost", "127.1"])
def test_the_url_that_is_said_is_answered(host):
    try:
        bound = listen(host, 0)
    except Exception as error:
        pytest.skip(f"this machine has no {host}: {error}")
    with bound:
        address, port = bound.getsockname()[:2]
        said = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"  # as `announce` writes it
        socket.create_connection((address, port), timeout=10).close()  # waits from now on, while models are loaded
        assert is_allowed(allowed_hosts(host, address, ()), said)
        assert not is_allowed(allowed_hosts(host, address, ()), f"evil.example:{port}")
