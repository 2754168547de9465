"""The shelf of a server's models, without the server: what is loaded, counted and dropped when."""

import asyncio
import shutil
from types import SimpleNamespace

import pytest
from cli_runs import BACKEND
from helpers import GOLDEN, model

import bitnet_ref
from bitnet_ref.errors import BitNetRefError, EngineClosed, OutOfMemory
from bitnet_ref.formats.open import ASSETS
from bitnet_ref.serving import start_engines
from bitnet_ref.system.sharing import model_files

pytest.importorskip("starlette", reason="starlette is not installed")
from bitnet_ref.serving.http import shelf as shelf_module
from bitnet_ref.serving.http.schemas import RequestError
from bitnet_ref.serving.http.shelf import ModelShelf

TINY, UNTIED = GOLDEN / "bitnet-packed-offline", GOLDEN / "llama-packed-bitlinear"
FILE_BYTES = sum(file.stat().st_size for file in model_files(TINY))


@pytest.fixture
def opened():
    engines = []

    def open_engine(path, room):
        engines.append(start_engines(model(path, BACKEND, threads=1), cache_tokens=64, max_batch=2))
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.close()


def loaded(shelf):
    return [name for name, place in shelf.places.items() if place.engine is not None]


async def use(shelf, name):
    async with shelf.borrow(shelf.place(name)) as engine:
        return engine


def copies(parent, names):
    return {name: shutil.copytree(TINY, parent / name) for name in names}


def test_the_first_models_within_the_budget(opened, tmp_path):
    """They count with what they hold once they are loaded, which is more than their files."""
    one = ModelShelf({"a": TINY}, opened)
    asyncio.run(one.load_first())
    held, sources = one.places["a"].nbytes, copies(tmp_path, "abc")
    assert held > FILE_BYTES
    for budget, names in ((2 * held, ["a", "b"]), (2 * held - 1, ["a"]), (held, ["a"]), (None, ["a", "b", "c"])):
        shelf = ModelShelf(sources, opened, budget)
        assert not shelf.is_ready
        asyncio.run(shelf.load_first())
        assert (loaded(shelf), shelf.is_ready) == (names, True)


def test_a_model_that_exceeds_the_budget_alone(opened):
    """By its files, or only by what it holds then: at the start it is an error either way, and no engine stays."""
    one = ModelShelf({"a": TINY}, opened)
    asyncio.run(one.load_first())
    held = one.places["a"].nbytes
    for budget, needed in ((held - 1, held), (FILE_BYTES - 1, FILE_BYTES)):
        shelf = ModelShelf({"a": TINY}, opened, budget)
        with pytest.raises(OutOfMemory, match=f"model a needs {needed:,} bytes; the budget is {budget:,}"):
            asyncio.run(shelf.load_first())
        assert loaded(shelf) == []


def test_the_default_cache_leaves_room_in_the_budget():
    """So two models that were loaded once can always be loaded again, in turn."""

    async def run():
        story = model("storyteller", BACKEND, threads=1)
        budget = 2 * story.weights.nbytes

        def open_engine(path, room):
            return start_engines(story, room=room)

        shelf = ModelShelf({"a": TINY, "b": UNTIED}, open_engine, budget)
        for name in "abab":
            engine = await use(shelf, name)
            assert loaded(shelf) == [name]
            assert engine.cache.nbytes <= budget // 4 < shelf.places[name].nbytes <= budget
        await shelf.close(False)

    asyncio.run(run())


@pytest.mark.parametrize(("path", "is_tied"), [(TINY, True), (UNTIED, False)])
def test_what_a_model_holds(opened, path, is_tied):
    shelf = ModelShelf({"m": path}, opened)
    engine = asyncio.run(use(shelf, "m"))
    weights = engine.model.weights
    assert weights.tied == is_tied
    tables = weights.embedding.nbytes + (0 if is_tied else weights.lm_head.nbytes)
    linears = sum(weight.nbytes for layer in weights.layers for _, weight in layer.linears())
    norms = sum(norm.weight.nbytes for layer in weights.layers for _, norm in layer.norms())
    norms += weights.final_norm.weight.nbytes
    assert shelf.places["m"].nbytes == tables + linears + norms + engine.cache.nbytes
    assert engine.metrics.labels["model_name"] == "m"


@pytest.mark.thorough
def test_room_is_made_by_the_one_that_was_idle_longest(tmp_path, opened):
    async def run():
        shelf = ModelShelf(copies(tmp_path, "abc"), opened)
        for name in "ab":
            await use(shelf, name)
        held = shelf.places["a"].nbytes
        await use(shelf, "a")
        shelf._budget = 3 * held
        await use(shelf, "c")  # there is just enough
        assert loaded(shelf) == ["a", "b", "c"]
        await shelf._drop(shelf.places["c"])
        shelf._budget = 3 * held - 1  # of "c" it is known now
        await use(shelf, "c")
        assert loaded(shelf) == ["a", "c"]
        shelf._budget = held
        async with shelf.borrow(shelf.place("a")), shelf.borrow(shelf.place("c")):
            with pytest.raises(RequestError, match=f"needs {held:,} bytes.* {held:,} is held by: a, c; try") as error:
                await use(shelf, "b")
            assert (error.value.status, error.value.code) == (503, "model_unavailable")
        shelf._budget = held - 1
        with pytest.raises(OutOfMemory, match=f"needs {held:,} bytes; the budget is {held - 1:,}"):
            await use(shelf, "b")
        assert {place.users for place in shelf.places.values()} == {0}

    asyncio.run(run())


