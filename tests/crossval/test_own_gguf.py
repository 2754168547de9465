"""llama.cpp on somebody's own GGUF file: judged with the allowance of its 8-bit activations."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from helpers import DATA, GOLDEN, model

from bitnet_ref.backends import Backend
from bitnet_ref.crossval import Crossing
from bitnet_ref.crossval.engines import llama_cpp
from bitnet_ref.crossval.opponents import default_tokens
from bitnet_ref.formats.gguf.export import write_gguf_model
from bitnet_ref.formats.open import open_checkpoint

FILE = DATA / "gguf" / "tq1_0.gguf"


class EightBits(Backend):
    """ggml's products: inputs in blocks of so many features, each with a scale of its own."""

    def __init__(self, block):
        super().__init__("float32", 1)
        self.block = block

    def dense_matmul(self, x, w):
        blocks = x.reshape(len(x), -1, self.block)
        step = np.maximum(np.abs(blocks).max(-1, keepdims=True), np.float32(1e-30)) / np.float32(127)
        return super().dense_matmul((np.rint(blocks / step) * step).reshape(x.shape), w)


class Run(dict):
    own_engine, engine_dtype = False, "float32"


def judged(backend, change=None, file=FILE):
    m = model(file)
    tokens = default_tokens(m)
    run = Run(llama_cpp._dense(m).on(backend).run_with_cache(tokens)[1])
    run.token_ids = tokens
    if change is not None:
        change(run)
    crossing = Crossing("llama.cpp")
    rounding = llama_cpp._activations_of(file)
    llama_cpp._judge_own_file(rounding, crossing, m, run)
    crossing.causes = llama_cpp._explain_own_file(rounding, crossing, m, run)
    return crossing


def test_the_type_of_the_matrices_says_what_is_rounded():
    assert llama_cpp._activations_of(FILE) == "8-bit activations"
    assert llama_cpp._activations_of(DATA / "gguf" / "f16.gguf") == "float16 activations"


@pytest.mark.parametrize("block", [32, 256])
def test_eight_bit_activations_are_allowed_for(block):
    crossing = judged(EightBits(block))
    assert crossing.agrees, crossing.verdict
    assert crossing.verdict.startswith("AGREES up to llama.cpp's 8-bit activations, free-running")


@pytest.mark.parametrize(("kind", "dtype"), [("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_sixteen_bit_matrices_are_judged_by_the_rule_of_their_products(tmp_path, kind, dtype):
    """Inputs rounded to the matrix's type give llama.cpp's tensors to 1e-7; sums in float16 only its tolerance."""
    with open_checkpoint(GOLDEN / "llama-dense") as checkpoint:
        write_gguf_model(checkpoint, tmp_path / "m.gguf", kind, dense_type=kind.upper())

    class Rounded(Backend):
        def dense_matmul(self, x, w):
            return super().dense_matmul(x.astype(dtype).astype(np.float32), w)

    class SumsInFloat16(Rounded):
        def dense_matmul(self, x, w):
            return super().dense_matmul(x, w).astype(np.float16).astype(np.float32)

    file = tmp_path / "m.gguf"
    for engine, exactly in ((Rounded, True), (SumsInFloat16, False)):
        crossing = judged(engine("float32", 1), file=file)
        assert crossing.agrees, crossing.verdict
        assert ("op by op within float32's tolerance" in crossing.verdict) == exactly

    def misread(run):
        run["blocks.1.attn.o_proj.hook_out"] = run["blocks.1.attn.o_proj.hook_out"] * np.float32(1.1)

    assert not judged(Rounded("float32", 1), misread, file).agrees


def test_a_file_that_is_misread_differs_and_its_cause_is_named():
    m = model(FILE)
    config = m.config

    class Silu(EightBits):
        def gated(self, gate, up, activation):
            return super().gated(gate, up, "silu" if activation == "relu2" else "relu2")

    crossing = judged(Silu(256))
    assert not crossing.agrees
    assert crossing.comparisons[-1].first_divergence.name == "blocks.0.mlp.hook_post"
    confirmed = [cause.name for cause in crossing.causes if cause.confirmed]
    assert confirmed, (config.activation, [str(cause) for cause in crossing.causes][:5])


def test_a_gguf_is_given_to_the_engine_as_it_is(tmp_path):
    (attempt,) = llama_cpp.attempts(Path(FILE))
    assert attempt.opponent == "llama.cpp, the file as it is"
    _, job = attempt.prepare(tmp_path)
    assert job["model"] == str(FILE)
    assert not list(tmp_path.iterdir())
