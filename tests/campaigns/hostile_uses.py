"""A campaign of use: what the readers accept of damaged or forged files is then computed with.

    python tests/campaigns/hostile_uses.py prepared 0 1200      # seeds 0 to 1199, each in a child of its own (Linux)

Kinds: accepted (mutated weights of every format, then a token by each backend), sizes (configs of huge numbers, through
load, generate, an engine, inspect and convert), prepared (tampered prepared weights: damaged at random, or forged with
right hashes), trace and receipt (mutated, then compared and verified). A child has 5 CPU-seconds and 1 GiB of address
space more than its parent. Outcomes are "ok" and bitnet_ref's errors; all else is a find, and its files are kept.
"""

import argparse
import gc
import json
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from contextlib import suppress
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "fuzz"))

import numpy as np
from campaign import mutate, write_good
from forked import run_in_child
from gguf_mutants import TILES_FILE
from helpers import BITNET, TINY, raw_safetensors, tiny_tensors, write_checkpoint
from json_mutants import change_json, dump, flip_bytes, mutate_json, mutate_safetensors

import bitnet_ref
from bitnet_ref.crossval import cross_trace, make_receipt, verify_receipt
from bitnet_ref.crossval.receipt import receipt_hash, write_receipt
from bitnet_ref.crossval.report import write_html
from bitnet_ref.crossval.trace import record_to_file
from bitnet_ref.errors import BitNetRefError, ConfigWarning
from bitnet_ref.formats import prepared
from bitnet_ref.formats.convert import convert
from bitnet_ref.formats.safetensors import content_hash
from bitnet_ref.inspection import inspect_model

KINDS = ("accepted", "sizes", "prepared", "trace", "receipt")
FORMATS = ("config", "weights", "native", "gguf", "onnx")
SPARE_BYTES, CPU_S = 1 << 30, 5
TOKENS = [1, 3, 2, 5]
HUGE = (
    0,
    -1,
    1,
    2,
    3,
    2**20,
    2**31 - 1,
    2**31,
    400_000_000,
    2**40,
    2**40 + 1,
    2**63,
    10**400,
    1e30,
    1e-30,
    1e308,
    5e-324,
)
KEYS = ("max_position_embeddings", "vocab_size", "num_hidden_layers", "intermediate_size", "hidden_size", "head_dim")
KEYS += ("num_attention_heads", "num_key_value_heads", "rope_theta", "rms_norm_eps", "sliding_window", "eos_token_id")


def sealed(header, data):
    """A prepared file of this header and data whose hashes are right: what a forger makes, not an accident."""
    metadata = header["__metadata__"]
    for key in ("content_hash", "full_hash"):
        metadata.pop(key, None)
    for key, digest in (("full_hash", prepared.sha256), ("content_hash", prepared.sum_pages)):
        facts = {
            name: (entry["dtype"], tuple(entry["shape"]), digest(data[slice(*entry["data_offsets"])]))
            for name, entry in header.items()
            if name != "__metadata__"
        }
        metadata[key] = content_hash(metadata, facts)
    text = json.dumps(header).encode()
    return raw_safetensors(text + b" " * (-(8 + len(text)) % 64), data)


def forge(dice, data):
    """Another tree of weights, config, dtype or shape, under right hashes."""
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    for _ in range(dice.choice([1, 1, 2, 4])):
        metadata, what = header["__metadata__"], dice.randrange(5)
        if what < 3:
            key = dice.choice(["weights", "weights", "config"])
            tree = json.loads(metadata[key])
            change_json(dice, tree)
            metadata[key] = json.dumps(tree)
        else:
            entry = header[dice.choice([name for name in header if name != "__metadata__"])]
            same = {"F32": ("I32", "U32"), "BF16": ("F16", "I16", "U16"), "U8": ("I8", "BOOL"), "I8": ("U8", "BOOL")}
            if what == 3:
                entry["dtype"] = dice.choice(same.get(entry["dtype"], (entry["dtype"],)))
            else:
                entry["shape"] = dice.choice(
                    [entry["shape"][::-1], [int(np.prod(entry["shape"]))], [1, *entry["shape"]]]
                )
    try:
        return sealed(header, body)
    except (AttributeError, KeyError, TypeError, ValueError):
        return raw_safetensors(header, body)


def use_prepared(dice, folder):
    options = {"backend": "cython", "threads": 1, "prepared": dice.choice([True, True, "mapped"])}
    options["head"] = dice.choice(["auto", "screened"])
    write_checkpoint(folder, BITNET)
    expected = bitnet_ref.load(folder, **options).logits(TOKENS)
    (file,) = (folder / prepared.FOLDER).iterdir()
    data = file.read_bytes()
    is_forged = dice.randrange(2) == 0
    file.write_bytes(forge(dice, data) if is_forged else dice.choice([flip_bytes, mutate_safetensors])(dice, data))
    damaged = file.read_bytes()

    def job():
        model = bitnet_ref.load(folder, verify=dice.randrange(4) == 0, **options)
        logits = model.logits(TOKENS)
        model.generate(TOKENS, max_tokens=1)
        from_file = not model.weights.embedding.array.flags.writeable
        if not is_forged:
            assert np.array_equal(logits, expected), "wrong numbers"
            anew = not from_file or file.read_bytes() != damaged  # a mapped file is used once it is written again
            assert damaged == data or anew, "damage was not noticed"
        return f"ok, {'from the file' if from_file else 'read anew'}"

    return job


