"""Layers divided over several backends: the same numbers, within each card's memory, and nothing left behind."""

from __future__ import annotations

import gc
import inspect
import json
import re
import sys
import threading
import warnings
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from helpers import BITNET, GOLDEN, TINY, call, golden, model, rng, run_python, tiny_tensors, write_checkpoint

import bitnet_ref
from bitnet_ref.backends import Backend, choose_backend, cuda
from bitnet_ref.backends.cuda import cupy_device, footprint
from bitnet_ref.backends.cuda.backend import CupyBackend
from bitnet_ref.backends.cuda.emulation.device import EmulatedDevice
from bitnet_ref.backends.options import DeviceOptions
from bitnet_ref.backends.paged_cache import CacheSpec
from bitnet_ref.backends.placement import Costs, divide_layers
from bitnet_ref.backends.split import LayerRun, SplitBackend, SplitKVCache
from bitnet_ref.benchmark import synthetic_model
from bitnet_ref.cli import cli
from bitnet_ref.crossval.tolerances import LOGITS_FLOOR
from bitnet_ref.errors import BackendUnavailable, ConfigError, DeviceError, NumericsError, OutOfMemory, ShapeError
from bitnet_ref.formats.checkpoint import LoadOptions, element_bytes, read_weights
from bitnet_ref.formats.open import find_model, open_checkpoint
from bitnet_ref.reference.cache import TokenBatch
from bitnet_ref.reference.weights import Norm
from bitnet_ref.serving import EngineConfig

pytestmark = pytest.mark.card

NO_CARD = cuda.why_unavailable()
TWO_CARDS = NO_CARD is None and (cuda.emulation_wanted() or cuda.device_count() > 1)
card = pytest.mark.skipif(NO_CARD is not None, reason=str(NO_CARD))
two_cards = pytest.mark.skipif(not TWO_CARDS, reason="needs two cards, or their emulation")
CASE = GOLDEN / "bitnet-packed-offline"
LAYERS = 6


def backend(name, index=0):
    return CupyBackend(index=index) if name == "cupy" else choose_backend(name, threads=2)


def split(path, *names_and_stops):
    """A model whose layers these backends compute, up to these layers."""
    path, parts, first, cards = find_model(path), [], 0, 0
    for name, stop in names_and_stops:
        parts.append(LayerRun(backend(name, cards), first, stop))
        first, cards = stop, cards + (name == "cupy")
    be = SplitBackend(parts)
    with open_checkpoint(path, LoadOptions()) as checkpoint:
        weights = read_weights(checkpoint, None, be.prepare_for)
        return bitnet_ref.Model(checkpoint.config, be.prepare_model(weights, checkpoint.config), be, path)


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """A BitNet of six layers."""
    return write_checkpoint(tmp_path_factory.mktemp("deep"), {**BITNET, "num_hidden_layers": LAYERS})


def limit_for(path, layers, with_head=True, cards=1, **options):
    """The least memory of a card in which so many layers fit by the plan, and a little."""
    with open_checkpoint(path, LoadOptions()) as checkpoint:
        tokens = DeviceOptions(**options).tokens(checkpoint.config)
        costs = Costs.of(checkpoint.config, element_bytes(checkpoint), CupyBackend(), None, tokens)
    be = CupyBackend()
    used = be.ws.device.memory().used
    need = sum(costs.layers[:layers]) // cards + with_head * costs.head + costs.working + used
    return need * 50 // 49 + 64


# -- the same numbers --------------------------------------------------------------------------------------------------

CASES = ("bitnet-packed-offline", "llama-bf16-biases", "llama-packed-rmsnorm", "llama-packed-skips")
CASES += ("mistral-dense-window8", "onebitllm-silu", "rope-yarn")


PAIRS = ["numpy|numpy", "cython|numpy", "cython|cython"]
PAIRS += [pytest.param(names, marks=two_cards) for names in ("cython|cupy", "cupy|cython", "cupy|cupy")]


