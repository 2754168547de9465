"""Plants mistakes in how generation is driven, counts which `crossval tokens` names, and judges correct runs.

    python crossval/generation_causes.py [--runs 200] [--json] [NAME ...]

Each mistake is made in a loop that generates token by token, as an engine would: nothing of the search's own arithmetic
is used. A mistake counts as named if it is the only confirmed cause; as among those named if the tokens cannot tell it
from others; and a confirmed cause that was not planted, or a list without the planted one, is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import bitnet_ref
from bitnet_ref.backends.loaded import LoadedModel
from bitnet_ref.backends.paged_cache import PagedKVCache
from bitnet_ref.crossval.explain.diagnose import Diagnosis
from bitnet_ref.crossval.outputs.causes import explain_tokens, judge_tokens
from bitnet_ref.crossval.outputs.given import GivenRun
from bitnet_ref.crossval.token_ids import end_ids
from bitnet_ref.reference.cache import TokenBatch

Ids = list[int]
OTHER_MODEL = Path(__file__).parents[1] / "tests" / "data" / "golden" / "llama-dense"
TEXTS = (
    "Once upon a time, the little rabbit ran down the hill and said to the other rabbits",
    "The old king went to the window and looked out. In the garden there was",
    "She said",
    "The",
)  # short ones show mistakes in BOS best


def diagnose_generation(
    model: LoadedModel,
    tokens: Sequence[int],
    candidate_generated: Sequence[int],
    generated: Sequence[int] | None = None,
) -> list[Diagnosis]:
    """Why a candidate's greedy continuation of the same token ids differs. Empty when it does not.

    generated: the reference's own continuation with its end token, where it is known: how long it should have been.
    """
    limit = None if generated is None else len(generated)
    run = GivenRun(tuple(map(int, tokens)), tuple(map(int, candidate_generated)), max_tokens=limit)
    return [] if judge_tokens(model, run).agrees else explain_tokens(model, [run])


# -- an engine, driven rightly or wrongly ------------------------------------------------------------------------------


def greedy(
    model: LoadedModel,
    prompt: Sequence[int],
    n: int,
    end_ids_: frozenset[int] | None = None,
    *,
    first_from: int = -1,
    shift: int = 0,
    keep: Callable[[Ids], Ids] = list,
    rule: Callable[[Ids, np.ndarray], np.ndarray] = lambda ids, row: row,
    choose: Callable[[np.ndarray], int] = lambda row: int(np.argmax(row)),
) -> Ids:
    """At most n new tokens, one by one, each the most likely one.

    end_ids_: stop after one of them; None takes the model's own.
    first_from: the prompt position whose logits choose the first new token.   shift: of the new tokens' positions.
    keep: what the cache holds of the prompt when the first new token comes.   rule, choose: on ids and logits
    """
    ends = frozenset(end_ids(model)) if end_ids_ is None else end_ids_
    capacity = len(prompt) + n + max(shift, 0)
    cache = model.new_cache(slots=1, capacity=capacity, page_size=capacity)
    assert isinstance(cache, PagedKVCache)
    cache.fill_with_zeros()  # a gap left by `shift` holds zeros
    logits = model.run(TokenBatch.of([(0, 0, prompt)]), cache).all()[first_from]
    if (kept := keep(list(prompt))) != list(prompt):
        cache.fill_with_zeros()
        if kept:
            model.run(TokenBatch.of([(0, 0, kept)]), cache)
    new: Ids = []
    while len(new) < n:
        new.append(choose(rule([*prompt, *new], logits)))
        if new[-1] in ends or len(new) == n:
            break
        step = TokenBatch.of([(0, len(prompt) + len(new) - 1 + shift, new[-1:])])
        logits = model.run(step, cache).all()[-1]
    return new


# -- the list ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planted:
    """name: the cause that is right.   make: (model, prompt, n, seed) -> ids.   twice: each prompt is run twice."""

    name: str
    label: str
    make: Callable[[LoadedModel, Ids, int, int], Ids]
    twice: bool = False


def _penalised(
    kind: str, value: float, part: slice | None = None, generated: bool = False, prompt_only: bool = False
) -> Callable[[LoadedModel, Ids, int, int], Ids]:
    def make(model: LoadedModel, prompt: Ids, n: int, seed: int) -> Ids:
        def rule(ids: Ids, row: np.ndarray) -> np.ndarray:
            seen = ids[len(prompt) :] if generated else prompt if prompt_only else ids
            out = row.copy()
            for token in set(seen[part] if part else seen):
                if kind == "repetition":
                    out[token] = row[token] / value if row[token] > 0 else row[token] * value
                else:
                    out[token] = row[token] - value * (seen.count(token) if kind == "frequency" else 1)
            return out

        return greedy(model, prompt, n, rule=rule)

    return make


def _no_repeats(size: int) -> Callable[[LoadedModel, Ids, int, int], Ids]:
    def make(model: LoadedModel, prompt: Ids, n: int, seed: int) -> Ids:
        def rule(ids: Ids, row: np.ndarray) -> np.ndarray:
            out = row.copy()
            for i in range(len(ids) - size + 1):
                if ids[i : i + size - 1] == ids[len(ids) - size + 1 :]:
                    out[ids[i + size - 1]] = -np.inf
            return out

        return greedy(model, prompt, n, rule=rule)

    return make


def _sampled(temperature: float, top_p: float = 1.0, top_k: int = 0) -> Callable[[LoadedModel, Ids, int, int], Ids]:
    def make(model: LoadedModel, prompt: Ids, n: int, seed: int) -> Ids:
        assert isinstance(model, bitnet_ref.Model)
        options: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
        result: Any = model.generate(prompt, max_tokens=n, **options)
        return list(result.token_ids)

    return make


def _prompt(edit: Callable[[Ids, int], Ids]) -> Callable[[LoadedModel, Ids, int, int], Ids]:
    """edit: (ids, an end token) -> ids"""
    return lambda model, prompt, n, seed: greedy(model, edit(prompt, end_ids(model)[0]), n)


def _driven(**options: Any) -> Callable[[LoadedModel, Ids, int, int], Ids]:
    return lambda model, prompt, n, seed: greedy(model, prompt, n, **options)


def _turned(first: Callable[[int, int], int]) -> Callable[[LoadedModel, Ids, int, int], Ids]:
    """RoPE at other positions: each new token is computed anew with all before it. first: (prompt, i) -> position"""

    def make(model: LoadedModel, prompt: Ids, n: int, seed: int) -> Ids:
        new: Ids = []
        for _ in range(n):
            new.append(int(np.argmax(_logits_at(model, prompt, new, first))))
            if new[-1] in end_ids(model):
                break
        return new

    return make


def _logits_at(model: LoadedModel, prompt: Ids, new: Ids, position: Callable[[int, int], int]) -> np.ndarray:
    """The last token's logits, with RoPE's tables of other positions in the place of the right ones."""
    from bitnet_ref.backends import Backend

    positions = np.array([*range(len(prompt)), *(position(len(prompt), i) for i in range(len(new)))])

    class Turned(Backend):
        def rope_tables(self, _: Any, *args: Any) -> Any:
            return super().rope_tables(positions, *args)

    return np.asarray(model.on(Turned("float32", 1)).logits([*prompt, *new])[-1])


def _stops_at(token_of: Callable[[Ids], int]) -> Callable[[LoadedModel, Ids, int, int], Ids]:
    def make(model: LoadedModel, prompt: Ids, n: int, seed: int) -> Ids:
        right = greedy(model, prompt, n)
        return right[: right.index(token_of(right)) + 1]

    return make


PLANTED: tuple[Planted, ...] = (
    Planted("bos_twice", "BOS twice", _prompt(lambda ids, end: [ids[0], *ids])),
    Planted("bos_missing", "BOS missing", _prompt(lambda ids, end: ids[1:] or ids)),
    Planted("eos_appended", "end token after the prompt", _prompt(lambda ids, end: [*ids, end])),
    Planted("last_token_twice", "last token twice", _prompt(lambda ids, end: [*ids, ids[-1]])),
    Planted("last_token_dropped", "last token dropped", _prompt(lambda ids, end: ids[:-1] or ids)),
    Planted("prompt_cut", "last 4 tokens of the prompt", _prompt(lambda ids, end: ids[-4:])),
    Planted("prompt_cut", "last 8 tokens of the prompt", _prompt(lambda ids, end: ids[-8:])),
    Planted("prompt_end_cut", "first 8 tokens of the prompt", _prompt(lambda ids, end: ids[:8])),
    Planted("repetition_penalty", "repetition penalty 1.1", _penalised("repetition", 1.1)),
    Planted("repetition_penalty", "repetition penalty 1.3", _penalised("repetition", 1.3)),
    Planted(
        "repetition_penalty_last", "repetition penalty 1.2, last 64", _penalised("repetition", 1.2, slice(-64, None))
    ),
    Planted(
        "repetition_penalty_generated", "repetition penalty 1.2, generated", _penalised("repetition", 1.2, None, True)
    ),
    Planted(
        "repetition_penalty_prompt",
        "repetition penalty 1.3, prompt",
        _penalised("repetition", 1.3, None, False, True),
    ),
    Planted("presence_penalty_generated", "presence penalty 0.5", _penalised("presence", 0.5, None, True)),
    Planted("presence_penalty_generated", "presence penalty 1", _penalised("presence", 1.0, None, True)),
    Planted("presence_penalty", "presence penalty 1, prompt too", _penalised("presence", 1.0)),
    Planted("frequency_penalty_generated", "frequency penalty 0.3", _penalised("frequency", 0.3, None, True)),
    Planted("frequency_penalty_generated", "frequency penalty 1", _penalised("frequency", 1.0, None, True)),
    Planted("frequency_penalty", "frequency penalty 0.5, prompt too", _penalised("frequency", 0.5)),
    Planted("no_repeat_ngram", "no 3-gram twice", _no_repeats(3)),
    Planted("no_repeat_ngram", "no 2-gram twice", _no_repeats(2)),
    Planted("sampling", "sampled, T=1", _sampled(1.0), twice=True),
    Planted("sampling", "sampled, T=0.8", _sampled(0.8), twice=True),
    Planted("sampling", "sampled, T=0.7, top_p 0.9, top_k 40", _sampled(0.7, 0.9, 40), twice=True),
    Planted("sampling", "sampled once, T=0.8", _sampled(0.8)),
    Planted("prefill_logits_of_the_previous_position", "first token one row early", _driven(first_from=-2)),
    Planted("prefill_logits_of_the_first_position", "first token of row 0", _driven(first_from=0)),
    Planted("decode_overwrites_the_last_entry", "cache one place low", _driven(shift=-1)),
    Planted("decode_leaves_a_gap", "cache one place high", _driven(shift=1)),
    Planted("decode_position_high", "RoPE one too high", _turned(lambda start, i: start + i + 1)),
    Planted("decode_position_low", "RoPE one too low", _turned(lambda start, i: start + i - 1)),
    Planted("decode_position_from_0", "RoPE from 0 again", _turned(lambda start, i: i)),
    Planted("decode_position_constant", "RoPE at one position", _turned(lambda start, i: start)),
    Planted("prompt_cache_lost", "prompt's cache lost", _driven(keep=lambda prompt: [])),
    Planted("prompt_cache_short", "first 8 of the prompt's cache", _driven(keep=lambda prompt: prompt[:8])),
    Planted("stops_early", "stops at a token that is no end", _stops_at(lambda ids: ids[len(ids) // 2])),
)


# -- the count ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """outcome: "named", "among others", "no cause" (it says that it does not know), "hidden" (the tokens are the
    reference's), or "wrong"."""

    model: str
    label: str
    outcome: str
    causes: list[str]


UNKNOWN = {"record_a_trace", "too_few"}
NEW_TOKENS = 64


@cache
def load(name: str) -> bitnet_ref.Model:
    backend = "numpy" if bitnet_ref.available_backends()["cython"] else "cython"
    return bitnet_ref.load(name, backend=backend, threads=1)


def prompts_of(model: bitnet_ref.Model, seed: int = 0) -> list[Ids]:
    """Four prompts: texts, or for a model without a tokenizer ids with its BOS."""
    if model.path is not None and any((model.path / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
        return [model.tokenizer.encode(text) for text in TEXTS]
    rng, bos = np.random.default_rng(seed), model.config.bos_token_id
    rows = [rng.integers(3, model.config.vocab_size, length).tolist() for length in (16, 12, 9, 4)]
    return [[bos, *row] if bos is not None else row for row in rows]


def find(name: str, planted: Planted, seed: int = 0, n: int = NEW_TOKENS) -> Outcome:
    """Generate with the mistake and let crossval look for it."""
    model, runs = load(name), []
    for number, prompt in enumerate(prompts_of(model)):
        room = min(n, model.context_length - len(prompt) - 3)
        for repeat in range(1 + planted.twice):
            ids = planted.make(model, prompt, room, seed + 2 * number + repeat)
            runs.append(GivenRun(tuple(prompt), tuple(ids), max_tokens=room))
    if all(judge_tokens(model, run).agrees for run in runs):
        return Outcome(name, planted.label, "hidden", [])
    causes = explain_tokens(model, runs)
    confirmed = [cause.name for cause in causes if cause.confirmed]
    possible = [cause.name for cause in causes if cause.possible]
    if confirmed:
        outcome = "named" if set(confirmed) == {planted.name} else "wrong"
    elif planted.name in possible:
        outcome = "among others"
    else:
        outcome = "no cause" if set(possible) <= UNKNOWN else "wrong"
    return Outcome(name, planted.label, outcome, confirmed or possible)


def correct_runs(count: int) -> Iterator[tuple[str, int, str | None]]:
    """(model, seed, what it is accused of or None) of correct greedy runs, and of runs that choose near ties freely."""
    models = ("storyteller", str(OTHER_MODEL))
    for seed in range(count):
        name = models[seed % 2]
        model, rng = load(name), np.random.default_rng(seed)
        length = int(rng.integers(1, 24))
        prompt = [model.config.bos_token_id or 0, *rng.integers(3, model.config.vocab_size, length).tolist()]
        room = min(64, model.context_length - len(prompt) - 2)

        def choose(row: np.ndarray, rng: np.random.Generator = rng) -> int:
            """A token whose logit is at most 0.07 below the largest: rounding flips may exchange them."""
            near = np.flatnonzero(row >= row.max() - 0.07)
            return int(rng.choice(near))

        ids = greedy(model, prompt, room, choose=choose)
        judged = judge_tokens(model, GivenRun(tuple(prompt), tuple(ids)))
        yield name, seed, None if judged.agrees else judged.verdict


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Plant mistakes in driving generation and find them.")
    parser.add_argument("labels", nargs="*", metavar="NAME", help="only these causes")
    parser.add_argument("--runs", type=int, default=200, help="correct runs")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    known = dict.fromkeys(each.name for each in PLANTED)
    if unknown := [label for label in options.labels if label not in known]:
        parser.error(f"no such cause: {', '.join(unknown)}; there are: {', '.join(known)}")
    chosen = [each for each in PLANTED if not options.labels or each.name in options.labels]
    outcomes = [find(name, planted) for name in ("storyteller", str(OTHER_MODEL)) for planted in chosen]
    accused = [each for each in correct_runs(options.runs) if each[2] is not None]
    counts = {
        kind: sum(o.outcome == kind for o in outcomes)
        for kind in ("named", "among others", "no cause", "hidden", "wrong")
    }
    if options.json:
        facts = {"planted": len(outcomes), **counts, "correct_runs": options.runs, "accused": len(accused)}
        print(json.dumps({**facts, "mistakes": [asdict(o) for o in outcomes]}, indent=1))
    else:
        for o in outcomes:
            print(f"{Path(o.model).name:24} {o.label:36} {o.outcome:14} {', '.join(o.causes)}")
        print(f"\n{len(outcomes)} planted: {', '.join(f'{count} {kind}' for kind, count in counts.items())}")
        print(f"{len(accused)} of {options.runs} correct runs accused")
        for name, seed, verdict in accused:
            print(f"  {Path(name).name}, seed {seed}: {verdict}")
    return 1 if counts["wrong"] or accused else 0


if __name__ == "__main__":
    sys.exit(main())
