"""Reading .onnx: our own exports bit for bit, other exporters' names and quantisers, and files that lie."""

import json
import re

import numpy as np
import onnx
import onnxruntime
import pytest
from helpers import BITNET, GOLDEN, GOLDEN_CASES, TINY, cut_to, golden, model, rng, tiny_tensors, write_checkpoint
from onnx import TensorProto, helper, numpy_helper
from onnx_graphs import LINEAR_STYLES, QUANTIZED_STYLES, decoder, nbits, write

import bitnet_ref
from bitnet_ref.errors import ConfigError, FormatError
from bitnet_ref.formats.checkpoint import read_weights
from bitnet_ref.formats.convert import convert
from bitnet_ref.formats.onnx.constants import Constants, ModelNames
from bitnet_ref.formats.onnx.export import export_onnx
from bitnet_ref.formats.onnx.file import OnnxFile
from bitnet_ref.formats.open import open_checkpoint

TOKENS = [1, 3, 2, 5]
BIASED = {**TINY, "attention_bias": True}


def hf(folder, config):
    tensors = tiny_tensors(config, np.float32)
    if config.get("attention_bias"):
        for name in [name for name in tensors if ".self_attn." in name]:
            size = len(tensors[name])
            tensors[name.replace(".weight", ".bias")] = rng(size).standard_normal(size).astype(np.float32)
    return write_checkpoint(folder, config, tensors)


def export(source, path, inside=False, **options):
    """inside: all tensors in one file, as some exporters write small models."""
    with open_checkpoint(source) as checkpoint:
        files = export_onnx(path, checkpoint, **options)
    if inside:
        onnx.save(onnx.load(path), path)
        files.pop().unlink()
    return files


# -- what can be read --------------------------------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", GOLDEN_CASES)
def test_our_own_exports_come_back_bit_for_bit(case, tmp_path):
    export(GOLDEN / case, tmp_path / "m.onnx")
    expected, found = model(GOLDEN / case), bitnet_ref.load(tmp_path / "m.onnx", backend="numpy")
    assert found.config == expected.config
    assert found.weights.tied == expected.weights.tied
    for (name, a), (_, b) in zip(expected.weights.linears(), found.weights.linears(), strict=True):
        assert type(a) is type(b), name
        if a.bit_linear is not None:
            np.testing.assert_array_equal(b.bit_linear.packed, a.bit_linear.packed, err_msg=name)
            assert b.bit_linear.w_dequant_scale == a.bit_linear.w_dequant_scale
        else:
            assert b.array.dtype == a.array.dtype
            np.testing.assert_array_equal(b.array, a.array, err_msg=name)
    tokens = golden(case)["tokens"]
    np.testing.assert_array_equal(found.logits(tokens), expected.logits(tokens))


@pytest.mark.parametrize("options", [{"external_bytes": 0}, {"inside": True}])
def test_wherever_the_tensors_are(options, tmp_path):
    case = "bitnet-packed-offline"
    export(GOLDEN / case, tmp_path / "m.onnx", **options)
    logits = bitnet_ref.load(tmp_path / "m.onnx", backend="numpy").logits(TOKENS)
    np.testing.assert_array_equal(logits, model(GOLDEN / case).logits(TOKENS))


def test_convert_and_load_the_folder(tmp_path):
    """With its tokenizer; convert's own proof compares every tensor and the logits."""
    proof = convert("storyteller", tmp_path / "out", "onnx")
    assert proof.exact
    m = bitnet_ref.load(tmp_path / "out", backend="numpy")
    expected = model("storyteller").generate("The rabbit ran", max_tokens=4, temperature=0.0).text
    assert m.generate("The rabbit ran", max_tokens=4, temperature=0.0).text == expected
    assert bitnet_ref.load(tmp_path / "out" / "model.onnx").tokenizer.encode("The rabbit") == m.tokenizer.encode(
        "The rabbit"
    )


@pytest.mark.parametrize("style", LINEAR_STYLES)
@pytest.mark.parametrize("config", [TINY, BIASED], ids=["plain", "biases"])
def test_names_of_other_exporters(style, config, tmp_path):
    m = model(hf(tmp_path / "hf", config))
    found = bitnet_ref.load(write(tmp_path / "onnx", decoder(m.weights, style, config), config), backend="numpy")
    np.testing.assert_array_equal(found.logits(TOKENS), m.logits(TOKENS))


@pytest.mark.parametrize("style", QUANTIZED_STYLES)
def test_ternary_planes_are_recovered(style, tmp_path):
    """From what a dequantiser gives: scales and planes as they were."""
    m = model(hf(tmp_path / "hf", BITNET))
    path = write(tmp_path / "onnx", decoder(m.weights, style, BITNET), BITNET)
    found = bitnet_ref.load(path, backend="numpy")
    np.testing.assert_array_equal(found.logits(TOKENS), m.logits(TOKENS))
    for (_, a), (_, b) in zip(m.weights.linears(), found.weights.linears(), strict=True):
        assert a is m.weights.embedding or (a.w_dequant_scale == b.w_dequant_scale)


