"""The shipped model, and an engine on it that must leave nothing behind."""

import weakref

import pytest
from engine_checks import check
from helpers import model

import bitnet_ref


@pytest.fixture
def story():
    return model("storyteller", "auto")


@pytest.fixture
def engine(story):
    with story.engine(max_batch=4, max_batch_tokens=32, page_size=4) as engine:
        yield engine
        engine.close()
        check(engine)


@pytest.fixture
def caches(monkeypatch):
    """Weak references to every cache that models make from here on."""
    caches = []
    new_cache = bitnet_ref.Model.new_cache

    def watched(self, *args, **kwargs):
        cache = new_cache(self, *args, **kwargs)
        caches.append(weakref.ref(cache))
        return cache

    monkeypatch.setattr(bitnet_ref.Model, "new_cache", watched)
    return caches
