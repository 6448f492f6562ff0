"""How calls divide into sequences, and every input that cannot be laid out."""

from __future__ import annotations

import pytest
import torch
from tests.models.hybrids import hybrid, tokens

from hybridize.models.layout import build_layout
from hybridize.models.modeling import CACHE

CPU = torch.device("cpu")


def mask(*rows: str) -> torch.Tensor:
    return torch.tensor([[int(c) for c in row] for row in rows])


def test_padding_becomes_lengths_once():
    layout = build_layout((3, 4), CPU, attention_mask=mask("0011", "1111", "1000"))
    assert layout.sequences.lengths == (2, 4, 1) and layout.sequences.shape == (1, 7)
    assert layout.position_ids.tolist() == [[0, 1, 0, 1, 2, 3, 0]]
    x = torch.arange(12.0).view(3, 4)
    assert layout.enter(x).tolist() == [[2, 3, 4, 5, 6, 7, 8]]
    assert layout.leave(layout.enter(x)).tolist() == [[0, 0, 2, 3], [4, 5, 6, 7], [8, 0, 0, 0]]
    assert layout.targets(x, -1).tolist() == [[-1, -1, -1, 3], [-1, 5, 6, 7], [-1] * 4]


def test_rows_without_padding_stay_in_place():
    for given in ({}, {"attention_mask": mask("111", "111")}, {"position_ids": torch.arange(3)[None]}):
        layout = build_layout((2, 3), CPU, **given)
        assert layout.sequences.is_dense and layout.real_P is None
        x = torch.arange(6).view(2, 3)
        assert (
            torch.equal(layout.enter(x), x)
            and torch.equal(layout.leave(x), x)
            and torch.equal(layout.targets(x, -1), x)
        )


def test_packed_rows_become_one():
    x = torch.arange(8).view(2, 4)
    positions = torch.tensor([[0, 1, 0, 1], [0, 0, 1, 2]])
    bounds = torch.tensor([0, 2, 4, 5, 8])
    for given in (
        {"position_ids": positions},
        {"cu_seqlens": bounds},
        {"cu_seqlens": bounds, "position_ids": positions},
    ):
        layout = build_layout((2, 4), CPU, **given)
        assert layout.sequences.lengths == (2, 2, 1, 3) and layout.sequences.shape == (1, 8)
        assert layout.enter(x).tolist() == [list(range(8))]
        assert torch.equal(layout.leave(layout.enter(x)), x)
        assert layout.targets(x, -1).tolist() == [[-1, 1, -1, 3], [-1, -1, 6, 7]]


def test_a_cache_moves_the_positions_of_each_row():
    given = {"cached": True, "past_columns": 3, "past_lengths": [1, 3]}
    layout = build_layout((2, 2), CPU, attention_mask=mask("00111", "11111"), **given)
    assert layout.position_ids.tolist() == [[1, 2], [3, 4]]
    assert build_layout((2, 2), CPU, **given).position_ids.tolist() == [[1, 2], [3, 4]]
    ids = torch.tensor([[1, 2], [3, 4]])
    assert build_layout((2, 2), CPU, position_ids=ids, **given).position_ids.tolist() == ids.tolist()
    late = build_layout(
        (2, 2), CPU, attention_mask=mask("00001", "11111"), cached=True, past_columns=3, past_lengths=[0, 3]
    )
    assert late.sequences.lengths == (1, 2) and late.position_ids.tolist() == [[0, 3, 4]]
    right = build_layout((2, 2), CPU, attention_mask=mask("10", "11"), **given)  # a mask of this call alone
    assert right.position_ids.tolist() == [[1, 3, 4]]


