"""What `bitnet-ref inspect` says of the models in tests/data, to the letter, and its JSON.

When a change of the words or numbers is meant, running this file records them.
"""

import json
import os

import pytest
from click.testing import CliRunner
from helpers import DATA

from bitnet_ref.cli import cli
from bitnet_ref.inspection import inspect_model, show_tensor

RECORDED = DATA / "inspection" / "reports.json"
SHOWN = DATA / "inspection" / "tensors.json"
LONG = ("config", "metadata", "ternary", "tensors")  # of the JSON: recorded for some files alone
WHOLE = ("golden/bitnet-packed-offline", "gguf/tq2_0.gguf", "native/tiny-v1.bitnet.safetensors")
TENSORS = (
    ("golden/bitnet-packed-offline", "blocks.0.attn.q_proj"),
    ("golden/llama-dense", "final_norm"),
    ("golden/llama-dense", "lm_head"),
    ("gguf/i2_s.gguf", "blk.1.ffn_down.weight"),
    ("containers/gguf-q1_0/model.gguf", "blk.0.attn_q.weight"),
    ("native/tiny-v1.bitnet.safetensors", "embedding"),
)


def models():
    folders = [path.parent for path in DATA.glob("*/*/config.json")]
    files = [*DATA.glob("gguf/*.gguf"), *DATA.glob("containers/*/model.gguf"), *DATA.glob("native/*.safetensors")]
    files += [*DATA.glob("containers/*/*-00001-of-*.gguf"), *DATA.glob("gguf/golden-i2_s.safetensors")]
    return sorted(str(path.relative_to(DATA)) for path in (*folders, *files))


def report_of(path):
    """The text, and the JSON."""
    text = CliRunner().invoke(cli, ["inspect", path], env={"COLUMNS": "100"}).stdout
    facts = inspect_model(path).to_dict()
    facts |= {name: len(facts[name] or ()) for name in LONG if path not in WHOLE}
    return {"text": text.splitlines(), "facts": plain(facts)}


def plain(facts):
    """As JSON, with nine digits: processors sum floats in different orders."""
    return json.loads(json.dumps(facts), parse_float=lambda text: float(f"{float(text):.9g}"))


def view_of(path, name):
    view = show_tensor(path, name)
    return {"path": path, "text": view.text(100).splitlines(), "facts": plain(view.statistics())}


def write(path, value):
    """The texts line by line, and each fact in one line."""

    def dump(value, indent, depth):
        if depth == 0 or not isinstance(value, dict | list) or not value:
            return json.dumps(value, ensure_ascii=False)
        if isinstance(value, dict):
            pairs = [f"{json.dumps(key)}: {dump(each, indent + 1, depth - 1)}" for key, each in value.items()]
        else:
            pairs = [dump(each, indent + 1, depth - 1) for each in value]
        inner, (begin, end) = "\n" + " " * (indent + 1), "{}" if isinstance(value, dict) else "[]"
        return begin + inner + f",{inner}".join(pairs) + "\n" + " " * indent + end

    path.write_text(dump(value, 0, 3) + "\n")


@pytest.fixture(autouse=True)
def here(monkeypatch):
    monkeypatch.chdir(DATA)


@pytest.mark.parametrize("path", models())
def test_the_report_of_a_model(path):
    recorded, found = json.loads(RECORDED.read_text())[path], report_of(path)
    assert found["text"] == recorded["text"]
    assert found["facts"] == recorded["facts"]


def test_no_record_is_of_a_model_that_is_gone():
    assert sorted(json.loads(RECORDED.read_text())) == models()


@pytest.mark.parametrize("number", range(len(TENSORS)), ids=[name for _, name in TENSORS])
def test_the_view_of_a_tensor(number):
    assert view_of(*TENSORS[number]) == json.loads(SHOWN.read_text())[number]


if __name__ == "__main__":
    os.chdir(DATA)
    write(RECORDED, {path: report_of(path) for path in models()})
    write(SHOWN, [view_of(*each) for each in TENSORS])