def test_our_dense_graph_by_its_names_alone(tmp_path):
    """Without our metadata, an export of ours reads as anybody's."""
    case = "llama-bf16-biases"
    export(GOLDEN / case, tmp_path / "m.onnx")
    proto = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    del proto.metadata_props[:]
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    (tmp_path / "config.json").write_bytes((GOLDEN / case / "config.json").read_bytes())
    logits = bitnet_ref.load(tmp_path / "m.onnx", backend="numpy").logits(TOKENS)
    np.testing.assert_array_equal(logits, model(GOLDEN / case).logits(TOKENS))
    with open_checkpoint(tmp_path / "m.onnx") as checkpoint:
        words = "the configuration is that of config.json beside the file; the graph itself is not read"
        assert checkpoint.evidence == [words]


@pytest.mark.parametrize(
    ("gathers", "expected"),
    [
        ("tokens[input_ids]", "tokens"),
        ("places[position_ids]", None),
        ("places[position_ids] tokens[input_ids] copies[input_ids]", "tokens"),
        ("model.embed_tokens.weight[position_ids] types[input_ids]", "model.embed_tokens.weight"),
        ("types[input_ids] model.embed_tokens.weight[flat_ids]", "model.embed_tokens.weight"),
        ("types[input_ids] tokens[flat_ids]/model/embed_tokens/Gather", "tokens"),
        ("vector[input_ids] cube[input_ids] computed[input_ids] tokens[input_ids]", "tokens"),
        ("embed_tokens.vector[input_ids] tokens[]", None),
    ],
)
def test_which_table_has_the_embeddings(gathers, expected, tmp_path):
    """The one whose name or whose node's name says so, else the first matrix that `input_ids` choose rows of."""
    ranks = {"embed_tokens.vector": 1, "vector": 1, "cube": 3}
    nodes, tables = [], {}
    for gather in gathers.split():
        table, indices, name = re.fullmatch(r"(\S+)\[(\w*)\](\S*)", gather).groups()
        inputs = [table, indices] if indices else [table]
        nodes.append(helper.make_node("Gather", inputs, [f"y{len(nodes)}"], name=name))
        if table != "computed":
            tables[table] = numpy_helper.from_array(np.ones((2,) * ranks.get(table, 2), np.float32), table)
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, None)
    graph = helper.make_graph(nodes, "g", [ids], [], list(tables.values()))
    (tmp_path / "m.onnx").write_bytes(helper.make_model(graph).SerializeToString())
    file = OnnxFile(tmp_path / "m.onnx")
    assert ModelNames(file, Constants(file)).embedding == expected


def test_which_vector_is_a_norm(tmp_path):
    """Not a bias, nor a matrix of such a name, nor a vector below a layer that is named as the last one."""
    names = {
        "model.layers.0.input_layernorm.bias": 1,
        "model.layers.0.input_layernorm.weight": 1,
        "model.layers.1.input_layernorm.weight": 2,
        "model.layers.1.other.norm.weight": 1,
        "model.norm.bias": 1,
        "model.norm.weight": 1,
        "copy.model.norm.weight": 1,
    }
    tensors = [numpy_helper.from_array(np.ones((2,) * rank, np.float32), name) for name, rank in names.items()]
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, None)
    node = helper.make_node("Identity", ["input_ids"], ["y"])
    proto = helper.make_model(helper.make_graph([node], "g", [ids], [], tensors))
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    file = OnnxFile(tmp_path / "m.onnx")
    assert ModelNames(file, Constants(file)).norms == {
        "blocks.0.attn_norm": "model.layers.0.input_layernorm.weight",
        "final_norm": "model.norm.weight",
    }


def test_norms_that_an_exporter_merged(tmp_path):
    """dynamo keeps one initialiser of several equal ones: which norm it is, only the node tells."""
    m = model(hf(tmp_path / "hf", TINY))
    proto = decoder(m.weights, "dynamo", TINY)
    norms = [t for t in proto.graph.initializer if t.name.endswith("post_attention_layernorm.weight")]
    for tensor in norms:
        node = helper.make_node("Mul", ["val_77" + tensor.name[13], "x"], ["y" + tensor.name], name="node_mul")
        scopes = str(["", "model", tensor.name.removesuffix(".weight"), "mul_4"])
        node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=scopes)
        proto.graph.node.append(node)
        tensor.name = node.input[0]
    found = bitnet_ref.load(write(tmp_path / "onnx", proto, TINY), backend="numpy")
    np.testing.assert_array_equal(found.logits(TOKENS), m.logits(TOKENS))


def test_only_constants_are_tensors(tmp_path):
    """ConstantOfShape has a tensor too, which is the value of every element and not the result."""
    value = numpy_helper.from_array(np.array([3], np.float32))
    nodes = [
        helper.make_node("ConstantOfShape", ["shape"], ["filled"], value=value),
        helper.make_node("Constant", [], ["three"], value=value),
        helper.make_node("Constant", [], ["four"], value_float=4.0),
    ]
    initializers = [numpy_helper.from_array(np.array([2, 2], np.int64), "shape")]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_tensor_value_info("filled", 1, None)], initializers)
    (tmp_path / "m.onnx").write_bytes(helper.make_model(graph).SerializeToString())
    file = OnnxFile(tmp_path / "m.onnx")
    assert {name: file.read(name).tolist() for name in file.tensors} == {"shape": [2, 2], "three": [3.0]}
    for name in ("x", "filled"):  # an input, and what a node makes
        with pytest.raises(FormatError, match=f"{name}: is computed as the model runs"):
            Constants(file).value(name)


