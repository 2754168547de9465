"""formats.tl, tl1, tl2, tl_tiles: bitnet.cpp's bytes, the layouts written out in loops, and which tiles they show.

data/formats holds the first 256 rows (two row tiles) of what bitnet.cpp's converter made of a random 1536 x 1536
matrix: for TL2 the parts of its value and sign sections that belong to them.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from helpers import DATA, random_ternary, rng
from hypothesis import given, settings
from hypothesis import strategies as st

from bitnet_ref.errors import FormatError, ShapeError
from bitnet_ref.formats.gguf.tl import _scores, decode_tl, infer_tiles, pack_tl, tl_nbytes, unpack_tl
from bitnet_ref.formats.gguf.tl2 import tl2_problem, tl2_sections
from bitnet_ref.formats.gguf.tl_tiles import KNOWN_TILES, Tiles, candidates, nest, read_kernel_config, tiles_problem

KINDS = ("tl1", "tl2")
KNOWN = [(kind, shape) for kind in KINDS for shape in KNOWN_TILES[kind]]


def test_the_tiles_that_bitnet_cpp_sets_up():
    """utils/codegen_tl1.py and codegen_tl2.py with the options of setup_env.py: --BM, --BK, --bm of each shape."""
    large, three, llama = "bitnet_b1_58-large", "bitnet_b1_58-3B", "Llama3-8B-1.58-100B-tokens"
    options = {
        large: {
            (1536, 4096): ("256 128 32", "256 96 32"),
            (1536, 1536): ("128 64 64", "128 192 32"),
            (4096, 1536): ("256 128 32", "256 96 32"),
        },
        three: {
            (3200, 8640): ("160 64 32", "160 96 32"),
            (3200, 3200): ("320 128 64", "320 96 32"),
            (8640, 3200): ("320 64 32", "320 96 32"),
        },
        llama: {
            (14336, 4096): ("256 128 32", "256 96 32"),
            (4096, 14336): ("128 64 64", "128 96 32"),
            (1024, 4096): ("256 128 32", "256 96 32"),
            (4096, 4096): ("128 64 64", "128 96 32"),
        },
    }
    for number, kind in enumerate(KINDS):
        assert KNOWN_TILES[kind] == {
            shape: (Tiles(*map(int, sizes[number].split())), model)
            for model, shapes in options.items()
            for shape, sizes in shapes.items()
        }


def fixture(kind):
    with np.load(DATA / f"formats/{kind}_256x1536.npz") as file:
        return file["ternary"], file["packed"], Tiles(*map(int, file["tiles"]))


def patterned(n, k, seed=0):
    """A ternary matrix whose rows and columns have different shares of zeros, as trained ones have."""
    generator = rng(seed)
    zeros = generator.uniform(0.2, 0.6, (n, 1)) + generator.uniform(-0.15, 0.15, (1, k))
    signs = 2 * generator.integers(0, 2, (n, k), dtype=np.int8) - 1
    return np.where(generator.random((n, k)) < zeros, 0, signs).astype(np.int8)


def tl1_in_loops(w_t, tiles):
    """The module's docstring as loops."""
    (n, k), (big_m, big_k, small_m) = w_t.shape, tiles
    small_k, out = 256 // small_m, []
    for m0 in range(0, n, big_m):
        for k0 in range(0, k, big_k):
            for m1 in range(m0, m0 + big_m, small_m):
                for k1 in range(k0, k0 + big_k, small_k):
                    for m2 in range(m1, m1 + small_m, 16):
                        for k2 in range(k1, k1 + small_k, 4):
                            for row in range(m2, m2 + 16):
                                a, b, c, d = map(int, w_t[row, k2 : k2 + 4])
                                out.append((3 * a + b + 4) * 16 + 3 * c + d + 4)
    return np.array(out, dtype=np.uint8)


