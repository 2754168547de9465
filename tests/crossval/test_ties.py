"""Rows of ties: which they are, what is chosen among them, and when they show a rule of rounding."""

import numpy as np
import pytest
from helpers import model

from bitnet_ref.crossval.explain.ties import choices, one_way, tied_rows
from bitnet_ref.crossval.flips import Flip, judge_flips

O_PROJ = "blocks.0.attn.o_proj.hook_x_int8"


def flip(before, element=0, name=O_PROJ):
    """The flip of a value to the integer on the other side of it; the reference rounds halves to even."""
    mine, below = round(before), int(np.floor(before))
    return Flip(name, 0, element, before, 1e-3, mine, below + (mine == below))


def test_a_row_of_ties_has_several_sizes_on_a_half():
    ties = [flip(size, i) for i, size in enumerate((0.5, -0.5, 7.5, 30.500002))]
    others = [
        flip(size, i, "blocks.0.mlp.down_proj.hook_x_int8") for i, size in enumerate((3.5, 8.5, 99.4999, 101.501))
    ]
    assert tied_rows([*ties, *others]) == {O_PROJ: {0.5: ties[:2], 7.5: ties[2:3], 30.500002: ties[3:]}}
    assert tied_rows(ties, least=4) == {}


def test_the_choice_is_the_one_whose_row_is_right():
    """Each tie moves the row by less than what every change of the choice scatters."""
    rng, count = np.random.default_rng(1), 30
    ties = [[flip(i + 0.5, i)] for i in range(count)]
    moves = rng.standard_normal((count, 200))

    def rows_of(sets):
        for made in sets:
            places = sorted(each.element for each in made)
            scatter = np.random.default_rng([3, *places]).standard_normal(200)
            yield moves[places].sum(axis=0) + 2 * scatter

    wanted = [each for alike, on in zip(ties, rng.random(count) < 0.5, strict=True) if on for each in alike]
    (right,) = rows_of([wanted])
    found = list(choices(ties, rows_of, right))
    assert (0.0, wanted) in found
    assert [error for error, _ in found] == sorted((error for error, _ in found), reverse=True)


@pytest.mark.parametrize(("count", "is_rule"), [(23, False), (24, True)])
@pytest.mark.parametrize("rule", [lambda x: np.floor(x + 0.5), lambda x: np.sign(x) * np.floor(abs(x) + 0.5)])
def test_many_halves_that_all_go_one_way_are_a_rule(count, is_rule, rule):
    ties = [flip(sign * (i + 0.5), i) for i, sign in zip(range(count), [1, -1] * 12, strict=False)]
    (row,) = tied_rows(ties).values()
    made = [each for each in ties if each.candidate == rule(each.before_rounding)]
    assert one_way([row], made) == is_rule
    assert not one_way([row], made[1:])


@pytest.mark.parametrize(("count", "is_rule"), [(6, False), (30, True)])
def test_equal_ties_of_heads_that_share_a_v_count_once(count, is_rule):
    """All halves of another engine go away from zero: 24 values of 6 sizes, and 120 of 30."""
    config = model("storyteller").config
    x = np.zeros((1, config.num_attention_heads * config.head_dim), dtype=np.float32)
    x[0, 0] = 127  # so that the scale is 1
    x[0, 1 : 1 + 4 * count] = np.tile(np.arange(count) + np.float32(0.5), 4)
    mine, theirs = (rule(x).astype(np.int8) for rule in (np.rint, lambda x: np.floor(x + 0.5)))
    linear, source = "blocks.0.mlp.down_proj", "blocks.0.mlp.sub_norm.hook_normalized"
    run = {source: x}
    judged = judge_flips(run, run, linear, config, 0, np.ones(1, dtype=bool), mine, theirs, own_engine=False)
    assert (judged.unexplained is not None) == is_rule, judged.why
    assert is_rule or len(judged.flips) == (mine != theirs).sum()
