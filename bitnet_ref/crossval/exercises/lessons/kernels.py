"""Notebooks 4 and 8: kernels for processors and graphics cards."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ....errors import BitNetRefError, describe
from ....reference.layers import Array
from ..answers import as_array, as_number, as_parts, expect_array, expect_number
from ..declare import Wrong, draws, exercise, run, said_of
from ..registers import Avx2
from ..tables import judged_by_table

# -- 4: CPU kernels ------------------------------------------------------------------------------------------------


@exercise("4.1")
def codes_of_neighbours(answer: Any) -> str:
    codes = draws(41).integers(0, 3, 16)
    table = codes.reshape(4, 4)
    four = (table << np.array([0, 2, 4, 6])).sum(axis=1).astype(np.uint8)
    mistakes = {
        "the columns of a byte are in the opposite order: the first is in the lowest bits": table[:, ::-1].ravel(),
        "you took the same place of all four bytes first; a byte holds neighbours": table.T.ravel(),
        "those are weights (−1, 0, 1), and codes are wanted": codes - 1,
        "a code is taken from an unsigned byte: 0 − 1 is 255": (codes - 1) % 256,
        "& 3 is missing: the codes above it are still there": (four[:, None] >> np.array([0, 2, 4, 6])).ravel(),
        "a code has two bits; yours are shifted by one": (four[:, None] >> np.arange(4) & 3).ravel(),
    }
    expect_array(run(answer, four), codes, mistakes=mistakes)
    return "Now: which columns lie in the lowest two bits of the four bytes?"


judged_by_table("4.2")
judged_by_table("4.3")


@exercise("4.4")
def table_of_a_pair(answer: Any) -> str:
    draw = draws(44)
    codes = np.indices((3, 3)).reshape(2, 9)[::-1]  # (2, 9): of column 0, then of column 1
    for x in (np.array([5, -2]), np.array([-128, -128]), draw.integers(-127, 128, 2)):
        right = x @ (codes - 1)
        mistakes = {
            "codes are multiplied; a weight is its code less 1": x @ codes,
            "the columns are exchanged: the code of column 0 runs first": x @ (codes[::-1] - 1),
            "256 is added; that is the package's, so that halves of 5 bits do without a sign": right + 256,
            "only column 0 is in it": x[0] * (codes[0] - 1),
            "a sum of two activations does not fit int8": right.astype(np.int8),
            "the two products are multiplied; they are added": np.prod(x[:, None] * (codes - 1), axis=0),
        }
        if as_array(run(answer, *x.tolist())).size == 16:
            raise Wrong("Nine entries are wanted, at c0 + 3 c1; vpshufb's table of 16 comes after.")
        expect_array(run(answer, *x.tolist()), right, mistakes=mistakes)
    return "A row of K weights is K / 2 look-ups, and no product."


class Undivided(np.ndarray):
    """Bytes that a vector unit would hold: it can add, multiply and shift them, but not divide."""

    def divide(self, *_: Any) -> Any:
        raise Wrong("A vector unit cannot divide: no /, // or %. Multiply by 3, and what passes 256 is the digit.")

    __truediv__ = __floordiv__ = __mod__ = __divmod__ = __itruediv__ = __ifloordiv__ = __imod__ = divide


@exercise("4.digits")
def digits_in_base_3(answer: Any) -> str:
    value = draws(48).permutation(243)
    r = (256 * value + 242) // 243
    powers = 3 ** np.arange(5)
    right = value[:, None] // powers[::-1] % 3
    passed = r[:, None] * 3 * powers >> 8
    mistakes = {
        "the digits run the other way: what comes off first is the highest digit, of 3⁴": right[:, ::-1],
        "3 r is computed in bytes, and what passes 256 is lost: widen r first": np.zeros_like(right),
        "what has come off must be taken away, & 255, before the next step": passed,
        "& 3 takes two bits; the next digit comes from what is left of 256, & 255": passed & 3,
        "those are digits of the number r; a byte is the fraction r / 256": r[:, None] // powers[::-1] % 3,
        "those are weights (−1, 0, 1), and codes are wanted": right - 1,
        "those are what is left after each step; the digit is what passed 256": r[:, None] * 3 * powers & 255,
    }
    expect_array(run(answer, r.astype(np.uint8).view(Undivided)), right, mistakes=mistakes)
    return "All 243 bytes, without a division."


@exercise("4.tile")
def tile_product(answer: Any) -> str:
    draw = draws(49)
    a = draw.integers(-128, 128, (16, 64), dtype=np.int8)
    b = draw.integers(0, 256, (16, 64), dtype=np.uint8)
    c = draw.integers(-1000, 1000, (16, 16))
    groups, of_rows = a.reshape(16, 16, 4).astype(np.int64), b.reshape(16, 16, 4).astype(np.int64)
    right = c + np.einsum("mki,kni->mn", groups, of_rows)
    wide = a.astype(np.int64)
    mistakes = {
        "the sums that are there already, c, are missing": right - c,
        "line k of b has four columns of every row, and not all columns of row k": c + wide @ b.astype(np.int64).T,
        "c[m, n] is of token m and row n; yours is the other way": c + (right - c).T,
        "only the first of each four products is added": c + np.einsum("mk,kn->mn", groups[..., 0], of_rows[..., 0]),
        "int8 times uint8 is int16 in NumPy, and wraps: widen both first": c
        + np.einsum("mki,kni->mn", a.reshape(16, 16, 4), b.reshape(16, 16, 4)),
        "the activation of b[k, 4n + i] is a[m, 4k + i]; the four are neighbours in a, too": c
        + np.einsum("mki,kni->mn", wide.reshape(16, 4, 16).swapaxes(1, 2), of_rows),
        "four neighbours in line k are four columns of one row; yours are 16 apart": c
        + np.einsum("mki,kin->mn", groups, of_rows.reshape(16, 4, 16)),
        "the bytes of b have no sign: 200 is not −56": c
        + np.einsum("mki,kni->mn", groups, of_rows.astype(np.int8).astype(np.int64)),
        "the bytes of a have a sign: −56 is not 200": c
        + np.einsum("mki,kni->mn", groups.astype(np.uint8).astype(np.int64), of_rows),
        "the wrong operand is unsigned: b has no sign, and a has one": c
        + np.einsum("mki,kni->mn", groups.astype(np.uint8).astype(np.int64), of_rows.astype(np.int8).astype(np.int64)),
    }
    expect_array(run(answer, c, a, b), right, mistakes=mistakes)
    return "16,384 products. The processor does them in one instruction, of 16 cycles."


@exercise("4.5")
def rows_and_columns(answer: Any) -> str:
    draw = draws(46)
    gate = draw.normal(size=(5, 40)).astype(np.float32)
    gate[0, :4] = 0
    x_int8 = np.where(gate > 0, draw.integers(-3, 4, gate.shape), 0).astype(np.int8)
    wanted = "Two arrays are wanted: the rows of up_proj, and the columns of down_proj."
    rows, columns = as_parts(run(answer, gate, x_int8), 2, wanted)
    of_rows = {
        "a gate of 0 is closed, too: ReLU² of it is 0": gate >= 0,
        "a negative gate is closed: ReLU² of it is 0": gate != 0,
        "those that need not be read": gate <= 0,
        "the int8 activation is known only when the row has been read and multiplied": x_int8 != 0,
    }
    of_columns = {
        "an open gate may still give an activation that is rounded to 0": gate > 0,
        "an activation below 0 counts, too: up_proj's result has a sign": x_int8 > 0,
        "those that need not be read": x_int8 == 0,
    }
    for what, mine, right, mistakes in (
        ("rows of up_proj", rows, gate > 0, of_rows),
        ("columns of down_proj", columns, x_int8 != 0, of_columns),
    ):
        with said_of(f"The {what}:"):
            expect_array(mine, right, mistakes=mistakes)
    return f"Here {(gate > 0).mean():.0%} of the rows, and {(x_int8 != 0).mean():.0%} of the columns."


@exercise("4.6")
def judged_by_the_roofline(answer: Any) -> str:
    draw = draws(47)
    cases = [(1, 4, 50.0, 20.0, 100.0), (2, 4, 50.0, 20.0, 100.0), (1, 5, 50.0, 20.0, 110.0)]
    cases += [(int(tokens), 4, 30.0, 15.1, 132.1) for tokens in draw.permutation([1, 2, 3, 4, 64])]
    for tokens, packed, speed, read, peak in cases:
        limits = {"memory": tokens * packed * read, "arithmetic": peak}
        right = min(limits, key=lambda name: limits[name])
        try:
            limit, share = run(answer, tokens, packed, speed, read, peak)
        except (TypeError, ValueError):
            raise Wrong('Two are wanted: "memory" or "arithmetic", and the share.') from None
        case = f"{tokens} tokens, {packed} weights in a byte, {read:g} GB/s, {peak:g} G per second"
        one, bytes_alone = packed * read, tokens * read
        name = str(limit).strip().lower()
        if name not in limits:
            raise Wrong(f'"memory" or "arithmetic" is wanted, not {describe(limit)}.')
        if name != right:
            causes = {
                "a byte meets each of the tokens": (one < peak) != (right == "memory"),
                "a byte has several weights": (bytes_alone < peak) != (right == "memory"),
            }
            why = next((f" Likely mistake: {cause}." for cause, made in causes.items() if made), "")
            raise Wrong(f"{case}: {limits['memory']:g} against {peak:g}, so the lower is {right}, not {limit!r}.{why}")
        mistakes = {
            "That is the percentage; a share is wanted.": 100 * speed / limits[right],
            "That is the limit over the speed: the share is 1 over it.": limits[right] / speed,
            f"{case}: that is the share of the higher limit; {right} is the lower one.": speed / max(limits.values()),
            "GB/s are bytes; each has several multiply-adds in it.": speed / read,
        }
        expect_number(
            share,
            speed / limits[right],
            within=1e-6,
            mistakes=mistakes,
            hint=f"{case}: {speed:g} over the lower limit.",
        )
    return "A kernel at its roof is done; one far below it waits for something else."


@exercise("4.7")
def kernel_of_registers(answer: Any) -> str:
    draw = draws(45)
    w_t = draw.integers(-1, 2, (64, 336), dtype=np.int8)
    x = draw.integers(-127, 128, 336, dtype=np.int8)
    wide, blocks = x.astype(np.int64), x.reshape(-1, 4, 4).astype(np.int64)
    codes, sum_of_x = w_t[:8].astype(np.int64) + 1, x.sum(dtype=np.int64)
    lowest = np.repeat(codes.reshape(8, -1, 4, 4)[:, :, :1], 4, axis=2).reshape(8, -1)
    mistakes = {
        "a code is w + 1, so the sum of the activations is still in it": codes @ wide,
        "the sum of the activations is added, not taken away": codes @ wide + sum_of_x,
        "the fields of a byte run the other way: the lowest bits are the first four columns": (
            codes @ np.flip(blocks, 1).ravel() - sum_of_x
        ),
        "the four codes of a byte are four columns apart, not neighbours": (
            codes @ blocks.swapaxes(1, 2).ravel() - sum_of_x
        ),
        "every block meets the first 16 activations": codes @ np.tile(wide[:16], 21) - sum_of_x,
        "& 3 is missing: from above come the other codes, and bits of the neighbour": without_mask(w_t, x, 16),
        "& 3 is missing; from above come the other codes, and bits of the neighbour": without_mask(w_t, x, 1),
        "the shift is missing: all four rounds take the lowest bits": lowest @ wide - sum_of_x,
        "what is in the int16 sums after the last whole 16 blocks is lost": codes[:, :256] @ wide[:256] - sum_of_x,
    }
    expect_array(run(answer, cpu := Avx2(), registers_of(w_t), x), codes @ wide - sum_of_x, mistakes=mistakes)
    if cpu.executed["vpmaddubsw"] < 4 * 21:
        raise Wrong(
            f"The sums are right, but not made by registers: {cpu.executed['vpmaddubsw']} vpmaddubsw were executed, "
            "and these 21 blocks take four each."
        )
    ones = registers_of(np.ones((64, 4096), dtype=np.int8))
    for worst in (-128, 127):
        sums = as_array(run(answer, cpu := Avx2(), ones, np.full(4096, worst, dtype=np.int8)))
        if not (sums == worst * 4096).all():
            raise Wrong(
                f"Right on random numbers. But 4,096 weights of +1 and activations of {worst} give {sums.ravel()[0]}, "
                f"not {worst * 4096}: an int16 wrapped. After how many vpmaddubsw must the sums be widened?"
            )
    each = 8 * 4096 / cpu.executed.total()
    return f"Exact, also on the worst input, with {each:.1f} multiply-adds per instruction."


def without_mask(w_t: Array, x: Array, blocks: int) -> Array:
    """The sums of exercise 4.7 if `vpand` is left out, widened after so many blocks."""
    cpu, ones, registers = Avx2(), np.ones(16, dtype=np.int16), registers_of(w_t)
    total, short = np.zeros(8, dtype=np.int32), np.zeros(16, dtype=np.int16)
    for block, register in enumerate(registers):
        for s in range(4):
            x4 = cpu.vpbroadcastd(x[16 * block + 4 * s :][:4])
            short = cpu.vpaddw(short, cpu.vpmaddubsw(cpu.vpsrlw(register, 2 * s), x4))
        if (block + 1) % blocks == 0 or block + 1 == len(registers):
            total = cpu.vpaddd(total, cpu.vpmaddwd(short, ones))
            short = np.zeros(16, dtype=np.int16)
    sums: Array = total - x.sum(dtype=np.int32)
    return sums


def registers_of(w_t: Array) -> Array:
    """w_t (64, K) -> (K / 16, 32) uint8: the first half of a panel's first register, rows 0 to 7, of each block."""
    return panel_of(w_t).reshape(-1, 256)[:, :32]


