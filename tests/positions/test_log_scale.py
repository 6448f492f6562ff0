"""Factors on q by the query's position, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from hybridize.positions import log_scale

T = torch.tensor([0, 1, 9, 99, 4095, 131_071])


@pytest.mark.parametrize("base", [2.0, 100.0, 500.0])
def test_log_position(base):
    """HyPE: ln(t + a) / ln a, t from 0: 1 at the first token, then growing."""
    factor = log_scale.log_position(T, base)
    expected = torch.tensor([math.log(t + base) / math.log(base) for t in T.tolist()])
    assert factor.dtype == torch.float32 and factor[0] == 1 and (factor.diff() > 0).all()
    torch.testing.assert_close(factor, expected)


@pytest.mark.parametrize("length", [10.0, 100.0, 4096.0])
def test_log_length(length):
    """max(1, ln(t + 1) / ln L): exactly 1 for the L tokens of the training length."""
    factor = log_scale.log_length(T, length)
    expected = torch.tensor([max(1.0, math.log(t + 1) / math.log(length)) for t in T.tolist()])
    assert factor.dtype == torch.float32 and (length < T + 1).equal(factor > 1)
    torch.testing.assert_close(factor, expected)


def test_constant():
    factor = log_scale.constant(T, 1.25)
    assert factor.dtype == torch.float32 and factor.shape == T.shape and (factor == 1.25).all()


def test_a_scale_is_not_rounded_to_the_models_dtype():
    """In bf16 a factor of 1.3333 would be 1.3359; q is rounded once, after the product."""
    from hybridize.layers.placing import place
    from hybridize.ops.sequences import Sequences
    from hybridize.spec import GroupSpec

    scale = {"kind": "constant", "value": 4 / 3}
    spec = GroupSpec.model_validate({"attention": "softmax", "position": "none", "logit_scale": scale})
    q = torch.full((1, 3, 1, 2), 3.0, dtype=torch.bfloat16)
    placed, _ = place(spec, q, q, Sequences.dense(1, 3), lambda q, k: (q, k), rotated=False, training=False)
    assert placed.dtype == torch.bfloat16 and (placed == 4).all()