def use_sizes(dice, folder):
    base = dice.choice([BITNET, TINY, {**TINY, "model_type": "mistral"}])
    changes = {dice.choice(KEYS): dice.choice(HUGE) for _ in range(dice.choice([1, 1, 2, 3]))}
    if dice.randrange(4) == 0:
        kind = dice.choice(["linear", "dynamic", "llama3", "yarn"])
        numbers = {key: dice.choice(HUGE) for key in ("factor", "original_max_position_embeddings", "high_freq_factor")}
        changes["rope_scaling"] = {"rope_type": kind, "low_freq_factor": 1.0, **numbers}
    write_checkpoint(folder / "m", {**base, **changes}, tiny_tensors(base))
    step = dice.randrange(5)

    def job():
        if step == 0:
            inspect_model(folder / "m")
        elif step == 1:
            target = dice.choice(["native", "gguf-tq2_0", "gguf-i2_s", "hf-bf16"])
            suffix = {"native": ".bitnet.safetensors", "hf-bf16": ""}.get(target, ".gguf")
            convert(folder / "m", folder / f"out{suffix}", target)
        else:
            model = bitnet_ref.load(folder / "m", backend=dice.choice(["numpy", "cython"]), threads=1)
            if step == 2:
                model.generate(TOKENS, max_tokens=2, overflow=dice.choice(["error", "sliding", "sinks"]))
            elif step == 3:
                model.run_with_cache(TOKENS[:1])
            else:
                with model.engine(cache_tokens=64) as engine:
                    engine.submit(TOKENS, max_tokens=2).result()
        return "ok"

    return job


def use_accepted(dice, folder):
    kind = dice.choice(FORMATS)
    path = mutate(kind, dice.randrange(1 << 40), folder) if dice.randrange(8) else write_good(kind, dice, folder)
    tiles = path.parent / TILES_FILE

    def job():
        for backend in ("numpy", "cython"):
            model = bitnet_ref.load(path, backend=backend, threads=1, tl_tiles=tiles if tiles.exists() else None)
            tokens = [token % model.config.vocab_size for token in TOKENS]
            model.generate(tokens[: max(1, min(4, model.config.context_length - 1))], max_tokens=1)
        return f"ok, {kind}"

    return job


def record(folder):
    """A model, and the trace of a run of it."""
    write_checkpoint(folder / "m", BITNET)
    model = bitnet_ref.load(folder / "m", backend="numpy", threads=1)
    record_to_file(model, TOKENS, folder / "trace.safetensors")
    return model


def use_trace(dice, folder):
    model, path = record(folder), folder / "trace.safetensors"
    data = path.read_bytes()
    for _ in range(dice.choice([1, 1, 2])):
        try:
            data = mutate_safetensors(dice, data)
        except (
            ValueError,
            KeyError,
            TypeError,
            RecursionError,
            AttributeError,
            IndexError,
            OverflowError,
        ):  # no longer a file that it can mutate
            break
    path.write_bytes(data)

    def job():
        crossing = cross_trace(model, path, causes=dice.randrange(4) == 0)
        write_html(folder / "page.html", "a trace", [crossing], {})
        write_receipt(folder / "r.json", make_receipt("trace", "m", model, TOKENS, [crossing], path))
        return "ok, agrees" if crossing.agrees else "ok, differs"

    return job


def use_receipt(dice, folder):
    model, path = record(folder), folder / "receipt.json"
    trace = folder / "trace.safetensors"
    write_receipt(path, make_receipt("trace", str(folder / "m"), model, TOKENS, [cross_trace(model, trace)], trace))
    value = json.loads(path.read_text())
    if dice.randrange(4) == 0:
        path.write_bytes(mutate_json(dice, path.read_bytes()))
    else:  # sealed again, as by a forger
        for _ in range(dice.choice([1, 1, 2, 5])):
            change_json(dice, value)
        with suppress(TypeError, AttributeError, ValueError):
            value["sha256"] = receipt_hash(value)
        path.write_bytes(dump(dice, value))

    def job():
        return "ok, holds" if verify_receipt(path).holds else "ok, does not hold"

    return job


def within(job):
    """`job`, with one of bitnet_ref's errors as an outcome."""

    def run():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ConfigWarning)
        try:
            return job()
        except BitNetRefError as error:
            if not str(error).replace("\n", "").isprintable():
                raise AssertionError("an error that acts on the terminal") from error
            return type(error).__name__

    return run


def run_campaign(kind, first, last, keep, seconds):
    """Each seed in a child, until `seconds` are over. Prints the counts; returns the finds."""
    make = globals()[f"use_{kind}"]
    started, counts, finds = time.perf_counter(), Counter(), []
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    for seed in range(first, last):
        if time.perf_counter() - started > seconds:
            break
        with tempfile.TemporaryDirectory(dir=memory) as name:
            job = make(random.Random(f"{kind} {seed}"), Path(name))
            if seed == first:
                within(make(random.Random("warm"), Path(tempfile.mkdtemp(dir=name))))()  # loads what children need
                gc.freeze()
            outcome, detail = run_in_child(within(job), SPARE_BYTES, CPU_S)
            counts[outcome] += 1
            if not outcome.startswith("ok") and not (outcome.isidentifier() and hasattr(bitnet_ref.errors, outcome)):
                finds.append(seed)
                shutil.copytree(name, keep / f"{kind}-{seed}", dirs_exist_ok=True)
                print(json.dumps({"kind": kind, "seed": seed, "find": outcome, "detail": detail[-3000:]}), flush=True)
    done = {"kind": kind, "done": counts.total(), "outcomes": dict(counts), "finds": finds}
    print(json.dumps({**done, "seconds": round(time.perf_counter() - started, 1)}), flush=True)
    return finds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int)
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()) / "bitnet-ref-finds")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    given = parser.parse_args()
    sys.exit(bool(run_campaign(given.kind, given.first, given.last, given.keep, given.seconds)))