def tl2_in_loops(w_t, tiles):
    (n, k), (big_m, big_k, _) = w_t.shape, tiles
    k3 = k - k % big_k
    rows = [*range(8), *range(16, 24), *range(8, 16), *range(24, 32)]
    values, signs, pairs = [], [], []
    v = w_t[:, :k3].reshape(n, -1, 3).astype(int) @ [9, 3, 1]  # (n, k3/3)
    for m0 in range(0, n, big_m):
        for k0 in range(0, k3, big_k):
            for m1 in range(m0, m0 + big_m, 32):
                for k1 in range(k0 // 3, (k0 + big_k) // 3, 2):
                    values += [abs(v[m1 + r, k1]) * 16 + abs(v[m1 + r, k1 + 1]) for r in rows]
                for k1 in range(k0 // 3, (k0 + big_k) // 3, 8):
                    for j in range(16):
                        bits = "".join(f"{v[m1 + j, t] < 0:d}{v[m1 + 16 + j, t] < 0:d}" for t in range(k1, k1 + 8))
                        signs += int(bits, 2).to_bytes(2, "little")
        for k0 in range(k3, k, 32):
            for m1 in range(m0, m0 + big_m, 32):
                for k1 in range(k0, k0 + 32, 4):
                    for r in rows:
                        a, b, c, d = map(int, w_t[m1 + r, k1 : k1 + 4])
                        pairs.append((3 * a + b + 4) * 16 + 3 * c + d + 4)
    out = values + signs + pairs
    room = (k - 256) * n // 3 * 5 // 8 + 256 * n // 2 * 4 // 8
    return np.array(out + [0] * (room - len(out)), dtype=np.uint8)


@pytest.mark.parametrize("kind", KINDS)
def test_bitnet_cpps_own_bytes(kind):
    w_t, data, tiles = fixture(kind)
    assert tl_nbytes(kind, *w_t.shape) == data.size
    np.testing.assert_array_equal(unpack_tl(kind, data, *w_t.shape, tiles), w_t)
    np.testing.assert_array_equal(pack_tl(kind, w_t, tiles), data)


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(32, 96), (64, 128), (96, 160), (64, 352), (128, 608), (64, 192)])
def test_the_layout_in_loops(kind, shape):
    w_t = random_ternary(rng(3), *shape)
    in_loops = tl1_in_loops if kind == "tl1" else tl2_in_loops
    tilings = candidates(kind, *shape)
    for tiles in [tilings[0], tilings[-1], tilings[len(tilings) // 2]]:
        np.testing.assert_array_equal(pack_tl(kind, w_t, tiles), in_loops(w_t, tiles))


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_there_and_back(data):
    kind = data.draw(st.sampled_from(KINDS))
    n = 32 * data.draw(st.integers(1, 6))
    k = (16 if kind == "tl1" else 8) * data.draw(st.integers(3, 60))
    tilings = candidates(kind, n, k)
    if kind == "tl1":
        tilings += [t for t in (Tiles(16, 16, 16), Tiles(n, k, 16)) if tiles_problem(kind, n, k, t) is None]
    if not tilings:
        return
    tiles = data.draw(st.sampled_from(tilings))
    w_t = random_ternary(rng(data.draw(st.integers(0, 1000))), n, k)
    packed = pack_tl(kind, w_t, tiles)
    assert packed.dtype == np.uint8
    assert packed.size == tl_nbytes(kind, n, k)
    np.testing.assert_array_equal(decode_tl(kind, packed, n, k, tiles=tiles).w_t, w_t)


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "shape"), [case for case in KNOWN if np.prod(case[1]) < 2e7])
def test_every_known_shape(kind, shape):
    tiles = KNOWN_TILES[kind][shape][0]
    assert tiles_problem(kind, *shape, tiles) is None
    w_t = random_ternary(rng(4), *shape)
    packed = pack_tl(kind, w_t, tiles)
    np.testing.assert_array_equal(unpack_tl(kind, packed, *shape, tiles), w_t)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "shape"), [case for case in KNOWN if np.prod(case[1]) >= 2e7])
def test_every_large_known_shape(kind, shape):
    test_every_known_shape(kind, shape)


@pytest.mark.parametrize(("kind", "shape"), [("tl1", (64, 192)), ("tl2", (64, 480)), ("tl2", (64, 80))])
def test_tilings_are_one_exactly_if_their_bytes_are(kind, shape):
    w_t = random_ternary(rng(5), *shape)
    fit = [Tiles(m, k, s) for s in (16, 32, 64) for m in range(s, 65, s) for k in range(4, shape[1] + 1, 4)]
    fit = [tiles for tiles in fit if tiles_problem(kind, *shape, tiles) is None]
    by_nest, by_bytes = {}, {}
    for tiles in fit:
        by_nest.setdefault(nest(kind, *shape, tiles), []).append(tiles)
        by_bytes.setdefault(pack_tl(kind, w_t, tiles).tobytes(), []).append(tiles)
    assert len(by_nest) < len(fit)
    assert sorted(by_nest.values()) == sorted(by_bytes.values())


