"""llama.cpp on somebody's own GGUF file: judged by its own rule of products, or with an allowance for it."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from helpers import DATA, GOLDEN, model

import bitnet_ref
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


RULE, WIDE = "8-bit activations, by rule", "8-bit activations"


def judged(backend, rounding, by_rule=True, change=None, file=FILE):
    """A run of that backend, of the file's matrices by ggml's rule or dequantised, as llama.cpp's."""
    ruled, plain = (bitnet_ref.load(file, backend="numpy", activations=each) for each in ("blocks", "auto"))
    tokens = default_tokens(plain)
    run = Run((ruled if by_rule else llama_cpp.dense_model(plain)).on(backend).run_with_cache(tokens)[1])
    run.token_ids = tokens
    if change is not None:
        change(run)
    crossing, reference = Crossing("llama.cpp"), ruled if rounding == RULE else plain
    llama_cpp._judge_own_file(rounding, crossing, reference, run)
    crossing.causes = llama_cpp._explain_own_file(rounding, crossing, reference, run)
    return crossing


def test_the_type_of_the_matrices_says_what_is_rounded(tmp_path):
    assert llama_cpp._activations_of(FILE) == RULE
    assert llama_cpp._activations_of(DATA / "gguf" / "f16.gguf") == "float16 activations"
    assert llama_cpp._activations_of(DATA / "gguf" / "i2_s.gguf") == WIDE


def test_a_run_by_the_rule_agrees_op_by_op_as_in_float32():
    crossing = judged(Backend("float32", 1), RULE)
    assert crossing.agrees, crossing.verdict
    assert crossing.verdict.startswith("AGREES, free-running")
    by_op = {op.name: op for op in crossing.comparisons[0].ops}
    assert by_op["blocks.0.mlp.down_proj.hook_out"].tolerance < 1e-4


@pytest.mark.parametrize("block", [32, 256])
def test_eight_bit_activations_are_allowed_for_where_the_rule_lacks_a_type(block):
    crossing = judged(EightBits(block), WIDE, by_rule=False)
    assert crossing.agrees, crossing.verdict
    assert crossing.verdict.startswith("AGREES up to llama.cpp's 8-bit activations, free-running")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "dtype"), [("f16", np.float16), pytest.param("bf16", ml_dtypes.bfloat16, marks=pytest.mark.thorough)]
)
def test_sixteen_bit_matrices_are_judged_by_the_rule_of_their_products(tmp_path, kind, dtype):
    """Inputs rounded to the matrix's type give llama.cpp's tensors to 1e-7; sums in float16 only its tolerance."""
    file = tmp_path / "m.gguf"
    with open_checkpoint(GOLDEN / "llama-dense") as checkpoint:
        write_gguf_model(checkpoint, file, kind, dense_type=kind.upper())
    rounding = llama_cpp._activations_of(file)

    class Rounded(Backend):
        def dense_matmul(self, x, w):
            return super().dense_matmul(x.astype(dtype).astype(np.float32), w)

    class SumsInFloat16(Rounded):
        def dense_matmul(self, x, w):
            return super().dense_matmul(x, w).astype(np.float16).astype(np.float32)

    for engine, exactly in ((Rounded, True), (SumsInFloat16, False)):
        crossing = judged(engine("float32", 1), rounding, False, file=file)
        assert crossing.agrees, crossing.verdict
        assert ("op by op within float32's tolerance" in crossing.verdict) == exactly

    def misread(run):
        run["blocks.1.attn.o_proj.hook_out"] = run["blocks.1.attn.o_proj.hook_out"] * np.float32(1.1)

    assert not judged(Rounded("float32", 1), rounding, False, misread, file).agrees


def test_flips_end_the_strict_part_and_the_rest_is_allowed_for():
    class LateNoise(Backend):
        """Half of a norm is 1.6% larger from the fifth token on, so that inputs round to their other neighbour."""

        def rms_norm(self, x, norm):
            y = super().rms_norm(x, norm)
            if norm.name == "blocks.0.ln2":
                y[4:, ::2] *= np.float32(1 + 2**-6)
            return y

    by_op, beginning, whole = judged(LateNoise("float32", 1), RULE).comparisons
    assert beginning.agrees
    assert "up to token 4, where" in beginning.mode
    assert whole.verdict.startswith(f"AGREES up to llama.cpp's {RULE}, free-running")
    assert by_op.first_divergence.name == "blocks.0.ln2.hook_normalized"


def test_other_blocks_than_the_rule_says_differ():
    crossing = judged(EightBits(32), RULE, by_rule=False)
    assert crossing.comparisons[0].first_divergence.name == "blocks.0.attn.q_proj.hook_out"


@pytest.mark.parametrize(("be", "rounding"), [(EightBits, WIDE), (Backend, RULE)])
def test_a_file_that_is_misread_differs_and_its_cause_is_named(be, rounding):
    config = model(FILE).config

    class Silu(be):
        def gated(self, gate, up, activation):
            return super().gated(gate, up, "silu" if activation == "relu2" else "relu2")

    crossing = judged(Silu(256) if be is EightBits else Silu("float32", 1), rounding, be is Backend)
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
