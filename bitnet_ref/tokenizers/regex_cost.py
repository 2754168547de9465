"""How long a regular expression of a tokenizer.json may search, estimated from its structure and the text at hand.

The library's engine, Oniguruma, backtracks: it stops one match after ten million retries (0.2 s), but a text has many
places where a match may begin. A repeat that something must follow is tried at every length. So where D of them stand
in a row, a run of R characters that they match costs R^(D+1) steps; a repeat that nothing must follow costs R. Refused
are repeats of a choice or of a repeat that something must follow, whose cost is exponential, references and recursion.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NoReturn

from ..errors import TokenizerError

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN35 = QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"?[^\s\p{L}\p{N}]", r"?[^\s\p{L}\p{M}\p{N}]")
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
# An alternative that fails after a run is followed by one that matches the whole run.
_LINEAR = {GPT2, LLAMA3, QWEN2, QWEN35, DEEPSEEK_V3[-1]}

_ANCHORS = {"^", "$", *("\\" + letter for letter in "bBAzZG")}
MAX_PATTERN = 4096  # characters; the longest published one has about 600
_MAX_STEPS = 1 << 14  # for one place of a text without runs
_MANY = 1 << 62
_SHORT = 64  # a repeat of at most this many is counted, a longer one is as good as unbounded
_SPARE_STEPS, _STEPS_PER_CHARACTER = 100_000_000, 200  # 15 to 30 ns each
_TOKEN = re.compile(
    r"(?P<open>\((?:\?(?:[im-]*:|<?[=!]|>|<[A-Za-z]\w*>)|(?!\?)))|(?P<close>\))|(?P<bar>\|)"
    r"|(?P<repeat>(?:[*+?]|\{(?=[\d,]*\d)(?P<low>\d{0,9})(?P<comma>,?)(?P<high>\d{0,9})\})(?P<mode>[+?]?))"
    r"|(?P<atom>\[|\\(?:[pP]\{\^?\w+\}|x\{[0-9A-Fa-f]+\}|x[0-9A-Fa-f]{1,2}|u[0-9A-Fa-f]{4}|[^0-9kgKXRpPxu])|[^()\\])",
    re.DOTALL,
)


@dataclass
class _Node:
    """An atom (a class or a character, `source`), an anchor, a repeat of one node, or a group of alternatives."""

    kind: str  # "atom", "repeat", "group", "look"
    source: str = ""
    low: int = 1
    high: int | None = 1
    parts: list[list[_Node]] = field(default_factory=list)

    def atoms(self) -> set[str]:
        inner = {atom for part in self.parts for node in part for atom in node.atoms()}
        return {self.source} if self.kind == "atom" else inner


@dataclass
class _Cost:
    """ways * size * R^(degree + 1) steps, for runs of R characters of `atoms`."""

    ways: int = 1
    size: int = 1  # atoms in one way
    degree: int = 0
    atoms: set[str] = field(default_factory=set)
    may_fail: bool = True

    @property
    def steps(self) -> int:
        return self.ways * (1 + self.size // 8)


class SearchLimit:
    """The cost of all matches of one pattern in a text."""

    def __init__(self, pattern: str, place: str) -> None:
        """Raises TokenizerError naming `place` if no text is safe."""
        self._place = place
        self._costs: list[_Cost] = []
        if pattern not in _LINEAR:
            if len(pattern) > MAX_PATTERN:
                raise self._error(f"has more than {MAX_PATTERN} characters")
            try:
                self._costs = [self._of_part(part, False) for part in self._parse(pattern)]
            except RecursionError:
                raise self._error("is nested too deeply") from None
        self._steps = sum(cost.steps for cost in self._costs)
        if self._steps > _MAX_STEPS:
            raise self._error("can be matched in too many ways")
        self._members: dict[frozenset[str], dict[str, bool]] = {}  # atoms -> character -> whether they match it

    @property
    def degree(self) -> int:
        return max((cost.degree for cost in self._costs), default=0)

    def is_cheap(self, length: int) -> bool:
        """Whether every text of this length is searched in time."""
        steps: int = self._steps * max(1, length) ** (self.degree + 1)
        return steps <= _SPARE_STEPS + _STEPS_PER_CHARACTER * length

    def check(self, text: str) -> None:
        """Raise TokenizerError if this text may take too long."""
        if self.is_cheap(len(text)):
            return
        steps = self._steps * len(text)
        for cost in self._costs:
            if cost.degree:
                steps += cost.steps * sum(len(run) ** (cost.degree + 1) for run in self._runs(cost, text))
        if steps > _SPARE_STEPS + _STEPS_PER_CHARACTER * len(text):
            self.refuse(text)

    def refuse(self, text: str) -> NoReturn:
        raise self._error(f"may take too long for this text of {len(text)} characters")

    def _error(self, message: str) -> TokenizerError:
        return TokenizerError(f"this regular expression {message}", field=self._place)

    # -- structure -----------------------------------------------------------------------------------------------------

    def _parse(self, pattern: str) -> list[list[_Node]]:
        stack, position = [_Node("group", parts=[[]])], 0
        if pattern.startswith("(?i)"):  # elsewhere Ruby's syntax gives it the alternatives after it
            position = 4
        while position < len(pattern):
            match = _TOKEN.match(pattern, position)
            if match is None:
                raise self._error(f"has something at {position} that is not supported: {pattern[position:][:20]!r}")
            position = match.end()
            current = stack[-1].parts[-1]
            if match["open"]:
                stack.append(_Node("look" if match["open"][-1] in "=!" else "group", parts=[[]]))
            elif match["close"]:
                if len(stack) == 1:
                    raise self._error("closes a bracket that is not open")
                node = stack.pop()
                stack[-1].parts[-1].append(node)
            elif match["bar"]:
                stack[-1].parts.append([])
            elif match["repeat"]:
                if not current or (match["comma"] is not None and match["mode"]):
                    raise self._error(f"has a repeat at {match.start()} that is not supported")
                current.append(self._repeat(current.pop(), match))
            else:
                if match["atom"] == "[":
                    position = self._end_of_class(pattern, match.start())
                source = pattern[match.start() : position]
                current.append(_Node("anchor" if source in _ANCHORS else "atom", source))
        if len(stack) > 1:
            raise self._error("has a bracket that is not closed")
        return stack[0].parts

    def _repeat(self, node: _Node, match: re.Match[str]) -> _Node:
        if node.kind == "repeat":
            raise self._error(f"has a repeat of a repeat at {match.start()}")
        if match["comma"] is None:
            low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}[match["repeat"][0]]
        else:
            low = int(match["low"] or 0)
            high = low if not match["comma"] else int(match["high"]) if match["high"] else None
        return _Node("repeat", low=low, high=high, parts=[[node]])

    def _end_of_class(self, pattern: str, start: int) -> int:
        """The offset after the class that begins at `start`; classes nest."""
        depth, position = 0, start
        while position < len(pattern):
            character = pattern[position]
            depth += (character == "[") - (character == "]")
            if character == "[" and pattern[position + 1 : position + 3].startswith(("]", "^]")):
                raise self._error(f"has a class at {position} that begins with ]")
            position += 2 if character == "\\" else 1
            if depth == 0:
                return position
        raise self._error("has a class that is not closed")

    def _of_part(self, part: list[_Node], must_follow: bool) -> _Cost:
        """Of nodes in a row. must_follow: whether something that may fail comes after them."""
        total = _Cost(size=0, may_fail=False)
        for node in reversed(part):
            cost = self._of_node(node, must_follow or total.may_fail)
            total.ways = min(total.ways * cost.ways, _MANY)
            total.size = min(total.size + cost.size, _MANY)
            total.degree += cost.degree
            total.atoms |= cost.atoms
            total.may_fail |= cost.may_fail
        return total

    def _of_node(self, node: _Node, must_follow: bool) -> _Cost:
        if node.kind in ("atom", "anchor"):
            return _Cost()
        if node.kind == "repeat":
            return self._of_repeat(node, must_follow)
        costs = [self._of_part(part, must_follow or node.kind == "look") for part in node.parts]
        return _Cost(
            min(sum(cost.ways for cost in costs), _MANY),
            max(cost.size for cost in costs),
            max(cost.degree for cost in costs),
            set().union(*(cost.atoms for cost in costs)),
            node.kind == "look" or all(cost.may_fail for cost in costs),
        )

    def _of_repeat(self, node: _Node, must_follow: bool) -> _Cost:
        body = self._of_node(node.parts[0][0], True)
        may_fail = node.low > 0 and body.may_fail
        if node.high is not None and node.high <= _SHORT:
            high = max(1, node.high)
            ways = (1 + node.high - node.low) * body.ways**high if node.low <= node.high else 1
            return _Cost(min(ways, _MANY), min(body.size * high, _MANY), body.degree * high, body.atoms, may_fail)
        if not must_follow and node.low <= 1:  # it takes what it can, and is not tried again
            return _Cost(body.ways, body.size, body.degree, body.atoms, may_fail)
        if body.ways > 1 or body.degree:
            raise self._error(
                "repeats a choice or a repeat that something must follow, which may take exponential time"
            )
        return _Cost(1, body.size, 1, node.atoms(), may_fail)

    # -- the text ------------------------------------------------------------------------------------------------------

    def _runs(self, cost: _Cost, text: str) -> list[str]:
        """The stretches of the text that the atoms match, as Oniguruma itself says, asked for each character once."""
        known = self._members.setdefault(frozenset(cost.atoms), {})
        fresh = "".join(set(text).difference(known))
        if fresh:
            either = "|".join(sorted(cost.atoms))
            rest = set(self._without(f"(?m:{either}|(?i:{either}))", fresh))
            known |= {character: character not in rest for character in fresh}
        members = "".join(character for character in set(text) if known[character])
        return re.findall(f"[{re.escape(members)}]+", text) if members else []

    @staticmethod
    def _without(pattern: str, text: str) -> str:
        from tokenizers import Regex, normalizers

        return normalizers.Replace(Regex(pattern), "").normalize_str(text)
