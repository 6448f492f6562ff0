"""One head group at a time with everything that may lie around it: positions, norms, gates, expanded heads, logit scales,
short convolutions.

DESIGN section 4, pairwise over attentions, dressings and families: one answer however tokens arrive, beams, save and load.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.models.hybrids import SLIDING, TERRACED, WINDOWED, hybrid, realigned, tokens
from tests.pairwise import full_product, label, pairwise
from transformers import AutoModelForCausalLM

from hybridize.models.modeling import CACHE, HybridForCausalLM
from hybridize.spec import RECURRENT

LONGEST = 70  # the recurrences' chunks hold 64 tokens
TOLERANCE = {"rtol": 2e-4, "atol": 2e-4}
ATTENTIONS: dict[str, dict[str, Any]] = {
    **{kind: {"attention": kind} for kind in RECURRENT},
    "minimax": {"attention": "lightning", "decay": {"convention": "minimax"}},
    "softmax": {"attention": "softmax"},
    "softmax-window": WINDOWED,
    "linear": {"attention": "linear"},
    "terraced": TERRACED,
    "sliding": SLIDING,
}
SCALES: dict[str, dict[str, Any] | None] = {
    "unscaled": None,
    "log_position": {"kind": "log_position", "base": 3},
    "log_length": {"kind": "log_length", "length": 4, "when": "always"},
    "log_declared": {"kind": "log_declared", "length": 4, "declared": 16},
    "constant": {"kind": "constant", "value": 1.7, "when": "always"},
}
POSITIONS: dict[str, Any] = {"own": None, "rope": "rope", "none": "none", "base50": {"rope": 50}}
FAMILIES = ("llama", "qwen2", "qwen3", "olmo2", "phi3", "smollm3")
DRESSING = {
    "position": tuple(POSITIONS),
    "qk_norm": (False, True),
    "output_norm": (False, True),
    "output_gate": (None, "open", "half"),
    "expand": (False, True),
    "family": FAMILIES,
}
RECURRENT_ONES = (*RECURRENT, "minimax")
MATRIX: list[dict[str, Any]] = [
    {"attention": tuple(name for name in ATTENTIONS if name not in ("softmax", *RECURRENT_ONES)), **DRESSING},
    {"attention": RECURRENT_ONES, "short_conv": (None, 2, 4), **DRESSING},
    {"attention": ("softmax",), "scale": tuple(SCALES), **DRESSING},
]
PAIRWISE = [row for factors in MATRIX for row in pairwise(factors)]


def build(row: dict[str, Any]) -> HybridForCausalLM:
    """One layer of these groups; in SmolLM3 it has no positions of its own."""
    group = {
        **ATTENTIONS[row["attention"]],
        "position": POSITIONS[row["position"]],
        "logit_scale": SCALES[row.get("scale", "unscaled")],
        "short_conv": row.get("short_conv"),
        **{name: row[name] for name in ("qk_norm", "output_norm", "output_gate", "expand")},
    }
    own = {"no_rope_layers": [0]} if row["family"] == "smollm3" else {}
    return hybrid({"all": group}, row["family"], layers=1, **own)


def padded(rows: list[torch.Tensor], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(ids.shape[1] for ids in rows)
    ids_BT = torch.zeros(len(rows), longest, dtype=torch.long)
    mask_BT = torch.zeros_like(ids_BT)
    for n, ids in enumerate(rows):
        place = slice(longest - ids.shape[1], None) if side == "left" else slice(0, ids.shape[1])
        ids_BT[n, place], mask_BT[n, place] = ids[0], 1
    return ids_BT, mask_BT


def cached(model: HybridForCausalLM, ids_BT: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    cache = model.new_cache()
    pieces = ids_BT[:, : sum(sizes)].split(sizes, 1)
    return torch.cat([model(piece, **{CACHE: cache}).logits for piece in pieces], 1)


@torch.no_grad()
def check(row: dict[str, Any], folder: Any) -> None:
    model, ids_BT = build(row), tokens(2, LONGEST)
    whole = model(ids_BT, use_cache=False).logits
    assert whole.isfinite().all()
    for sizes in ([1] * 6, [63, 1, 1, 5], [3, 66, 1]):
        torch.testing.assert_close(cached(model, ids_BT, sizes), whole[:, : sum(sizes)], **TOLERANCE)
    prefix = model(ids_BT[:, :9], use_cache=False).logits
    torch.testing.assert_close(prefix, whole[:, :9], **TOLERANCE)
    rows = [ids_BT[:1], tokens(1, 1, seed=1), tokens(1, 9, seed=2)]
    alone = [whole[0], *(model(ids, use_cache=False).logits[0] for ids in rows[1:])]
    for side in ("left", "right"):
        padded_BT, mask_BT = padded(rows, side)
        logits = model(padded_BT, attention_mask=mask_BT, use_cache=False).logits
        for n, expected in enumerate(alone):
            torch.testing.assert_close(logits[n][mask_BT[n].bool()], expected, **TOLERANCE)
    sizes = [ids.shape[1] for ids in rows]
    bounds = torch.tensor([0, *sizes]).cumsum(0)
    packed = model(torch.cat(rows, 1), cu_seqlens=bounds).logits[0].split(sizes)
    for piece, expected in zip(packed, alone, strict=True):
        torch.testing.assert_close(piece, expected, **TOLERANCE)
    prompts, mask_BT = padded(rows[1:], "left")
    options = {"num_beams": 2, "max_new_tokens": 4, "pad_token_id": 0, "eos_token_id": None}
    beams = [
        model.generate(prompts, attention_mask=mask_BT, use_cache=use_cache, do_sample=False, **options)
        for use_cache in (True, False)
    ]
    assert torch.equal(*beams)
    model.save_pretrained(folder)
    loaded = realigned(AutoModelForCausalLM.from_pretrained(folder))
    assert torch.equal(loaded(ids_BT, use_cache=False).logits, whole)
    low = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    logits = low(ids_BT, use_cache=False).logits
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - whole).norm() < 0.1 * whole.norm()


@pytest.mark.parametrize("row", PAIRWISE, ids=label)
def test_matrix(row, tmp_path):
    check(row, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_full_product(attention, family, tmp_path):
    """Every choice with every other: about 17,000 models."""
    factors = next(factors for factors in MATRIX if attention in factors["attention"])
    for number, row in enumerate(full_product({**factors, "attention": (attention,), "family": (family,)})):
        check(row, tmp_path / str(number))