@pytest.mark.parametrize("names", PAIRS)
@pytest.mark.parametrize("case", CASES)
def test_logits_of_transformers(case, names):
    """By every path; a decoding step too, which a divided model does not replay."""
    first, second = names.split("|")
    m, tokens = split(GOLDEN / case, (first, 1), (second, 2)), golden(case)["tokens"]
    logits = m.logits(tokens)
    np.testing.assert_allclose(logits, golden(case)["logits"], rtol=0, atol=2e-4)  # as test_golden.py
    if first == second:
        np.testing.assert_array_equal(logits, model(GOLDEN / case, first).logits(tokens))
    for path in m.backend.paths:
        n, cache = len(tokens), m.new_cache(1, len(tokens))
        prompt = m.run(TokenBatch.of([(0, 0, tokens[: n - 2])]), cache, path=path).all()
        steps = [m.run(TokenBatch.of([(0, i, [tokens[i]])], [0]), cache, path=path).all() for i in (n - 2, n - 1)]
        np.testing.assert_array_equal(np.concatenate([prompt, *steps]), logits, err_msg=path)


@two_cards
def test_a_story_over_four_parts(in_double):
    m = split("storyteller", ("numpy", 1), ("cython", 3), ("cupy", 4), ("cupy", 6))
    whole, double = model("storyteller"), model("storyteller", dtype="float64")
    tokens = whole.tokenizer.encode("Once upon a time there was")
    exact = double.logits(tokens)
    allowed = 2 * np.abs(whole.logits(tokens) - exact).max() + LOGITS_FLOOR
    assert np.abs(m.logits(tokens) - exact).max() <= allowed
    found, expected = (each.generate(tokens, max_tokens=6) for each in (m, whole))
    assert found.token_ids == expected.token_ids
    assert m.backend.name == "numpy+cython+cupy"


