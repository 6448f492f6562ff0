"""The short convolution against torch's own, and against itself however tokens arrive.

Legend: B rows, T tokens, N sequences, C channels, w width.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d

from hybridize.ops import short_conv
from hybridize.ops.sequences import Sequences
from hybridize.ops.short_conv import ShortConvState

C = 6
WIDTHS = (2, 3, 4)
LENGTHS = (1, 2, 3, 4, 5, 13)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def oracle(x_BTC: Tensor, weight_Cw: Tensor) -> Tensor:
    channels, width = weight_Cw.shape
    y_BCS = conv1d(x_BTC.transpose(1, 2), weight_Cw[:, None], padding=width - 1, groups=channels)
    return y_BCS[..., : x_BTC.shape[1]].transpose(1, 2)


def in_pieces(x_BTC: Tensor, weight_Cw: Tensor, sizes: list[int]) -> tuple[Tensor, ShortConvState]:
    state, outputs = None, []
    for x in x_BTC.split(sizes, 1):
        y, state, _ = short_conv.forward(x, weight_Cw, state=state, return_state=True)
        outputs.append(y)
    return torch.cat(outputs, 1), state


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("length", LENGTHS)
def test_dense_rows_equal_torch(length, width):
    x, weight = random(3, length, C), random(C, width, seed=1)
    y, state, _ = short_conv.forward(x, weight)
    torch.testing.assert_close(y, oracle(x, weight))
    assert state is None


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("sizes", [[1] * 13, [2, 1, 5, 1, 4], [1, 12], [12, 1], [0, 7, 0, 6], [13]], ids=str)
def test_pieces_and_the_state_after_them(sizes, width):
    x, weight = random(2, 13, C), random(C, width, seed=1)
    y, state = in_pieces(x, weight, sizes)
    torch.testing.assert_close(y, oracle(x, weight))
    assert torch.equal(state.x_NRC, x[:, 1 - width :])
    assert state.lengths_N.tolist() == [13, 13]
    short = short_conv.forward(x[:, :1], weight, return_state=True).state
    assert torch.equal(short.x_NRC[:, -1:], x[:, :1]) and not short.x_NRC[:, :-1].any()


def test_a_prefix_does_not_see_what_follows():
    x, weight = random(2, 13, C), random(C, 4, seed=1)
    y = short_conv.forward(x, weight).o
    x[:, 5:] = torch.nan
    torch.testing.assert_close(short_conv.forward(x, weight).o[:, :5], y[:, :5])


@pytest.mark.parametrize("width", WIDTHS)
def test_packed_documents_start_from_zeros_and_never_leak(width):
    """Documents of every length, empty ones too, in one row and in halves that hand on a state; every second is poison."""
    lengths = [0, 1, 5, 2, 0, 3, 9, 1, 4, 2]
    documents = [random(1, n, C, seed=n) for n in lengths]
    for n in range(1, len(documents), 2):
        documents[n] = torch.full_like(documents[n], torch.nan)
    weight, state = random(C, width, seed=1), None
    begins = [0] * len(lengths)
    for ends in ([(n + 1) // 2 for n in lengths], lengths):
        counts = [e - b for b, e in zip(begins, ends, strict=True)]
        x = torch.cat([d[:, b:e] for d, b, e in zip(documents, begins, ends, strict=True)], 1)
        sequences = Sequences.packed(torch.tensor([0, *counts]).cumsum(0), begins)
        y, state, _ = short_conv.forward(x, weight, sequences=sequences, state=state, return_state=True)
        for piece, document, b, e in zip(y.split(counts, 1), documents, begins, ends, strict=True):
            expected = oracle(document, weight)[:, b:e] if document.shape[1] else piece
            torch.testing.assert_close(piece, expected, equal_nan=True)
        begins = ends
    for row, document in zip(state.x_NRC, documents, strict=True):
        held = torch.cat([torch.zeros(width - 1, C), document[0]])[1 - width :]
        torch.testing.assert_close(row, held, equal_nan=True)
    assert state.lengths_N.tolist() == lengths


def test_rows_of_a_batch_that_hold_several_sequences():
    """Sequences that end where no row does."""
    x, weight = random(2, 6, C), random(C, 3, seed=1)
    sequences = Sequences([4, 5, 3], shape=(2, 6))
    y = short_conv.forward(x, weight, sequences=sequences).o
    assert y.shape == x.shape
    expected = [oracle(piece[None], weight)[0] for piece in x.flatten(0, 1).split([4, 5, 3])]
    torch.testing.assert_close(y.flatten(0, 1), torch.cat(expected))


def test_states_select_and_repeat():
    x, weight = random(3, 9, C), random(C, 4, seed=1)
    state = short_conv.forward(x[:, :5], weight, return_state=True).state
    order = torch.tensor([2, 0, 0])
    moved = state.select(order).repeat(2)
    rest = x[order, 5:].repeat_interleave(2, 0)
    y = short_conv.forward(rest, weight, state=moved).o
    torch.testing.assert_close(y, oracle(x, weight)[order, 5:].repeat_interleave(2, 0))


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_equal_torchs(packed):
    """Of inputs and weights, in one pass and through the state."""
    x = random(2, 7, C, dtype=torch.float64).requires_grad_()
    weight = random(C, 3, dtype=torch.float64, seed=1).requires_grad_()
    seed = random(2, 7, C, dtype=torch.float64, seed=2)
    expected = torch.autograd.grad((oracle(x, weight) * seed).sum(), (x, weight))
    if packed:
        sequences = Sequences.packed(torch.tensor([0, 7, 14]))
        y = short_conv.forward(x.reshape(1, 14, C), weight, sequences=sequences).o.reshape(2, 7, C)
    else:
        y = short_conv.forward(x, weight).o
    for way in (y, in_pieces(x, weight, [1, 4, 1, 1])[0]):
        found = torch.autograd.grad((way * seed).sum(), (x, weight))
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_one_rounding(dtype):
    """Sums in float32, also under autocast; the state keeps the inputs as they are."""
    x, weight = random(2, 9, C, dtype=dtype), random(C, 4, dtype=dtype, seed=1)
    exact = oracle(x.double(), weight.double()).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        y, state, _ = short_conv.forward(x, weight, return_state=True)
    torch.testing.assert_close(y, exact)
    assert state.x_NRC.dtype == dtype


def test_a_state_does_not_hold_on_to_the_text():
    x, weight = random(1, 500, C), random(C, 4)
    state = short_conv.forward(x, weight, return_state=True).state
    assert state.x_NRC.untyped_storage().nbytes() == 3 * C * 4


def test_what_does_not_fit_is_refused():
    x, weight = random(2, 5, C), random(C, 3)
    state = short_conv.forward(x, weight, return_state=True).state
    with pytest.raises(ValueError, match=r"x has shape \(5, 6\); it must be \[B, T, channels\]"):
        short_conv.forward(x[0], weight)
    for wrong in (weight[:4], weight[:, :1], weight[0]):
        with pytest.raises(ValueError, match="weight has shape .*must be \\[6, width\\], width at least 2"):
            short_conv.forward(x, wrong)
    with pytest.raises(
        ValueError, match=r"state holds inputs of shape \(2, 2, 6\); the call needs \(2, 3, 6\)"
    ):
        short_conv.forward(x, random(C, 4), state=state)
    with pytest.raises(
        ValueError, match=r"state holds inputs of shape \(2, 2, 6\); the call needs \(1, 2, 6\)"
    ):
        short_conv.forward(x[:1], weight, state=state)
