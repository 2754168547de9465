"""`compare`: a candidate's tensors against the reference's, op by op in the order of the computation.

Both are mappings from trace names (see `names.py`) to arrays: what `run_with_cache` returns, or a `Trace` file, which
is read one tensor at a time. The walk tracks which tokens a rounding flip has reached. A token that no flip has reached
must agree within the table's tolerance at every op. The others are only held to `FLIP_CEILING`; `teacher.py` judges
their ops one by one. The first op that fails its limit is `first_divergence`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ..errors import count_of, printable
from ..families.family import widest_window
from ..reference.config import ModelConfig
from ..reference.layers import Array
from .calls import Calls, placed_by_calls, token_count
from .flips import Flip, implied_int8, judge_flips
from .metrics import Distance, Figures, LogitsDistance, Rows, measure, measure_logits, recorded_dtype, tensor_of
from .names import ACC, INT8, LOGITS, SYNONYMS, layer_of, linear_input, nearest_name, op_inputs, op_kind, op_order
from .token_ids import token_parity
from .tolerances import (
    FLIP_CEILING,
    FLOAT_SUMS,
    NARROW_FLOATS,
    RECORDED_ROUNDING,
    angle_drift,
    narrow_tie,
    tolerance_of,
)
from .types import Ints, Mask, Tensors, Tokens

OK, FLIP, DIFFERS = "ok", "rounding flip", "differs"
OTHER_SHAPE = "shape"  # how the note on a tensor of another shape begins
_MAX_FLIPS = 100  # how many are kept; the count is exact
_MAX_NEAREST = 100  # unknown names whose nearest right name is looked up
_LISTED, _NAME_LENGTH = 4, 100  # names in a sentence, characters of one that is not ours
_NEXT = 6  # tensors to record next: floats, which every engine has
_WITHOUT_THESE, _BLOCK_END = ("hook_x_int8", "hook_x_scale", "hook_acc_int32", "hook_scale"), "hook_resid_post"


@dataclass(frozen=True)
class OpResult(Figures):
    """One tensor of the candidate beside the reference's."""

    name: str  # "blocks.3.mlp.hook_post"
    kind: str  # "gate"; the key of the table of tolerances
    shape: tuple[int, ...]
    status: str  # OK, FLIP or DIFFERS
    token: int | None  # the first token whose row is beyond its tolerance
    excess: float  # the largest error / the error allowed there; above 1 is too much
    tolerance: float  # allowed error as a share of the token's largest value; 0 is equality
    reason: str  # of the tolerance
    note: str = ""

    @property
    def layer(self) -> int | None:
        return layer_of(self.name)

    @property
    def equal(self) -> bool:
        return self.n_differ == 0

    def __str__(self) -> str:
        kind = self.kind if self.layer is None else f"{self.kind}, layer {self.layer}"
        if self.note and self.n_values == 0:
            return f"{self.name} ({kind}): {self.note}"
        token = "" if self.token is None else f", first at token {self.token}"
        note = f"; {self.note}" if self.note else ""
        return (
            f"{self.name} ({kind}): {self.n_differ:,} of {self.n_values:,} values differ, largest by "
            f"{self.max_abs:.3g}{token}; relative L2 {self.relative_l2:.2g}, cosine {self.cosine:.6f}, "
            f"scale ratio {self.scale_ratio:.6f}{note}"
        )


