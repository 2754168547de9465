"""`show_tensor`: the plane that `load` reads, by any name, as text, figures and a picture."""

import shutil
import sys

import numpy as np
import pytest
from helpers import DATA, GOLDEN, model, safetensors_bytes
from safetensors.numpy import save_file

from bitnet_ref.errors import BackendUnavailable, ConfigError, FormatError
from bitnet_ref.formats.convert import convert
from bitnet_ref.inspection import show_tensor
from bitnet_ref.inspection.tensor import TensorView
from bitnet_ref.notebook import figures

GGUF = DATA / "gguf"
PACKED = GOLDEN / "bitnet-packed-offline"


def view(w_t, scale=0.5):
    return TensorView("m", "blocks.0.attn.q_proj", "ternary", np.asarray(w_t, dtype=np.int8), scale)


@pytest.mark.parametrize(
    ("path", "names"),
    [
        (PACKED, ("blocks.1.mlp.up_proj", "model.layers.1.mlp.up_proj.weight", "blk.1.ffn_up.weight")),
        (GGUF / "i2_s.gguf", ("blocks.1.mlp.up_proj", "blk.1.ffn_up.weight", "blk.1.ffn_up")),
        (GGUF / "tq1_0.gguf", ("blocks.1.mlp.up_proj",)),
    ],
    ids=str,
)
def test_a_ternary_matrix_by_any_of_its_names(path, names):
    expected = dict(model(path).weights.linears())["blocks.1.mlp.up_proj"]
    for name in names:
        found = show_tensor(path, name)
        assert (found.name, found.is_ternary) == ("blocks.1.mlp.up_proj", True)
        assert np.array_equal(found.values, expected.ternary())
        assert found.w_dequant_scale == expected.w_dequant_scale


@pytest.mark.parametrize("target", ["native", "native-base3", "onnx"])
def test_names_of_our_own_files(tmp_path, target):
    if target == "onnx":
        pytest.importorskip("onnx")
    path = tmp_path / ("m" if target == "onnx" else "m.bitnet.safetensors")
    convert(PACKED, path, target, verify=False)
    stored = {
        "native": "blocks.0.attn.k_proj.packed",
        "native-base3": "blocks.0.attn.k_proj.trits",
        "onnx": "model.layers.0.self_attn.k_proj.weight_packed",
    }
    expected = show_tensor(PACKED, "blocks.0.attn.k_proj").values
    assert np.array_equal(show_tensor(path, stored[target]).values, expected)
    assert show_tensor(path, "blocks.0.ffn_norm").shape == (256,)
    other = {"onnx": "model.layers.0.self_attn.k_proj.weight_scale"}.get(target, "blocks.0.attn.k_proj.w_dequant_scale")
    assert show_tensor(path, other).stored_as.endswith("as stored")


def test_dense_parts():
    weights = model(PACKED).weights
    assert np.array_equal(show_tensor(PACKED, "embedding").values, weights.embedding.array.astype(np.float32))
    assert np.array_equal(show_tensor(PACKED, "model.norm.weight").values, weights.final_norm.weight)
    assert show_tensor(GGUF / "f16.gguf", "token_embd.weight").name == "embedding"


@pytest.mark.parametrize(
    ("case", "stored", "part"),
    [
        ("embedding-gemma3", "model.layers.0.post_attention_layernorm.weight", "blocks.0.attn_post_norm"),
        ("embedding-gemma3", "model.layers.0.pre_feedforward_layernorm.weight", "blocks.0.ffn_norm"),
        ("embedding-qwen3", "model.layers.0.post_attention_layernorm.weight", "blocks.0.ffn_norm"),
        ("qwen3_5-groups128-hybrid", "blocks.3.attn.q_proj", "blocks.3.attn.q_proj"),
        ("qwen3_5-groups128-hybrid", "blocks.0.attn.a_proj", "blocks.0.attn.a_proj"),
    ],
)
def test_parts_of_a_family_by_its_own_names(case, stored, part):
    assert show_tensor(DATA / "families" / case, stored).name == part


def test_what_is_no_part_of_the_model(tmp_path):
    scale = show_tensor(PACKED, "model.layers.0.self_attn.q_proj.weight_scale")
    assert (scale.stored_as, scale.shape, scale.is_ternary) == ("BF16, as stored", (1,), False)
    plain = tmp_path / "plain.safetensors"
    plain.write_bytes(safetensors_bytes({"a": np.arange(6, dtype=np.float32).reshape(2, 3)}))
    found = show_tensor(plain, "a")
    assert found.statistics() | {"histogram": None} == {
        "name": "a",
        "shape": [2, 3],
        "stored_as": "F32, as stored",
        "ternary": False,
        "values": 6,
        "not_finite": 0,
        "min": 0.0,
        "max": 5.0,
        "mean": 2.5,
        "std": pytest.approx(1.7078251),
        "mean_abs": 2.5,
        "zeros": 1,
        "distinct": 6,
        "histogram": None,
    }
    assert sum(found.statistics()["histogram"]["counts"]) == 6