@pytest.mark.parametrize(
    ("kind", "dtype", "values"),
    [
        (TensorProto.FLOAT, "float32", [1.5, -2.25, 3e-5]),
        (TensorProto.DOUBLE, "float64", [1.5, -2.25, 1e-300]),
        (TensorProto.FLOAT16, "float16", [1.5, -2.25, 65504.0]),
        (TensorProto.BFLOAT16, "bfloat16", [1.5, -2.25, 3e38]),
        (TensorProto.INT64, "int64", [1, -(2**62), 3]),
        (TensorProto.INT32, "int32", [1, -(2**31), 3]),
        (TensorProto.INT8, "int8", [1, -128, 127]),
        (TensorProto.UINT8, "uint8", [1, 0, 255]),
        (TensorProto.UINT32, "uint32", [1, 0, 2**32 - 1]),
        (TensorProto.UINT64, "uint64", [1, 0, 2**64 - 1]),
        (TensorProto.BOOL, "bool", [True, False, True]),
    ],
)
def test_numbers_in_fields_of_their_own(kind, dtype, values, tmp_path):
    """As protobuf has them for small tensors, and as bytes: the same array."""
    typed = helper.make_tensor("typed", kind, [3], values)
    array = numpy_helper.to_array(typed)
    raw = helper.make_tensor("raw", kind, [3], array.tobytes(), raw=True)
    node = helper.make_node("Identity", ["typed"], ["y"])
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, None)]
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", kind, None)], [typed, raw])
    (tmp_path / "m.onnx").write_bytes(helper.make_model(graph).SerializeToString())
    file = OnnxFile(tmp_path / "m.onnx")
    assert not typed.HasField("raw_data")
    for name in ("typed", "raw"):
        found = file.read(name)
        assert (found.dtype.name, found.tobytes()) == (dtype, array.tobytes())


def run_onnx(node, tensors, x=None, opset=21):
    """One node by onnxruntime: the outside oracle of the dequantisers."""
    inputs = [] if x is None else [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph([node], "g", inputs, outputs, tensors)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {} if x is None else {"x": x})[0]


def constants(folder, node, tensors):
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, None)]
    graph = helper.make_graph(
        [node], "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)], tensors
    )
    (folder / "one.onnx").write_bytes(helper.make_model(graph).SerializeToString())
    return Constants(OnnxFile(folder / "one.onnx"))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("k", [32, 40])
def test_matmul_n_bits_as_onnxruntime_dequantises_it(bits, zeros, k, tmp_path):
    n, block, generator = 8, 16, rng(bits, k)
    blocks = -(-k // block)
    codes = generator.integers(0, 2**bits, (n, k), dtype=np.uint8)
    scales = generator.standard_normal((n, blocks)).astype(np.float32)
    points = generator.integers(0, 2**bits, (n, blocks), dtype=np.uint8) if zeros else None
    blob, scales, points = nbits(codes, scales, points, bits, block)
    arrays = {"b": blob, "s": scales} | ({} if points is None else {"z": points})
    tensors = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    attributes = {"N": n, "K": k, "bits": bits, "block_size": block, "domain": "com.microsoft"}
    node = helper.make_node("MatMulNBits", ["x", *arrays], ["y"], **attributes)
    expected = run_onnx(node, tensors, np.eye(k, dtype=np.float32)).T
    found = constants(tmp_path, node, tensors).matrix(node)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)  # a product with 1 and zeros


@pytest.mark.parametrize("scales", [np.ones((8, 3), np.int8), np.ones((8, 2), np.float32)])
def test_scales_of_matmul_n_bits_are_floats_one_for_each_block(scales, tmp_path):
    tensors = [numpy_helper.from_array(np.zeros((8, 3, 8), np.uint8), "b"), numpy_helper.from_array(scales, "s")]
    attributes = {"N": 8, "K": 40, "bits": 4, "block_size": 16, "domain": "com.microsoft"}
    node = helper.make_node("MatMulNBits", ["x", "b", "s"], ["y"], **attributes)
    with pytest.raises(FormatError, match=r"expected 8 x 3 scales, got"):
        constants(tmp_path, node, tensors).matrix(node)


@pytest.mark.parametrize(
    ("dtype", "axis", "block", "scales", "zeros"),
    [
        (TensorProto.INT8, 1, 0, (), False),
        (TensorProto.INT8, 0, 0, (6,), True),
        (TensorProto.UINT8, 1, 0, (8,), True),
        (TensorProto.INT8, -1, 4, (6, 2), True),
        (TensorProto.UINT4, 0, 3, (2, 8), False),
        (TensorProto.INT4, 1, 0, (8,), False),
    ],
)
def test_dequantize_linear_as_onnxruntime_computes_it(dtype, axis, block, scales, zeros, tmp_path):
    generator = rng(dtype)
    low, high = {TensorProto.INT4: (-8, 8), TensorProto.UINT4: (0, 16), TensorProto.INT8: (-128, 128)}.get(
        dtype, (0, 256)
    )
    q = helper.make_tensor("q", dtype, (6, 8), generator.integers(low, high, 48).tolist())
    s = numpy_helper.from_array(np.asarray(generator.random(scales) + 0.5, np.float32), "s")
    z = helper.make_tensor("z", dtype, scales, generator.integers(low, high, int(np.prod(scales))).tolist())
    attributes = {"axis": axis} | ({"block_size": block} if block else {})
    node = helper.make_node("DequantizeLinear", ["q", "s", *(["z"] if zeros else [])], ["y"], **attributes)
    tensors = [q, s, *([z] if zeros else [])]
    found = constants(tmp_path, node, tensors).value("y")
    np.testing.assert_array_equal(found, run_onnx(node, tensors))


