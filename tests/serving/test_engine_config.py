"""EngineConfig: checked values, and where they come from."""

from dataclasses import asdict, fields
from typing import get_type_hints

import pytest

from bitnet_ref.errors import ConfigError, GenerationError
from bitnet_ref.serving import EngineConfig
from bitnet_ref.serving.engine_config import EngineOptions

pytestmark = pytest.mark.quick_emulated

TOML = """
max_queue = 9
[engine]
max_batch = 8
fallback = ["cython", "numpy"]
[sampling]
temperature = 0.5
max_new_tokens = 7
"""


@pytest.fixture
def toml(tmp_path):
    path = tmp_path / "engine.toml"
    path.write_text(TOML)
    return path


def test_the_types_for_editors_name_every_setting():
    types, fields_of = get_type_hints(EngineOptions), get_type_hints(EngineConfig)
    assert list(types) == [field.name for field in fields(EngineConfig)]
    wider = {"fallback", "devices", "sampling"}  # one name, any sequence
    assert all(types[name] == fields_of[name] for name in types.keys() - wider)


def test_the_defaults():
    assert asdict(EngineConfig()) == {
        "max_batch": 64,
        "max_batch_tokens": 512,
        "max_wait_s": 0.0,
        "max_queue": 1024,
        "request_timeout_s": None,
        "priority_wait_s": 10.0,
        "max_unread": 32,
        "page_size": 16,
        "cache_tokens": None,
        "cache_bytes": None,
        "cache_dtype": None,
        "prefix_sharing": True,
        "memory_limit": None,
        "backend": "auto",
        "dtype": "float32",
        "fallback": (),
        "devices": None,
        "gpu_layers": None,
        "sampling": {},
        "generation_defaults": None,
        "timeline_steps": 2000,
        "replicas": 1,
    }
    assert hash(EngineConfig(sampling={"top_k": 3})) == hash(EngineConfig())  # a dict has none


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("max_batch", 1, 65536),
        ("max_batch_tokens", 2, 2**31 - 1),
        ("max_queue", 1, 2**31 - 1),
        ("max_unread", 1, 2**31 - 1),
        ("page_size", 1, 2**31 - 1),
        ("cache_tokens", 1, 2**40),
        ("timeline_steps", 0, 2**31 - 1),
        ("replicas", 1, 1024),
        ("max_wait_s", 0, 1e9),
        ("priority_wait_s", 0, 1e9),
    ],
)
def test_numbers_from_the_least_to_the_most(name, least, most):
    for value in (least, most):
        others = {"max_batch_tokens": 2**31 - 1, "max_batch": 1}
        assert getattr(EngineConfig(**{**others, name: value}), name) == value
    for value in (least - 1, most + 1):
        with pytest.raises(ConfigError, match=f"{name}: expected"):
            EngineConfig(**{name: value})


def test_a_file_then_the_environment_then_the_arguments(toml):
    env = {"BITNET_REF_ENGINE_MAX_BATCH": "16", "BITNET_REF_ENGINE_SAMPLING_TOP_K": "3", "OTHER": "1"}
    config = EngineConfig.load(toml, env=env, max_queue=11, sampling={"temperature": 0.25})
    assert (config.max_batch, config.max_queue, config.fallback) == (16, 11, ("cython", "numpy"))
    params = config.params({})
    assert (params.temperature, params.max_tokens, params.top_k) == (0.25, 7, 3)


def test_the_environment_is_read(monkeypatch):
    monkeypatch.setenv("BITNET_REF_ENGINE_BACKEND", "numpy")
    monkeypatch.setenv("BITNET_REF_ENGINE_PREFIX_SHARING", "false")
    monkeypatch.setenv("BITNET_REF_ENGINE_MAX_WAIT_S", "0.25")
    config = EngineConfig.load()
    assert (config.backend, config.prefix_sharing, config.max_wait_s) == ("numpy", False, 0.25)


def test_a_file_may_say_sizes_in_words_and_one_device(tmp_path):
    path = tmp_path / "engine.toml"
    path.write_text('memory_limit = "8GiB"\ndevices = 1\nfallback = "numpy"\n')
    config = EngineConfig.load(path, env={})
    assert (config.memory_limit, config.devices, config.fallback) == (8 << 30, (1,), ("numpy",))


def test_a_request_overrides_the_defaults_by_any_of_their_names():
    other = EngineConfig(sampling={"max_new_tokens": 5})
    assert other.sampling == {"max_tokens": 5}
    assert [other.params(given).max_tokens for given in ({}, {"max_tokens": 3})] == [5, 3]
    config = EngineConfig(sampling={"max_tokens": 5, "temperature": 1.0})
    assert config.params({"max_new_tokens": 3}).max_tokens == 3
    assert config.params({}).max_tokens == 5
    with pytest.raises(GenerationError, match="twice"):
        config.params({"max_new_tokens": 3, "max_tokens": 3})


