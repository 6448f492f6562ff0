"""Losses against plain materialised float64 references: values, gradients, what counts, and how much memory they take.

N rows, E width, C vocabulary, B batch, T tokens, H heads, V value dim, Q queries, S keys.
"""

import weakref
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybridize import losses


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def randn(*shape: int, grad: bool = True, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype).requires_grad_(grad)


class Largest(TorchDispatchMode):
    """Records the largest number of elements any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor))])
        return out


# ---- attention outputs


def test_output_mse_counts_only_unmasked_tokens() -> None:
    student, teacher = randn(2, 5, 3, 4), randn(2, 5, 3, 4, grad=False) * 3 + 7
    mask = torch.rand(2, 5) < 0.6
    mse, nmse = losses.output_mse(student, teacher, mask)
    s, t = student[mask], teacher[mask]
    torch.testing.assert_close(mse, F.mse_loss(s, t))
    torch.testing.assert_close(nmse, F.mse_loss(s, t) / t.var(0, correction=0).mean())
    (gradient,) = torch.autograd.grad(mse, student)
    assert gradient[~mask].abs().max() == 0
    torch.testing.assert_close(gradient[mask], 2 * (s - t).detach() / t.numel())


def test_output_mse_ignores_poison_under_the_mask() -> None:
    student, teacher = randn(1, 4, 2, 3), randn(1, 4, 2, 3, grad=False)
    mask = torch.tensor([[True, True, False, True]])
    want = losses.output_mse(student, teacher, mask)
    poisoned = student.detach().clone()
    poisoned[:, 2] = float("nan")
    poisoned.requires_grad_()
    got = losses.output_mse(poisoned, teacher, mask)
    torch.testing.assert_close(got, want)
    assert torch.autograd.grad(got[0], poisoned)[0].isfinite().all()


def test_normalised_mse_is_one_for_the_best_constant() -> None:
    teacher = randn(2, 50, 3, 4, grad=False) * torch.tensor([1.0, 10.0, 100.0])[:, None]
    constant = teacher.mean((0, 1), keepdim=True).expand_as(teacher)
    torch.testing.assert_close(losses.output_mse(constant, teacher)[1].item(), 1.0)


def test_output_mse_without_a_counted_token_is_zero() -> None:
    student = randn(1, 3, 2, 2)
    mse, nmse = losses.output_mse(student, randn(1, 3, 2, 2, grad=False), torch.zeros(1, 3))
    assert (mse.item(), nmse.item()) == (0, 0)
    assert torch.autograd.grad(mse, student)[0].abs().max() == 0


def test_output_mse_sums_in_float32() -> None:
    student, teacher = randn(1, 4096, 1, 8, dtype=torch.bfloat16), randn(1, 4096, 1, 8, dtype=torch.bfloat16)
    mse, _ = losses.output_mse(student, teacher)
    assert mse.dtype == torch.float32
    torch.testing.assert_close(
        mse.double(), F.mse_loss(student.double(), teacher.double()), rtol=1e-5, atol=0
    )


def test_output_mse_refuses_different_shapes() -> None:
    with pytest.raises(ValueError, match=r"\(1, 2, 3\).*\(1, 2, 4\)"):
        losses.output_mse(torch.zeros(1, 2, 3), torch.zeros(1, 2, 4))


# ---- attention weights


def causal_weights(scores_BHTS: Tensor) -> Tensor:
    mask = torch.ones(scores_BHTS.shape[-2:], dtype=torch.bool).triu(1)
    return scores_BHTS.masked_fill(mask, -torch.inf).softmax(-1)


def test_weight_cross_entropy_is_the_plain_formula() -> None:
    teacher, scores = causal_weights(randn(2, 3, 7, 7, grad=False)), randn(2, 3, 7, 7)
    cross, divergence = losses.weight_cross_entropy(teacher, causal_weights(scores))
    student = causal_weights(scores)
    want = torch.stack(
        [-(teacher[..., t, : t + 1] * student[..., t, : t + 1].log()).sum(-1).mean() for t in range(7)]
    ).mean()
    torch.testing.assert_close(cross, want)
    entropy = -torch.xlogy(teacher, teacher).sum(-1).mean()
    torch.testing.assert_close(divergence, want - entropy)
    torch.testing.assert_close(torch.autograd.grad(cross, scores)[0], torch.autograd.grad(want, scores)[0])
    assert losses.weight_cross_entropy(teacher, teacher)[1].abs() < 1e-12


def test_weight_cross_entropy_clamps_missing_mass() -> None:
    teacher, student = torch.tensor([[[[0.5, 0.5]]]]).double(), torch.tensor([[[[1.0, 0.0]]]]).double()
    cross, _ = losses.weight_cross_entropy(teacher, student)
    torch.testing.assert_close(cross, -0.5 * torch.tensor(1e-12).double().log())


@pytest.mark.parametrize("tile", [1, 3, 7, 16])
def test_tiled_weight_cross_entropy_equals_the_whole(tile: int) -> None:
    """Its gradients are written by hand; weights below the clamp have none."""
    tokens = 11
    q, k = randn(1, 2, tokens, 4), randn(1, 2, tokens, 4)
    teacher = causal_weights(randn(1, 2, tokens, tokens, grad=False))

    def student(rows: slice) -> Tensor:
        scores = q[..., rows, :] @ k[..., : rows.stop, :].mT
        hidden = torch.arange(rows.stop)[None] > torch.arange(tokens)[rows][:, None]
        return scores.masked_fill(hidden, -torch.inf).softmax(-1)

    tiles = [slice(start, min(start + tile, tokens)) for start in range(0, tokens, tile)]
    tiled = losses.tiled_weight_cross_entropy(
        lambda rows: (teacher[..., rows, : rows.stop], student(rows)), tiles, [q, k], clamp=0.02
    )
    whole = losses.weight_cross_entropy(teacher, student(slice(0, tokens)), clamp=0.02)[0] * 2 * tokens
    torch.testing.assert_close(tiled, whole)
    expected = torch.autograd.grad(3 * whole, (q, k))
    torch.testing.assert_close(torch.autograd.grad(3 * tiled, (q, k)), expected)


def test_tiled_weight_cross_entropy_counts_and_learns_what_it_is_told() -> None:
    """Queries left out reach neither value nor gradient; unused and frozen tensors get none; no graph without gradients."""
    tokens = 6
    q, k, unused, frozen = randn(1, 1, tokens, 4), randn(1, 1, tokens, 4), randn(3), randn(3, grad=False)
    teacher = causal_weights(randn(1, 1, tokens, tokens, grad=False))
    counts = torch.tensor([True, False, True, True, True, False])

    def weights(rows: slice) -> tuple[Tensor, Tensor]:
        return teacher[..., rows, :], (q[..., rows, :] @ k.mT).softmax(-1)

    def tiled() -> Tensor:
        return losses.tiled_weight_cross_entropy(
            weights,
            [slice(0, 4), slice(4, 6)],
            [q, k, unused, frozen],
            counted=lambda rows: counts[rows][None, None],
        )

    want = -(teacher * (q @ k.mT).softmax(-1).log()).sum(-1)[..., counts].sum()
    torch.testing.assert_close(tiled(), want)
    gradients = torch.autograd.grad(tiled(), (q, k, unused), allow_unused=True)
    assert gradients[2] is None and gradients[0][..., ~counts, :].abs().max() == 0
    torch.testing.assert_close(gradients[:2], torch.autograd.grad(want, (q, k)))
    with torch.no_grad():
        assert not tiled().requires_grad


def test_tiled_weight_cross_entropy_keeps_one_tile() -> None:
    tokens, tile = 256, 16
    q, k = randn(1, 1, tokens, 4), randn(1, 1, tokens, 4)
    live: list[int] = []

    def weights(rows: slice) -> tuple[Tensor, Tensor]:
        assert not live, "the tile before has left something behind"
        pair = (q[..., rows, :] @ k.mT).softmax(-1), (k[..., rows, :] @ q.mT).softmax(-1)
        for tensor in pair:
            live.append(rows.start)
            weakref.finalize(tensor.untyped_storage(), live.remove, rows.start)
        return pair

    tiles = [slice(start, start + tile) for start in range(0, tokens, tile)]
    with Largest() as largest:
        losses.tiled_weight_cross_entropy(weights, tiles, [q, k]).backward()
    assert largest.elements == tile * tokens
    assert not live and q.grad is not None


# ---- next-token cross-entropy


def plain_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None, scale: float | None
) -> Tensor:
    logits = F.linear(hidden, weight, bias) * (scale or 1)
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


OPTIONS = [
    {},
    {"bias": True},
    {"softcap": 2.0},
    {"logit_scale": 0.3},
    {"vocab_size": 13},
    {"bias": True, "softcap": 2.0, "logit_scale": 0.3, "vocab_size": 13},
]


@pytest.mark.parametrize("chunk", [1, 4, 7, 100, None])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_next_token_ce_equals_the_materialised_loss(options: dict, chunk: int | None) -> None:
    options = dict(options)
    head = nn.Linear(6, 17, bias=options.pop("bias", False)).double()
    hidden, size = randn(2, 9, 6), options.get("vocab_size", 17)
    labels = torch.randint(size, (2, 9))
    labels[0, :4] = losses.IGNORE
    total, count = losses.next_token_ce(hidden, head, labels, chunk=chunk, **options)
    logits = plain_logits(hidden, head.weight, head.bias, options.get("softcap"), options.get("logit_scale"))
    want = F.cross_entropy(
        logits[:, :-1, :size].reshape(-1, size), labels[:, 1:].reshape(-1), reduction="sum"
    )
    torch.testing.assert_close(total, want)
    assert count.item() == (labels[:, 1:] != losses.IGNORE).sum() == losses.count_targets(labels)
    inputs = [hidden, *head.parameters()]
    torch.testing.assert_close(torch.autograd.grad(3 * total, inputs), torch.autograd.grad(3 * want, inputs))
    nll = losses.token_nll(hidden, head, labels, chunk=chunk, **options)
    assert nll.shape == labels.shape
    torch.testing.assert_close(nll.sum(), want.detach())


def test_vocabulary_padding_never_counts() -> None:
    weight, hidden, labels = randn(12, 4), randn(1, 6, 4), torch.randint(10, (1, 6))
    total, _ = losses.next_token_ce(hidden, weight, labels, vocab_size=10)
    assert torch.autograd.grad(total, weight)[0][10:].abs().max() == 0
    with torch.no_grad():
        weight[10:] = 1e4
    torch.testing.assert_close(losses.next_token_ce(hidden, weight, labels, vocab_size=10)[0], total)


def test_uncounted_rows_may_hold_anything() -> None:
    weight, clean = randn(12, 4), randn(1, 6, 4, grad=False)
    labels = torch.tensor([[3, 4, losses.IGNORE, 5, losses.IGNORE, losses.IGNORE]])
    dirty = clean.clone()
    dirty[0, [1, 3, 4, 5]] = float("nan")
    results = []
    for hidden in (clean.requires_grad_(), dirty.requires_grad_()):
        total, count = losses.next_token_ce(hidden, weight, labels, chunk=4)
        results.append((total, count, *torch.autograd.grad(total, (hidden, weight))))
    torch.testing.assert_close(results[0], results[1])
    assert results[0][1] == 2


def test_nothing_to_count_is_zero() -> None:
    hidden, weight = randn(1, 5, 4), randn(8, 4)
    total, count = losses.next_token_ce(hidden, weight, torch.full((1, 5), losses.IGNORE))
    assert (total.item(), count.item()) == (0, 0)
    for gradient in torch.autograd.grad(total, (hidden, weight)):
        assert gradient.abs().max() == 0
    total, count = losses.logits_kl(hidden, weight, hidden, weight * 2, mask_BT=torch.zeros(1, 5))
    assert (total.item(), count.item()) == (0, 0)


def test_shift_respects_documents() -> None:
    labels = torch.arange(10, 17)[None]
    assert losses.shift(labels).tolist() == [[11, 12, 13, 14, 15, 16, -100]]
    packed = losses.shift(labels, torch.tensor([0, 3, 4, 7], dtype=torch.int32))
    assert packed.tolist() == [[11, 12, -100, -100, 15, 16, -100]]
    assert losses.shift(labels[0]).tolist() == losses.shift(labels)[0].tolist()


def test_packed_loss_is_the_sum_over_documents() -> None:
    hidden, weight, labels = randn(1, 9, 4), randn(8, 4), torch.randint(8, (1, 9))
    ends = [0, 4, 5, 9]
    packed, count = losses.next_token_ce(hidden, weight, labels, cu_seqlens=torch.tensor(ends))
    alone = [losses.next_token_ce(hidden[:, a:b], weight, labels[:, a:b]) for a, b in pairwise(ends)]
    torch.testing.assert_close(packed, sum(total for total, _ in alone))
    assert count == sum(n for _, n in alone) == 6


def test_bfloat16_hidden_states_get_a_float32_softmax() -> None:
    hidden, weight = randn(2, 40, 16, dtype=torch.bfloat16), randn(300, 16, dtype=torch.bfloat16)
    labels = torch.randint(300, (2, 40))
    total, _ = losses.next_token_ce(hidden, weight, labels, chunk=32)
    assert total.dtype == torch.float32
    want = F.cross_entropy(
        (hidden[:, :-1] @ weight.T).float().reshape(-1, 300), labels[:, 1:].reshape(-1), reduction="sum"
    )
    torch.testing.assert_close(total, want, rtol=1e-5, atol=0)
    gradients = torch.autograd.grad(total, (hidden, weight))
    assert [g.dtype for g in gradients] == [torch.bfloat16, torch.bfloat16]
    exact = torch.autograd.grad(
        F.cross_entropy(
            (hidden[:, :-1].double() @ weight.double().T).reshape(-1, 300),
            labels[:, 1:].reshape(-1),
            reduction="sum",
        ),
        (hidden, weight),
    )
    torch.testing.assert_close(gradients, exact, rtol=0.05, atol=0.05)


def test_autocast_runs_the_head_in_bfloat16() -> None:
    hidden, head, labels = (
        randn(1, 8, 16, dtype=torch.float32),
        nn.Linear(16, 50, bias=False),
        torch.randint(50, (1, 8)),
    )
    with torch.autocast("cpu", torch.bfloat16):
        total, _ = losses.next_token_ce(hidden, head, labels)
        logits = head(hidden)
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(
        total, F.cross_entropy(logits[0, :-1].float(), labels[0, 1:], reduction="sum"), rtol=1e-5, atol=0
    )
    gradients = torch.autograd.grad(total, (hidden, head.weight))
    assert [g.dtype for g in gradients] == [torch.float32, torch.float32]


def test_frozen_head_takes_no_gradient() -> None:
    hidden, weight, labels = randn(1, 5, 4), randn(8, 4, grad=False), torch.randint(8, (1, 5))
    total, _ = losses.next_token_ce(hidden, weight, labels)
    total.backward()
    assert weight.grad is None and hidden.grad is not None
    with torch.no_grad():
        assert not losses.next_token_ce(hidden, weight, labels)[0].requires_grad


# ---- distillation


@pytest.mark.parametrize("chunk", [1, 4, 100, None])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_logits_kl_equals_the_materialised_loss(chunk: int | None, softcap: float | None) -> None:
    teacher_head, student_head = nn.Linear(5, 20).double(), nn.Linear(6, 17).double()
    teacher, student, mask = randn(2, 7, 5), randn(2, 7, 6), torch.rand(2, 7) < 0.6
    total, count = losses.logits_kl(
        teacher,
        teacher_head,
        student,
        student_head,
        mask_BT=mask,
        softcap=softcap,
        vocab_size=15,
        chunk=chunk,
    )
    log_p = plain_logits(teacher, teacher_head.weight, teacher_head.bias, softcap, None)[
        ..., :15
    ].log_softmax(-1)
    log_q = plain_logits(student, student_head.weight, student_head.bias, softcap, None)[
        ..., :15
    ].log_softmax(-1)
    want = F.kl_div(log_q[mask], log_p[mask].detach(), log_target=True, reduction="sum")
    torch.testing.assert_close(total, want)
    assert count == mask.sum()
    inputs = [student, *student_head.parameters()]
    torch.testing.assert_close(
        torch.autograd.grad(total, inputs, retain_graph=True), torch.autograd.grad(want, inputs)
    )
    total.backward()
    assert teacher.grad is None and teacher_head.weight.grad is None


def test_logits_kl_compares_the_common_vocabulary() -> None:
    teacher, student = randn(1, 4, 5), randn(1, 4, 5)
    weight = randn(11, 5)
    padded = torch.cat([weight, torch.full((3, 5), 50.0, dtype=torch.float64)])
    torch.testing.assert_close(
        losses.logits_kl(teacher, padded, student, weight), losses.logits_kl(teacher, weight, student, weight)
    )
    assert losses.logits_kl(student, padded, student, weight)[0].abs() < 1e-12


# ---- memory


@pytest.mark.parametrize("name", ["ce", "kl"])
def test_no_tensor_of_rows_by_vocabulary(name: str) -> None:
    rows, width, vocabulary, chunk = 512, 8, 400, 32
    hidden, weight = randn(1, rows, width, dtype=torch.float32), randn(vocabulary, width, dtype=torch.float32)
    with Largest() as largest:
        if name == "ce":
            total, _ = losses.next_token_ce(hidden, weight, torch.randint(vocabulary, (1, rows)), chunk=chunk)
        else:
            total, _ = losses.logits_kl(hidden, weight, hidden * 2, weight, chunk=chunk)
        total.backward()
    assert largest.elements <= chunk * vocabulary < rows * vocabulary / 8
    assert hidden.grad is not None and weight.grad is not None


# ---- bad input


def test_bad_input_is_named() -> None:
    hidden, weight, labels = torch.zeros(1, 4, 6), torch.zeros(10, 6), torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match=r"vocab_size is 11.*10 rows"):
        losses.next_token_ce(hidden, weight, labels, vocab_size=11)
    with pytest.raises(ValueError, match=r"width is 6.*expects 5"):
        losses.next_token_ce(hidden, weight[:, :5], labels)
    with pytest.raises(ValueError, match="4 positions and labels 3"):
        losses.next_token_ce(hidden, weight, labels[:, :3])
    with pytest.raises(ValueError, match="chunk is 0"):
        losses.next_token_ce(hidden, weight, labels, chunk=0)
    with pytest.raises(ValueError, match="head is a Sequential"):
        losses.next_token_ce(hidden, nn.Sequential(nn.Linear(6, 10)), labels)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tiles is empty"):
        losses.tiled_weight_cross_entropy(lambda rows: (weight, weight), [], [])