def arrays_of(**values):
    return [numpy_helper.from_array(np.asarray(value), name) for name, value in values.items()]


Q8 = np.arange(48, dtype=np.int8).reshape(6, 8)
ONE = np.float32(0.5)
INTEGERS = "expected integers of at most 32 bits and a scale, got {}"


@pytest.mark.parametrize(
    ("tensors", "attributes", "message"),
    [
        ({"q": Q8.astype(np.float32), "s": ONE}, {}, INTEGERS.format("float32")),
        ({"q": Q8.astype(np.int64), "s": ONE}, {}, INTEGERS.format("int64")),
        ({"q": Q8}, {}, INTEGERS.format("int8")),
        ({"q": Q8, "s": ONE, "z": np.float32(0)}, {}, "expected a whole zero point for each of 1 scales"),
        ({"q": Q8, "s": ONE, "z": np.zeros(2, np.int8)}, {}, "expected a whole zero point for each of 1 scales"),
        ({"q": Q8, "s": np.zeros(0, np.float32)}, {}, "has no scale"),
        ({"q": Q8, "s": np.ones(8, np.float32)}, {"axis": 2}, "has no axis 2 in shape [6, 8]"),
        ({"q": Q8, "s": np.ones(8, np.float32)}, {"axis": -3}, "has no axis -1 in shape [6, 8]"),
        ({"q": Q8, "s": np.ones(6, np.float32)}, {}, "expected 8 scales, got shape [6]"),
        ({"q": Q8, "s": np.ones((1, 8), np.float32)}, {}, "expected 8 scales, got shape [1, 8]"),
        (
            {"q": Q8, "s": np.ones((6, 3), np.float32)},
            {"block_size": 4},
            "expected scales of shape [6, 2], got [6, 3]",
        ),
        (
            {"q": Q8, "s": np.ones((6, 2), np.float32)},
            {"block_size": 3},
            "expected scales of shape [6, 3], got [6, 2]",
        ),
        (
            {"q": Q8, "s": np.ones((6, 2), np.float32)},
            {"block_size": -4},
            "expected scales of shape [6, 0], got [6, 2]",
        ),
    ],
)
def test_what_is_no_dequantizer(tensors, attributes, message, tmp_path):
    node = helper.make_node("DequantizeLinear", [*tensors], ["y"], name="dq", **attributes)
    with pytest.raises(FormatError) as caught:
        constants(tmp_path, node, arrays_of(**tensors)).value("y")
    assert (caught.value.field, caught.value.message) == ("node dq", message)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32])
def test_a_dequantizer_of_every_width(dtype, tmp_path):
    q = np.array([[0, 1], [2, np.iinfo(dtype).max]], dtype)
    node = helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"])
    dequantized = constants(tmp_path, node, arrays_of(q=q, s=np.float32([2.0]), z=np.array([1], dtype))).value("y")
    np.testing.assert_array_equal(dequantized, (q.astype(np.float32) - 1) * 2)


CODES, SCALES = np.arange(8 * 3 * 8).astype(np.uint8).reshape(8, 3, 8), np.ones((8, 3), np.float32)
NUMBERS = {"N": 8, "K": 40, "bits": 4, "block_size": 16}


@pytest.mark.parametrize(
    ("tensors", "attributes", "message"),
    [
        ({}, {"bits": 3}, "expected bits 2, 4 or 8, got 3; block_size 16, N 8, K 40"),
        ({}, {"block_size": 0}, "expected bits 2, 4 or 8, got 4; block_size 0, N 8, K 40"),
        ({}, {"block_size": 3}, "expected bits 2, 4 or 8, got 4; block_size 3, N 8, K 40"),
        (
            {},
            {"block_size": 2**20 + 2},
            f"expected bits 2, 4 or 8, got 4; block_size {2**20 + 2}, N 8, K 40",
        ),
        ({}, {"N": 0}, "expected bits 2, 4 or 8, got 4; block_size 16, N 0, K 40"),
        ({}, {"K": 0}, "expected bits 2, 4 or 8, got 4; block_size 16, N 8, K 0"),
        ({"s": None}, {}, "expected a matrix and scales, and no g_idx"),
        (
            {"z": np.zeros((8, 2), np.uint8), "g": np.zeros(40, np.int32)},
            {},
            "expected a matrix and scales, and no g_idx",
        ),
        ({"b": CODES.view(np.int8)}, {}, "expected 8 rows of 3 blocks of 8 bytes, got int8 [8, 3, 8]"),
        ({"b": CODES[:7]}, {}, "expected 8 rows of 3 blocks of 8 bytes, got uint8 [7, 3, 8]"),
        ({"s": SCALES[:7]}, {}, "expected 8 x 3 scales, got float32 [7, 3]"),
        ({"s": SCALES.astype(np.int32)}, {}, "expected 8 x 3 scales, got int32 [8, 3]"),
        ({"z": np.zeros((8, 3), np.uint8)}, {}, "expected 8 rows of 2 bytes of zero points, got [8, 3]"),
        ({"z": np.zeros((8, 3), np.int16)}, {}, "expected 8 rows of 2 bytes of zero points, got [8, 3]"),
        ({"z": np.zeros((8, 2), np.float32)}, {}, "expected 8 rows of 2 bytes of zero points, got [8, 2]"),
    ],
)
def test_what_is_no_matrix_of_blocks(tensors, attributes, message, tmp_path):
    arrays = {name: array for name, array in ({"b": CODES, "s": SCALES} | tensors).items() if array is not None}
    node = helper.make_node("MatMulNBits", ["x", *arrays], ["y"], name="mm", **NUMBERS | attributes)
    with pytest.raises(FormatError) as caught:
        constants(tmp_path, node, arrays_of(**arrays)).matrix(node)
    assert (caught.value.field, caught.value.message) == ("node mm", message)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("zeros", ["middle", "packed", "floats"])
