"""`bitnet-ref serve`: models behind OpenAI's HTTP API."""

from __future__ import annotations

import logging
import os
import signal
import socket
from functools import partial
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .. import __version__
from ..backends.options import ComputeOptions
from ..errors import BackendUnavailable, ConfigError, StorageError
from ..serving.engine_config import EngineConfig
from ..system.options import LONGEST_S, Number
from .generation_options import (
    READING,
    declared_option,
    lora_option,
    name_model,
    read_adapters,
    read_by,
    read_bytes,
    read_template,
    reading_options,
    server_config,
)
from .shell import common_options, report, say

if TYPE_CHECKING:
    from ..serving import Engine

KEY_VARIABLE = "BITNET_REF_API_KEY"
NEEDED = ("starlette", "uvicorn", "fastjsonschema")
LOOPBACK = ("localhost", "127.0.0.1", "::1")
SEND_BUFFER_BYTES = 1 << 16  # of a connection: a client that does not read is noticed soon
CONNECTIONS = 2048
SECONDS = Number(0, LONGEST_S, above=True, optional=True)
KEEP_ALIVE_S = 75  # more than clients keep idle connections (httpx 5 s, proxies 60 s): the first to close must be them


def check_keys(values: tuple[str, ...]) -> tuple[str, ...]:
    """The keys, or the one of the environment, which may hold blanks. Raises ConfigError for one that is blank: a
    variable that was not set would open the server to everyone."""
    if not values and KEY_VARIABLE in os.environ:
        values = (os.environ[KEY_VARIABLE],)
    if not all(key.strip() for key in values):
        message = f"a key is blank; give one, or leave --api-key out and unset {KEY_VARIABLE} to serve without keys"
        raise ConfigError(message, field="--api-key")
    return tuple(key.strip() for key in values)


def check_names(**names: tuple[str, ...]) -> None:
    """Raise ConfigError for a blank one, by a variable that was not set: it would mean something else than is meant."""
    for option, texts in names.items():
        if not all(text.strip() for text in texts):
            flag = "--" + option.replace("_", "-")
            raise ConfigError(f"expected a name, got a blank one; give one, or leave {flag} out", field=flag)


