"""Asks Hugging Face transformers for tests/data/sampling: what its processors make of logits, and what its beams find.

    python tests/data/make_sampling.py        # needs torch, transformers >= 5, accelerate; no test runs it

`processors.npz`: `logits` (N, V) and `ids` (N, T), the tokens so far, of which the last 6 were generated; `out.NAME`
(N, V) what a processor makes of them. The names say which, with which settings, in the order they are applied.
`beams.json`: for each model and setting the sequences of `generate`, without the prompt, and their scores.
"""

from __future__ import annotations

import os

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # transformers compiles its BitLinear; the plain text is the oracle

import json
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.generation import logits_process as lp

HERE = Path(__file__).parent / "sampling"
GOLDEN = Path(__file__).parent / "golden"
STORYTELLER = Path(__file__).parents[2] / "bitnet_ref" / "assets" / "storyteller"
PROMPT = 8  # tokens of the prompt, in processors.npz

# Each is (processor, one setting), so that the test can make the same of its name.
PROCESSORS = {
    "repetition_penalty=1.3": [lp.RepetitionPenaltyLogitsProcessor(1.3)],
    "repetition_penalty=0.8": [lp.RepetitionPenaltyLogitsProcessor(0.8)],
    "logit_bias": [lp.SequenceBiasLogitsProcessor([[[3], 2.5], [[40], -7.0]])],
    "min_tokens=6": [lp.MinNewTokensLengthLogitsProcessor(PROMPT, 6, [2, 9], device="cpu")],
    "min_tokens=7": [lp.MinNewTokensLengthLogitsProcessor(PROMPT, 7, [2, 9], device="cpu")],
    "bad_words": [lp.NoBadWordsLogitsProcessor([[3], [10, 11], [10, 11, 12], [20, 21, 20]])],
    "temperature=0.7": [lp.TemperatureLogitsWarper(0.7)],
    "top_k=5": [lp.TopKLogitsWarper(5)],
    "top_p=0.8": [lp.TopPLogitsWarper(0.8)],
    "top_p=0.05": [lp.TopPLogitsWarper(0.05)],
    "min_p=0.1": [lp.MinPLogitsWarper(0.1)],
    "typical_p=0.6": [lp.TypicalLogitsWarper(0.6)],
    "typical_p=0.95": [lp.TypicalLogitsWarper(0.95)],
    "temperature=1.4,top_k=20,top_p=0.9,min_p=0.05,typical_p=0.8": [
        lp.TemperatureLogitsWarper(1.4),
        lp.TopKLogitsWarper(20),
        lp.TopPLogitsWarper(0.9),
        lp.MinPLogitsWarper(0.05),
        lp.TypicalLogitsWarper(0.8),
    ],
    "temperature=0.6,top_p=0.95,min_p=0.02": [
        lp.TemperatureLogitsWarper(0.6),
        lp.TopPLogitsWarper(0.95),
        lp.MinPLogitsWarper(0.02),
    ],
}
# transformers' names; eos counts places in the best beam of the first setting, whose tokens then end a text
BEAMS = [
    {"num_beams": 4},
    {"num_beams": 3, "eos": [4, 9], "num_return_sequences": 3},
    {"num_beams": 4, "eos": [5], "early_stopping": True, "num_return_sequences": 2},
    {"num_beams": 4, "eos": [3], "early_stopping": "never", "length_penalty": 2.0},
    {"num_beams": 2, "eos": [3, 8], "length_penalty": 0.0, "early_stopping": "never", "num_return_sequences": 2},
    {"num_beams": 3, "eos": [2, 6], "length_penalty": -1.0},
    {"num_beams": 5, "eos": [4], "repetition_penalty": 1.5, "num_return_sequences": 5},
    {"num_beams": 3, "eos": [1], "min_new_tokens": 5},
    {"num_beams": 1, "repetition_penalty": 1.3},
    {"num_beams": 1, "eos": [2], "min_new_tokens": 8},
]
MODELS = ("storyteller", "llama-dense", "mistral-dense-window8", "bitnet-packed-offline", "bitnet-bf16-online")


def make_processors() -> None:
    rng = np.random.default_rng(7)
    logits = (rng.standard_normal((12, 64)) * np.linspace(0.3, 6, 12)[:, None]).astype(np.float32)
    ids = rng.integers(0, 64, (12, PROMPT + 6))
    ids[:, -2:] = [10, 11]
    ids[::3, -2:] = [20, 21]
    ids[1::4, 2:4] = 40
    found = {"logits": logits, "ids": ids}
    for name, processors in PROCESSORS.items():
        scores = torch.from_numpy(logits)
        for processor in processors:
            scores = processor(torch.from_numpy(ids), scores.clone())
        found[f"out.{name}"] = scores.numpy()
    np.savez_compressed(HERE / "processors.npz", **found)


def load_in_float32(folder: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):  # left in part in the file's dtype
            for tensor in tensors.values():
                if tensor is not None and tensor.dtype in (torch.bfloat16, torch.float16):
                    tensor.data = tensor.data.float()
    return model


@torch.no_grad()
def make_beams() -> None:
    cases = []
    for name in MODELS:
        folder = STORYTELLER if name == "storyteller" else GOLDEN / name
        model = load_in_float32(folder)
        # storyteller's first tokens are those by make_storyteller.py in which no int8 rounds the other way
        golden = HERE.parent / "storyteller" if name == "storyteller" else folder
        prompts = [load_file(golden / "golden.safetensors")["tokens"].reshape(-1)[:7].tolist()]
        if name == "storyteller":
            prompts.append([1, 600, 300])
        for prompt in prompts:
            places: list[int] = []
            for setting in BEAMS:
                given = dict(setting)
                end = sorted({places[at] for at in given.pop("eos", [])})
                config = GenerationConfig(
                    max_new_tokens=16, do_sample=False, eos_token_id=end or None, pad_token_id=0, **given
                )
                model.generation_config = GenerationConfig()
                out = model.generate(
                    torch.tensor([prompt]), generation_config=config, return_dict_in_generate=True, output_scores=True
                )
                sequences = [trim(row[len(prompt) :].tolist(), end) for row in out.sequences]
                scores = out.sequences_scores.tolist() if given["num_beams"] > 1 else None
                places = places or sequences[0]
                cases.append({"model": name, "prompt": prompt, "end": end, **given, "out": sequences, "scores": scores})
    text = ",\n".join(json.dumps(case) for case in cases)
    oracle = f"transformers {transformers.__version__}, torch {torch.__version__}, float32"
    (HERE / "beams.json").write_text(f'{{"oracle": "{oracle}",\n"cases": [\n{text}\n]}}\n')


def trim(tokens: list[int], end: list[int]) -> list[int]:
    """Without the padding after an end token."""
    at = next((i for i, token in enumerate(tokens) if token in end), len(tokens) - 1)
    return tokens[: at + 1]


if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    make_processors()
    make_beams()