@two_cards
def test_every_intermediate_has_its_name():
    m, whole = split(CASE, ("cupy", 1), ("cupy", 2)), model(CASE, "cupy")
    tokens = golden(CASE.name)["tokens"]
    (logits, seen), (_, expected) = m.run_with_cache(tokens), whole.run_with_cache(tokens)
    assert list(seen) == list(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(seen[name], array, err_msg=name)
    np.testing.assert_array_equal(logits, m.logits(tokens))


@two_cards
@pytest.mark.parametrize("names", ["numpy|cython", "cupy|cython"])
@pytest.mark.parametrize("cache_dtype", ["float32", "float16", "int8"])
def test_batches_beams_and_chosen_tokens(cache_dtype, names):
    """What copies, shares and takes over caches does it in all parts."""
    first, second = names.split("|")
    m, whole = split(CASE, (first, 1), (second, 2)), model(CASE, "numpy")
    subject = bitnet_ref.Model(m.config, m.weights, m.backend, CASE, cache_dtype=cache_dtype)
    other = bitnet_ref.Model(whole.config, whole.weights, whole.backend, CASE, cache_dtype=cache_dtype)
    prompts = [[1, 5, 9], [3, 3, 3, 8]]
    for params in ({}, {"n": 2, "temperature": 1.0, "seed": 4}, {"num_beams": 2}):
        found, expected = (each.generate(prompts, max_tokens=4, ignore_eos=True, **params) for each in (subject, other))
        assert [_ids(out) for out in found] == [_ids(out) for out in expected]


def _ids(out):
    return [each.token_ids for each in out] if isinstance(out, list) else out.token_ids


@two_cards
def test_an_engine_shares_prefixes():
    m, whole = split(CASE, ("cython", 1), ("cupy", 2)), model(CASE, "numpy")
    prompts = [[*range(1, 20), 30 + i] for i in range(4)]
    expected = [out.token_ids for out in whole.generate(prompts, max_tokens=6, ignore_eos=True)]
    with m.engine(page_size=4, cache_tokens=200) as engine:
        assert isinstance(engine.cache, SplitKVCache)
        first = engine.generate(prompts[0], max_tokens=6, ignore_eos=True)
        found = [first, *engine.generate(prompts[1:], max_tokens=6, ignore_eos=True)]
        assert [out.token_ids for out in found] == expected
        assert engine.metrics.snapshot()["prefix_cache_hits"] >= 3 * 16
        several = engine.generate(prompts[0], n=3, temperature=1.0, seed=2, max_tokens=6, ignore_eos=True)
    alone = whole.generate(prompts[0], n=3, temperature=1.0, seed=2, max_tokens=6, ignore_eos=True)
    assert [out.token_ids for out in several] == [out.token_ids for out in alone]


@two_cards
def test_a_longer_cache_takes_over():
    m = split(CASE, ("cython", 1), ("cupy", 2))
    tokens = rng(1).integers(1, 400, 9)
    small, large = m.new_cache(1, 8), m.new_cache(1, 300)
    m.run(TokenBatch.of([(0, 0, tokens[:6])]), small).all()
    large.take_over(small, 6)
    found = m.run(TokenBatch.of([(0, 6, tokens[6:])]), large).all()
    np.testing.assert_array_equal(found, m.logits(tokens)[6:])
    large.fill_with_zeros()
    assert not any(a.any() for layer in range(2) for a in large.visible(layer, 0, 8, None))


@pytest.fixture
def restless():
    """Threads that are changed a thousand times as often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


@two_cards
@pytest.mark.parametrize("first", ["cupy", "numpy"])
def test_threads_take_turns(first, restless):
    m = split(CASE, (first, 1), ("cython", 2))
    prompts = [rng(i).integers(1, 400, 4 + i) for i in range(4)]
    expected, found = [m.logits(prompt) for prompt in prompts], {}
    workers = [
        threading.Thread(target=lambda i=i: found.update({i: [m.logits(prompts[i]) for _ in range(3)]}))
        for i in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for i, logits in enumerate(expected):
        for again in found[i]:
            np.testing.assert_array_equal(again, logits)


@two_cards
def test_nan_on_the_first_card_is_told_before_the_second_begins(tmp_path):
    tensors = tiny_tensors(BITNET)
    tensors["model.layers.0.mlp.ffn_sub_norm.weight"][:] = 3e38  # times anything above 1.13: no float32
    m = split(write_checkpoint(tmp_path, BITNET, tensors), ("cupy", 1), ("cupy", 2))
    with pytest.raises(NumericsError) as caught:
        m.logits([1, 2, 3])
    assert caught.value.tensor.startswith("blocks.0.mlp")


@two_cards
def test_a_profile_sees_all_parts():
    m = split(CASE, ("cupy", 1), ("cython", 2))
    profile = m.profile([1, 2, 3], max_tokens=2, ignore_eos=True)
    assert profile.outcome.token_ids == m.generate([1, 2, 3], max_tokens=2, ignore_eos=True).token_ids
    report = str(profile)
    assert all(f"linears {names}" in report for names in ("q_proj k_proj v_proj", "down_proj"))
    assert len(re.findall("attention_block +2 ", report)) == 2  # both layers, in the prompt and in the step


@pytest.mark.skipif(not cuda.emulation_wanted(), reason="what a card does here is not one error")
def test_an_array_of_another_device_is_refused():
    """So the emulation finds what computes on one card with what lies on another."""
    one, two = CupyBackend(), CupyBackend()
    x, norm = rng(1).standard_normal((2, 64)).astype(np.float32), Norm(np.ones(64, dtype=np.float32), 1e-5)
    mine, other = one.ws.upload(x), two.ws.upload(x)
    np.testing.assert_array_equal(one.to_host(one.rms_norm(mine, norm)), call(one, "rms_norm", x, norm))
    with pytest.raises(DeviceError, match="rows_2: an array of emulated device"):
        one.to_host(one.rms_norm(other, norm))
    with pytest.raises(DeviceError, match="device copy"):
        one.ws.device.copy(mine, other[::-1][::-1])


def test_parts_follow_on_each_other():
    with pytest.raises(ShapeError, match="one after the other"):
        SplitBackend([LayerRun(Backend(), 0, 2), LayerRun(Backend(), 3, 4)])
    with pytest.raises(ShapeError, match="0 to 2"):
        SplitBackend([LayerRun(Backend(), 0, 2)])


def test_a_split_has_every_operation_of_a_backend():
    """Those that it inherits do not compute anything themselves; its parts compute the ops of the layers."""
    life_cycle = {
        name for name, value in vars(Backend).items() if not name.startswith("_") and inspect.isfunction(value)
    }
    own = {name for name in vars(SplitBackend) if not name.startswith("_")}
    assert life_cycle - own == {
        "check_prepared",
        "choose_cache_dtype",
        "embed_on_host",
        "greedy_steps",
        "other_layouts",
        "pack_plane",
        "place",
        "prepare",
        "prepare_in_steps",  # `prepare_model` in one step
        "prepared_layout",
        "prompt_tokens",
    }


# -- who has which layers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_no_other_division_fills_the_fullest_card_less(seed):
    generator = rng(seed)
    costs = [int(cost) for cost in generator.integers(1, 50, 7)]
    rooms = [int(room) for room in generator.integers(60, 300, 3)]
    fits = {}
    for a in range(8):
        for b in range(a, 8):
            shares = [sum(costs[:a]), sum(costs[a:b]), sum(costs[b:])]
            fits[a, b - a, 7 - b] = max(share / room for share, room in zip(shares, rooms, strict=True))
    best, found = min(fits.values()), divide_layers(costs, rooms)
    assert (found is None) == (best > 1)
    if found is not None:
        assert fits[tuple(found)] <= best + 2 / min(rooms)  # whole bytes


@card
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", [*CASES, "storyteller"])
def test_the_plan_knows_what_a_card_will_hold(case, dtype):
    path = GOLDEN / case if case != "storyteller" else find_model(case)
    be = CupyBackend(dtype)
    before = be.ws.device.memory().used
    with open_checkpoint(path, LoadOptions()) as checkpoint:
        config = checkpoint.config
        costs = Costs.of(checkpoint.config, element_bytes(checkpoint), be, None, 256)
        w = be.prepare_model(read_weights(checkpoint, None, be.prepare_for), checkpoint.config)
    gc.collect()
    cache = be.new_cache(config, CacheSpec(1, 256))
    used = be.ws.device.memory().used - before
    planned = sum(costs.layers) + costs.head + costs.embedding
    vectors = 512 * 4 * sum(1 for _ in w.linears()) + 8192  # rounding up to 512 bytes, on a model of a few KB
    assert planned - vectors <= used <= planned + vectors
    assert cache.nbytes == config.num_hidden_layers * footprint.cache_bytes(config, dtype, 256)


@card
def test_what_does_not_fit_is_computed_by_the_cpu(deep):
    expected = model(deep).logits([1, 2, 3, 4])
    for layers in (4, 1):
        limit = limit_for(deep, layers)
        said = (
            rf"^{layers} of 6 layers fit in .* of card 0 beside the head, a cache of 64 tokens and .*; {6 - layers} are"
        )
        with pytest.warns(UserWarning, match=said + " computed by cython on the CPU$"):
            m = bitnet_ref.load(deep, backend="cupy", memory_limit=limit)
        names = [(part.backend.name, part.first, part.stop) for part in m.backend.parts]
        assert names == [("cython", 0, 6 - layers), ("cupy", 6 - layers, 6)]
        np.testing.assert_allclose(m.logits([1, 2, 3, 4]), expected, rtol=0, atol=LOGITS_FLOOR)
        m.logits(rng(2).integers(1, 39, 64))  # the whole context
        memory = m.backend.parts[1].backend.ws.device.memory()
        assert memory.limit == limit
        assert memory.peak <= limit
    assert bitnet_ref.load(deep, backend="cupy", memory_limit=limit_for(deep, 6)).backend.name == "cupy"


@card
def test_a_smaller_cache_leaves_room_for_more_layers(deep):
    limit = limit_for(deep, 3, cache_tokens=2000)
    for options, layers in (({"cache_tokens": 2000}, 3), ({"cache_tokens": 2000, "cache_dtype": "int8"}, 5), ({}, 6)):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            m = bitnet_ref.load(deep, backend="cupy", memory_limit=limit, **options)
        assert [str(each.message)[:6] for each in said] == ([f"{layers} of 6"] if layers < 6 else [])
        assert m.backend.name == ("cupy" if layers == 6 else "cython+cupy")


@card
def test_a_head_that_no_card_holds_stays_on_the_cpu_with_the_last_layers(tmp_path):
    config = {**TINY, "num_hidden_layers": 4, "vocab_size": 9000, "max_position_embeddings": 8}
    path = write_checkpoint(tmp_path, config)
    with pytest.warns(
        UserWarning, match=r"^3 of 4 layers fit in .* beside a cache of 8 tokens and .* 1 and the head are comp"
    ):
        m = bitnet_ref.load(path, backend="cupy", memory_limit=limit_for(path, 3, with_head=False))
    assert [part.backend.name for part in m.backend.parts] == ["cupy", "cython"]
    np.testing.assert_allclose(m.logits([1, 2, 3]), model(path).logits([1, 2, 3]), rtol=0, atol=LOGITS_FLOOR)
    assert m.generate([1, 2], max_tokens=4).token_ids == model(path).generate([1, 2], max_tokens=4).token_ids


@card
def test_so_many_layers_as_are_asked_for(deep):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # who asks is not warned
        m = bitnet_ref.load(deep, backend="cupy", gpu_layers=2)
        assert [len(part) for part in m.backend.parts] == [4, 2]
        assert bitnet_ref.load(deep, backend="cupy", gpu_layers=0).backend.name in ("cython", "numpy")
        for every in (6, 99, "all"):
            assert bitnet_ref.load(deep, backend="cupy", gpu_layers=every).backend.name == "cupy"
    assert "layers 0 to 3 by cython, layers 4 to 5 by cupy on card 0 and the head" in repr(m)
    small = limit_for(deep, 3)
    for asked in (4, 6, "all"):
        with pytest.raises(OutOfMemory, match=rf"gpu_layers={asked!r}: .*not room for them in .* of card 0; give more"):
            bitnet_ref.load(deep, backend="cupy", gpu_layers=asked, memory_limit=small)


@card
def test_no_room_for_any_layer(deep):
    with pytest.warns(UserWarning, match=r"^0 of 6 layers fit in .*; 6 and the head are computed by"):
        m = bitnet_ref.load(deep, backend="cupy", memory_limit="40 kB")
    assert m.backend.name in ("cython", "numpy")


@two_cards
def test_cards_share_the_layers_by_their_bytes(deep):
    m = bitnet_ref.load(deep, backend="cupy", devices=[0, 1])
    assert [part.backend.index for part in m.backend.parts] == [0, 1]
    assert sum(len(part) for part in m.backend.parts) == 6
    np.testing.assert_array_equal(m.logits([1, 2, 3]), model(deep, "cupy").logits([1, 2, 3]))
    limit = limit_for(deep, 6, cards=2) + 1
    two = bitnet_ref.load(deep, backend="cupy", devices=(0, 1), memory_limit=limit)
    assert [part.backend.name for part in two.backend.parts] == ["cupy", "cupy"]
    with pytest.warns(UserWarning, match="of card 0 and .* of card 1"):
        less = bitnet_ref.load(deep, backend="cupy", devices=(0, 1), memory_limit=limit_for(deep, 2))
    assert [part.backend.name for part in less.backend.parts] == ["cython", "cupy", "cupy"]
    np.testing.assert_allclose(less.logits([1, 2, 3]), m.logits([1, 2, 3]), rtol=0, atol=LOGITS_FLOOR)


@card
def test_what_cannot_be_meant(deep):
    for wrong in ({"devices": [0, 0]}, {"devices": []}, {"devices": [-1]}, {"gpu_layers": "most"}, {"gpu_layers": -1}):
        with pytest.raises(BackendUnavailable, match=next(iter(wrong))):
            bitnet_ref.load(deep, backend="cupy", **wrong)
    with pytest.raises(BackendUnavailable, match="cache_tokens"):
        bitnet_ref.load(deep, backend="cupy", cache_tokens=0)
    with pytest.raises(BackendUnavailable, match="not for 'numpy'"):
        bitnet_ref.load(deep, backend="numpy", gpu_layers=2)


def test_auto_says_when_there_is_no_card_to_take(deep, monkeypatch):
    monkeypatch.setattr(cuda, "emulation_wanted", lambda: False)
    monkeypatch.setattr(cuda, "why_unavailable", lambda index=0: "there is none")
    with pytest.warns(UserWarning, match="no card to take"):
        m = bitnet_ref.load(deep, gpu_layers=3)
    assert m.backend.name in ("cython", "numpy")
    with pytest.raises(BackendUnavailable, match="there is none"):
        bitnet_ref.load(deep, backend="cupy", gpu_layers=3)


@two_cards
def test_an_engines_config_says_it_too(deep, tmp_path, monkeypatch):
    file = tmp_path / "engine.toml"
    file.write_text('backend = "cupy"\ndevices = [0, 1]\ngpu_layers = 5\ncache_tokens = 64\npage_size = 8\n')
    with bitnet_ref.load_engine(deep, EngineConfig.load(file, env={})) as engine:
        assert len(engine.model.backend.parts[0]) == 1
        assert engine.cache.pages == 8
    monkeypatch.setenv("BITNET_REF_ENGINE_GPU_LAYERS", "2")
    monkeypatch.setenv("BITNET_REF_ENGINE_BACKEND", "cupy")
    with bitnet_ref.load_engine(deep) as engine:
        assert [len(part) for part in engine.model.backend.parts] == [4, 2]
    with pytest.raises(ConfigError, match="gpu_layers: expected a number of layers, or 'all', got -1"):
        EngineConfig(gpu_layers=-1)
    with pytest.raises(ConfigError, match="devices: expected different numbers"):
        EngineConfig(devices=(1, 1))


@card
def test_an_engine_keeps_to_the_limit(deep):
    """The cache grows on all parts; what is free is what the fullest card has for its own layers."""
    limit = limit_for(deep, 3)
    config = EngineConfig(backend="cupy", memory_limit=limit, page_size=8, cache_tokens=64)
    with pytest.warns(UserWarning, match="of 6 layers fit"):
        engine = bitnet_ref.load_engine(deep, config)
    with engine:
        device = engine.model.backend.parts[1].backend.ws.device
        outs = engine.generate([[1, 2, 3 + i] for i in range(6)], max_tokens=12, ignore_eos=True)
        assert device.memory().peak <= limit
    expected = model(deep).generate([[1, 2, 3 + i] for i in range(6)], max_tokens=12, ignore_eos=True)
    assert [out.token_ids for out in outs] == [out.token_ids for out in expected]


@two_cards
def test_the_command_line_says_it_too():
    more = ["--backend", "cupy", "--devices", "0,1", "--gpu-layers", "2", "--memory-limit", "8GiB", "--json"]
    more += ["--temperature", "0"]
    result = CliRunner().invoke(cli, ["generate", "Once", "--max-tokens", "1", *more])
    assert result.exit_code == 0
    assert '"cython+cupy"' in result.stdout
    assert json.loads(result.stdout)["text"] == model("storyteller").generate("Once", max_tokens=1).text
    for wrong in (["--devices", "0,x"], ["--gpu-layers", "some"]):
        assert CliRunner().invoke(cli, ["generate", "Once", *wrong]).exit_code == 2


def cupy_of_two_cards(monkeypatch):
    """What CupyDevice asks of CuPy about memory. As CuPy's, a pool counts for the device that is current."""
    current, used = [0], {0: 100, 1: 2000}

    class Device:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            current.append(self.index)

        def __exit__(self, *_):
            current.pop()

    class MemoryPool:
        used_bytes = total_bytes = staticmethod(lambda: used[current[-1]])
        set_limit = staticmethod(lambda size: None)
        free_all_blocks = staticmethod(lambda: None)

    error = type("Error", (Exception,), {})
    facts = {"name": b"card", "major": 9, "minor": 0, "multiProcessorCount": 132, "l2CacheSize": 1 << 20}
    facts["sharedMemPerBlockOptin"] = 227 << 10
    runtime = SimpleNamespace(
        getDeviceCount=lambda: 2,
        driverGetVersion=lambda: 13000,
        getDeviceProperties=lambda index: facts,
        memGetInfo=lambda: (10_000 - used[current[-1]], 10_000),
        CUDARuntimeError=error,
    )
    parts = {"memory": SimpleNamespace(OutOfMemoryError=error), "compiler": SimpleNamespace(CompileException=error)}
    parts |= {"nvrtc": SimpleNamespace(getVersion=lambda: (13, 0))}
    parts |= {"driver": SimpleNamespace(CUDADriverError=error), "Stream": lambda non_blocking: None}
    cupy = ModuleType("cupy")
    cupy.cuda = SimpleNamespace(runtime=runtime, Device=Device, MemoryPool=MemoryPool, **parts)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(cupy_device, "find_spec", lambda name: object())


def test_each_card_counts_its_own_memory(monkeypatch):
    cupy_of_two_cards(monkeypatch)
    monkeypatch.setattr(cupy_device, "_retired", [])
    cupy_device.why_unavailable.cache_clear()
    try:
        found = [cupy_device.CupyDevice(index, memory_limit=5000).memory() for index in (0, 1)]
    finally:
        cupy_device.why_unavailable.cache_clear()
    assert [(info.used, info.held, info.peak, info.free) for info in found] == [
        (100, 100, 100, 9900),
        (2000, 2000, 2000, 8000),
    ]


@card
def test_what_is_free_is_what_the_fullest_part_has(deep):
    m = bitnet_ref.load(deep, backend="cupy", memory_limit="1 MiB", gpu_layers=2)
    info = m.backend.parts[1].backend.ws.device.memory()
    assert m.backend.memory() == (None, (info.limit - info.used) * 6 // 2)
    with m.engine(memory_limit=1 << 20, page_size=8) as engine:  # a quarter of that
        quarter = (info.limit - info.used) * 6 // 2 // 4
        assert 0.98 * quarter < engine.cache.nbytes <= quarter


# -- nothing stays -----------------------------------------------------------------------------------------------------


@two_cards
def test_everything_is_given_back(deep):
    m = bitnet_ref.load(deep, backend="cupy", devices=[0, 1], gpu_layers=4)
    devices = [part.backend.ws.device for part in m.backend.parts if part.backend.name == "cupy"]
    m.logits([1, 2, 3])
    m.generate([1, 2, 3], max_tokens=3, ignore_eos=True)
    m.close()
    used = [device.memory().used for device in devices]
    del m
    gc.collect()
    for device, before in zip(devices, used, strict=True):
        assert device.memory().used < before / 4


LOOP = """
import gc, json, sys
import bitnet_ref
from bitnet_ref.system.memory import memory_bytes
path, loads = sys.argv[1], int(sys.argv[2])
found = []
for i in range(loads):
    options = [{}, {"devices": [0, 1]}, {"gpu_layers": 1}][i % 3]
    m = bitnet_ref.load(path, backend="cupy", **options)
    m.generate([1, 2], max_tokens=2, ignore_eos=True)
    devices = [part.backend.ws.device for part in m.backend.parts[1:]] if i % 3 else [m.backend.ws.device]
    m.close()
    del m
    if i % 10 == 9:
        gc.collect()
        found.append(memory_bytes())
        left = max(device.memory().used for device in devices)
print(json.dumps({"memory": found, "left": left}))
"""


@two_cards
@pytest.mark.parametrize("loads", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_loads_and_generations_leak_nothing(tmp_path, loads):
    found = run_python(LOOP, write_checkpoint(tmp_path, BITNET), str(loads))
    memory = found["memory"]
    settled = memory[len(memory) // 4]
    assert memory[-1] - settled < 4 << 20, json.dumps([round(m / 2**20, 1) for m in memory])
    assert found["left"] < 100_000  # counters and notes of a device that somebody still refers to


@card
def test_loads_are_shared_when_they_mean_the_same(deep):
    first = bitnet_ref.load(deep, backend="cupy", gpu_layers=2, share=True)
    assert bitnet_ref.load(deep, backend="cupy", gpu_layers=2, share=True) is first
    assert bitnet_ref.load(deep, backend="cupy", gpu_layers=3, share=True) is not first


@pytest.mark.skipif(not cuda.emulation_wanted(), reason="counts bytes of the emulated device")
def test_a_failed_load_holds_nothing(deep, monkeypatch):
    devices = []
    opened = EmulatedDevice.__init__
    monkeypatch.setattr(
        EmulatedDevice, "__init__", lambda self, *a, **k: (opened(self, *a, **k), devices.append(self))[0]
    )
    with pytest.raises(OutOfMemory):
        bitnet_ref.load(deep, backend="cupy", devices=[0, 1], gpu_layers="all", memory_limit=limit_for(deep, 1))
    gc.collect()
    assert all(device.memory().used < 100_000 for device in devices)


def test_a_synthetic_model_over_two_parts():
    """Random weights go to whoever computes their layer; they are the same weights."""
    config = bitnet_ref.load(GOLDEN / "bitnet-packed-offline", backend="numpy").config
    be = SplitBackend([LayerRun(choose_backend("numpy"), 0, 1), LayerRun(CupyBackend(), 1, config.num_hidden_layers)])
    batch = TokenBatch.of([(0, 0, [3, 1, 2])])
    logits = [
        m.run(batch, m.new_cache(1, 4)).all()
        for m in (synthetic_model(config, be, seed=5), synthetic_model(config, Backend(), seed=5))
    ]
    np.testing.assert_allclose(logits[0], logits[1], rtol=0, atol=LOGITS_FLOOR)
