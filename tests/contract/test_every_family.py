"""Every family, the engine and batches: a sequence has the same logits and tokens alone, in pieces and among others."""

import numpy as np
import pytest
from helpers import BITNET, DATA, GOLDEN, TINY, model, rng, tiny_tensors, write_checkpoint

from bitnet_ref.errors import BackendUnavailable
from bitnet_ref.reference.cache import TokenBatch

pytestmark = pytest.mark.long_emulated

SMOLLM = {**TINY, "hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": True}
MINICPM = {**TINY, "model_type": "minicpm", "tie_word_embeddings": False, "scale_emb": 12, "scale_depth": 1.4}
MADE = {
    "minicpm": {**MINICPM, "dim_model_base": 4},
    "smollm, all ternary": SMOLLM,
    "trilm": {**SMOLLM, "tie_word_embeddings": False},
    "weight-only": {**BITNET, "use_sub_norms": False},
}
STORED = {folder.name: folder for folder in (DATA / "families").iterdir()} | {
    "llama": GOLDEN / "llama-dense",
    "mistral": GOLDEN / "mistral-dense-window8",
    "hadamard": DATA / "families" / "qwen3-groups128" / "pq2_0-hadamard.gguf",
}


def ternary_tensors(name, config):
    """The family's tensors. SmolLM: every matrix by groups of 32; TriLM: one scale for each half of the rows."""
    tensors = tiny_tensors(config)
    if name == "weight-only":
        return {key: array for key, array in tensors.items() if "sub_norm" not in key}
    for key, array in tensors.items() if config["hidden_size"] == 64 else ():
        if array.ndim == 2 and (name != "trilm" or "proj" in key):
            groups = np.abs(array.astype(np.float32)).reshape(len(array), -1, 32 if name != "trilm" else array.shape[1])
            scale = groups.mean(axis=2, keepdims=True)
            if name == "trilm":
                scale[: len(array) // 2], scale[len(array) // 2 :] = scale[0], scale[-1]
            w_t = np.sign(array.astype(np.float32)) * (np.abs(array) > np.abs(array).mean(dtype=np.float32) / 2)
            tensors[key] = (w_t.reshape(groups.shape) * scale).reshape(array.shape).astype(array.dtype)
    return tensors


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    parent = tmp_path_factory.mktemp("families")
    made = {name: write_checkpoint(parent / name, c, ternary_tensors(name, c)) for name, c in MADE.items()}
    return STORED | made


@pytest.fixture(params=sorted({*MADE, *STORED}))
def m(request, folders, backend_name):
    try:
        return model(folders[request.param], backend_name)
    except BackendUnavailable as problem:
        pytest.skip(str(problem))


def prompts_of(m):
    return [rng(n).integers(0, m.config.vocab_size, n).tolist() for n in (9, 1, 6)]


@pytest.mark.sample(9)
def test_alone_among_others_and_in_pieces(m):
    prompts = prompts_of(m)
    alone = [m.logits(prompt) for prompt in prompts]
    together = m.logits(prompts)
    for mine, expected in zip(together, alone, strict=True):
        np.testing.assert_array_equal(mine, expected)
    cache = m.new_cache(2, 16)
    m.run(TokenBatch.of([(0, 0, prompts[0][:4])]), cache).all()
    joined = m.run(TokenBatch.of([(0, 4, prompts[0][4:5]), (1, 0, prompts[2])]), cache).all()
    np.testing.assert_array_equal(joined, np.concatenate([alone[0][4:5], alone[2]]))
    rest = m.run(TokenBatch.of([(0, 5, prompts[0][5:])]), cache).all()
    np.testing.assert_array_equal(rest, alone[0][5:])


@pytest.mark.sample(9)
def test_the_engine(m):
    """More requests than rows, prompts in pieces, and the same prompts again: shared, but not a DeltaNet's."""
    prompts, greedy = prompts_of(m), {"max_tokens": 3, "temperature": 0.0, "ignore_eos": True}
    expected = [m.generate(prompt, **greedy).token_ids for prompt in prompts]
    with m.engine(max_batch=2, max_batch_tokens=6, page_size=2) as engine:
        for _ in range(2):
            assert [out.token_ids for out in engine.generate(prompts, **greedy)] == expected
        assert (engine.metrics.snapshot()["prefix_cache_hits"] > 0) == (not m.config.has_states)


@pytest.mark.sample(9)
def test_the_logits_are_the_references(m, folders, request):
    reference = model(folders[request.node.callspec.params["m"]])
    for prompt in prompts_of(m):
        expected = reference.logits(prompt)
        np.testing.assert_allclose(m.logits(prompt), expected, rtol=0, atol=2e-5 * np.abs(expected).max())
