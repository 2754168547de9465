"""Generation parameters: every bad value is refused by name, and an unknown name gets the nearest right one."""

import pytest

from bitnet_ref.errors import GenerationError
from bitnet_ref.generation import SamplingParams

BAD = {
    "max_tokens": [0, -1, 1.5, "8", True],
    "temperature": [-0.1, float("nan"), float("inf"), "hot", None],
    "top_k": [-1, 2.0, None],
    "top_p": [0, -0.5, 1.01, float("nan")],
    "seed": [-1, 0.5, "x"],
    "stop": [[""], [1], 5, {"a": 1}],
    "stop_token_ids": [[-1], ["a"], 3],
    "ignore_eos": [1, None],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_bad_values_are_refused_by_name(name, value):
    with pytest.raises(GenerationError, match=name):
        SamplingParams.of(**{name: value})


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("temprature", "temperature"), ("topk", "top_k"), ("max_token", "max_tokens"), ("stops", "stop")],
)
def test_an_unknown_name_gets_the_nearest_right_one(wrong, right):
    with pytest.raises(GenerationError, match=f"did you mean '{right}'"):
        SamplingParams.of(**{wrong: 1})


def test_a_name_like_no_other_gets_the_list():
    with pytest.raises(GenerationError, match=r"there are: max_tokens, temperature"):
        SamplingParams.of(zzzzqq=1)


def test_max_new_tokens_means_max_tokens():
    assert SamplingParams.of(max_new_tokens=7).max_tokens == 7
    with pytest.raises(GenerationError, match="twice"):
        SamplingParams.of(max_new_tokens=7, max_tokens=8)


def test_one_stop_string_may_stand_alone():
    assert SamplingParams.of(stop="END").stop == ("END",)
    assert SamplingParams.of(stop=["a", "b"]).stop == ("a", "b")
