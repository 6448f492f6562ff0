"""The chunk walker: states before every chunk and after every sequence, with gradients, for even and uneven lengths."""

from __future__ import annotations

import pytest
import torch

from hybridize.ops.grid import get_grid
from hybridize.ops.sequences import Sequences
from hybridize.ops.walk import walk

CHUNK = 4
CALLS = {
    "dense": Sequences.dense(3, 10),
    "dense, continued apart": Sequences.dense(3, 10, [0, 3, 6]),
    "one row": Sequences.dense(1, 9),
    "uneven, some empty": Sequences((0, 13, 1, 0, 40, 4, 5), (5, 0, 3, 0, 2, 4, 3), shape=(1, 63)),
    "no tokens": Sequences((0, 0), shape=(1, 0)),
}


def step(state, decay, kv):
    return decay * state + kv


@pytest.mark.parametrize("name", CALLS)
def test_walk_equals_a_loop_over_each_sequence_with_gradients(name):
    sequences = CALLS[name]
    grid = get_grid(sequences, CHUNK, None)
    generator = torch.Generator().manual_seed(0)
    leaves = [
        torch.randn(*shape, 2, 3, 5, dtype=torch.float64, generator=generator).requires_grad_()
        for shape in ((len(sequences),), (grid.chunks,), (grid.chunks,))
    ]
    start, decay, kv = leaves
    entering, final = [None] * grid.chunks, list(start)
    for m, row in enumerate(grid.row_M.tolist()):
        entering[m] = final[row]
        final[row] = step(final[row], decay[m], kv[m])
    expected = torch.stack([*entering, *final])
    ours = torch.cat(walk(grid, start, step, decay, kv))
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)
    seed = torch.randn(ours.shape, dtype=torch.float64, generator=generator)
    for grad, wanted in zip(
        torch.autograd.grad((ours * seed).sum(), leaves, allow_unused=True),
        torch.autograd.grad((expected * seed).sum(), leaves, allow_unused=True, materialize_grads=True),
        strict=True,
    ):
        torch.testing.assert_close(torch.zeros_like(wanted) if grad is None else grad, wanted)


def test_a_step_may_need_nothing_of_the_chunks():
    grid = get_grid(CALLS["uneven, some empty"], CHUNK, None)
    entering, final = walk(grid, torch.zeros(7, 1, 1, 1), lambda state: state + 1)
    assert final.flatten().tolist() == [0, 4, 1, 0, 11, 1, 2]
    assert entering.flatten().tolist() == [*range(4), 0, *range(11), 0, 0, 1]
