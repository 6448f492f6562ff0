"""The rules on tables made by hand: known orders, ties, zeros, caps, and what is refused."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest

from hybridize.select import rules
from hybridize.select.rules import EPSILON, count_kept

RECALL = [0.90, 0.60, 0.70, 0.88, 0.30, 0.90, 0.50, 0.85]
KNOWLEDGE = [0.55, 0.59, 0.50, 0.60, 0.40, 0.58, 0.52, 0.57]
# (0.9 - R) / (0.6 - C), by hand: 0, 30, 2, 0.02 / 1e-6, 3, 0, 5, 1.67
ORDER = (3, 1, 6, 4, 2, 7, 0, 5)


def test_halo_on_a_known_table():
    found = rules.halo(RECALL, KNOWLEDGE, keep="1/4")
    assert found.order == ORDER and found.kept == (1, 3)
    assert found.scores == tuple(
        (0.90 - r) / (0.60 - c + 1e-6) for r, c in zip(RECALL, KNOWLEDGE, strict=True)
    )
    assert found.scores[3] == pytest.approx(0.02 / EPSILON, rel=1e-6)
    assert found.scores[1] == pytest.approx(0.3 / 0.01, rel=1e-3)


def test_the_example_of_the_paper_notes():
    """R 0.60 and C 0.59 against bests of 0.90 and 0.60 give about 30; R 0.70 and C 0.50 about 2."""
    scores = rules.halo([0.60, 0.70, 0.90], [0.59, 0.50, 0.60], keep=1).scores
    assert scores[0] == pytest.approx(30, rel=1e-3) and scores[1] == pytest.approx(2, rel=1e-3)
    assert scores[2] == 0


def test_a_cap_makes_ties_that_go_to_the_lower_layer():
    found = rules.halo(RECALL, KNOWLEDGE, keep=3, cap=5.0)
    # 1 and 3 reach the cap; layer 6 falls short of it by the epsilon
    assert found.order[:3] == (1, 3, 6) and found.scores[1] == found.scores[3] == 5.0 > found.scores[6]
    assert rules.halo(RECALL, KNOWLEDGE, cap=1e9).order == ORDER


def test_a_floor_is_the_least_loss_of_knowledge():
    # layer 0 is best in knowledge by less than the probe can tell, layer 2 loses most of recall
    recall, knowledge = [0.85, 0.90, 0.30, 0.70], [0.600, 0.598, 0.590, 0.500]
    assert rules.halo(recall, knowledge, keep=1).kept == (0,)
    found = rules.halo(recall, knowledge, keep=1, floor=0.02)
    assert found.order == (2, 0, 3, 1)
    assert found.scores == tuple(
        x / (d + EPSILON)
        for x, d in zip((0.9 - 0.85, 0.0, 0.9 - 0.3, 0.9 - 0.7), (0.02, 0.02, 0.02, 0.6 - 0.5), strict=True)
    )
    by_layer = rules.halo(recall, knowledge, floor=[0.0, 0.02, 0.02, 0.02])
    assert by_layer.scores[0] == pytest.approx(0.05 / EPSILON) and by_layer.scores[1:] == found.scores[1:]
    assert rules.halo(recall, knowledge, floor=0) == rules.halo(recall, knowledge)
    for floor in (
        -0.1,
        5,
        True,
        "x",
        Decimal("0.1"),
        float("nan"),
        [],
        [0.1],
        ["a"] * 4,
        [0.1, 0.1, 0.1, -1.0],
    ):
        with pytest.raises(ValueError, match="floor is"):
            rules.halo(recall, knowledge, floor=floor)


def test_spread_keeps_the_best_layer_of_each_even_block():
    recall, knowledge = [0.9, 0.2, 0.1, 0.3, 0.8, 0.7, 0.85, 0.8, 0.75], [0.5] * 9
    best, spread = (rules.halo(recall, knowledge, keep=3, spread=spread) for spread in (False, True))
    assert best.kept == (1, 2, 3) and spread.kept == (2, 3, 8)  # blocks 0 to 2, 3 to 5, 6 to 8
    assert (spread.order, spread.scores) == (best.order, best.scores)
    assert rules.jet(recall, 0.9, keep=3, spread=True).kept == (2, 3, 8)
    assert rules.kl([1.0, 2.0, 2.0, 0.5, 0.6], keep=2, spread=True).kept == (0, 3)  # 0 and 1, 2 to 4
    assert rules.kl([1.0] * 5, keep=2, spread=True).kept == (0, 2)  # ties go to the lower layer
    for layers in range(1, 12):
        for count in range(1, layers + 1):
            kept = rules.kl([float(layer) for layer in range(layers)], keep=count, spread=True).kept
            assert kept == (0, *(end + 1 for end in rules.uniform(layers, count).kept[:-1]))


def test_ties_go_to_the_lower_layer():
    found = rules.halo([0.5, 0.9, 0.5, 0.9, 0.5], [0.5, 0.5, 0.5, 0.5, 0.5], keep=2)
    assert found.order == (0, 2, 4, 1, 3) and found.kept == (0, 2)
    assert rules.jet([0.2, 0.1, 0.1], 0.9, keep=1).kept == (1,)
    assert rules.kl([2.0, 1.0, 1.0], keep=1).kept == (1,)


def test_equal_knowledge_leaves_recall_to_decide():
    found = rules.halo([0.1, 0.8, 0.4], [1.0, 1.0, 1.0], keep=1)
    assert found.order == (0, 2, 1)
    assert found.scores[0] == pytest.approx(0.7 / EPSILON)
    assert rules.halo([0.0, 1.0], [0.0, 1.0], keep=1).scores == (1 / (1 + EPSILON), 0)


def test_flat_recall_is_refused():
    flat, steep = [0.50, 0.52, 0.51], [0.50, 0.80, 0.51]
    same = [0.6, 0.6, 0.6]
    # where some are unknown, the others count
    for errors in (0.01, [0.001, 0.002, 0.01], [None, 0.01, None]):
        with pytest.raises(ValueError, match="recall hardly varies over layers: from 0.5 to 0.52"):
            rules.halo(flat, same, recall_se=errors)
        assert rules.halo(steep, same, recall_se=errors).order[0] == 0
        with pytest.raises(ValueError, match="recall hardly varies"):
            rules.jet(flat, 0.9, recall_se=errors)
    assert rules.halo(flat, same, recall_se=[None] * 3) == rules.halo(flat, same)
    rules.halo([0.0, 0.75], [0.5, 0.5], recall_se=0.25)  # three standard errors are enough
    with pytest.raises(ValueError, match="harder"):
        rules.halo([1.0, 1.0, 1.0], same)
    with pytest.raises(ValueError, match="easier"):
        rules.halo([0.0, 0.0, 0.0], same, recall_se=0.0)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (([0.1, 90.0], [0.1, 0.2]), "recall holds 90.0"),
        (([0.1, 0.9], [0.1, float("nan")]), "knowledge holds nan"),
        (([0.1, 0.9], [0.1]), "knowledge has 1"),
        (([], []), "recall is empty"),
    ],
)
def test_halo_names_what_is_wrong(arguments, named):
    with pytest.raises(ValueError, match=named):
        rules.halo(*arguments)


def test_halo_refuses_bad_caps_and_errors():
    for cap in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="cap is"):
            rules.halo(RECALL, KNOWLEDGE, cap=cap)
    for errors in (-0.1, float("nan"), [0.1, 0.1], []):
        with pytest.raises(ValueError, match="recall_se"):
            rules.halo(RECALL, KNOWLEDGE, recall_se=errors)


def test_jet_ranks_by_the_drop():
    found = rules.jet([0.9, 0.2, 0.95, 0.5], 0.93, keep=2)
    assert found.order == (1, 3, 0, 2) and found.kept == (1, 3)
    assert found.scores[2] == pytest.approx(-0.02)  # better than the teacher: never worth keeping
    with pytest.raises(ValueError, match="teacher_recall"):
        rules.jet([0.1, 0.2], 93.0)


def test_kl_ranks_by_loss_ascending():
    found = rules.kl([3.0, 1.5, 2.0, 1.0], keep="1/2")
    assert found.order == (3, 1, 2, 0) and found.kept == (1, 3) and found.scores[3] == -1.0
    with pytest.raises(ValueError, match="losses"):
        rules.kl([1.0, float("inf")])


def test_uniform_is_the_end_of_every_block():
    assert rules.uniform(28, 7).kept == (3, 7, 11, 15, 19, 23, 27)
    assert rules.uniform(30, "1/4").kept == (3, 7, 11, 16, 20, 24, 29)
    assert rules.uniform(3, 3).kept == (0, 1, 2) and rules.uniform(5, 1).kept == (4,)


def test_tail_is_even_in_the_second_half():
    assert rules.tail(28, 7).kept == (15, 17, 19, 21, 23, 25, 27)
    assert rules.tail(30, 7).kept == (16, 18, 20, 22, 24, 26, 29)
    assert rules.tail(5, 3).kept == (2, 3, 4)
    with pytest.raises(ValueError, match="keep is 4, 4 layers; the second half of 5 holds 3"):
        rules.tail(5, 4)


@pytest.mark.parametrize("layers", range(1, 40))
def test_even_places_are_distinct_and_inside(layers):
    for count in range(1, layers + 1):
        kept = rules.uniform(layers, count).kept
        assert len(set(kept)) == count and kept[0] >= 0 and kept[-1] == layers - 1
        if count <= layers - layers // 2:
            kept = rules.tail(layers, count).kept
            assert len(set(kept)) == count and layers // 2 <= kept[0] and kept[-1] == layers - 1


def test_given_is_taken_as_it_is():
    found = rules.given(28, [3, 21, 2, 9, 25, 6, 8])
    assert found.order[:2] == (3, 21) and found.kept == (2, 3, 6, 8, 9, 21, 25)
    for wrong in ([28], [-1], [1, 1], [], [True], [1.0]):
        with pytest.raises(ValueError, match="given"):
            rules.given(28, wrong)


@pytest.mark.parametrize(
    ("layers", "keep", "count"),
    [
        (28, "1/4", 7),
        (30, "1/4", 7),
        (36, Fraction(1, 4), 9),
        (3, "1/4", 1),
        (10, 0.1, 1),
        (10, 0.3, 3),
        (28, "7", 7),
        (28, 7, 7),
        (4, "1/1", 4),
        (4, Fraction(1), 4),
    ],
)
def test_shares_round_down_and_keep_one_at_least(layers, keep, count):
    assert count_kept(layers, keep) == count


@pytest.mark.parametrize(
    "keep", [0, -1, 9, "0", "9", "5/4", 0.0, 1.0, "1.0", "1e0", 1.5, "x", "1/0", True, None, float("nan")]
)
def test_other_values_of_keep_are_refused(keep):
    with pytest.raises(ValueError, match="keep is"):
        count_kept(8, keep)
