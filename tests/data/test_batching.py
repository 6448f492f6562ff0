"""Batches: epochs, resuming, positions."""

import itertools
import json

import numpy as np
import pytest
import torch

from hybridize.data import DataSpec, build_rows
from hybridize.data.batching import batches, ordered_batches


@pytest.fixture
def rows(tmp_path, tokenizer):
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"text": f"w{n} " + "w7 " * (n % 9)}) + "\n" for n in range(60)))
    rows = build_rows(DataSpec(source=str(path), length=16, validation=0, test=0), tokenizer, "train")
    return rows


def take(iterator, count):
    return list(itertools.islice(iterator, count))


def same(one, two):
    return all(
        torch.equal(getattr(one, name), getattr(two, name))
        for name in ("input_ids_BT", "labels_BT", "position_ids_BT")
    )


def test_starting_late_equals_continuing(rows):
    everything = take(batches(rows, 4, seed=3), 40)
    for start in (0, 1, 4, 5, 17, 39):
        late = take(batches(rows, 4, seed=3, start_step=start), 40 - start)
        assert all(same(one, two) for one, two in zip(everything[start:], late, strict=True))


def test_every_epoch_holds_every_row_once_in_its_own_order(rows):
    n = len(rows)
    stream = torch.cat([batch.input_ids_BT for batch in take(batches(rows, 4, seed=0), n)])[: 4 * n]
    epochs = [stream[e * n : (e + 1) * n].tolist() for e in range(4)]
    everything = sorted(np.asarray(rows.tokens_NT).tolist())
    assert all(sorted(epoch) == everything for epoch in epochs)
    assert len({str(epoch) for epoch in epochs}) == 4
    other = torch.cat([batch.input_ids_BT for batch in take(batches(rows, 4, seed=1), n)])
    assert not torch.equal(stream, other[: 4 * n])


def test_a_batch_larger_than_the_data(rows):
    (batch,) = take(batches(rows, 2 * len(rows), seed=0), 1)
    assert batch.input_ids_BT.shape == (2 * len(rows), 16)


def test_positions_restart_and_labels_fit(rows):
    for batch in ordered_batches(rows, 4):
        first = batch.position_ids_BT == 0
        after_eos = torch.zeros_like(first)
        after_eos[:, 1:] = batch.input_ids_BT[:, :-1] == 2
        after_eos[:, 0] = True
        assert torch.equal(first, after_eos)
        steps = batch.position_ids_BT[:, 1:] - batch.position_ids_BT[:, :-1]
        assert bool(((steps == 1) | first[:, 1:]).all())
        assert torch.equal(batch.labels_BT == -100, first)
        assert batch.tokens == int((~first).sum())
        assert batch.input_ids_BT.dtype == batch.labels_BT.dtype == batch.position_ids_BT.dtype == torch.int64


def test_one_ordered_pass(rows):
    whole = torch.cat([batch.input_ids_BT for batch in ordered_batches(rows, 4)])
    assert whole.tolist() == np.asarray(rows.tokens_NT).tolist()
    assert sum(len(batch.input_ids_BT) for batch in ordered_batches(rows, 4, tokens=100)) == 7


def test_a_batch_moves_whole(rows):
    moved = next(batches(rows, 2, seed=0)).to("meta")
    assert {
        moved.input_ids_BT.device.type,
        moved.labels_BT.device.type,
        moved.position_ids_BT.device.type,
    } == {"meta"}


def test_bad_arguments_are_refused_at_once(rows):
    with pytest.raises(ValueError, match="batch_size is 0"):
        batches(rows, 0, seed=0)
    with pytest.raises(ValueError, match="start_step -1"):
        batches(rows, 1, seed=0, start_step=-1)
    with pytest.raises(ValueError, match="batch_size is 0"):
        ordered_batches(rows, 0)