@pytest.mark.parametrize(
    ("default", "given", "left"),
    [
        ({"guided_regex": "a+"}, {"guided_choice": ["b"]}, {"guided_regex": None}),
        ({"guided_regex": "a+"}, {"guided_choice": ()}, {"guided_regex": "a+"}),
        ({"speculate": "lookup"}, {"num_beams": 2}, {"speculate": None}),
        ({"speculate": "lookup"}, {}, {"speculate": "lookup"}),
        ({"overflow": "truncate"}, {"prompt_logprobs": 1}, {"overflow": "error"}),
        ({"overflow": "truncate"}, {"max_tokens": 2}, {"overflow": "truncate"}),
        ({"min_tokens": 4}, {"max_tokens": 2}, {"min_tokens": 2}),
        ({"min_tokens": 4}, {"max_tokens": 5}, {"min_tokens": 4}),
        ({"min_tokens": 4}, {"max_completion_tokens": 2}, {"min_tokens": 2}),
    ],
)
def test_a_default_gives_way_to_what_a_request_says(default, given, left):
    """Together they are refused, of one who has said both."""
    params = EngineConfig(sampling=default).params(given)
    assert {name: getattr(params, name) for name in left} == left


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_batch": 0}, "max_batch: expected a whole number from 1 to 65536, got 0"),
        ({"max_batch": True}, "max_batch"),
        ({"max_batch": 8, "max_batch_tokens": 8}, "max_batch_tokens: expected more than max_batch, 8"),
        ({"max_wait_s": -1}, "max_wait_s"),
        ({"max_wait_s": float("nan")}, "max_wait_s"),
        ({"request_timeout_s": 0}, "request_timeout_s"),
        ({"cache_tokens": 4, "cache_bytes": 4}, "cache_bytes"),
        ({"prefix_sharing": 1}, "prefix_sharing"),
        ({"backend": "cuda"}, "backend"),
        ({"fallback": ["gpu"]}, "fallback: expected a list of backends: auto, numpy, cython, cupy, got 'gpu'"),
        ({"devices": [0, 0]}, "devices: expected different numbers of cards"),
        ({"memory_limit": "9" * 400}, "memory_limit: expected bytes"),
        ({"memory_limit": 10**5000}, "memory_limit: expected bytes"),
        ({"memory_limit": "8Gob"}, "memory_limit: expected bytes, or a text like '8GiB', got '8Gob'"),
        ({"cache_dtype": "int4"}, "cache_dtype: expected one of float32, float16, int8"),
        ({"sampling": {"temprature": 1}}, "sampling: .*temperature"),
        ({"sampling": {"top_p": 3}}, "sampling: top_p"),
        ({"max_bach": 3}, "max_bach: there is no such setting; did you mean 'max_batch'"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig.of(**settings)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_batch = ", "is not valid TOML"),
        (f"max_batch = {'1' * 5000}", "is not valid TOML: Exceeds the limit"),
        (f"max_batch = {'[' * 5000}", "is not valid TOML: maximum recursion depth"),
        ("max_batch = 'many'", "max_batch: expected a whole number"),
        ("[engine]\nmax_que = 3", "max_que: there is no such setting; did you mean 'max_queue'"),
        ("engine = 3", "engine: expected a table"),
        ("sampling = 3", "sampling: expected a table"),
        ("page_size = 3\n[engine]\npage_size = 3", "page_size: is given twice"),
        ("[sampling]\ntop = 3", "sampling: unknown generation parameter"),
    ],
)
def test_a_wrong_file_is_named_with_the_key(tmp_path, text, message):
    path = tmp_path / "engine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"engine.toml.*{message}"):
        EngineConfig.load(path, env={})


def test_a_wrong_variable_is_named():
    for text in ("lots", "9" * 5000, "[" * 5000, "8\npage_size = 4"):
        with pytest.raises(ConfigError, match="environment, BITNET_REF_ENGINE_MAX_BATCH: expected a whole number"):
            EngineConfig.load(env={"BITNET_REF_ENGINE_MAX_BATCH": text})
    with pytest.raises(ConfigError, match="BITNET_REF_ENGINE_MAX_BACH: there is no such setting"):
        EngineConfig.load(env={"BITNET_REF_ENGINE_MAX_BACH": "3"})


def test_a_file_of_one_mebibyte_is_read(tmp_path):
    path = tmp_path / "engine.toml"
    path.write_text("#" * (1 << 20))
    EngineConfig.load(path, env={})
    path.write_text("#" * ((1 << 20) + 1))
    with pytest.raises(ConfigError, match="more than 1048576 bytes"):
        EngineConfig.load(path, env={})


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        EngineConfig.load(tmp_path / "none.toml", env={})
