"""A server's embeddings against the reference's: pooling, the end token, BOS, the prompt before a text, the length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np

from ...api import Model
from ...errors import BackendUnavailable
from ...generation.embed import (
    default_dimensions,
    default_prompt,
    embed,
    instruction_prompt,
    published_prompts,
    token_rows,
)
from ...reference.cache import TokenBatch
from ..explain.diagnose import Diagnoses, Diagnosis, joined, sure_or_possible
from ..tolerances import NARROW_FLOATS, SAME_TENSOR
from ..types import Ids, Wide
from .client import Client, Refused

TEXTS = (
    *("A red boat lies on the beach.", "What does the law say about taxes?"),
    *("The little rabbit ran down the hill", "tea"),
)
QUERY = instruction_prompt("Given a web search query, retrieve relevant passages that answer the query")
_LENGTH = 1e-2  # of a vector, relative


@dataclass
class ServedVectors:
    """errors: relative L2 of each text's direction.   lengths: of the server's vectors."""

    url: str
    errors: list[float]
    lengths: list[float]
    limit: float
    unit: bool
    causes: Diagnoses = field(default_factory=Diagnoses)
    problem: str | None = None

    @property
    def agrees(self) -> bool:
        return self.problem is None and max(self.errors) <= self.limit and self.lengths_agree

    @property
    def lengths_agree(self) -> bool:
        return not self.unit or max(abs(length - 1) for length in self.lengths) <= _LENGTH

    @property
    def verdict(self) -> str:
        if self.problem is not None:
            return f"DIFFERS: {self.problem}"
        if max(self.errors) > self.limit:
            cosine = 1 - max(self.errors) ** 2 / 2
            return f"DIFFERS: the vectors of {len(self.errors)} texts, smallest cosine {cosine:.4f}"
        if not self.lengths_agree:
            return f"DIFFERS: vectors of length {min(self.lengths):.4g} to {max(self.lengths):.4g}, which should be 1"
        return f"AGREES: the vectors of {len(self.errors)} texts, largest relative error {max(self.errors):.2g}"

    def to_dict(self) -> dict[str, Any]:
        causes = [cause.to_dict() for cause in self.causes]
        return {**{k: v for k, v in asdict(self).items() if k != "causes"}, "agrees": self.agrees,
                "verdict": self.verdict, "causes": causes}  # fmt: skip


def cross_vectors(
    model: Model, client: Client, *, texts: Sequence[str] = (), engine_dtype: str = "float32"
) -> ServedVectors:
    """Ask the server for the vectors of some texts, and compare. Raises BackendUnavailable."""
    texts = list(texts) or list(TEXTS)
    body = {"model": client.name, "input": texts, "encoding_format": "float"}
    try:
        answer = client.ask("/v1/embeddings", body)
    except Refused as refused:
        raise BackendUnavailable(f"{client.url}/v1/embeddings refuses the request: {refused}") from refused
    try:
        rows = sorted(answer["data"], key=lambda each: int(each["index"]))
        theirs = np.array([each["embedding"] for each in rows], dtype=np.float64)
    except (KeyError, TypeError, ValueError) as error:
        raise BackendUnavailable(f"{client.url}/v1/embeddings answers with no vectors of OpenAI's form") from error
    default = default_dimensions(model.texts_path)
    size = default if theirs.shape[-1] == default else model.config.hidden_size  # few servers cut by themselves
    right = embed(model, texts, dimensions=size).astype(np.float64)
    limit = SAME_TENSOR if engine_dtype == "float32" else NARROW_FLOATS[engine_dtype].relative_l2
    unit = model.config.unit_embeddings
    if theirs.shape != right.shape or not np.isfinite(theirs).all():
        expected = f"expected {right.shape[0]} of {right.shape[1]}"
        problem = f"{theirs.shape[0]} vectors of {theirs.shape[-1]} numbers; {expected}"
        return ServedVectors(client.url, [1.0], [1.0], limit, unit, problem=problem)
    lengths = np.linalg.norm(theirs, axis=1)
    out = ServedVectors(client.url, _errors(theirs, right), lengths.tolist(), limit, unit)
    if not out.agrees:
        out.causes = _explain(model, texts, theirs, limit, out)
    return out


def _errors(theirs: Wide, right: Wide) -> list[float]:
    """The distance of each two directions."""
    a, b = (x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12) for x in (theirs, right))
    return [float(each) for each in np.linalg.norm(a - b, axis=1)]


@dataclass(frozen=True)
class _Change:
    """One deviation: of the text, its ids, or the pooling. Two of the same kind exclude each other."""

    kind: str
    name: str
    cause: str
    remedy: str
    prompt: str | None = None
    ids: Callable[[Ids], Ids] = list
    pooling: str | None = None


def _changes(model: Model) -> Iterator[_Change]:
    right, names = model.config.pooling, {"last": "the last token", "mean": "the mean of all tokens"}
    names["first"] = "the first token"
    for pooling, words in names.items():
        if pooling != right:
            cause = f"pooling takes {words}, and not {names[right]}"
            yield _Change("pooling", f"pooling_{pooling}", cause, f"Set the pooling to {right!r}.", pooling=pooling)
    tokenizer, default = model.tokenizer, default_prompt(model.texts_path)
    sample = [int(token) for token in token_rows(model, ["a"])[0]]
    # fmt: off
    if len(sample) > len(tokenizer.encode(f"{default}a")) or sample[-1] in tokenizer.eos_ids:
        yield _Change("end", "end_missing", "the end token is missing, or the token before it is pooled",
            "Append the end token to each text, as the model's tokenizer does.", ids=lambda ids: ids[:-1])
    else:
        for end in tokenizer.eos_ids:
            yield _Change("end", "end_added", f"the end token {tokenizer.id_to_token(end)} is appended",
                "This model's texts have none.", ids=partial(lambda end, ids: [*ids, end], end))
    bos = tokenizer.bos_id
    if bos is not None and sample[0] == bos:
        yield _Change("bos", "bos_missing", "BOS is missing", "Put it before each text.", ids=lambda ids: ids[1:])
        yield _Change("bos", "bos_twice", "BOS comes twice", "Put it once before each text.",
            ids=lambda ids: [bos, *ids])
    elif bos is not None:
        yield _Change("bos", "bos_added", "BOS is put before the text", "Leave it out.", ids=lambda ids: [bos, *ids])
    if default:
        yield _Change("prompt", "prompt_missing", "the model's default prompt is missing before the text",
            f"Put {default!r} before each text.", prompt="")
    for name, prompt in {"query": QUERY, **published_prompts(model.texts_path)}.items():
        if prompt and prompt != default:
            yield _Change("prompt", "prompt_added", f"the prompt {name!r} ({prompt!r}) is put before the text",
                "Documents have no prompt; send none.", prompt=prompt)
    # fmt: on


def _explain(model: Model, texts: Sequence[str], theirs: Wide, limit: float, out: ServedVectors) -> Diagnoses:
    normal = Diagnosis("not_normalised", "vectors are not divided by their length", "Normalise them.", confirmed=True)
    length = [] if out.lengths_agree else [normal]
    if max(out.errors) <= limit:
        return Diagnoses(length)
    changes, states = list(_changes(model)), dict[tuple[int, ...], Wide]()
    for count in (1, 2):
        groups = [group for group in combinations(changes, count) if len({each.kind for each in group}) == count]
        vectors = (_vectors(model, texts, group, states)[:, : theirs.shape[1]] for group in groups)
        fitting = [group for group, mine in zip(groups, vectors, strict=True) if max(_errors(theirs, mine)) <= limit]
        if fitting:
            causes = [sure_or_possible(*joined(group), len(fitting) == 1) for group in fitting]
            return Diagnoses([*causes, *length])
    return Diagnoses(length)


def _vectors(model: Model, texts: Sequence[str], group: Sequence[_Change], states: dict[tuple[int, ...], Wide]) -> Wide:
    """The reference's vectors with these deviations.   states: final hidden states by ids, computed once"""
    prompt = next((each.prompt for each in group if each.prompt is not None), None)
    pooling = next((each.pooling for each in group if each.pooling is not None), model.config.pooling)
    vectors = []
    for row in token_rows(model, list(texts), prompt):
        ids = [int(token) for token in row]
        for each in group:
            ids = each.ids(ids) or ids
        key = tuple(ids)
        if key not in states:
            batch = TokenBatch.of([(0, 0, ids)])
            states[key] = np.asarray(model.run_hidden(batch, model.new_cache(1, len(ids))), dtype=np.float64)
        hidden = states[key]
        vectors.append(hidden.mean(axis=0) if pooling == "mean" else hidden[0 if pooling == "first" else -1])
    return np.stack(vectors)
