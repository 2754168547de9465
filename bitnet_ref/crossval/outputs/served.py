"""An OpenAI-compatible server against the reference: prompt ids, greedy tokens, log probabilities, and their causes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ...api import Model
from ...errors import BackendUnavailable, ContextOverflow, TokenizerError
from ...generation.sampling import log_probabilities
from ..explain.diagnose import Diagnoses, Diagnosis, Progress, sure_or_possible
from ..opponents import PROMPT, default_tokens
from ..token_ids import Greedy, common_prefix, compare_text, ids_of_text, token_parity
from ..tolerances import LOGPROB_SHARE, near_tie
from ..types import Ids
from .causes import explain_tokens, judge_tokens, tried, within_context
from .client import Answer, Client, Refused, rms
from .driving import Driving, drivings
from .given import GivenRun, Replay, Rows

PROMPTS = (PROMPT, "Once upon a time", "She said", "The")
_OTHER_COUNT = sure_or_possible(
    "other_prompt",
    "the server runs on another prompt: it adds BOS, a space or a template, or has another tokenizer",
    "Compare its prompt's ids with those of the model's tokenizer.",
    False,
)
_FEW_PROMPT = 8  # ids, of a model without a tokenizer


@dataclass(frozen=True)
class LogprobErrors:
    """How far a server's log probabilities are from the reference's log-softmax, in nats."""

    count: int
    largest: float
    rms: float
    limit: float  # of the largest
    token: int  # id and place of the largest error
    place: int

    @property
    def agrees(self) -> bool:
        return self.largest <= self.limit and self.rms <= LOGPROB_SHARE * self.limit

    def __str__(self) -> str:
        size = f"largest error {self.largest:.2g}, root mean square {self.rms:.2g}"
        if self.agrees:
            return f"{self.count} log probabilities agree, {size}"
        return f"{self.count} log probabilities: {size}, largest at place {self.place}, token {self.token}"


@dataclass
class Exchange:
    """One prompt and what came of it.   sent: "ids" or "text"."""

    sent: str
    prompt: Ids
    answer: Answer
    run: GivenRun | None  # with ids that the server chose
    problem: str | None = None  # with the prompt's tokens
    greedy: Greedy | None = None
    logprobs: LogprobErrors | None = None

    @property
    def agrees(self) -> bool:
        judged = [each.agrees for each in (self.greedy, self.logprobs) if each is not None]
        return self.problem is None and all(judged) and bool(judged)

    @property
    def verdict(self) -> str:
        if self.problem is not None:
            return f"DIFFERS: {self.problem}"
        parts = [] if self.greedy is None else [self.greedy.verdict]
        if self.logprobs is not None:
            parts.append(str(self.logprobs) if self.logprobs.agrees else f"DIFFERS: {self.logprobs}")
        parts.sort(key=lambda part: not part.startswith("DIFFERS"))
        return "; ".join(parts) or "NOT COMPARABLE: the server gave no token"

    def to_dict(self) -> dict[str, Any]:
        return {
            "sent": self.sent,
            "prompt": self.prompt,
            "tokens": None if self.run is None else list(self.run.tokens),
            "text": self.answer.text,
            "agrees": self.agrees,
            "verdict": self.verdict,
            "greedy": None if self.greedy is None else self.greedy.to_dict(),
            "logprobs": None if self.logprobs is None else {**asdict(self.logprobs), "agrees": self.logprobs.agrees},
        }


@dataclass
class Served:
    """The comparison with a server.   offers: what it gives, in words."""

    url: str
    offers: str
    exchanges: list[Exchange]
    causes: Diagnoses = field(default_factory=Diagnoses)

    @property
    def agrees(self) -> bool:
        return bool(self.exchanges) and all(each.agrees for each in self.exchanges)

    @property
    def verdict(self) -> str:
        """One line: of the first exchange that differs, or a sum of all."""
        bad = next((each for each in self.exchanges if not each.agrees), None)
        if bad is not None:
            return f"{bad.verdict} (prompt of {len(bad.prompt)} tokens, sent as {bad.sent})"
        tokens = sum(each.greedy.compared for each in self.exchanges if each.greedy is not None)
        margins = [g.smallest_margin for each in self.exchanges if (g := each.greedy) and g.smallest_margin is not None]
        ties = sum(len(each.greedy.ties) for each in self.exchanges if each.greedy is not None)
        scores = [each.logprobs for each in self.exchanges if each.logprobs is not None]
        verdict = f"AGREES{' up to near ties' * bool(ties)}: {tokens} tokens of {len(self.exchanges)} prompts"
        verdict += f", smallest margin {min(margins):.3g}" if margins else ""
        if scores:
            largest = max(each.largest for each in scores)
            verdict += f"; {sum(each.count for each in scores)} log probabilities, largest error {largest:.2g}"
        return verdict

    def to_dict(self) -> dict[str, Any]:
        return {
            "url": self.url,
            "offers": self.offers,
            "agrees": self.agrees,
            "verdict": self.verdict,
            "causes": [cause.to_dict() for cause in self.causes],
            "exchanges": [each.to_dict() for each in self.exchanges],
        }


def cross_server(
    model: Model,
    client: Client,
    *,
    prompts: Sequence[str] | None = None,
    max_tokens: int = 48,
    engine_dtype: str = "float32",
    progress: Progress | None = None,
    budget_s: float | None = None,
) -> Served:
    """Ask the server to continue some prompts, each as ids and the first as text too, and compare.

    The first prompt is sent twice: greedy tokens must come again.   Raises BackendUnavailable.
    """
    texts = list(prompts) if prompts else list(PROMPTS)
    try:
        rows: list[tuple[str | None, Ids]] = [(text, model.tokenizer.encode(text)) for text in texts]
    except TokenizerError:
        if prompts:
            raise
        ids = default_tokens(model)
        rows = [(None, ids), (None, ids[:_FEW_PROMPT])]
    limit = model.context_length - 2  # a server may refuse what ends at the context exactly
    if (longest := max(len(ids) for _, ids in rows)) >= limit:
        raise ContextOverflow(f"a prompt has {longest} tokens, and the context {model.context_length}: shorten it")
    plan: list[tuple[str, str | None, Ids]] = [("ids", *rows[0]), *(("ids", *row) for row in rows)]
    plan += [("text", *rows[0]), ("text", *rows[-1])] if rows[0][0] is not None else []
    exchanges = []
    for sent, text, ids in plan:
        if sent == "ids" and not client.takes_ids:
            if text is None:
                raise BackendUnavailable(f"{client.url} takes no prompt of token ids, and the model has no tokenizer")
            sent = "text"
        room = min(max_tokens, limit - len(ids))
        prompt: str | Ids = ids if sent == "ids" or text is None else text
        try:
            try:
                answer = client.complete(model, prompt, room)
            except Refused:
                if sent != "ids" or text is None:
                    raise
                sent, answer = "text", client.complete(model, text, room)
        except Refused as refused:
            raise BackendUnavailable(f"{client.url}/v1/completions refuses the request: {refused}") from refused
        exchanges.append(_judge(model, Exchange(sent, ids, answer, None), text, room, engine_dtype))
    served = Served(client.url, _offers(client), exchanges)
    served.causes = _explain(model, served, progress, budget_s)
    return served


def _offers(client: Client) -> str:
    features = client.features or {}
    parts = ["prompts of ids"] if client.takes_ids else []
    parts += ["log probabilities"] if "logprobs" in features else []
    parts += ["those of the prompt"] if "echo" in features else []
    parts += ["token ids"] if "return_token_ids" in features else []
    return ", ".join(parts) or "text"


def _judge(model: Model, exchange: Exchange, text: str | None, room: int, engine_dtype: str) -> Exchange:
    answer, prompt = exchange.answer, exchange.prompt
    if answer.prompt_ids is not None:
        exchange.problem = token_parity(prompt, answer.prompt_ids, model.config)
    elif answer.counted is not None and answer.counted != len(prompt):
        exchange.problem = f"the server counts {answer.counted} prompt tokens; they are {len(prompt)}"
    ids = answer.ids
    if answer.is_cut and ids is not None:
        room = len(ids)
    if ids is None and answer.text:
        ids = ids_of_text(model, prompt, answer.text)
    if ids:
        exchange.run = GivenRun(tuple(prompt), tuple(ids), text, None, answer.finish, room, engine_dtype)
    if answer.ids and exchange.run is not None:
        exchange.greedy = judge_tokens(model, exchange.run)
    elif answer.text:
        exchange.greedy = compare_text(model, prompt, answer.text, room, engine_dtype=engine_dtype)
    if answer.logprobs and exchange.problem is None:
        exchange.logprobs = _logprob_errors(model, exchange)
    return exchange


def _logprob_errors(model: Model, exchange: Exchange, rows: Rows | None = None) -> LogprobErrors | None:
    """rows: the logits that choose the new ids, of a mistake; None: the reference's, and the prompt's tokens too."""
    run, prompt = exchange.run, exchange.prompt
    if rows is None:
        ids = [*prompt, *(() if run is None else run.tokens)][: model.context_length]
        logits, first = np.asarray(model.logits(ids)), 1
    else:
        logits, first = rows, len(prompt)
    dtype = "float32" if run is None else run.engine_dtype
    errors: list[tuple[float, float, int, int]] = []
    for place, named in exchange.answer.logprobs.items():
        if not first <= place < first + len(logits):
            continue
        row = logits[place - first]
        right, limit = log_probabilities(row), float(near_tie(dtype, row[None])[0])
        known = {token: value for token, value in named.items() if 0 <= token < len(right) and np.isfinite(value)}
        errors += [(abs(value - float(right[token])), limit, token, place) for token, value in known.items()]
    if not errors:
        return None
    error, limit, token, place = max(errors)
    return LogprobErrors(len(errors), error, rms([each[0] for each in errors]), limit, token, place)


def _explain(model: Model, served: Served, progress: Progress | None, budget_s: float | None) -> Diagnoses:
    """The causes of what differs; of prompts sent as ids first, as then the server's tokenizer has no part in it."""
    for sent in ("ids", "text"):
        group = [each for each in served.exchanges if each.sent == sent]
        if any(not each.agrees for each in group):
            if (by_prompt := _prompt_cause(group)) is not None:
                return by_prompt
            if (by_logprobs := _by_logprobs(model, group)) is not None:
                return by_logprobs
            runs = [each.run for each in group if each.run is not None]
            causes = explain_tokens(model, runs, progress=progress, budget_s=budget_s)
            if any(each.problem for each in group) and all(cause.name == "record_a_trace" for cause in causes):
                return Diagnoses([_OTHER_COUNT])
            return causes
    return Diagnoses()