# -- which tiles -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_pattern_of_zeros_tells_the_tiles(kind):
    """In a shape that no table knows. Two tilings of TL2 may differ in the few columns of pairs alone, too few to tell;
    but what is told is right."""
    n, k = 512, 768
    w_t = patterned(n, k)
    tilings = candidates(kind, n, k)
    told = 0
    for tiles in tilings[:: len(tilings) // 6]:
        try:
            result = decode_tl(kind, pack_tl(kind, w_t, tiles), n, k)
        except FormatError:
            continue
        told += 1
        assert nest(kind, n, k, result.tiles) == nest(kind, n, k, tiles)
        np.testing.assert_array_equal(result.w_t, w_t)
        assert "zeros per row and column" in result.evidence
    assert told >= 5


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_pattern_nothing_is_guessed(kind):
    n, k = 256, 768
    tiles = candidates(kind, n, k)[3]
    data = pack_tl(kind, random_ternary(rng(6), n, k), tiles)
    message = (
        r"blk\.0\.q: the tile sizes .* not clearly tell .* = (\(\d+, \d+, \d+\), )+\.\.\.\. Give tiles=\(BM, BK, bm\)"
    )
    with pytest.raises(FormatError, match=message):
        decode_tl(kind, data, n, k, field="blk.0.q")
    for constant in (-1, 0, 1):
        with pytest.raises(FormatError, match="not clearly tell"):
            infer_tiles(kind, pack_tl(kind, np.full((n, k), constant, dtype=np.int8), tiles), n, k)


@pytest.mark.parametrize(
    ("kind", "n", "k", "count"),
    [
        ("tl1", 32, 64, 1),
        ("tl2", 32, 96, 1),
        ("tl1", 64, 8, 2),
        ("tl2", 64, 48, 2),
        ("tl1", 64, 128, 6),
        ("tl1", 64, 96, 7),
    ],
)
def test_which_orders_cannot_be_told_apart(kind, n, k, count):
    """At most six are shown; a single one needs no telling."""
    tilings = candidates(kind, n, k)
    assert len(tilings) == count
    data = pack_tl(kind, np.zeros((n, k), dtype=np.int8), tilings[-1])
    if count == 1:
        assert infer_tiles(kind, data, n, k) == (tilings[0], "the only ones that fit the shape and the bytes")
        return
    with pytest.raises(FormatError) as caught:
        infer_tiles(kind, data, n, k, field="a")
    shown = ", ".join([*(str(tuple(tiles)) for tiles in tilings[:6]), *(["..."] if count > 6 else [])])
    assert str(caught.value) == (
        f"a: the tile sizes of this {kind.upper()} matrix ({n}, {k}) are not in the file, and its bytes do not clearly "
        f"tell {count} possible orders apart: (BM, BK, bm) = {shown}. Give tiles=(BM, BK, bm), or the "
        "kernel_config.ini that bitnet.cpp made it with"
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_known_shape(kind):
    n, k = 1536, 1536
    usual, model = KNOWN_TILES[kind][n, k]
    plain = decode_tl(kind, pack_tl(kind, random_ternary(rng(7), n, k), usual), n, k)
    assert plain.tiles == usual
    assert model in plain.evidence
    assert "do not tell it from" in plain.evidence
    assert "confirm it" in infer_tiles(kind, pack_tl(kind, patterned(n, k), usual), n, k)[1]
    other = Tiles(512, 384, 32)
    with pytest.raises(FormatError, match=r"bitnet\.cpp uses .* speak for .*512"):
        infer_tiles(kind, pack_tl(kind, patterned(n, k), other), n, k)


@pytest.mark.parametrize("kind", KINDS)
def test_the_excess_of_a_matrix_without_a_pattern_is_near_zero(kind):
    """A chi-square minus its degrees of freedom: its deviation is the root of twice as many."""
    n, k = 1536, 1536
    usual = KNOWN_TILES[kind][n, k][0]
    tilings = candidates(kind, n, k)
    w_t = random_ternary(rng(9), n, k)
    plain, dof = _scores(kind, pack_tl(kind, w_t, usual), n, k, tilings)
    assert dof == n // 8 + k
    excess = plain[tilings.index(usual)]
    assert abs(excess) < 6 * np.sqrt(2 * dof)
    if kind == "tl1":  # whose groups of eight rows are neighbours
        zeros = w_t == 0
        share = zeros.mean()
        of_rows = np.square(zeros.reshape(-1, 8 * k).sum(axis=1) - 8 * k * share).sum() / (8 * k)
        of_columns = np.square(zeros.sum(axis=0) - n * share).sum() / n
        np.testing.assert_allclose(excess, (of_rows + of_columns) / (share * (1 - share)) - dof, rtol=1e-9)
    patterns, _ = _scores(kind, pack_tl(kind, patterned(n, k), usual), n, k, tilings)
    assert tilings[int(patterns.argmax())] == usual
    assert patterns.max() > 100 * np.sqrt(2 * dof)


@pytest.mark.parametrize("kind", KINDS)
def test_how_far_the_next_order_is(kind):
    """In sigmas: twice the noise of a chi-square of so many degrees of freedom with this much pattern in it."""
    n, k = 512, 768
    tilings = candidates(kind, n, k)
    for tiles in tilings[:: len(tilings) // 3]:
        data = pack_tl(kind, patterned(n, k), tiles)
        try:
            _, words = infer_tiles(kind, data, n, k)
        except FormatError:
            continue
        fitting = [each for each in tilings if kind == "tl1" or k % each.BK == k % tiles.BK]
        scores, dof = _scores(kind, data, n, k, fitting)
        second, best = np.sort(scores)[-2:]
        sigmas = (best - second) / math.sqrt(2 * (2 * dof + 4 * best))
        assert words == (
            f"by the zeros per row and column: {sigmas:.0f} sigmas before the next of {len(fitting)} orders"
        )


def test_the_bytes_that_tl2_needs():
    data = pack_tl("tl2", patterned(32, 544), Tiles(32, 288, 32))
    *_, needed = tl2_sections(32, 544, 256)
    assert tl2_problem(data[:needed], 32, 544, 256) is None
    assert tl2_problem(data[: needed - 1], 32, 544, 256) == (needed - 1, f"the matrix would need {needed} bytes")


def test_the_exact_checks_tell_how_many_columns_are_pairs():
    """352 columns: BK 96 leaves 64, BK 288 leaves 64, BK 24 leaves 16 (impossible), BK 192 leaves 160."""
    n, k = 32, 352
    data = pack_tl("tl2", random_ternary(rng(8), n, k), Tiles(32, 192, 32))
    assert infer_tiles("tl2", data, n, k)[0] == Tiles(32, 192, 32)
    with pytest.raises(FormatError, match="not a TL2 matrix"):
        unpack_tl("tl2", data, n, k, Tiles(32, 96, 32))


def test_no_tiling_fits():
    with pytest.raises(FormatError, match=r"no tile sizes of TL1 fit a matrix \(33, 64\)"):
        infer_tiles("tl1", np.zeros(tl_nbytes("tl1", 33, 64), dtype=np.uint8), 33, 64)
    with pytest.raises(FormatError, match="no tile sizes of TL2"):
        infer_tiles("tl2", np.zeros(tl_nbytes("tl2", 32, 64), dtype=np.uint8), 32, 64)


INI = "[Kernels_0]\nm = 64\nk = 480\nbm = 64\nbk = 96\nbmm = 32\n\n[Kernels_1]\nm=32\nk=96\nbm=32\nbk=96\nbmm=32\n"


def test_the_kernel_configuration(tmp_path):
    path = tmp_path / "kernel_config.ini"
    path.write_text(INI)
    assert read_kernel_config(path) == {(64, 480): Tiles(64, 96, 32), (32, 96): Tiles(32, 96, 32)}
    (tmp_path / "other.ini").write_text(INI.replace("bk = 96", "bk = 999999999"))
    assert max(tiles.BK for tiles in read_kernel_config(tmp_path / "other.ini").values()) == 999_999_999
    w_t = random_ternary(rng(9), 64, 480)
    data = pack_tl("tl2", w_t, Tiles(64, 96, 32))
    for config in (path, str(path), read_kernel_config(path)):
        result = decode_tl("tl2", data, 64, 480, config=config)
        np.testing.assert_array_equal(result.w_t, w_t)
        assert "kernel configuration" in result.evidence
    with pytest.raises(FormatError, match=r"has no shape \(32, 480\)"):
        decode_tl("tl2", np.zeros(tl_nbytes("tl2", 32, 480), dtype=np.uint8), 32, 480, config=path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no kernel in it"),
        ("m = 3", "not an ini file"),
        ("\xff\xfe", "not an ini file"),
        (INI + INI, "not an ini file"),
        (INI.replace("bk = 96", "bk = 1e2"), r"Kernels_0\.bk: expected a positive integer, got '1e2'"),
        (INI.replace("bk = 96", "bk = -96"), "expected a positive integer"),
        (INI.replace("bk = 96", "bk = 0"), "expected a positive integer, got '0'"),
        (INI.replace("bk = 96", "bk = 1234567890"), "expected a positive integer, got '1234567890'"),
        (INI.replace("bk = 96", "bk = " + "9" * 5000), "expected a positive integer"),
        (INI.replace("bk = 96\n", ""), r"Kernels_0\.bk: expected a positive integer, got nothing"),
        (INI + INI.replace("_", "_x").replace("bk = 96", "bk = 48"), "in another section"),
    ],
)
def test_bad_kernel_configurations(tmp_path, text, message):
    path = tmp_path / "kernel_config.ini"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(FormatError, match=message):
        read_kernel_config(path)


# -- bytes that are wrong ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_sizes_and_arguments(kind):
    tiles = Tiles(32, 96, 32)
    w_t = random_ternary(rng(10), 64, 480 if kind == "tl1" else 192)
    data = pack_tl(kind, w_t, tiles)
    for wrong in (data[:-1], np.append(data, np.uint8(0)), data[:0], data.astype(np.int16), data.tobytes()):
        with pytest.raises(ShapeError, match="bytes, as a uint8 array"):
            decode_tl(kind, wrong, *w_t.shape, tiles=tiles)
    for bad in ((0, 96, 32), (-32, 96, 32), (64, 96, 48), (48, 96, 32), (32, 100, 32), (32, 960, 32), (64, 96, 128)):
        with pytest.raises(ShapeError, match="tile sizes that fit"):
            decode_tl(kind, data, *w_t.shape, tiles=bad)
    for matrix in (w_t.astype(np.int16), w_t[0], w_t + np.int8(1), w_t - np.int8(1), w_t.tolist()):
        with pytest.raises(ShapeError):
            pack_tl(kind, matrix, tiles)


def test_a_tl1_nibble_above_8():
    w_t, data, tiles = fixture("tl1")
    for at in (0, 70_000):
        bad = data.copy()
        bad[at] = 0x39
        with pytest.raises(FormatError, match=f"byte {at}, q: byte 0x39 is no pair") as caught:
            decode_tl("tl1", bad, *w_t.shape, tiles=tiles, field="q")
        assert caught.value.offset == at
        with pytest.raises(FormatError, match="in any tiles: byte 0x39"):
            infer_tiles("tl1", bad, *w_t.shape)


def test_wrong_tl2_bytes():
    w_t, data, tiles = fixture("tl2")
    values_end, signs_end = w_t.size // 6, w_t.size * 5 // 24
    zero = pack_tl("tl2", np.zeros_like(w_t), tiles)
    for source, at, value, message in (
        (data, 70, 0xE0, "no pair of triples 0..13"),
        (zero, values_end + 32 * 7, 0x80, "sign bit is set for a triple that is zero"),
        (data, signs_end, 1, "in the padding"),
        (data, data.size - 1, 1, "in the padding"),
    ):
        bad = source.copy()
        bad[at] = value
        with pytest.raises(FormatError, match=message) as caught:
            unpack_tl("tl2", bad, *w_t.shape, tiles)
        assert caught.value.offset == at
    tail = pack_tl("tl2", random_ternary(rng(11), 32, 128), Tiles(32, 96, 32))
    tail[32 * 96 * 5 // 24] = 0x99
    with pytest.raises(FormatError, match=r"0x99 is no pair of nibbles 0\.\.8"):
        unpack_tl("tl2", tail, 32, 128, Tiles(32, 96, 32))


@settings(deadline=None, max_examples=60)
@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 10**6), changes=st.integers(1, 5))
def test_damage_is_an_error_or_the_matrix_of_those_bytes(kind, seed, changes):
    """Whatever is read without an error packs to the very bytes it was read from."""
    generator, tiles = rng(seed), Tiles(32, 96, 32)
    data = pack_tl(kind, random_ternary(generator, 64, 192 if kind == "tl1" else 224), Tiles(32, 96, 32))
    data[generator.integers(0, data.size, changes)] = generator.integers(0, 256, changes)
    k = 192 if kind == "tl1" else 224
    try:
        w_t = unpack_tl(kind, data, 64, k, tiles)
    except FormatError:
        return
    np.testing.assert_array_equal(pack_tl(kind, w_t, tiles), data)


@pytest.mark.parametrize("tiles", [Tiles(256, 128, 32), Tiles(256, 128, 64), Tiles(128, 64, 32)])
def test_the_loops_of_tl1_pass_every_weight_once(tiles):
    """The innermost block has 16 rows and 4 columns."""
    loops = nest("tl1", 512, 256, tiles)
    assert math.prod(count for _, _, count in loops) * 16 * 4 == 512 * 256