def test_numbers_keep_what_they_are(tmp_path):
    """All but floats of 16 bits, which become float32; NaN stays NaN."""
    arrays = {
        str(dtype): np.array([1, 3], dtype) for dtype in (np.dtype(each) for each in ("i1", "u1", "i4", "i8", "?"))
    }
    arrays |= {"float64": np.array([0.1, np.nan]), "float32": np.array([0.1], "f4"), "float16": np.array([0.5], "f2")}
    save_file(arrays, tmp_path / "m.safetensors")
    for name, array in arrays.items():
        values = show_tensor(tmp_path / "m.safetensors", name).values
        assert values.dtype == ("float32" if name == "float16" else name)
        np.testing.assert_array_equal(values, array)


def test_a_tensor_of_a_gguf_that_is_no_model(tmp_path):
    data = (GGUF / "i2_s.gguf").read_bytes().replace(b"bitnet-b1.58", b"bitnet-b9.99")
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    raw = show_tensor(path, "blk.0.attn_q.weight")
    assert (raw.stored_as, raw.shape) == ("I2_S, its bytes, as stored", (256 * 256 // 4 + 32,))
    assert show_tensor(path, "token_embd.weight").stored_as == "F16, as stored"


def test_no_such_tensor(tmp_path):
    with pytest.raises(ConfigError, match=r"no tensor 'blocks.0.attn.q_prjo'; near it are .*blocks.0.attn.q_proj"):
        show_tensor(PACKED, "blocks.0.attn.q_prjo")
    with pytest.raises(ConfigError, match=r"near it are ([^,]+, ){2}[^,]+$"):
        show_tensor(PACKED, "xyz")
    folder = shutil.copytree(PACKED, tmp_path / "broken")
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"Only the file's own names can be used, .*not valid JSON"):
        show_tensor(folder, "xyz")
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ConfigError, match=r"^(?!there is no tensor).*not valid JSON"):  # no tensor could be named
        show_tensor(folder, "xyz")
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(FormatError):
        show_tensor(tmp_path / "m.gguf", "blk.0.attn_q.weight")


def test_shares_and_maps_of_a_matrix_with_a_pattern():
    w_t = np.zeros((8, 8), dtype=np.int8)
    w_t[:4] = 1
    w_t[4:, 4:] = -1
    found = view(w_t)
    assert found.shares() == (0.25, 0.25, 0.5)
    assert found.bands(0, 2) == [(0, 4, (0.0, 0.0, 1.0)), (4, 8, (0.5, 0.5, 0.0))]
    assert found.bands(1, 2) == [(0, 4, (0.0, 0.5, 0.5)), (4, 8, (0.5, 0.0, 0.5))]
    assert found.nonzero_map(2, 2).tolist() == [[1.0, 1.0], [0.0, 1.0]]
    assert found.nonzero_map(2, 2).dtype == np.float32
    assert found.nonzero_map(3, 100).shape == (3, 8)
    lines = found.text(unicode=False).splitlines()
    assert lines[0] == "blocks.0.attn.q_proj: 8 x 8, ternary"
    assert " ++++++++" in lines
    assert " ....----" in lines
    assert "|####    |" not in lines
    assert "|    ####|" in lines


TERNARY_TEXT = """\
blocks.0.attn.q_proj: 5 x 6, ternary
-1: 23.3%, 0: 60.0%, +1: 16.7%, each times w_dequant_scale 0.5

Share of non-zeros, from 0.0% (' ') to 100.0% ('#'):
|## #  |
|      |
|   ###|
|      |
|######|

The first weights (-, . and + for -1, 0 and +1):
 +-.+..
 ......
 ...+++
 ......
 ------

rows                 -1      0     +1
0 to 0            16.7%  50.0%  33.3%
1 to 1             0.0% 100.0%   0.0%
2 to 2             0.0%  50.0%  50.0%
3 to 3             0.0% 100.0%   0.0%
4 to 4           100.0%   0.0%   0.0%

columns              -1      0     +1
0 to 0            20.0%  60.0%  20.0%
1 to 1            40.0%  60.0%   0.0%
2 to 2            20.0%  80.0%   0.0%
3 to 3            20.0%  40.0%  40.0%
4 to 4            20.0%  60.0%  20.0%
5 to 5            20.0%  60.0%  20.0%"""
DENSE_TEXT = """\
x: 6, F32
from 0 to 8, mean 2.25, std 2.73481
mean size 2.25, 2 zeros, 5 distinct values

          0 to 0.5                2  ####################
        0.5 to 1                  0
          1 to 1.5                1  ##########
        1.5 to 2                  0
          2 to 2.5                1  ##########
        2.5 to 3                  1  ##########
"""