def panel_of(w_t: Array) -> Array:
    """w_t (64, K) -> (16 K,) uint8, the panel as the kernels read it: 256 bytes for each 16 columns."""
    codes = (w_t + 1).astype(np.uint8).reshape(64, -1, 4, 4)  # row, block, shift, byte
    joined = (codes << np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]).sum(axis=2, dtype=np.uint8)
    return np.ascontiguousarray(joined.swapaxes(0, 1)).ravel()


# -- 8: CUDA kernels -----------------------------------------------------------------------------------------------


judged_by_table("8.1")


@exercise("8.2")
def place_in_a_tile(answer: Any) -> str:
    lane, word, crumb, byte = np.indices((32, 4, 4, 4))
    row = lane // 4 + 8 * (word % 2)
    column = 64 * (word // 2) + 16 * (lane % 4) + 4 * crumb + byte
    right = np.empty((16, 128, 4), dtype=np.int64)
    right[row, column] = np.stack([lane, word, crumb, byte], axis=-1)
    for (r, c), _ in np.ndenumerate(right[..., 0]):
        got = as_array(run(answer, r, c)).ravel()
        if got.size != 4:
            raise Wrong("Four numbers are wanted: (lane, word, crumb, byte).")
        if (got == right[r, c]).all():
            continue
        names = ("lane", "word", "crumb", "byte")
        bad = next(i for i in range(4) if got[i] != right[r, c, i])
        swapped = " Crumb and byte are exchanged." * bool((got[[0, 1, 3, 2]] == right[r, c]).all())
        raise Wrong(f"Row {r}, column {c}: the {names[bad]} is {right[r, c, bad]}, yours is {got[bad]}.{swapped}")
    return "All 2,048 weights."


@exercise("8.mma")
def fragments_multiplied(answer: Any) -> str:
    draw = draws(86)
    lane, r4, i = np.indices((32, 4, 4))
    g, t = lane // 4, lane % 4
    at_a, at_b = (g + 8 * (r4 % 2), 4 * t + 16 * (r4 // 2) + i), (4 * t + 16 * r4 + i, g)
    a, b = (draw.integers(-128, 128, (32, registers, 4), dtype=np.int8) for registers in (4, 2))

    def product(of_a: Sequence[Array] = at_a, of_b: Sequence[Array] = at_b, kind: type = np.int64) -> Array:
        """A B, if fragments lie at these places."""
        whole_a: Array = np.zeros((16, 32), dtype=kind)
        whole_b: Array = np.zeros((32, 8), dtype=kind)
        whole_a[of_a[0], of_a[1]] = a
        whole_b[of_b[0][:, :2], of_b[1][:, :2]] = b
        return whole_a @ whole_b

    def part(whole: Array, rows: tuple[int, ...] = (0, 0, 8, 8), tokens: tuple[int, ...] = (0, 1, 0, 1)) -> Array:
        return np.stack([whole[g[:, 0, 0] + m, 2 * t[:, 0, 0] + n] for m, n in zip(rows, tokens, strict=True)], axis=1)

    whole = product()
    exchanged = g + 8 * (r4 // 2), 4 * t + 16 * (r4 % 2) + i
    strided = t + 4 * i + 16 * (r4 // 2)
    mistakes = {
        "A's register 1 is row g + 8 of the same columns; register 2 is 16 columns on": part(product(exchanged)),
        "D's registers 0 and 1 are two tokens of row g; 2 and 3 those of row g + 8": part(
            whole, (0, 8, 0, 8), (0, 0, 1, 1)
        ),
        "a lane has two neighbouring tokens of D, 2t and 2t + 1": np.stack(
            [whole[g[:, 0, 0] + m, t[:, 0, 0] + n] for m in (0, 8) for n in (0, 4)], axis=1
        ),
        "the four bytes of a register are four neighbouring columns, in A as in B": part(product((at_a[0], strided))),
        "B's register 1 is 16 columns on; yours follows at once": part(product(of_b=(8 * t + 4 * r4 % 8 + i, g))),
        "int8 products wrap: widen both first": part(product(kind=np.int8)),
        "row g + 8 is missing: all four are of row g": part(whole, (0, 0, 0, 0)),
    }
    result = as_array(run(answer, a, b))
    if result.shape == (16, 8):
        raise Wrong("That is D as a whole. Each lane's part is wanted: (32 lanes, 4 registers).")
    if result.shape == (32, 4) and result[5].any():
        of_lane_5 = [np.where(np.arange(32)[:, None, None] == 5, each, 0).astype(np.int8) for each in (a, b)]
        if np.array_equal(result[5], as_array(run(answer, *of_lane_5))[5]):
            raise Wrong(
                "Lane 5 gets the same when the other lanes hand in zeros: each lane multiplies its own fragments. "
                "A sum of D needs a whole row of A and a column of B, which are those of several lanes."
            )
    expect_array(result, part(whole), mistakes=mistakes)
    return "4,096 products in one instruction of a warp."


@exercise("8.3")
def race_mended(answer: Any, run_kernel: Callable[..., Array], orders: Mapping[str, int]) -> str:
    """run_kernel: (text, name, x, order, threads) -> y."""
    if not isinstance(answer, str) or "tree" not in answer:
        raise Wrong("The text of a kernel named tree is wanted.")
    draw = draws(83)
    for order, seed in orders.items():
        numbers = draw.integers(-1000, 1000, 64)
        got = run_text(run_kernel, answer, "tree", numbers, seed)
        if (got == numbers.sum()).all():
            continue
        if got[0] == numbers.sum():
            raise Wrong(
                f"Threads {order}: thread 0 has the sum, thread {np.flatnonzero(got != got[0])[0]} has not. "
                "It reads all[0] before it is written: one barrier is missing before the last line."
            )
        raise Wrong(
            f"Threads {order}: thread 0 has {got[0]}, and the sum is {numbers.sum()}. A round must not begin "
            "before all threads have finished the one before, and the first not before all have written their x."
        )
    if not re.search(r"all\[[^]]+\]\s*(\+=|=\s*all)", answer):
        return "In every order. But it is no tree any more: each thread adds all 64, where six rounds would do."
    return "In every order, for every thread, on numbers that you have not seen."


@exercise("8.4")
def warp_of_rows(answer: Any, run_kernel: Callable[..., Array]) -> str:
    """run_kernel: (text, name, x, order, threads) -> y."""
    if not isinstance(answer, str) or "eight_rows" not in answer:
        raise Wrong("The text of a kernel named eight_rows is wanted.")
    draw = draws(84)
    w_t, x_q = draw.integers(-1, 2, (8, 64), dtype=np.int8), draw.integers(-128, 128, 64, dtype=np.int8)
    by_lane = w_t.reshape(32, 4, 4).astype(np.int64)  # lane, crumb, byte
    words = ((by_lane & 3) << (2 * np.arange(4)[:, None] + 8 * np.arange(4))).sum(axis=(1, 2)).astype(np.uint32)
    x = np.concatenate([words.view(np.int32), x_q.view(np.int32)])
    shifted = words[:, None] << np.array([6, 4, 2, 0], dtype=np.uint32)  # lane, crumb

    def sums(weights: Array, *distances: int, activations: Array | None = None) -> Array:
        """Of all lanes, after shuffles over these distances. weights: (lane, crumb, byte)."""
        own = x_q.reshape(4, 4, 4) if activations is None else activations
        of_lane = np.tile(own.astype(np.int64), (8, 1, 1))
        result: Array = (weights.astype(np.int64) * of_lane).sum(axis=(1, 2))
        for distance in distances:
            result = result + result[np.arange(32) ^ distance]
        return result

    right = sums(by_lane, 1, 2)
    unmasked = shifted.view(np.int8).reshape(32, 4, 4)
    unshifted = np.repeat((words & 0xC0C0C0C0).astype(np.uint32)[:, None], 4, axis=1).view(np.int8).reshape(32, 4, 4)
    first = np.tile(x_q.reshape(4, 4, 4)[:1], (4, 1, 1))
    mistakes = {
        "it is 64 times the sum: divide at the end": 64 * right,
        "each lane has its own part; the four lanes of a row must add theirs, by two shuffles": sums(by_lane),
        "two of the four lanes are added: one shuffle is missing": sums(by_lane, 1),
        "two of the four lanes are added: the shuffle over 1 is missing": sums(by_lane, 2),
        "it adds lanes of other rows: those of a row differ in the bits worth 1 and 2": sums(by_lane, 2, 4),
        "eight lanes are added; a row has four, and the shuffle over 4 meets another row": sums(by_lane, 1, 2, 4),
        "all lanes of the warp are added; a row has four": sums(by_lane, 1, 2, 4, 8, 16),
        "crumb 0 is in the lowest bits of its byte; yours run the other way": sums(by_lane[:, ::-1], 1, 2),
        "every lane takes the activations of the first: its own begin at 32 + 4 * (i % 4)": sums(
            by_lane, 1, 2, activations=first
        ),
        "the other crumbs are still in the bytes: & 0xC0C0C0C0 is missing": np.trunc(sums(unmasked, 1, 2) / 64),
        "no crumb but the highest is read: each has a shift of its own": sums(unshifted, 1, 2) // 64,
    }
    expect_array(run_text(run_kernel, answer, "eight_rows", x, 1, threads=32), right, mistakes=mistakes)
    return "512 weights in four dp4a of a warp. The package's kernel does this for 16 rows, and tile after tile."


def run_text(
    run_kernel: Callable[..., Array],
    text: str,
    name: str,
    x: Array,
    order: int,
    threads: int | None = None,
) -> Array:
    """y of the student's kernel. Raises Wrong if it does not compile or run.   threads: one for each x if None."""
    try:
        return run_kernel(text, name, x, order, threads or len(x))
    except BitNetRefError as error:
        waits = "no thread can go on" in str(error)
        hint = " A barrier must be reached by all threads: it cannot stand inside the if." * waits
        raise Wrong(f"It does not run: {str(error)[:300]}.{hint}") from None


@exercise("8.5")
def one_order_for_a_sum(answer: Any) -> str:
    draw = draws(85)
    cases = [draw.normal(size=count).astype(np.float32) for count in (3, 12, 40)]
    cases += [np.array([1e30, 1, -1e30, 3], dtype=np.float32)]  # float64 has an order, too
    in_chunks = True
    for parts in cases:
        results: dict[float, list[int]] = {}
        for order in ([*range(len(parts))], *(draw.permutation(len(parts)).tolist() for _ in range(20))):
            results.setdefault(as_number(run(answer, [(i, parts[i]) for i in order])), order)
        size = float(np.abs(parts).max())
        true = float(math.fsum(parts.tolist()))
        for result in results:
            if abs(result - true) > 1e-5 * size:
                missing = [i for i in range(len(parts)) if abs(result + float(parts[i]) - true) <= 1e-5 * size]
                why = f" Part {missing[0]} is missing." if missing and len(parts) < 40 else ""
                raise Wrong(f"{len(parts)} parts: the sum is {true:.6g}, and yours {result:.6g}.{why}")
        if len(results) > 1:
            (one, first), (other, second) = [*results.items()][:2]
            wide = float(sum(float(parts[i]) for i in second)) == other
            why = "they are added as they come" if not wide else "float64 only rounds less; its sums have an order, too"
            raise Wrong(
                f"{len(parts)} parts: {one:.9g} if they arrive in the order {first[:8]}, and {other:.9g} in the order "
                f"{second[:8]}. Likely mistake: {why}."
            )
        in_chunks &= float(np.cumsum(parts)[-1]) in results
    return (
        "One order of arrival is as good as another: that of the chunks, as in the package's kernel."
        if in_chunks
        else "The same for every order. (The package adds in the order of the chunks; yours is another rule.)"
    )


judged_by_table("8.6")


@exercise("8.fixed")
def fixed_time_of_a_product(answer: Any) -> str:
    rate = (8.85 - 1.64) / (6.74 - 3.81)
    given = as_array(answer).ravel()
    if given.size != 2:
        raise Wrong("Two numbers are wanted: the microseconds of a matrix of no bytes, and TB/s.")
    if 2400 < given[1] < 2500:
        raise Wrong("Those are GB/s; TB/s are wanted.")
    with_it = "That is with the fixed time in it; how much longer takes the larger one, and for how many more bytes?"
    of_rate: dict[str, ArrayLike] = {
        with_it: (8.85 / 6.74, 1.64 / 3.81),
        "Those are microseconds for a MB; TB/s are 1 over it.": 1 / rate,
        "The microseconds come first, then TB/s.": 3.81 - 1.64 / rate,
    }
    speed = rate if given[1] == round(rate, 1) else given[1]  # 2.5, rounded by hand, will do
    expect_number(speed, rate, within=0.01, mistakes=of_rate, hint="TB/s: the difference of bytes over that of times.")
    of_time = {
        "That is the time of the smaller matrix, with its 1.64 MB.": 3.81,
        "That is how much longer the larger one takes.": 6.74 - 3.81,
        "That is with the memory's 4.2 TB/s; take the speed that you found.": 3.81 - 1.64 / 4.2,
        "That is with 1.31 TB/s, in which the fixed time is.": 3.81 - 1.64 / (8.85 / 6.74),
        "Those are seconds.": (3.81 - 1.64 / rate) / 1e6,
    }
    expect_number(
        given[0], 3.81 - 1.64 / rate, within=0.06, mistakes=of_time, hint="Microseconds: 3.81 less its bytes."
    )
    return "So three microseconds do not depend on the bytes: half of the larger one's time, and most of the other's."
