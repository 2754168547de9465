"""The shipped model, and an engine on it that must leave nothing behind."""

import pytest
from engine_checks import check
from helpers import model


@pytest.fixture
def story():
    return model("storyteller", "auto")


@pytest.fixture
def engine(story):
    with story.engine(max_batch=4, max_batch_tokens=32, page_size=4) as engine:
        yield engine
        engine.close()
        check(engine)
