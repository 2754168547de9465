"""The page at `/`: one HTML document of the files in assets/page, and the state of an engine for its live view."""

from __future__ import annotations

import base64
import hashlib
import re
import time
from functools import cache
from pathlib import Path
from typing import Any

from ..engine import Engine
from .schemas import RequestError

FILES = Path(__file__).parents[2] / "assets" / "page"
MAX_STEPS = 120  # of an answer: more are not shown at a time
MAX_REQUESTS = 100
MAX_PAGES = 4096


@cache
def render_page() -> tuple[bytes, dict[str, str]]:
    """The document with its styles and scripts inside, and its headers.

    The Content-Security-Policy names the hash of each of them, so nothing else runs, and lets the page talk to this
    server only.
    """
    html = (FILES / "index.html").read_text(encoding="utf-8")
    html = re.sub(r"\{\{(.+?)\}\}", lambda name: (FILES / name[1]).read_text(encoding="utf-8"), html)
    styles, scripts = (_hashes(html, tag) for tag in ("style", "script"))
    policy = (
        f"default-src 'none'; style-src {styles}; script-src {scripts}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "trusted-types 'none'; require-trusted-types-for 'script'"
    )
    headers = {"content-type": "text/html; charset=utf-8", "content-security-policy": policy}
    headers |= {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer", "cache-control": "no-cache"}
    return html.encode(), headers


def _hashes(html: str, tag: str) -> str:
    contents = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in contents
    )


def describe_engine(engine: Engine, replica: int = 0, after: int = 0) -> dict[str, Any]:
    """What one of the engines has done since step `after` and holds now, without any text of its requests, for JSON.

    It copies what the engine's thread has noted already, and lets that thread wait for nothing. "replicas" counts the
    unfinished requests of each engine. Raises RequestError for a replica that is not there.
    """
    if replica >= len(engines := engine.engines):
        raise RequestError(f"expected at most {len(engines) - 1}, got {replica}", "replica")
    unfinished, engine = [each.unfinished for each in engines], engines[replica]
    steps = [vars(step) for step in engine.timeline.copy() if step.number > after][-MAX_STEPS:]
    stories = engine.stories
    ended = [story for story in stories if story.end_s is not None]
    alive = sorted((story for story in stories if story.end_s is None), key=lambda story: story.state == "waiting")
    holders, config = engine.page_holders, engine.config
    while holders and holders[-1] is None:
        holders.pop()
    metrics = {name: None if value != value else value for name, value in engine.metrics.snapshot().items()}  # no NaN
    return {
        "now_s": time.perf_counter(),
        "replica": replica,
        "replicas": unfinished,
        "closed": engine.closed,
        "limits": {"max_batch": config.max_batch, "max_batch_tokens": config.max_batch_tokens},
        "metrics": metrics,
        "steps": steps,
        "requests": [vars(story) for story in (*alive[:MAX_REQUESTS], *reversed(ended))],
        "hidden_requests": max(0, len(alive) - MAX_REQUESTS),
        "pages": {"size": engine.cache.page_size, "total": engine.cache.pages, "holders": holders[:MAX_PAGES]},
    }
