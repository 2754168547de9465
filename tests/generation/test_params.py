"""Generation parameters: every bad value is refused by name, and an unknown name gets the nearest right one."""

import inspect
import re
from dataclasses import fields
from typing import get_type_hints

import pytest

import bitnet_ref
from bitnet_ref.errors import GenerationError
from bitnet_ref.generation import ChatSession, SamplingParams, generate, stream
from bitnet_ref.generation.params import ALIASES, SamplingOptions

BAD = {
    "max_tokens": [0, -1, 1.5, "8", True],
    "temperature": [-0.1, float("nan"), float("inf"), "hot", None],
    "top_k": [-1, 2.0, None],
    "top_p": [0, -0.5, 1.01, float("nan")],
    "seed": [-1, 0.5, "x"],
    "stop": [[""], [1], 5, {"a": 1}],
    "stop_token_ids": [[-1], ["a"], 3],
    "ignore_eos": [1, None],
    "min_tokens": [-1, 1.5, None],
    "min_p": [-0.1, 1.1, "x"],
    "typical_p": [0, 1.5, None],
    "repetition_penalty": [0, -1, float("inf")],
    "presence_penalty": [2.1, -3, None],
    "frequency_penalty": [2.1, True],
    "logit_bias": [[1], {"a": 1}, {-1: 1}, {3: 101}, {3: "x"}, {1.5: 1}, {3: float("nan")}],
    "n": [0, True, 2.0],
    "logprobs": [-1, True],
    "echo": [1, "yes"],
    "bad_words": [[""], [1], 5],
    "filter": [[""], [1], 5],
    "guided_json": [5, [1]],
    "guided_regex": ["", 5],
    "guided_choice": [[""], 5],
    "guided_grammar": ["", 5],
    "num_beams": [0, 1.5],
    "length_penalty": ["x", float("nan")],
    "early_stopping": ["always", None, 1],
    "strategy": ["greedy", 5],
    "processors": [5, ["x"], lambda ids, logits: logits],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in BAD.items() for value in values],
    ids=lambda value: "a function" if callable(value) else str(value),
)
def test_bad_values_are_refused_by_name(name, value):
    with pytest.raises(GenerationError, match=name):
        SamplingParams.of(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("max_tokens", 0, "a whole number from 1 to 2147483647, got 0"),
        ("top_k", 2.0, "a whole number from 0 to 2147483647, got 2.0"),
        ("temperature", -1, "0 or a number from 1e-100 to 1e+100, got -1"),
        ("n", 10**400, "a whole number from 1 to 1024, got a whole number of 1329 bits"),
        ("top_p", 1.5, "a number above 0, at most 1, got 1.5"),
        ("min_p", 2, "a number from 0 to 1, got 2"),
        ("repetition_penalty", 0, "a number from 1e-06 to 1e+06, got 0"),
        ("presence_penalty", 3, "a number from -2 to 2, got 3"),
        ("length_penalty", "x", "a number from -30 to 30, got 'x'"),
        ("stop", [""], "a list of non-empty strings, got ''"),
    ],
)
def test_the_error_gives_the_range(name, value, expected):
    with pytest.raises(GenerationError, match=f"^{name}: expected {re.escape(expected)}$"):
        SamplingParams.of(**{name: value})


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("temprature", "temperature"), ("topk", "top_k"), ("max_token", "max_tokens"), ("stops", "stop")],
)
def test_an_unknown_name_gets_the_nearest_right_one(wrong, right):
    with pytest.raises(GenerationError, match=f"did you mean '{right}'"):
        SamplingParams.of(**{wrong: 1})


def test_a_name_like_no_other_gets_the_list():
    with pytest.raises(GenerationError, match=r"there are: max_tokens, .*temperature"):
        SamplingParams.of(zzzzqq=1)


def test_max_new_tokens_means_max_tokens():
    assert SamplingParams.of(max_new_tokens=7).max_tokens == 7
    with pytest.raises(GenerationError, match="twice"):
        SamplingParams.of(max_new_tokens=7, max_tokens=8)


def test_one_stop_string_may_stand_alone():
    assert SamplingParams.of(stop="END").stop == ("END",)
    assert SamplingParams.of(stop=["a", "b"]).stop == ("a", "b")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens: 9 is more than max_tokens"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_json and guided_regex"),
        ({"num_beams": 2, "n": 3}, "at most num_beams, 2, got 3"),
        ({"num_beams": 2, "temperature": 1.0}, "takes no temperature"),
        ({"num_beams": 2, "stop": "x"}, "takes no stop"),
        ({"num_beams": 2, "filter": len}, "takes no filter"),
        ({"num_beams": 2, "strategy": len}, "takes no strategy"),
    ],
)
def test_what_does_not_go_together(params, message):
    with pytest.raises(GenerationError, match=message):
        SamplingParams.of(**params)


def test_other_names_for_the_same():
    assert SamplingParams.of(num_return_sequences=2, top_logprobs=3, max_completion_tokens=4) == SamplingParams(
        n=2, logprobs=3, max_tokens=4
    )
    with pytest.raises(GenerationError, match="'n' is given twice"):
        SamplingParams.of(num_return_sequences=2, n=2)


def test_the_bias_of_json_has_text_for_keys():
    assert SamplingParams.of(logit_bias={"262": -5, 7: 1.5}).logit_bias == {262: -5.0, 7: 1.5}


def test_every_parameter_is_explained():
    for field in fields(SamplingParams):
        assert re.search(rf"\b{field.name}\b", SamplingParams.__doc__), field.name


def test_the_types_for_editors_name_every_parameter():
    types = get_type_hints(SamplingOptions)
    assert set(types) == {field.name for field in fields(SamplingParams)} | set(ALIASES)
    for alias, name in ALIASES.items():
        assert types[name] in (types[alias], types[alias] | None)


@pytest.mark.parametrize(
    "function",
    [
        *(generate, stream, ChatSession, ChatSession.send, ChatSession.stream),
        *(getattr(bitnet_ref.Model, name) for name in ("generate", "stream", "chat")),
        *(
            getattr(bitnet_ref.Engine, name)
            for name in ("submit", "stream", "streams", "chat", "generate", "agenerate")
        ),
    ],
    ids=lambda function: function.__qualname__,
)
def test_signatures_and_help_show_every_parameter(function):
    signature = inspect.signature(function)
    assert not any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())
    for field in fields(SamplingParams):
        shown = signature.parameters[field.name]
        assert (shown.kind, shown.default) == (shown.KEYWORD_ONLY, getattr(SamplingParams(), field.name))
    assert signature.parameters["temperature"].annotation is float
    if inspect.isfunction(function):
        assert "temperature: 0 takes the most likely token" in inspect.getdoc(function)


def test_half_of_a_surrogate_pair_is_refused_wherever_it_is():
    for value in ("a\ud800", ["b", "\udfffc"], {"x": ["y\udc80"]}, {"\ud83d": 1}):
        for name in ("stop", "bad_words", "filter", "guided_json", "guided_regex", "guided_grammar", "guided_choice"):
            with pytest.raises(GenerationError) as caught:
                SamplingParams.of(**{name: value})
            assert caught.value.field == name
    loop = {}
    loop["self"] = loop
    assert SamplingParams(guided_json=loop).guided_json is loop  # what reads it says what is wrong