def test_an_engine_that_has_stopped_takes_no_room(opened):
    """It stopped by a fault of its own; the next request loads the model again, also where there is room for one."""

    async def use():
        shelf = ModelShelf({"a": TINY}, opened)
        await shelf.load_first()
        place = shelf.places["a"]
        shelf._budget, stopped = place.nbytes, place.engine
        stopped.close()
        async with shelf.borrow(place) as engine:
            assert engine is not stopped

    asyncio.run(use())


def test_a_closed_shelf_lends_no_engine(opened):
    """A request that comes late loads no model for a server that is ending."""

    async def run():
        shelf = ModelShelf({"a": TINY}, opened)
        engine = await use(shelf, "a")
        await shelf.close(drain=False)
        assert engine.closed
        with pytest.raises(EngineClosed, match="the server is ending"):
            await use(shelf, "a")
        assert shelf.places["a"].users == 0

    asyncio.run(run())


def test_idle_models_are_looked_for_in_time(opened, monkeypatch):
    """After a quarter of the time that they may be idle, and at least once a minute."""
    slept, clock = [], SimpleNamespace(now=1000.0)

    async def sleep(seconds):
        slept.append(seconds)
        if len(slept) > 2:
            raise asyncio.CancelledError

    async def run(idle_s):
        shelf = ModelShelf({"a": TINY}, opened, idle_s=idle_s)
        await use(shelf, "a")
        clock.now += idle_s
        monkeypatch.setattr(shelf_module.asyncio, "sleep", sleep)
        with pytest.raises(asyncio.CancelledError):
            await shelf.drop_idle()
        return loaded(shelf)

    monkeypatch.setattr(shelf_module.time, "monotonic", lambda: clock.now)
    assert asyncio.run(run(8.0)) == ["a"]  # idle for just so long
    assert slept == [2.0] * 3
    slept.clear()
    monkeypatch.undo()
    monkeypatch.setattr(shelf_module.time, "monotonic", lambda: clock.now)
    clock.now += 1
    assert asyncio.run(run(1000.0)) == ["a"]
    assert slept == [60.0] * 3


def test_which_model_is_meant(opened):
    one, two = ModelShelf({"a": TINY}, opened), ModelShelf({"a": TINY, "b": ASSETS / "storyteller"}, opened)
    assert one.place(None) is one.places["a"]
    assert two.place("b") is two.places["b"]
    with pytest.raises(RequestError, match="model: is missing; there are: a, b") as error:
        two.place(None)
    assert (error.value.status, error.value.field) == (400, "model")
    with pytest.raises(RequestError, match="no model 'c'; there are: a, b") as error:
        two.place("c")
    assert (error.value.status, error.value.field, error.value.code) == (404, "model", "model_not_found")
    with_default = ModelShelf({"a": TINY, "b": ASSETS / "storyteller"}, opened, default="b")
    assert [with_default.name(name) for name in (None, "", "c", "a", "a:latest")] == ["b", "b", "b", "a", "a"]
    assert (one.name(""), one.known_name("c"), one.known_name(5)) == ("a", "c", "a")
    with pytest.raises(RequestError, match="no model 'c'"):
        one.place("c")


def test_names_of_one_model_share_its_engine(opened, tmp_path):
    (tmp_path / "link").symlink_to(TINY)
    shelf = ModelShelf({"a": TINY, "b": TINY / ".." / TINY.name, "c": tmp_path / "link", "d": UNTIED}, opened)
    asyncio.run(shelf.load_first())
    assert len({id(shelf.places[name].engine) for name in "abc"}) == 1
    assert loaded(shelf) == ["a", "b", "c", "d"]
    assert shelf._held(but=shelf.places["a"]) == shelf.places["d"].nbytes
    assert shelf._held(but=shelf.places["d"]) == shelf.places["a"].nbytes
    assert shelf.places["a"].engine.metrics.labels["model_name"] == "a"


def test_a_model_whose_files_are_gone(tmp_path):
    """A request gets a 503 without the path; at the start the error is that of the files."""

    def open_engine(path, room):
        return start_engines(bitnet_ref.load(path, backend=BACKEND, threads=1), cache_tokens=64, max_batch=2)

    async def run():
        shelf = ModelShelf(copies(tmp_path, "ab"), open_engine)
        await shelf.load_first()
        for name in "ab":
            await shelf._drop(shelf.places[name])
        shutil.rmtree(tmp_path / "a")
        (tmp_path / "b" / "config.json").write_text("{")
        for name in "ab":
            with pytest.raises(RequestError, match=f"model: {name} cannot be loaded now; the server's log") as error:
                await use(shelf, name)
            assert (error.value.status, error.value.field, error.value.code) == (503, "model", "model_unavailable")
            assert shelf.places[name].is_idle is False
        with pytest.raises(BitNetRefError, match=str(tmp_path)):
            await ModelShelf({"a": tmp_path / "a"}, open_engine).load_first()

    asyncio.run(run())