PAST = {"cached": True, "past_columns": 3, "past_lengths": [3, 3]}
BAD = {
    "hole": ({"attention_mask": mask("1011", "1111")}, "attention_mask row 0 has a hole"),
    "hole over the cache": (
        {"attention_mask": mask("1101111", "1111111"), **PAST},
        "attention_mask row 0 has a hole",
    ),
    "restart after right padding": (
        {"attention_mask": mask("0111", "1111"), **PAST},
        "attention_mask row 0 has a hole",
    ),
    "rows": (
        {"attention_mask": mask("1111")},
        r"attention_mask has shape \(1, 4\); it must be 2-D, \[2, 4\]",
    ),
    "columns": ({"attention_mask": mask("11111", "11111")}, r"attention_mask has shape \(2, 5\)"),
    "columns with a cache": (
        {"attention_mask": mask("11111", "11111"), **PAST},
        r"it must be 2-D, \[2, 4\] or \[2, 7\]",
    ),
    "4-D": (
        {"attention_mask": torch.zeros(2, 1, 4, 4)},
        r"attention_mask has shape \(2, 1, 4, 4\); it must be 2-D",
    ),
    "additive": (
        {"attention_mask": torch.tensor([[0.0, 0, 0, -1e9]] * 2)},
        "it must hold 1 for tokens and 0 for padding",
    ),
    "all padding": (
        {"attention_mask": mask("0000", "0000")},
        "attention_mask marks every token of this call as padding",
    ),
    "mask of another past": (
        {"attention_mask": mask("0111111", "1111111"), **PAST},
        "attention_mask row 0 marks 2 earlier tokens; the cache holds 3",
    ),
    "jump": ({"position_ids": torch.tensor([[0, 1, 2, 7]])}, r"position_ids run \[0, 1, 2, 7\]"),
    "late start": ({"position_ids": torch.arange(5, 9)[None]}, "position_ids run .* from 0 without a jump"),
    "jump under a mask": (
        {"position_ids": torch.tensor([[0, 0, 1, 2], [0, 1, 2, 5]]), "attention_mask": mask("0111", "1111")},
        "position_ids run",
    ),
    "positions that ignore padding": (
        {"position_ids": torch.arange(4)[None], "attention_mask": mask("0111", "1111")},
        "attention_mask tells where padding is",
    ),
    "positions that ignore the cache": (
        {"position_ids": torch.arange(1, 5)[None], **PAST},
        "from 3 without a jump",
    ),
    "position shape": (
        {"position_ids": torch.arange(5)[None]},
        r"position_ids has shape \(1, 5\); it must be \[2, 4\]",
    ),
    "packed positions with a cache": (
        {"position_ids": torch.tensor([[0, 1, 0, 1]]), "cached": True},
        "packed rows cannot be continued",
    ),
    "packed with a cache": (
        {"cu_seqlens": torch.tensor([0, 3, 8]), "cached": True},
        "cu_seqlens with a cache",
    ),
    "cu_seqlens short": (
        {"cu_seqlens": torch.tensor([0, 3, 7])},
        "cu_seqlens ends at 7; the rows hold 2 x 4 = 8",
    ),
    "cu_seqlens falls": ({"cu_seqlens": torch.tensor([0, 5, 3, 8])}, "cu_seqlens is .* never fall"),
    "cu_seqlens from 1": ({"cu_seqlens": torch.tensor([1, 8])}, "cu_seqlens is .* must start at 0"),
    "cu_seqlens 2-D": (
        {"cu_seqlens": torch.tensor([[0, 8]])},
        r"cu_seqlens is a torch.int64 tensor of shape \(1, 2\)",
    ),
    "cu_seqlens empty": ({"cu_seqlens": torch.tensor([], dtype=torch.int32)}, r"of shape \(0,\)"),
    "cu_seqlens and padding": (
        {"cu_seqlens": torch.tensor([0, 8]), "attention_mask": mask("0111", "1111")},
        "attention_mask marks padding beside cu_seqlens",
    ),
    "cu_seqlens against positions": (
        {"cu_seqlens": torch.tensor([0, 3, 8]), "position_ids": torch.arange(4)[None]},
        "position_ids disagree with cu_seqlens",
    ),
    "rows of the cache": (
        {"cached": True, "past_columns": 3, "past_lengths": [3]},
        "the cache holds 1 rows and input_ids has 2",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_laid_out_is_refused(name):
    given, message = BAD[name]
    with pytest.raises(ValueError, match=message) as caught:
        build_layout((2, 4), CPU, **given)
    assert "\n" not in str(caught.value)


@torch.no_grad()
def test_the_model_refuses_what_is_not_a_2d_mask_or_no_tokens():
    model, ids_BT = hybrid("terraced"), tokens(2, 4)
    with pytest.raises(ValueError, match="attention_mask is a dict; it must be a 2-D tensor"):
        model(ids_BT, attention_mask={"full_attention": None})
    with pytest.raises(ValueError, match=r"attention_mask has shape \(2, 1, 4, 4\)"):
        model(ids_BT, attention_mask=torch.ones(2, 1, 4, 4))
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model()
    with pytest.raises(ValueError, match=r"input_ids has shape \(2, 0\)"):
        model(ids_BT[:, :0])
    with pytest.raises(ValueError, match="cu_seqlens with a cache"):
        model(ids_BT, cu_seqlens=torch.tensor([0, 3, 8]), **{CACHE: model.new_cache()})


@torch.no_grad()
def test_padding_in_hugging_faces_own_positions_still_gets_a_cache():
    """`generate` writes 0 (others write 1) at padding: no packed document begins there."""
    model, ids_BT = hybrid("terraced"), tokens(2, 4)
    for filler in (0, 1):
        positions = torch.tensor([[filler, filler, 0, 1], [0, 1, 2, 3]])
        result = model(ids_BT, attention_mask=mask("0011", "1111"), position_ids=positions)
        assert getattr(result, CACHE).lengths == [2, 4]
