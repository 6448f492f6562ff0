"""RoPE with a base of its own = transformers' tables and rotation for the same base."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from hybridize.positions import rope


def theirs(base: float, dim: int, position_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    config = LlamaConfig(
        hidden_size=2 * dim,
        num_attention_heads=2,
        head_dim=dim,
        max_position_embeddings=1 << 20,
        rope_parameters={"rope_type": "default", "rope_theta": base},
    )
    return LlamaRotaryEmbedding(config)(torch.zeros(1), position_BT)


@pytest.mark.parametrize("dim", [8, 64, 96, 128, 256])
@pytest.mark.parametrize("base", [10_000.0, 100_000.0, 1e6, 50.0])
def test_tables_are_transformers(base, dim):
    position = torch.tensor([0, 1, 2, 5, 63, 511])
    for ours, expected in zip(
        rope.tables(position, dim, base), theirs(base, dim, position[None]), strict=True
    ):
        assert ours.dtype == torch.float32 and ours.shape == (6, dim)
        # they round the frequencies to float32, an error of position * 2^-24 radians
        torch.testing.assert_close(ours, expected[0], rtol=0, atol=1e-4)


def test_far_positions_are_no_worse_than_transformers():
    """Frequencies stay float64 until they have met their positions; the angle is then rounded once, to float32."""
    position = torch.tensor([2**17 - 1, 2**19 - 1])
    frequency = 1e4 ** (-torch.arange(32, dtype=torch.float64) / 32)
    exact = (position.double()[:, None] * frequency).cos().repeat(1, 2)
    ours = (rope.tables(position, 64, 1e4)[0] - exact).abs().amax(1)
    other = (theirs(1e4, 64, position[None])[0][0] - exact).abs().amax(1)
    assert (ours <= other).all() and (ours < position * 2.0**-24).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_is_transformers(dtype):
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 9, heads, 16, generator=generator).to(dtype) for heads in (4, 2))
    position_BT = torch.stack([torch.arange(9), torch.arange(9) + 100])
    cos, sin = (x.unflatten(0, (2, 9)) for x in rope.tables(position_BT.flatten(), 16, 1e4))
    expected = apply_rotary_pos_emb(q, k, cos.to(dtype), sin.to(dtype), unsqueeze_dim=2)
    for ours, other in zip((rope.rotate(q, cos, sin), rope.rotate(k, cos, sin)), expected, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, other, rtol=0, atol=0)


def test_scores_depend_on_the_distance_alone():
    q, k = torch.randn(2, 1, 1, 1, 32, dtype=torch.float64)
    scores = []
    for t, s in ((7, 3), (104, 100)):
        turned = []
        for x, position in ((q, t), (k, s)):
            cos, sin = rope.tables(torch.tensor([position]), 32, 1e4)
            turned.append(rope.rotate(x, cos[None], sin[None]))
        scores.append((turned[0] * turned[1]).sum())
    torch.testing.assert_close(*scores, rtol=1e-5, atol=1e-5)