def test_a_matrix_of_blocks_number_by_number(bits, zeros, tmp_path):
    """The first number of a byte is in its lowest bits; without zero points the middle of the range is zero."""
    n, k, block, blocks = 3, 76, 8, 10
    codes = rng(bits).integers(0, 256, (n, blocks, block * bits // 8), dtype=np.uint8)
    scales = rng(bits, 1).random((n, blocks)).astype(np.float32)
    row = -(-blocks * bits // 8)
    points = rng(bits, 2).integers(0, 256, (n, row), dtype=np.uint8)
    of_floats = rng(bits, 3).random((n, blocks)).astype(np.float32)
    given = {"middle": {}, "packed": {"z": points}, "floats": {"z": of_floats}}[zeros]
    node = helper.make_node("MatMulNBits", ["x", "b", "s", *given], ["y"], N=n, K=k, bits=bits, block_size=block)
    matrix = constants(tmp_path, node, arrays_of(b=codes, s=scales, **given)).matrix(node)
    assert matrix.shape == (n, k)

    def number(data, index):
        return int(data[index * bits // 8]) >> (index * bits % 8) & (1 << bits) - 1

    for i in range(n):
        for j in range(k):
            at = j // block
            zero = {"middle": 1 << (bits - 1), "packed": number(points[i], at), "floats": of_floats[i, at]}[zeros]
            expected = (np.float32(number(codes[i, at], j % block)) - np.float32(zero)) * scales[i, at]
            assert matrix[i, j] == expected


def test_one_number_of_the_largest_block(tmp_path):
    node = helper.make_node("MatMulNBits", ["x", "b", "s"], ["y"], N=1, K=1, bits=2, block_size=2**20)
    codes = np.full((1, 1, 2**18), 3, dtype=np.uint8)
    matrix = constants(tmp_path, node, arrays_of(b=codes, s=np.array([[0.5]], np.float32))).matrix(node)
    assert matrix.tolist() == [[(3 - 2) * 0.5]]


def test_four_bits_are_what_is_not_said(tmp_path):
    node = helper.make_node("MatMulNBits", ["x", "b", "s"], ["y"], N=8, K=40, block_size=16)
    assert constants(tmp_path, node, arrays_of(b=CODES, s=SCALES)).matrix(node)[0, 1] == (int(CODES[0, 0, 0]) >> 4) - 8


W = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.mark.parametrize(
    ("kind", "attributes", "expected"),
    [
        ("MatMul", {}, W.T),
        ("Gemm", {}, W.T),
        ("Gemm", {"transB": 0, "transA": 0, "alpha": 1.0, "beta": 1.0}, W.T),
        ("Gemm", {"transB": 1}, W),
        ("Gemm", {"transA": 1}, None),
        ("Gemm", {"alpha": 0.5}, None),
        ("Gemm", {"beta": 0.5, "transB": 1}, None),
    ],
)
def test_the_matrix_of_a_product(kind, attributes, expected, tmp_path):
    node = helper.make_node(kind, ["x", "w"], ["y"], name="mm", **attributes)
    made = constants(tmp_path, node, arrays_of(w=W))
    if expected is None:
        with pytest.raises(FormatError, match=r"^.*node mm: expected transA 0, alpha 1 and beta 1$"):
            made.matrix(node)
    else:
        np.testing.assert_array_equal(made.matrix(node), expected, strict=True)
    with pytest.raises(FormatError, match=r"node mm: expected a matrix, got an array of shape \[6\]"):
        constants(tmp_path, node, arrays_of(w=W.reshape(-1))).matrix(node)


@pytest.mark.parametrize(
    ("kind", "attributes", "expected"),
    [
        ("Transpose", {}, W.T),
        ("Transpose", {"perm": [0, 1]}, W),
        ("Transpose", {"perm": [1, 0]}, W.T),
        ("Transpose", {"perm": [0, 0]}, "expected perm to permute 2 axes, got [0, 0]"),
        ("Transpose", {"perm": [0]}, "expected perm to permute 2 axes, got [0]"),
        ("Cast", {"to": TensorProto.FLOAT16}, W.astype(np.float16)),
        ("Cast", {"to": TensorProto.STRING}, "casts to type 8, which is not supported"),
        ("Cast", {}, "casts to type None, which is not supported"),
        ("Identity", {}, W),
    ],
)
def test_what_a_constant_passes_through(kind, attributes, expected, tmp_path):
    node = helper.make_node(kind, ["w"], ["y"], name="n", **attributes)
    made = constants(tmp_path, node, arrays_of(w=W))
    assert made.root("y") == "w"
    assert made.root("x") is None
    if isinstance(expected, str):
        with pytest.raises(FormatError) as caught:
            made.value("y")
        assert (caught.value.field, caught.value.message) == ("node n", expected)
    else:
        np.testing.assert_array_equal(made.value("y"), expected, strict=True)


@pytest.mark.parametrize(
    ("product", "readers", "bias"),
    [
        (("Gemm", ["x", "w", "b"]), [], "b"),
        (("Gemm", ["x", "w"]), [], None),
        (("Gemm", ["x", "w", ""]), [], None),
        (("MatMulNBits", ["x", "w", "s", "", "", "b"]), [], "b"),
        (("MatMulNBits", ["x", "w", "s", "", "b"]), [], None),
        (("MatMul", ["x", "w"]), [("Add", ["y", "b"])], "b"),
        (("MatMul", ["x", "w"]), [("Add", ["b", "y"])], "b"),
        (("MatMul", ["x", "w"]), [("Mul", ["b", "y"]), ("Add", ["y", "x"]), ("Add", ["y", "w"])], None),
        (("MatMul", ["x", "w"]), [("Add", ["y", "x"]), ("Add", ["y", "b"])], "b"),
    ],
)
def test_the_bias_of_a_product(product, readers, bias, tmp_path):
    """A constant vector: not an activation, and not a matrix."""
    nodes = [
        helper.make_node(kind, names, [f"y{n}" if n else "y"]) for n, (kind, names) in enumerate([product, *readers])
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, None)]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "g", inputs, outputs, arrays_of(w=W, b=np.ones(3, np.float32), s=ONE))
    (tmp_path / "m.onnx").write_bytes(helper.make_model(graph).SerializeToString())
    file = OnnxFile(tmp_path / "m.onnx")
    names = ModelNames(file, Constants(file))
    assert names.bias(file.model.graph.node[0]) == bias


def test_numbers_beyond_float32_are_no_matrix(tmp_path):
    """One of them is enough."""
    q = numpy_helper.from_array(np.array([[1, 127], [1, 1]], np.int8), "q")
    node = helper.make_node("DequantizeLinear", ["q", "s"], ["y"], axis=1)
    for scale, is_finite in ((1e36, True), (1e37, False)):
        found = constants(tmp_path, node, [q, numpy_helper.from_array(np.array(scale, np.float32), "s")])
        if is_finite:
            assert np.isfinite(found.value("y")).all()
        else:
            with pytest.raises(FormatError, match="gives numbers that are not finite"):
                found.value("y")


# -- what cannot -------------------------------------------------------------------------------------------------------


def edited(folder, edit, source="bitnet-packed-offline", **options):
    """An export of ours, its message edited."""
    path = folder / "m.onnx"
    export(GOLDEN / source, path, **options)
    proto = onnx.load(path, load_external_data=False)
    edit(proto, {tensor.name: tensor for tensor in proto.graph.initializer})
    path.write_bytes(proto.SerializeToString())
    return path


def place(key, value, name="model.layers.0.self_attn.q_proj.weight_packed"):
    def edit(_, tensors):
        entries = [entry for entry in tensors[name].external_data if entry.key == key]
        entries[0].value = value

    return edit


Q = "model.layers.0.self_attn.q_proj"
LIES = {
    "a path out": (place("location", "../m.onnx.data"), "name of a file of the same folder"),
    "an absolute path": (place("location", "/etc/hostname"), "name of a file of the same folder"),
    "a NUL": (place("location", "a\0b"), "name of a file of the same folder"),
    "no such file": (place("location", "other.data"), "other.data is no file"),
    "beyond the end": (place("offset", str(2**40)), "the file has"),
    "a negative offset": (place("offset", "-1"), "whole number of bytes as offset"),
    "an offset of 19 digits": (place("offset", "9" * 19), "the file has"),
    "an offset of 20 digits": (place("offset", "9" * 20), "whole number of bytes as offset"),
    "a short length": (place("length", "8"), "external data: expected"),
    "huge dims": (lambda _, t: t[f"{Q}.weight_packed"].dims.__setitem__(0, 2**61), "dimensions|expected shape"),
    "dims whose product wraps to 16": (
        lambda _, t: t[f"{Q}.weight_packed"].dims.__setitem__(slice(0, 2), [2**32 + 1, 2**32 + 16]),
        "of an array's size",
    ),
    "dims beside a zero": (
        lambda _, t: t[f"{Q}.weight_packed"].dims.__setitem__(slice(0, 2), [2**62, 0]),
        "dimensions|expected shape",
    ),
    "nine dims": (lambda _, t: t[f"{Q}.weight_packed"].dims.extend([1] * 7), "at most 8 dimensions"),
    "negative dims": (lambda _, t: t[f"{Q}.weight_packed"].dims.__setitem__(0, -1), "dimensions"),
    "another type": (lambda _, t: setattr(t["model.norm.weight"], "data_type", 7), "bytes for its shape"),
    "strings": (lambda _, t: setattr(t["model.norm.weight"], "data_type", 8), "got type 8"),
    "a name twice": (lambda p, t: p.graph.initializer.append(t["model.norm.weight"]), "occurs twice"),
    "a tensor less": (lambda p, t: p.graph.initializer.remove(t[f"{Q}.weight_scale"]), "the tensor is missing"),
    "a zero scale": (lambda _, t: setattr(t[f"{Q}.weight_scale"], "raw_data", b"\0" * 4), "scale above zero"),
    "a NaN scale": (lambda _, t: setattr(t[f"{Q}.weight_scale"], "raw_data", b"\0\0\xc0\x7f"), "finite"),
    "no nodes": (lambda p, _: p.graph.ClearField("node"), "no nodes"),
    "a newer format": (lambda p, _: setattr(p.metadata_props[0], "value", "2"), "expected 1, got '2'"),
    "one layer more": (
        lambda p, _: setattr(
            p.metadata_props[1], "value", p.metadata_props[1].value.replace('layers": 2', 'layers": 3')
        ),
        "the tensor is missing",
    ),
    "a million layers": (
        lambda p, _: setattr(
            p.metadata_props[1], "value", p.metadata_props[1].value.replace('layers": 2', 'layers": 1000000')
        ),
        "1000000 layers",
    ),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("lie", LIES)
def test_files_that_lie(lie, tmp_path):
    edit, says = LIES[lie]
    path = edited(tmp_path, edit)
    with pytest.raises(FormatError, match=says) as caught:
        bitnet_ref.load(path, backend="numpy")
    assert str(tmp_path) in caught.value.path


def test_a_link_out_of_the_folder(tmp_path):
    (tmp_path / "in").mkdir()
    export(GOLDEN / "llama-dense", tmp_path / "in" / "m.onnx")
    (tmp_path / "in" / "m.onnx.data").rename(tmp_path / "elsewhere.data")
    (tmp_path / "in" / "m.onnx.data").symlink_to(tmp_path / "elsewhere.data")
    with pytest.raises(FormatError, match=r"no file of the model's folder"):
        bitnet_ref.load(tmp_path / "in" / "m.onnx", backend="numpy")


def test_an_invalid_ternary_code(tmp_path):
    def edit(_, tensors):
        tensor = tensors[f"{Q}.weight_packed"]
        tensor.raw_data = b"\xff" + tensor.raw_data[1:]

    with pytest.raises(FormatError, match=r"invalid ternary code 3 in byte \[0, 0\]"):
        bitnet_ref.load(edited(tmp_path, edit, inside=True), backend="numpy")


def test_a_name_that_is_no_text(tmp_path):
    """protobuf gives bytes, not text, for what is not UTF-8."""
    path = edited(tmp_path, lambda *_: None)
    path.write_bytes(path.read_bytes().replace(b"model.norm.weight", b"model.norm.weigh\xff"))
    with pytest.raises(FormatError, match="not UTF-8"):
        bitnet_ref.load(path)


def test_a_config_that_is_none(tmp_path):
    def edit(proto, _):
        raw = json.loads(proto.metadata_props[1].value)
        proto.metadata_props[1].value = json.dumps({**raw, "surprise": 1})

    with pytest.raises(ConfigError, match="surprise") as caught:
        bitnet_ref.load(edited(tmp_path, edit), backend="numpy")
    assert caught.value.path == str(tmp_path / "m.onnx")


@pytest.mark.parametrize("ours", [True, False])
def test_truncated(ours, tmp_path):
    """There is no header: the message, with the weights beside it or in it, at every byte where it begins."""
    if ours:
        path = export_and_keep(tmp_path)
    else:
        path = write(tmp_path, decoder(model(hf(tmp_path / "hf", TINY)).weights, "named", TINY), TINY)
    size = path.stat().st_size
    for _ in cut_to(path, [*range(1000), *range(1000, size, 101), size - 1]):
        with pytest.raises(FormatError) as caught, open_checkpoint(path) as checkpoint:
            read_weights(checkpoint)
        assert caught.value.path == str(path)


def export_and_keep(folder):
    export(hf(folder / "hf", TINY), folder / "m.onnx", external_bytes=0)
    return folder / "m.onnx"


def test_external_data_that_is_cut(tmp_path):
    path = export_and_keep(tmp_path)
    data = (tmp_path / "m.onnx.data").read_bytes()
    for size in (0, 1, len(data) // 2, len(data) - 1):
        (tmp_path / "m.onnx.data").write_bytes(data[:size])
        with pytest.raises(FormatError, match=f"the file has {size}"):
            bitnet_ref.load(path, backend="numpy")


@pytest.mark.parametrize("data", [b"", b"\x08", b"\xff" * 40, b"{}", b"\x0a\xff\xff\xff\xff\x0f"])
def test_files_that_are_no_models(data, tmp_path):
    (tmp_path / "m.onnx").write_bytes(data)
    with pytest.raises(FormatError, match="is no ONNX model"):
        bitnet_ref.load(tmp_path / "m.onnx")


def test_without_a_configuration(tmp_path):
    m = model(hf(tmp_path / "hf", TINY))
    path = write(tmp_path / "onnx", decoder(m.weights, "named", TINY), TINY)
    (path.parent / "config.json").unlink()
    with pytest.raises(FormatError, match=r"config\.json"):
        bitnet_ref.load(path)


def change_of_foreign(edit, says, style="torchscript", config=TINY, file_config=None):
    return pytest.param(edit, says, style, config, file_config or config, id=says[:30])


@pytest.mark.parametrize(
    ("edit", "says", "style", "config", "file_config"),
    [
        change_of_foreign(lambda g: g.node.pop(), "no MatMul, Gemm or MatMulNBits"),
        change_of_foreign(lambda g: None, "says a bias here, the graph has none", file_config=BIASED),
        change_of_foreign(lambda g: None, "says no bias here, the graph has one", config=BIASED, file_config=TINY),
        change_of_foreign(lambda g: None, "is no part of a llama", file_config={**TINY, "num_hidden_layers": 1}),
        change_of_foreign(lambda g: None, "expected shape", file_config={**TINY, "intermediate_size": 20}),
        change_of_foreign(lambda g: g.initializer.pop(1), "no such norm"),
        change_of_foreign(lambda g: g.node.append(g.node[1]), "two matrices", style="named"),
    ],
)
def test_graphs_of_another_model(edit, says, style, config, file_config, tmp_path):
    m = model(hf(tmp_path / "hf", config))
    proto = decoder(m.weights, style, config)
    if says == "two matrices":
        proto.graph.initializer.append(numpy_helper.from_array(np.ones((16, 16), np.float32), "other"))
        node = proto.graph.node.add(op_type="MatMul", name="/model/layers.0/self_attn/q_proj/MatMul")
        node.input.extend(["x", "other"])
    else:
        edit(proto.graph)
    with pytest.raises(FormatError, match=says):
        bitnet_ref.load(write(tmp_path / "onnx", proto, file_config), backend="numpy")


@pytest.mark.parametrize(
    ("style", "module", "name"),
    [
        ("gemm", "layers.1.self_attn.q_proj", "blocks.1.attn.q_proj"),
        ("gemm", "layers.0.mlp.down_proj", "blocks.0.mlp.down_proj"),
        ("genai-qkv", "layers.1.attn.o_proj", "blocks.1.attn.o_proj"),
        ("genai-qkv", "layers.0.mlp.gate_proj", "blocks.0.mlp.gate_proj"),
        ("gemm", "lm_head", "lm_head"),
    ],
)
def test_a_graph_without_one_of_its_matrices(style, module, name, tmp_path):
    proto = decoder(model(hf(tmp_path / "hf", TINY)).weights, style, TINY)
    kept = [node for node in proto.graph.node if not any(module in each for each in node.input)]
    assert len(kept) == len(proto.graph.node) - 1
    del proto.graph.node[:]
    proto.graph.node.extend(kept)
    with pytest.raises(FormatError) as caught:
        bitnet_ref.load(write(tmp_path / "onnx", proto, TINY), backend="numpy")
    full = f"model.{module}".replace(".attn.", ".self_attn.") if module != "lm_head" else module
    assert caught.value.field == name
    assert caught.value.message == f"no MatMul, Gemm or MatMulNBits with constant weights was found for {full}"


@pytest.mark.parametrize(
    ("style", "config", "op_type", "name"),
    [
        *(("nbits-4", BITNET, "MatMulNBits", name) for name in ("N", "K", "bits", "block_size")),
        ("qdq", BITNET, "DequantizeLinear", "axis"),
        ("named", TINY, "Transpose", "perm"),
        ("gemm", TINY, "Gemm", "transB"),
    ],
)
def test_an_attribute_of_another_type(style, config, op_type, name, tmp_path):
    """ONNX lets every attribute say of which type it is: a list where a number should be, or a float."""
    m = model(hf(tmp_path / "hf", config))
    proto = decoder(m.weights, style, config)
    node = next(node for node in proto.graph.node if node.op_type == op_type)
    kept = [attribute for attribute in node.attribute if attribute.name != name]
    node.ClearField("attribute")
    node.attribute.extend([*kept, helper.make_attribute(name, 2.0 if name == "perm" else [16, 16])])
    with pytest.raises(FormatError, match=f"expected {name} to be of type"):
        bitnet_ref.load(write(tmp_path / "onnx", proto, config), backend="numpy")


def test_a_scale_that_is_elsewhere(tmp_path):
    """-1, 0, +1 without a scale: the graph multiplies by it later, and guessing 1 would be wrong in silence."""
    m = model(hf(tmp_path / "hf", BITNET))
    proto = decoder(m.weights, "qdq", BITNET)
    scale = next(t for t in proto.graph.initializer if t.name.endswith("q_proj.weight_scale"))
    scale.raw_data = np.float32(1).tobytes()
    with pytest.raises(FormatError, match="its scale is elsewhere"):
        bitnet_ref.load(write(tmp_path / "onnx", proto, BITNET), backend="numpy")


def test_a_dense_matrix_where_the_config_says_ternary(tmp_path):
    m = model(hf(tmp_path / "hf", TINY))
    config = {**BITNET, "tie_word_embeddings": False}
    proto = decoder(m.weights, "named", TINY)
    for i in range(2):
        for name, size in (("self_attn.attn_sub_norm", 16), ("mlp.ffn_sub_norm", 24)):
            tensor = numpy_helper.from_array(np.ones(size, np.float32), f"model.layers.{i}.{name}.weight")
            proto.graph.initializer.append(tensor)
    with pytest.raises(FormatError, match=r"expected a matrix of -s, 0 and \+s"):
        bitnet_ref.load(write(tmp_path / "onnx", proto, config), backend="numpy")