@dataclass
class Comparison:
    """The result of `compare`. `agrees` and `verdict` sum it up."""

    mode: str  # "free-running", "teacher-forced" or "op by op"
    tokens: int
    layers: int
    ops: list[OpResult] = field(default_factory=list)  # in the order of the computation
    problem: str | None = None  # why nothing could be compared: other tokens, no tensor in common
    logits: LogitsDistance | None = None
    flips: list[Flip] = field(default_factory=list)  # the first of them
    n_flips: int = 0
    up_to: str = ""  # what the engine rounds by design, for which the tolerances allow
    calls: Calls = ()  # how many tokens each call of the candidate computed, where it says so
    implied_flips: int = 0  # of `flips`, the first so many are not recorded: the reference rounded as they say
    undecided: str = ""  # why tensors that do not agree may be a correct engine's all the same
    missing: list[str] = field(default_factory=list)  # in the reference, not in the candidate
    # The part of `missing` that the reference computes between the last tensor that agrees and the first that differs.
    missing_between: list[str] = field(default_factory=list)
    # in the candidate, with a name that no run has -> the nearest name that runs have, if one is near
    unknown: dict[str, str | None] = field(default_factory=dict)
    contradictions: list[str] = field(default_factory=list)  # sentences about names of one tensor with two values

    @property
    def first_divergence(self) -> OpResult | None:
        """The first op in the order of the computation that no tolerance and no rounding flip explains."""
        return next((op for op in self.ops if op.status == DIFFERS), None)

    @property
    def agrees(self) -> bool:
        """Whether something was compared and nothing differs except by rounding."""
        return self.problem is None and bool(self.ops) and self.first_divergence is None

    @property
    def accumulators(self) -> tuple[int, int]:
        """(int32 accumulators compared, how many of them differ)"""
        compared = [op for op in self.ops if op.kind == "accumulator"]
        return sum(op.n_values for op in compared), sum(op.n_differ for op in compared)

    @property
    def verdict(self) -> str:
        """One line."""
        if self.problem is not None:
            return f"NOT COMPARABLE: {self.problem}"
        if self.undecided:
            is_alone = [op.name for op in self.ops] == [LOGITS]
            source, names = ("the logits alone", "hook_resid_post") if is_alone else ("these tensors", INT8)
            advice = f"record {names} of every block next, which shows them"
            return f"CANNOT TELL from {source}, {self.mode}: {self.undecided}; {advice}"
        if (bad := self.first_divergence) is not None:
            place = "" if bad.token is None else placed_by_calls(bad.token, self.calls)
            return f"DIFFERS, {self.mode}, {place + '; ' if place else ''}first at {bad}"
        total, differ = self.accumulators
        missing = set(self.missing)
        compared = [op for op in self.ops if op.name not in missing]
        unequal = sum(not op.equal for op in compared)
        equal = "all equal" if not unequal else f"{len(compared) - unequal} equal, the others within tolerance"
        parts = [f"{len(compared)} of {len(compared) + len(self.missing)} tensors compared, {equal}"]
        if total:
            parts.append(f"{total:,} accumulators {f'compared, {differ:,} differ' if differ else 'equal'}")
        if self.logits is not None:
            parts.append(f"max KL {self.logits.kl_max:.1e}, top-1 agreement {self.logits.top1_agreement:.1%}")
        if self.implied_flips:
            words = [flip.in_words for flip in self.flips[: self.implied_flips]]
            parts[:0] = [*words[:_LISTED], f"and {len(words) - _LISTED} more"][: len(words)]
        elif self.n_flips:
            parts.insert(0, f"{self.n_flips} flips, expected, the first is {self.flips[0]}")
        up_to = f" up to {self.up_to}" if self.up_to else " up to rounding" * bool(self.n_flips)
        return f"AGREES{up_to}, {self.mode}: {'; '.join(parts)}"

    @property
    def record_next(self) -> list[str]:
        """Some of `missing_between`, spread over it: with them the first wrong op is known more closely.

        If they are of several layers, these are the ends of blocks.
        """
        names = [name for name in self.missing_between if not name.endswith(_WITHOUT_THESE)]
        names = [name for name in names if name.endswith(_BLOCK_END)] or names
        count = min(len(names), _NEXT)
        return [names[(2 * i + 1) * len(names) // (2 * count)] for i in range(count)]

    @property
    def gaps(self) -> list[str]:
        """One sentence each for unknown names, for tensors that the candidate has not recorded, for contradictions."""
        last = f" (the layers are blocks.0 to blocks.{self.layers - 1})"
        names = []
        for name, near in self.unknown.items():
            advice = f" (did you mean {near}?)" if near else last * ((layer_of(name) or 0) >= self.layers)
            names.append(printable(name[:_NAME_LENGTH], keep="") + advice)
        unknown = f"{count_tensors(self.unknown)} not compared, with a name that no run has: {listed(names)}"
        missing = f"{count_tensors(self.missing)} not recorded: {listed(self.missing)}"
        return [unknown] * bool(names) + [missing] * bool(self.missing) + self.contradictions

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values (infinities and NaN as strings)."""
        out: dict[str, Any] = {**asdict(self), "agrees": self.agrees, "verdict": self.verdict}
        out["ops"] = [{**values, "layer": op.layer} for values, op in zip(out["ops"], self.ops, strict=True)]
        out["accumulators"] = dict(zip(("compared", "differ"), self.accumulators, strict=True))
        first = self.first_divergence
        out["first_divergence"] = None if first is None else first.name
        return {key: _to_json(value) for key, value in out.items()}


def all_agree(comparisons: Iterable[Comparison]) -> bool | None:
    """Whether they all agree; None if one is undecided and none differs."""
    left = [comparison for comparison in comparisons if not comparison.agrees]
    return not left or (None if all(comparison.undecided for comparison in left) else False)


def compare(
    reference: Tensors,
    candidate: Tensors,
    config: ModelConfig,
    tokens: Tokens | Ints | None = None,
    *,
    mode: str = "free-running",
    own_engine: bool | None = None,
    engine_dtype: str | None = None,
) -> Comparison:
    """Compare two runs of the same tokens.

    reference, candidate: name -> array, or `Trace`. Names that only one has are listed, not judged. A candidate's
        array may have leading axes of length 1, and heads joined or apart. Its logits may be the last token's only.
    tokens: the reference's token ids (N,); taken from the reference where it is a Trace.
    mode: "free-running" (each engine fed itself) or "teacher-forced" (each op fed the reference's inputs).
    own_engine: the candidate follows this package's contract, so a BitLinear is one float32 expression and equal
        inputs give equal bits. None: as a Trace says; True for a dict.
    engine_dtype: "float32", "bfloat16" or "float16": what the candidate computes in. None: as a Trace says; float32.
    """
    candidate = View(candidate)
    tokens = getattr(reference, "token_ids", None) if tokens is None else tokens
    ids = None if tokens is None else np.asarray(tokens, dtype=np.int64)
    own_engine = getattr(candidate, "own_engine", True) if own_engine is None else own_engine
    engine_dtype = str(engine_dtype or getattr(candidate, "engine_dtype", None) or "float32")
    count = len(ids) if ids is not None else token_count(reference)
    calls = getattr(candidate, "calls", ())
    comparison = Comparison(mode=mode, tokens=count, layers=config.num_hidden_layers, calls=calls)
    comparison.problem = same_tokens(ids, candidate, config, getattr(reference, "prompt", None))
    if comparison.problem is not None:
        return comparison
    walk = Walk(reference, candidate, config, ids, comparison, own_engine, engine_dtype)
    order = op_order(config)
    unknown, recorded = sorted(set(candidate) - set(order)), set(candidate)
    expected = [name for name in order if name in reference and name not in recorded]
    near = {name: nearest_name(name, expected) for name in unknown[:_MAX_NEAREST]}
    comparison.unknown = {name: near.get(name) for name in unknown}
    comparison.contradictions = candidate.contradictions()
    with np.errstate(all="ignore"):  # values that are not finite are named below
        for name in order:
            walk.step(name)
    if not comparison.ops:
        gaps = f"; {comparison.gaps[0]}" if comparison.unknown else ""
        comparison.problem = f"the two runs have no tensor in common{gaps}"
    return comparison


def same_tokens(ids: Ints | None, candidate: Tensors, config: ModelConfig, prompt: str | None = None) -> str | None:
    """`token_parity` of a run and a candidate; None if the tokens are the same or either has none."""
    theirs = getattr(candidate, "token_ids", None)
    if ids is None or theirs is None:
        return None
    return token_parity(ids.tolist(), list(theirs), config, (prompt, getattr(candidate, "prompt", None)))


@dataclass
class Walk:
    """Judges tensors in the order of the computation, and tracks which tokens a flip has reached."""

    reference: Tensors
    candidate: Tensors
    config: ModelConfig
    ids: Ints | None
    comparison: Comparison  # the results go there
    own_engine: bool
    engine_dtype: str
    is_ternary: Callable[[str], bool] | None = None  # of a linear's name; None: as recorded

    def __post_init__(self) -> None:
        self._is_ternary = self.is_ternary or self._recorded_as_ternary
        self._any_int8 = any(name.endswith(INT8) for name in self.reference)
        self.reached = np.zeros(self.comparison.tokens, dtype=bool)
        self.rerouted = np.zeros(self.comparison.tokens, dtype=bool)  # tokens that rounding gave to other experts
        self._unseen: list[str] = []  # since the last tensor that agrees

    def step(self, name: str) -> None:
        if name.endswith("hook_attn_scores"):
            self._spread()
        if name not in self.reference:
            return
        mine, depth = tensor_of(self.reference, name), self._depth(name)
        if _is_head_norm(name) and mine.shape[0] != self.comparison.tokens:  # a recorded reference
            mine = mine[:].reshape(self.comparison.tokens, -1)
        if op_kind(name, config=self.config) == "routing":
            self._note_rerouted(name, np.asarray(mine[:]))
        if name in self.candidate:
            result = self.judge(name, mine, tensor_of(self.candidate, name), depth)
            if result.status == DIFFERS and self.comparison.first_divergence is None:
                self.comparison.missing_between = self._unseen
            self.comparison.ops.append(result)
            self._unseen = []
            return
        self.comparison.missing.append(name)
        self._unseen.append(name)
        if name.endswith(INT8) and self._is_ternary(linear := name.rpartition(".")[0]):
            source = linear_input(linear, self.config)
            tokens = self.comparison.tokens
            theirs = tensor_of(self.candidate, source) if source in self.candidate else np.empty(0, dtype=np.float32)
            if theirs.shape[:1] == (tokens,) and recorded_dtype(theirs) not in RECORDED_ROUNDING:
                x = np.asarray(self.candidate[source], dtype=np.float32).reshape(tokens, -1)
                result = self.judge(name, mine, implied_int8(x), depth, f"not recorded, rounded from {source}")
                if result.status == FLIP:  # it is not the candidate's own tensor: only the flips it shows matter
                    self.comparison.ops.append(result)

    def refuse(self, name: str, shape: tuple[int, ...], note: str) -> OpResult:
        """The result for a tensor that cannot be compared."""
        figures = (0, 0, math.inf, None, math.inf, math.nan, math.nan)
        kind, reason = op_kind(name, self._is_ternary, self.config), "what cannot be compared does not agree"
        return OpResult(*figures, name, kind, shape, DIFFERS, None, math.inf, 0.0, reason, note)

    def judge(self, name: str, mine: Rows, theirs: Rows, depth: int | None = None, note: str = "") -> OpResult:
        """The candidate's tensor `theirs` against the reference's. depth: see `Tolerance.relative`."""
        kind = op_kind(name, self._is_ternary, self.config)
        by_head = kind in ("attention scores", "attention pattern")
        whole, reached, first_row = mine, self.reached, 0
        shape, given = mine.shape, theirs.shape
        if kind == "logits" and is_last_token(shape, given):
            first_row, reached = shape[0] - 1, self.reached[-1:]
            mine, shape, note = whole[first_row:], (1, shape[1]), "of the last token only"
        if not fits(shape, given, name):
            return self.refuse(name, shape, shape_note(name, shape, given))
        if shape != given:
            theirs = theirs[:].reshape(shape)
        tolerance = tolerance_of(kind, self.own_engine)
        if kind == "linear" and not self.own_engine and f"{name.rpartition('.')[0]}.{ACC}" not in self.candidate:
            tolerance = FLOAT_SUMS
        relative = tolerance.relative(depth)
        if kind == "dense linear" and depth is not None:  # its result is as far off as what it reads may be
            for each in op_inputs(name, self.config):
                source = tolerance_of(op_kind(each, self._is_ternary, self.config), self.own_engine)
                relative = max(relative, source.relative(depth))
        allowed = np.full(len(self.reached), relative)
        allowed += RECORDED_ROUNDING.get(recorded_dtype(theirs), 0.0)
        if not self.own_engine:
            allowed += angle_drift(kind, depth, len(allowed))
        d = measure(mine, theirs, allowed[first_row:], by_head, floor=float(by_head))
        if kind == "logits" and d.finite:
            ids = None if self.ids is None or self.ids.max(initial=0) >= shape[1] else self.ids
            self.comparison.logits = measure_logits(whole, theirs, ids, first_row)
        status, token, why, reason = OK, None, "", tolerance.reason
        if self.engine_dtype in NARROW_FLOATS:
            engine = NARROW_FLOATS[self.engine_dtype]
            relative, reason = engine.relative_l2, f"an engine in {self.engine_dtype}, relative L2: {engine.reason}"
            relative_l2 = d.relative_l2
            judged = ~self.rerouted[first_row:]  # tokens
            if not relative_l2 <= engine.relative_l2 and d.finite and judged.any() and not judged.all():
                r, c = (x[:][:, judged][:, :, judged] if by_head else x[:][judged] for x in (mine, theirs))
                relative_l2 = measure(r, c, allowed[first_row:][judged], by_head, floor=float(by_head)).relative_l2
                why = f"{relative_l2:.2g} without tokens {listed(list(map(str, np.flatnonzero(self.rerouted))))}"
                why += f", which rounding to {self.engine_dtype} may give to other experts"
            if not relative_l2 <= engine.relative_l2:
                status, token = DIFFERS, _first((d.row_l2 > engine.relative_l2) & judged)
            excess = relative_l2 / engine.relative_l2
        else:
            status, token, why = self._status(name, kind, d, reached, mine, theirs, depth)
            excess = float(d.row_excess[~reached].max(initial=0.0))
        if not d.finite and status != DIFFERS and not np.isfinite(d.max_abs):
            status, why = DIFFERS, "not finite"
        not_finite = ""
        if not d.finite:
            other_mask = by_head and (theirs[:] < np.inf).all()
            not_finite = "not the same scores are masked" if other_mask else "holds NaN or Inf"
        note = "; ".join(part for part in (note, why, not_finite) if part)
        return OpResult(*d.figures, name, kind, shape, status, token, excess, relative, reason, note)

    def _status(
        self, name: str, kind: str, d: Distance, reached: Mask, mine: Rows, theirs: Rows, depth: int | None
    ) -> tuple[str, int | None, str]:
        """(status, first token that is beyond its tolerance, why)"""
        if not d.finite:
            return DIFFERS, _first(~np.isfinite(d.row_l2)), ""
        beyond = ~(d.row_excess <= 1)
        fresh = beyond & ~reached
        if kind == "activation int8" and fresh.any() and self.comparison.mode == "free-running":
            runs, linear = (self.reference, self.candidate), name.rpartition(".")[0]
            own, depths = self.own_engine, depth or 0
            judged = judge_flips(*runs, linear, self.config, depths, fresh, mine[:], theirs[:], own_engine=own)
            if judged.unexplained is not None:
                return DIFFERS, judged.unexplained[0], f"{list(judged.unexplained)}: {judged.why}"
            self.comparison.n_flips += len(judged.flips)
            self.comparison.flips += judged.flips[: _MAX_FLIPS - len(self.comparison.flips)]
            self.reached |= fresh
            return FLIP, int(judged.flips[0].token), f"{len(judged.flips)} flips, expected: {judged.flips[0]}"
        if fresh.any():
            return DIFFERS, _first(fresh), ""
        too_far = beyond & reached & ~(d.row_l2 <= FLIP_CEILING)
        if too_far.any():
            return DIFFERS, _first(too_far), f"after a rounding flip, but above the limit for one ({FLIP_CEILING})"
        if beyond.any():
            first = self.comparison.flips[0] if self.comparison.flips else None
            since = f", since {first.name}[{first.token}, {first.element}]" if first else ""
            return FLIP, _first(beyond), f"expected, after a rounding flip{since}"
        return OK, None, ""

    def _note_rerouted(self, name: str, shares: Array) -> None:
        """Note the tokens that an engine in a narrow float may give to other experts, or has, where it shows them.

        shares: the reference's, (N, E), 0 of experts that are not chosen.
        """
        (source,) = op_inputs(name, self.config)
        if self.comparison.mode != "free-running" or source not in self.reference:
            return
        scores, chosen = np.asarray(self.reference[source], dtype=np.float64), shares != 0
        least = np.where(chosen, scores, np.inf).min(axis=1)
        gap = least - np.where(chosen, -np.inf, scores).max(axis=1)
        near = gap <= narrow_tie(self.engine_dtype, scores)
        if name in self.candidate and (theirs := np.asarray(self.candidate[name])).size == shares.size:
            near &= ((theirs.reshape(shares.shape) != 0) != chosen).any(axis=1)
        self.rerouted |= near

    def _spread(self) -> None:
        """Mark every token that sees a marked one in attention."""
        window = widest_window(self.config) or len(self.reached)
        for source in np.flatnonzero(self.reached):
            self.reached[source : source + window] = True

    def _recorded_as_ternary(self, linear: str) -> bool:
        """As the reference's trace says; as the config says if the trace has no int8 tensor at all."""
        if self._any_int8:
            return f"{linear}.{INT8}" in self.reference
        return self.config.quantization is not None and linear != "lm_head"

    def _depth(self, name: str) -> int | None:
        """Layers computed before this op; None for an op that was fed the reference's inputs."""
        if self.comparison.mode != "free-running":
            return None
        layer = layer_of(name)
        return layer if layer is not None else 0 if name == "hook_embed" else self.config.num_hidden_layers


class View(Mapping[str, Array]):
    """A candidate's tensors, or those of some names, without synonyms: "logits" is "lm_head.hook_out"."""

    token_ids: list[int]  # those of a trace, if it is one
    prompt: str | None
    own_engine: bool
    engine_dtype: str
    calls: Calls
    others: Sequence[Tokens]  # the tokens of the other sequences of the trace

    def __init__(self, candidate: Tensors, only: Container[str] | None = None) -> None:
        last = sorted(candidate, key="logits".__eq__)  # of several synonyms this one counts: what the engine returns
        names = {SYNONYMS.get(name, name): name for name in last}
        self.candidate = candidate
        self.names = {name: actual for name, actual in names.items() if only is None or name in only}
        for attribute in ("token_ids", "prompt", "own_engine", "engine_dtype", "calls", "others"):
            if hasattr(candidate, attribute):
                setattr(self, attribute, getattr(candidate, attribute))

    def contradictions(self) -> list[str]:
        """One sentence for each tensor that has a synonym with other values, and does not count."""
        used = {name: self.names.get(SYNONYMS.get(name, name), name) for name in self.candidate}
        others = [name for name in used if used[name] != name]
        differ = [
            name
            for name in others
            if not np.array_equal(self.candidate[name], self.candidate[used[name]], equal_nan=True)
        ]
        return [f"{name} not compared: {used[name]}, a name of the same tensor, has other values" for name in differ]

    def tensor(self, name: str) -> Rows:
        return tensor_of(self.candidate, self.names[name])

    def __getitem__(self, name: str) -> Array:
        return self.candidate[self.names[name]]

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def _is_head_norm(name: str) -> bool:
    return ".q_norm." in name or ".k_norm." in name


def fits(shape: tuple[int, ...], given: tuple[int, ...], name: str = "") -> bool:
    """Whether an array of shape `given` can be read as one of `shape`: axes of 1 in front, heads joined or apart.

    name: of the tensor; a norm over heads may have a row for each head of each token, (N*H, d).
    """
    while len(given) > len(shape) and given[0] == 1:
        given = given[1:]
    if given == shape or (1, *given) == shape:
        return True
    if _is_head_norm(name) and len(given) == 2 and given[0] % shape[0] == 0:
        return math.prod(given) == math.prod(shape)
    same_rows = given[:1] == shape[:1] and math.prod(given) == math.prod(shape)
    return same_rows and 2 in (len(shape), len(given)) and abs(len(shape) - len(given)) <= 1


def shape_note(name: str, shape: tuple[int, ...], given: tuple[int, ...]) -> str:
    """What is said of a tensor of shape `given`, which cannot be read as one of `shape`.

    >>> shape_note("lm_head.hook_out", (8, 1000), (8, 1024))
    'shape [8, 1024] instead of [8, 1000]: cut the padded logits to vocab_size, logits[..., :1000]'
    """
    note = f"{OTHER_SHAPE} {list(given)} instead of {list(shape)}"
    is_padded = op_kind(name) == "logits" and len(given) == len(shape) and given[-1:] > shape[-1:]
    return note + f": cut the padded logits to vocab_size, logits[..., :{shape[-1]}]" * is_padded


def is_last_token(shape: tuple[int, ...], given: tuple[int, ...]) -> bool:
    """Whether logits of shape `given` are the last token's of a run whose logits have this shape (N, V)."""
    return shape[0] > 1 and given[-1:] == shape[1:] and math.prod(given) == shape[1]


def count_tensors(names: Collection[str]) -> str:
    """How many they are: "6 tensors"."""
    return count_of(len(names), "tensor")


def listed(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    return ", ".join([*names[:_LISTED], f"and {len(names) - _LISTED} more"][: len(names)])


def _first(rows: Mask) -> int | None:
    indices = np.flatnonzero(rows)
    return int(indices[0]) if len(indices) else None


def _to_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _to_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value.item() if isinstance(value, np.generic) else value
