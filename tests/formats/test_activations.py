"""One list of activations: every reader knows those names, and an unknown one is an error that names it."""

import json

import numpy as np
import pytest
from helpers import BITNET, DATA, GOLDEN, TINY, tiny_tensors, write_checkpoint

import bitnet_ref
from bitnet_ref.errors import ConfigError, FormatError
from bitnet_ref.families.family import activation_name
from bitnet_ref.formats.gguf.config import architecture, architectures
from bitnet_ref.formats.gguf.export import TensorToWrite, write_gguf
from bitnet_ref.formats.gguf.file import GgufFile, Typed
from bitnet_ref.formats.gguf.model import GgufCheckpoint
from bitnet_ref.formats.hf.config import parse_hf_config
from bitnet_ref.formats.native.model import write_native
from bitnet_ref.formats.onnx.graph import DecoderGraph
from bitnet_ref.formats.open import open_checkpoint
from bitnet_ref.inspection import inspect_model
from bitnet_ref.reference.layers import ACTIVATIONS

I2_S = DATA / "gguf" / "i2_s.gguf"  # of the architecture bitnet-b1.58
KEY = "bitnet-b1.58.hidden_activation"


def with_key(path, value, kind="string", source=I2_S, key=KEY):
    with GgufFile(source) as file:
        tensors = [
            TensorToWrite(t.name, t.shape, t.type.name, lambda n=t.name: file.read_raw(n), t.nbytes)
            for t in file.tensors.values()
        ]
        write_gguf(path, file.typed | {key: Typed(kind, value)}, tensors)
    return path


def test_one_list():
    assert {each.activation for _, each in architectures().values()} <= set(ACTIVATIONS)


@pytest.mark.parametrize("spelling", ["gelu", "SiLU", "", None, 5, ["silu"], {}])
def test_an_unknown_name_is_an_error_that_names_it(spelling):
    with pytest.raises(ConfigError, match=r"expected one of relu2, silu, gelu_tanh, got") as caught:
        activation_name(spelling, "hidden_act")
    assert caught.value.field == "hidden_act"
    assert repr(spelling) in str(caught.value)


def test_hugging_face(tmp_path):
    assert parse_hf_config({**TINY, "hidden_act": "swish"}, tmp_path).activation == "silu"
    with pytest.raises(ConfigError, match="got 'gelu_new'") as caught:
        parse_hf_config({**TINY, "hidden_act": "gelu_new"}, tmp_path)
    assert caught.value.field == "hidden_act"


@pytest.mark.parametrize("activation", ["silu", "relu2"])
def test_the_key_of_a_gguf_decides(activation, tmp_path):
    path = with_key(tmp_path / "x.gguf", activation)
    with GgufCheckpoint(path) as checkpoint:
        assert checkpoint.config.activation == activation
        contradictions = [words for words in checkpoint.evidence if words.startswith("activation")]
    inspection = inspect_model(path)
    assert KEY in inspection.activation
    assert inspection.activation.startswith(activation)
    warnings = [finding for finding in inspection.warnings if finding.field == KEY]
    if activation == "relu2":
        assert contradictions == warnings == []
    else:
        assert contradictions == [f"activation: silu, by {KEY}; the architecture bitnet-b1.58 alone would mean relu2"]
        assert "would mean relu2" in warnings[0].message


def test_a_bitnet_file_that_carries_relu2(tmp_path):
    """Newer converters write the architecture `bitnet` with relu2; read by the architecture it would be silu."""
    folder = write_checkpoint(tmp_path / "hf", {**BITNET, "hidden_act": "silu"}, tiny_tensors(BITNET))
    from bitnet_ref.formats.convert import convert

    convert(folder, tmp_path / "silu.gguf", "gguf-f16", verify=False)
    path = with_key(tmp_path / "x.gguf", "relu2", source=tmp_path / "silu.gguf", key="bitnet.hidden_activation")
    tokens = [1, 2, 3]
    assert bitnet_ref.load(path, backend="numpy").config.activation == "relu2"
    assert bitnet_ref.load(tmp_path / "silu.gguf", backend="numpy").config.activation == "silu"
    logits = [bitnet_ref.load(p, backend="numpy").logits(tokens) for p in (path, tmp_path / "silu.gguf")]
    assert not np.array_equal(*logits)


@pytest.mark.parametrize(("value", "kind"), [("gelu", "string"), ("", "string"), (1, "uint32")])
def test_an_unknown_activation_in_a_gguf(value, kind, tmp_path):
    path = with_key(tmp_path / "x.gguf", value, kind)
    with pytest.raises(ConfigError, match=f"got {value!r}") as caught:
        bitnet_ref.load(path, backend="numpy")
    assert (caught.value.field, caught.value.path) == (KEY, str(path))
    assert [finding.field for finding in inspect_model(path).errors] == [KEY]


def unknown(config):
    """The configuration with an activation that no format knows."""
    object.__setattr__(config, "activation", "gelu")
    return config


def test_writers_refuse_what_they_do_not_know(tmp_path):
    with open_checkpoint(GOLDEN / "bitnet-packed-offline") as checkpoint:
        unknown(checkpoint.config)
        with pytest.raises(ConfigError, match="gelu") as caught:
            architecture(checkpoint.config)
        assert caught.value.field == "hidden_act"
        pytest.importorskip("onnx")
        with pytest.raises(ConfigError, match="gelu"):
            DecoderGraph(checkpoint, lambda *args: None)


def test_a_native_file(tmp_path):
    path = tmp_path / "x.bitnet.safetensors"
    with open_checkpoint(GOLDEN / "bitnet-packed-offline") as checkpoint:
        write_native(checkpoint, path)
    data = path.read_bytes().replace(b'\\"activation\\":\\"relu2\\"', b'\\"activation\\":\\"relu3\\"')
    assert b"relu3" in data
    path.write_bytes(data)
    with pytest.raises(FormatError, match="'relu3'"):
        open_checkpoint(path)


def test_the_configuration_of_an_onnx_file(tmp_path):
    onnx = pytest.importorskip("onnx")
    from bitnet_ref.formats.onnx.export import export_onnx
    from bitnet_ref.formats.onnx.file import CONFIG_KEY

    assert CONFIG_KEY == "bitnet_ref.config"  # files in the world have it
    path = tmp_path / "x.onnx"
    with open_checkpoint(GOLDEN / "bitnet-packed-offline") as checkpoint:
        export_onnx(path, checkpoint)
    proto = onnx.load(path, load_external_data=False)
    entry = next(entry for entry in proto.metadata_props if entry.key == CONFIG_KEY)
    entry.value = json.dumps(json.loads(entry.value) | {"activation": "relu3"})
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(ConfigError, match="'relu3'"):
        open_checkpoint(path)