def _prompt_cause(group: Sequence[Exchange]) -> Diagnoses | None:
    """Where the server shows the ids that it ran on, no search is needed."""
    bad = next((each for each in group if each.problem is not None and each.answer.prompt_ids is not None), None)
    if bad is None or bad.problem is None:
        return None
    theirs = bad.answer.prompt_ids or []
    at = common_prefix(bad.prompt, theirs)
    remedy = f"The server shows its prompt's ids; they part from those that were sent at index {at}."
    return Diagnoses([Diagnosis("prompt_ids", bad.problem, remedy, confirmed=True)])


def _by_logprobs(model: Model, group: Sequence[Exchange]) -> Diagnoses | None:
    """The mistakes with which the reference gives the server's log probabilities; None if they tell nothing."""
    judged = [each for each in group if each.logprobs is not None and each.run is not None]
    if not judged or all(each.logprobs is None or each.logprobs.agrees for each in judged):
        return None
    replays = [Replay(model, within_context(model, each.run)) for each in judged if each.run is not None]
    fitting: list[tuple[Driving, str]] = []
    for driving in drivings([replay.run for replay in replays], model):
        for value in driving.values or (None,):
            given = () if value is None else (value,)
            rows = (tried(driving, replay, *given) for replay in replays)
            if all(_agrees(model, *each) for each in zip(judged, rows, strict=True)):
                fitting.append((driving, driving.cause.format(value)))
                break
    return Diagnoses([sure_or_possible(d.name, cause, d.remedy, len(fitting) == 1) for d, cause in fitting]) or None


def _agrees(model: Model, exchange: Exchange, rows: Rows | None) -> bool:
    if rows is None:
        return False
    errors = _logprob_errors(model, exchange, rows)
    return errors is not None and errors.agrees
