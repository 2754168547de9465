"""Plants the known mistakes of other engines, one at a time, in a copy of the reference: crossval must name each.

    python crossval/planted_bugs.py [--json] [--logits-only] [NAME ...]

For each bug the copy runs and its trace is compared with the reference's. The table says which op differs first, which
cause was confirmed by a test, and whether both are right. Exit code 0 only if all are.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import Any

from bug_list import BLOCK_BUGS, Bug
from bug_list_families import FAMILY_BUGS
from bug_list_linears import LINEAR_BUGS
from generation_causes import diagnose_generation
from planted_models import CHAT, MODELS
from planting import planted

import bitnet_ref
from bitnet_ref.crossval.compare import compare
from bitnet_ref.crossval.explain.diagnose import Diagnosis, diagnose, diagnose_prompt
from bitnet_ref.crossval.explain.near_halves import follow_flips
from bitnet_ref.crossval.token_ids import token_parity

BUGS = (*BLOCK_BUGS, *LINEAR_BUGS, *FAMILY_BUGS)
NEW_TOKENS = 12


@dataclass(frozen=True)
class Outcome:
    """What crossval reports about one bug. `agreed`: it saw no difference, which is the worst outcome."""

    bug: str
    level: str
    op: str | None
    causes: list[str]
    op_right: bool
    cause_right: bool
    agreed: bool
    tested: int

    @property
    def right(self) -> bool:
        return self.op_right and self.cause_right and not self.agreed


class Hunt:
    """Plants bugs and lets crossval find them. The models are written to a temporary folder."""

    def __init__(self) -> None:
        self._scratch = tempfile.TemporaryDirectory()
        self._models: dict[str, bitnet_ref.Model] = {}

    def close(self) -> None:
        self._scratch.cleanup()

    def __enter__(self) -> Hunt:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reference(self, name: str) -> bitnet_ref.Model:
        if name not in self._models:
            folder = MODELS[name](Path(self._scratch.name) / name.replace(" ", "_"))
            self._models[name] = bitnet_ref.load(folder, backend="numpy", threads=1)
        return self._models[name]

    def find(self, bug: Bug, logits_only: bool = False) -> Outcome:
        model = self.reference(bug.model)
        with planted(bug.edits) as engine:
            levels = {"forward": self._forward, "prompt": self._prompt, "generation": self._generation}
            op, diagnoses = levels[bug.level](bug, model, engine, logits_only)
        by_tokens = bug.level == "generation"  # which may not tell a cause from others that give the same tokens
        confirmed = [d.name for d in diagnoses if d.confirmed or (by_tokens and d.possible)]
        op_right = logits_only or (op is not None and any(fnmatchcase(op, glob) for glob in bug.ops))
        right = {*bug.causes, *(bug.twins if logits_only or by_tokens else ())}
        needed = set(bug.causes) if by_tokens else right
        cause_right = bool(needed & set(confirmed)) and set(confirmed) <= right
        return Outcome(bug.name, bug.level, op, confirmed, op_right, cause_right, op is None, len(diagnoses))

    def _forward(
        self, bug: Bug, model: bitnet_ref.Model, engine: ModuleType, logits_only: bool
    ) -> tuple[str | None, list[Diagnosis]]:
        tokens = list(bug.tokens)
        _, trace = _load_copy(engine, model).run_with_cache(tokens, "lm_head.hook_out" if logits_only else None)
        _, reference = model.run_with_cache(tokens)
        comparison = follow_flips(model, tokens, trace, compare(reference, trace, model.config, tokens))
        op = None if comparison.first_divergence is None else comparison.first_divergence.name
        return op, diagnose(model, tokens, trace, comparison)

    def _prompt(
        self, bug: Bug, model: bitnet_ref.Model, engine: ModuleType, logits_only: bool
    ) -> tuple[str | None, list[Diagnosis]]:
        prompt, copy = model.tokenizer.apply_chat_template(CHAT), _load_copy(engine, model).tokenizer
        ids, other = model.tokenizer.encode(prompt), copy.apply_chat_template(CHAT)
        theirs = copy.encode(other)
        problem = token_parity(ids, theirs, model.config, (prompt, other))
        return None if problem is None else "token_ids", diagnose_prompt(model, ids, theirs, prompt)

    def _generation(
        self, bug: Bug, model: bitnet_ref.Model, engine: ModuleType, logits_only: bool
    ) -> tuple[str | None, list[Diagnosis]]:
        chat = bug.model == "chat"
        ids = model.tokenizer.apply_chat_template(CHAT, tokenize=True) if chat else model.tokenizer.encode("Once upon")
        ours: Any = model.generate(ids, max_tokens=NEW_TOKENS)
        theirs = _load_copy(engine, model).generate(ids, max_tokens=NEW_TOKENS)
        same = ours.token_ids == theirs.token_ids
        return None if same else "generated_ids", diagnose_generation(model, ids, theirs.token_ids, ours.token_ids)


def _load_copy(engine: ModuleType, model: bitnet_ref.Model) -> Any:
    return engine.load(model.path, backend="numpy", threads=1)


def table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes in columns: bug, op named, cause named, right?"""
    rows = [("planted bug", "first op named", "cause confirmed", "right?")]
    for o in outcomes:
        op = "AGREEMENT" if o.agreed else o.op or "-"
        rows.append((o.bug, op, ", ".join(o.causes) or "none", "yes" if o.right else "NO"))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Plant every known mistake in a copy of the reference and find it.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these bugs")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--logits-only", action="store_true", help="show crossval nothing but the logits")
    options = parser.parse_args(arguments)
    known = {bug.name: bug for bug in BUGS}
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"no such bug: {', '.join(unknown)}; there are: {', '.join(known)}")
    chosen = [known[name] for name in options.names] or list(BUGS)
    if options.logits_only:
        chosen = [bug for bug in chosen if bug.in_logits]
    with Hunt() as hunt:
        outcomes = [hunt.find(bug, options.logits_only) for bug in chosen]
    right = sum(o.right for o in outcomes)
    if options.json:
        bugs = [asdict(o) | {"right": o.right} for o in outcomes]
        print(json.dumps({"planted": len(outcomes), "named_rightly": right, "bugs": bugs}, indent=1))
    else:
        print(table(outcomes))
        print(f"\n{right} of {len(outcomes)} named rightly, op and cause")
    return 0 if right == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
