"""What several commands are tested with."""

import json

import pytest
from helpers import DATA, chat_folder


@pytest.fixture(scope="module")
def expected():
    """The first greedy case: what another implementation says."""
    return json.loads((DATA / "storyteller" / "expected.json").read_text())["cases"][0]


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """Storyteller with a chat template: a model that chat accepts, whatever it answers."""
    return chat_folder(tmp_path_factory.mktemp("models"))
