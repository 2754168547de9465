"""Writes answers.json beside the shipped model: what `doctor` holds every backend against.

Logits and greedy texts come from Hugging Face transformers (tests/data/storyteller). Sampled texts are this package's
own on the numpy backend, whose rules are held against transformers' by tests/generation/test_oracle.py.

    python scripts/make_answers.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

import bitnet_ref

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data" / "storyteller"
TOKENS = 32  # before the first int8 that two correct float32 engines round to different sides
COLUMNS = 48  # logits per token
PROMPT = "The old man looked at the sea and said"
SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0.8, "top_k": 40, "seed": 1},
    {"temperature": 1.0, "top_p": 0.9, "seed": 2},
    {"temperature": 0.9, "min_p": 0.05, "repetition_penalty": 1.2, "seed": 3},
    {"temperature": 1.0, "typical_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.3, "seed": 4},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.95, "logit_bias": {"262": -2.0, "277": 1.5}, "seed": 5},
    {"temperature": 0.0, "min_tokens": 4, "stop": ["a boy"]},
    {"temperature": 0.0, "bad_words": ["the", "and"], "repetition_penalty": 1.3},
    {"temperature": 0.0, "num_beams": 3, "length_penalty": 0.8},
    {"temperature": 0.0, "overflow": "sliding", "window": 16},
    {"temperature": 0.9, "top_k": 30, "seed": 6, "n": 2},
]


def main() -> None:
    golden = load_file(DATA / "golden.safetensors")
    expected = json.loads((DATA / "expected.json").read_text(encoding="utf-8"))
    tokens, logits = golden["tokens"][:TOKENS], golden["logits"][:TOKENS]
    columns = np.sort(np.random.default_rng(0).choice(logits.shape[1], COLUMNS, replace=False))
    model = bitnet_ref.load("storyteller", backend="numpy")
    sampled = []
    for params in SAMPLED:
        given = {**params, "max_tokens": 20}
        if "logit_bias" in given:
            given["logit_bias"] = {int(token): bias for token, bias in given["logit_bias"].items()}
        outs: Any = model.generate(PROMPT, **given)
        outs = outs if isinstance(outs, list) else [outs]
        outputs = [{key: getattr(out, key) for key in ("token_ids", "text", "finish_reason")} for out in outs]
        sampled.append({"params": {**params, "max_tokens": 20}, "outputs": outputs})
    answers = {
        "oracle": expected["oracle"],
        "tokens": tokens.tolist(),
        "columns": columns.tolist(),
        "logits": [[round(float(value), 5) for value in row] for row in logits[:, columns]],
        "largest": logits.argmax(axis=1).tolist(),
        "greedy": [
            {key: case[key] for key in ("prompt", "prompt_ids", "token_ids", "text")} for case in expected["cases"][:4]
        ],
        "prompt": PROMPT,
        "sampled": sampled,
    }
    path = ROOT / "bitnet_ref" / "assets" / "storyteller" / "answers.json"
    path.write_text(json.dumps(answers, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{path.name}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