@click.command(short_help="Serve models by OpenAI's HTTP API.")
@click.argument("models", nargs=-1, metavar="[MODEL | NAME=MODEL]...")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 is every network.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one.")
@click.option(
    *("--api-key", "api_keys"),
    multiple=True,
    help=f"Clients need one of these keys.  [env var: {KEY_VARIABLE}, one key]",
)
@click.option("--config", type=click.Path(path_type=Path), help="Engine settings, a TOML file (docs/operating.md).")
@declared_option(EngineConfig, "backend", help="As in generate.  [default: the config's]")
@declared_option(ComputeOptions, "threads", type=click.IntRange(min=1))
@reading_options
@declared_option(EngineConfig, "replicas")
@declared_option(EngineConfig, "generation_defaults")
@lora_option
@click.option("--chat-template", metavar="JINJA", help="Instead of the models' own; @FILE reads it.")
@click.option(
    "--memory-budget", callback=read_bytes, metavar="BYTES", help="Of all loaded models.  [default: no limit]"
)
@click.option("--idle-s", type=float, callback=read_by(SECONDS), help="Drop a model that is idle for so long.")
@click.option("--max-streams", type=click.IntRange(min=1), default=256, show_default=True, help="Requests at a time.")
@click.option("--max-body", callback=read_bytes, default="4MiB", show_default=True, help="Bytes of a request.")
@click.option("--request-timeout-s", type=float, callback=read_by(SECONDS), help="Then a request gets 504.")
@click.option(
    "--drain-s",
    type=click.IntRange(min=0),
    default=30,
    show_default=True,
    help="After SIGTERM, finish requests for so long.",
)
@click.option("--allow-origin", "origins", multiple=True, help="A web page that may use the server (CORS).")
@click.option("--allow-host", "hosts", multiple=True, help="A name of the server, beside localhost.")
@click.option("--default-model", metavar="NAME", help="Meant by requests that name none, or one that is not served.")
@click.option(
    "--unknown-fields",
    type=click.Choice(["refuse", "warn"]),
    help="Of a request: an error, or a warning in the log.  [default: warn on Responses, Messages and Ollama's paths]",
)
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Of the log on stderr, which has a line for each request.",
)
@click.option("--verify", is_flag=True, help="Add /v1/verify, which computes an answer again and compares.")
@common_options
def serve(models: tuple[str, ...], host: str, port: int, **options: Any) -> None:
    """Serve models by OpenAI's HTTP API: completions, chats, embeddings. The default model is storyteller.

    \b
    bitnet-ref serve &
    curl --retry 9 --retry-connrefused localhost:8000/v1/completions \\
        -H "content-type: application/json" \\
        -d '{"prompt": "Once upon a time"}'
    """
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise BackendUnavailable(f"serve needs {', '.join(missing)}: pip install 'bitnet-ref[server]'")
    from ..api import load_engine
    from ..serving.http.admission import ServerLimits
    from ..serving.http.app import create_app
    from ..serving.http.draining import DrainingServer
    from ..serving.http.request_log import JsonLines
    from ..serving.http.shelf import ModelShelf

    api_keys = check_keys(options["api_keys"])
    check_names(host=(host,), allow_host=options["hosts"], allow_origin=options["origins"])
    backend, threads = options["backend"], options["threads"]
    reading: Any = {name: options[name] for name in READING}
    config = server_config(
        options["config"],
        backend=backend,
        replicas=options["replicas"],
        generation_defaults=options["generation_defaults"],
    )

    def open_engine(path: Path, room: int | None) -> Engine:
        return load_engine(path, config, room, threads=threads, **reading)

    sources: dict[str, Path] = {}
    for text in models or ("storyteller",):
        name, path = name_model(text)
        if name in sources:
            raise click.UsageError(f"two models have the name {name!r}; write NAME=MODEL for one of them")
        sources[name] = path
    adapters = read_adapters(options["adapters"], list(sources))
    default_model = options["default_model"]
    if default_model is not None and default_model not in sources:
        raise click.UsageError(f"--default-model: {default_model!r} is not served; there are: {', '.join(sources)}")
    limits = ServerLimits(options["max_body"], options["max_streams"], request_timeout_s=options["request_timeout_s"])
    template = read_template(options["chat_template"])
    bound = listen(host, port)
    is_private = is_loopback(bound.getsockname()[0])
    shelf = ModelShelf(sources, open_engine, options["memory_budget"], options["idle_s"], adapters, default_model)
    app = create_app(
        shelf,
        limits,
        api_keys=api_keys,
        chat_template=template,
        origins=options["origins"],
        hosts=allowed_hosts(host, bound.getsockname()[0], options["hosts"]),
        version=__version__,
        verify=options["verify"],
        unknown_fields=options["unknown_fields"],
    )
    if not is_private and not api_keys:
        say(f"anyone who reaches {host} can use this server: set --api-key, or listen on 127.0.0.1")
    handler = logging.StreamHandler()
    is_json = options["log_format"] == "json"
    handler.setFormatter(
        JsonLines() if is_json else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    handler.addFilter(lambda record: (record.name, record.levelno) != ("bitnet_ref.serving.worker", logging.INFO))
    logging.basicConfig(handlers=[handler], level=logging.INFO)  # but for the engines' lines: requests have their own
    server = DrainingServer(uvicorn_config(app), options["drain_s"], partial(shelf.close, drain=False))
    failures: list[BaseException] = []

    def on_loaded(error: BaseException | None) -> None:
        if error is None:
            announce(bound, [*sources, *(f"{base}:{name}" for base, name in adapters)])
        else:
            failures.append(error)
            server.should_exit = True

    app.state.on_loaded = on_loaded
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises them again when it has ended
        signal.signal(number, lambda *_: None)
    server.run(sockets=[bound])
    if failures:
        raise failures[0]


def allowed_hosts(host: str, address: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """The names under which clients may call the server that listens on this address; "*" is any.

    host: as the user wrote it. names: of --allow-host. A web page can give a loopback address a name of its own, so
    there only the usual names are allowed, and those of the address.
    """
    if is_loopback(address):
        return (*names, *dict.fromkeys((*LOOPBACK, host, address)))
    return names or ("*",)


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches the address: all of 127.0.0.0/8, ::1, and these as IPv4 in IPv6."""
    ip = ip_address(address.partition("%")[0])
    return ip.is_loopback or bool(getattr(ip, "ipv4_mapped", None) and ip.ipv4_mapped.is_loopback)  # type: ignore[union-attr]


def uvicorn_config(app: Any) -> Any:
    import uvicorn

    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,  # `RequestLog` has a line for each request
        lifespan="on",
        proxy_headers=False,
        server_header=False,
        limit_concurrency=CONNECTIONS,
        timeout_keep_alive=KEEP_ALIVE_S,
    )


def listen(host: str, port: int) -> socket.socket:
    """A socket on which the server waits. Raises ConfigError for an address that is not of this machine,
    StorageError for one in use."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"{host!r} is no address of this machine: {error.strerror}", field="host") from error
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    try:
        bound.bind(address)
        bound.listen(CONNECTIONS)
    except OSError as error:
        bound.close()
        raise StorageError(
            f"cannot listen on {host}:{port}: {error.strerror}; see --host and --port (0: a free port)"
        ) from error
    return bound


def announce(bound: socket.socket, names: list[str]) -> None:
    """Say where the server is, when its models are loaded."""
    host, port = bound.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    shown = f"serving {', '.join(names)} at {url}/v1, with a page at {url}; Ctrl-C ends"
    report({"url": url, "models": names}, shown)