def test_the_whole_text():
    w_t = np.zeros((5, 6), dtype=np.int8)
    w_t[0, :4] = 1, -1, 0, 1
    w_t[2, 3:] = 1
    w_t[4] = -1
    assert view(w_t).text(40, unicode=False) == TERNARY_TEXT
    dense = TensorView("m", "x", "F32", np.array([0, 0, 1, 2, 2.5, 8], dtype=np.float32))
    text = dense.text(60, unicode=False)
    assert text.startswith(DENSE_TEXT)
    assert len(text.splitlines()) == 4 + 16
    assert f"{2:9}  {'█' * 60}\n" in dense.text(200)
    assert f"{2:9}  {'█' * 10}\n" in dense.text(30)
    assert "Share of non-zeros: 0.0% everywhere" in view(np.zeros((3, 3))).text()
    shades = view(np.tri(4, 4, dtype=np.int8).repeat(16, axis=0)).text(unicode=True).splitlines()
    assert shades[4] == "|█   |"
    cells = show_tensor(PACKED, "blocks.0.mlp.down_proj").text(200, unicode=False).splitlines()[4:20]
    assert {(len(line), line[0], line[-1]) for line in cells} == {(66, "|", "|")}  # 16 x 64 cells


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("name", ["blocks.0.mlp.down_proj", "blocks.0.ffn_norm", "embedding"])
def test_text_fits_the_width(name, width):
    text = show_tensor(PACKED, name).text(width, unicode=False)
    assert text.isascii()
    assert max(len(line) for line in text.splitlines()[3:]) <= max(width, 60)


def test_what_is_not_finite_is_counted():
    found = TensorView("m", "x", "F32", np.array([1, np.nan, np.inf, 3], dtype=np.float32))
    assert "2 of 4 values are NaN or Inf" in found.text()
    assert found.statistics()["max"] == 3.0
    assert "not_finite" in TensorView("m", "x", "F32", np.full(3, np.nan, dtype=np.float32)).statistics()


@pytest.mark.thorough
def test_pictures():
    pytest.importorskip("matplotlib")
    for name in ("blocks.0.mlp.down_proj", "final_norm"):
        found = show_tensor(PACKED, name)
        assert len(found.figure().axes) == (4 if found.is_ternary else 1)
        picture = found._repr_html_()
        assert 'src="data:image/png;base64,iVBOR' in picture
        assert picture.partition("</pre>")[0].splitlines() == f"<pre>{found.text()}".splitlines()[:2]


@pytest.mark.thorough
def test_what_the_pictures_show():
    pytest.importorskip("matplotlib")
    found = show_tensor(PACKED, "blocks.0.mlp.down_proj")  # (256, 768)
    first, share, by_row, _ = found.figure().axes
    assert np.array_equal(first.images[0].get_array(), found.values[:48, :64])
    assert np.array_equal(share.images[0].get_array(), found.nonzero_map(32, 96))
    assert share.images[0].get_extent() == [0, 768, 256, 0]
    assert {axes.images[0].get_interpolation() for axes in (first, share)} == {"nearest"}
    assert (first.images[0].get_clim(), share.images[0].get_cmap().name) == ((-1, 1), "magma")
    labels = [(axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) for axes in (first, share, by_row)]
    assert labels == [
        ("the first 48 x 64", "input", "output"),
        ("share of non-zeros", "input", ""),
        ("-1, 0 and +1 by row", "share", ""),
    ]
    assert first.images[0].cmap.colors == [figures.MINUS, "#e3e3e3", figures.PLUS]
    assert (by_row.get_xlim(), by_row.get_ylim()) == ((0, 1), (256, 0))
    bars = np.array([[bar.get_x(), bar.get_width(), bar.get_y(), bar.get_height()] for bar in by_row.patches])
    shares = np.array([shares for _, _, shares in found.bands(0)])  # eight bands of 32 rows
    assert bars[:, 1].reshape(3, 8) == pytest.approx(shares.T)
    assert bars[:, 0].reshape(3, 8) == pytest.approx(np.cumsum(shares, axis=1).T - shares.T)
    assert bars[:8, 2] + bars[:8, 3] / 2 == pytest.approx(np.arange(8) * 32 + 16)
    assert bars[:, 3] == pytest.approx(0.9 * 32)
    widths = [axes.get_position().width for axes in (first, by_row)]
    assert widths[0] / widths[1] == pytest.approx(1.2)
    (axes,) = show_tensor(PACKED, "final_norm").figure().axes
    counts, edges = show_tensor(PACKED, "final_norm").histogram(bins=64)
    drawn = axes.patches[0].get_data()
    assert np.array_equal(drawn.values, counts)
    assert np.array_equal(drawn.edges, edges)
    assert (axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) == ("final_norm", "value", "count")


def test_without_matplotlib(monkeypatch):
    figures.figure_class.cache_clear()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    found = view([[1, 0], [-1, 1]])
    with pytest.raises(BackendUnavailable, match=r"pip install 'bitnet-ref\[notebooks\]'"):
        found.figure()
    assert found._repr_html_().startswith("<pre>blocks.0.attn.q_proj: 2 x 2")
