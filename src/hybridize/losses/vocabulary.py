"""Losses over the vocabulary, whose logits exist a chunk of rows at a time: next-token cross-entropy, KL of two models.

Shapes: B batch, T tokens, E model width, N rows (B and T flattened), n rows of a chunk, C vocabulary. Losses over tokens
come as `(sum, count)`, both on the device, so that callers can weight by tokens over a whole optimizer step.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hybridize.losses.precision import wide

IGNORE = -100
_CHUNK_ELEMENTS = 2**26  # logits of one chunk: 256 MiB in float32


def shift(labels_BT: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """Next-token targets from labels in the Hugging Face convention (aligned with their inputs, -100 ignored).

    Position t gets the label of t + 1; a row's last position is ignored, and so is the last position of every document
    where `cu_seqlens` (offsets `[documents + 1]` into one packed row) is given.
    """
    targets = torch.full_like(labels_BT, IGNORE)
    targets[..., :-1] = labels_BT[..., 1:]
    if cu_seqlens is not None:
        ends = cu_seqlens[1:].to(labels_BT.device, torch.long)
        targets[..., (ends - 1).clamp(min=0)] = IGNORE
    return targets


def count_targets(labels_BT: Tensor, cu_seqlens: Tensor | None = None) -> int:
    """How many positions `next_token_ce` counts; a device synchronisation unless the labels are on the CPU."""
    return int((shift(labels_BT, cu_seqlens) != IGNORE).sum())


def next_token_ce(
    hidden_BTE: Tensor,
    head: Tensor | nn.Linear,
    labels_BT: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float | None = None,
    vocab_size: int | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Next-token cross-entropy in nats, summed over the counted positions, without logits `[B, T, C]`.

    Logits are made, used and dropped `chunk` rows at a time; the gradients to the hidden states, to the head's weight and
    to its bias are formed in the same pass, so the cost is that of the materialised loss.

    Args:
        hidden_BTE: final hidden states, after the last norm, `[..., T, E]`.
        head: the output projection, as `[C, E]` or as an `nn.Linear` (its bias counts).
        labels_BT: labels aligned with the inputs; `shift` is applied here and nowhere else.
        cu_seqlens: document offsets of a packed row: a document's last token predicts nothing.
        softcap: `softcap * tanh(logits / softcap)`, as in Gemma 2.
        logit_scale: a factor on the logits, before the cap.
        vocab_size: the real vocabulary; the head's rows past it are padding and never count.
        chunk: rows at a time; by default what makes 2^26 logits.

    Returns:
        the summed loss (float32, 0 where nothing counts) and the number of counted positions (int64), both 0-d.
    """
    targets_N = shift(labels_BT, cu_seqlens).reshape(-1).to(hidden_BTE.device)
    weight, bias = _head(head, vocab_size)
    hidden_NE = _rows(hidden_BTE, weight, targets_N.numel(), "labels")
    chunk = _chunk(chunk, weight)
    loss = _ChunkedCE.apply(
        hidden_NE, weight, bias, targets_N, softcap, logit_scale, chunk, torch.is_grad_enabled()
    )
    return loss, (targets_N != IGNORE).sum()


@torch.no_grad()
def token_nll(
    hidden_BTE: Tensor,
    head: Tensor | nn.Linear,
    labels_BT: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float | None = None,
    vocab_size: int | None = None,
    chunk: int | None = None,
) -> Tensor:
    """The loss of `next_token_ce` token by token, `[..., T]` float32 in nats, 0 where not counted; no gradient."""
    targets = shift(labels_BT, cu_seqlens).to(hidden_BTE.device)
    weight, bias = _head(head, vocab_size)
    hidden_NE = _rows(hidden_BTE, weight, targets.numel(), "labels")
    dtype, chunk = _dtype(hidden_NE), _chunk(chunk, weight)
    weight = weight.to(dtype)
    nll_N = torch.empty(targets.numel(), dtype=wide(hidden_NE[:0]).dtype, device=hidden_NE.device)
    for start in range(0, targets.numel(), chunk):
        rows = slice(start, start + chunk)
        logits, _ = _logits(hidden_NE[rows].to(dtype), weight, bias, softcap, logit_scale)
        nll_N[rows], _ = _nll(logits, targets.reshape(-1)[rows])
    return nll_N.reshape(targets.shape)


def logits_kl(
    teacher_hidden_BTE: Tensor,
    teacher_head: Tensor | nn.Linear,
    student_hidden_BTE: Tensor,
    student_head: Tensor | nn.Linear,
    *,
    mask_BT: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float | None = None,
    vocab_size: int | None = None,
    chunk: int | None = None,
    rows: Callable[..., tuple[Tensor, Tensor | None]] | None = None,
) -> tuple[Tensor, Tensor]:
    """KL(teacher || student) of the next-token distributions in nats, summed over counted positions, chunked alike.

    The two heads may be padded to different vocabularies and have different widths: the first `vocab_size` rows, or the
    smaller of the two sizes, are compared. Positions count where `mask_BT` is true (all without a mask). The teacher
    gets no gradient. `rows` computes a chunk: `kl_rows` (the default) or a compiled form of it. Forward KL as in HALO (arXiv
    2601.22156), stage 2.

    Returns:
        the summed divergence (float32, 0 where nothing counts) and the number of counted positions (int64), both 0-d.
    """
    size = min(_head(teacher_head, vocab_size)[0].shape[0], _head(student_head, vocab_size)[0].shape[0])
    teacher_weight, teacher_bias = _head(teacher_head, size)
    weight, bias = _head(student_head, size)
    positions = student_hidden_BTE.shape[:-1].numel()
    mask_N = torch.ones(positions, dtype=torch.bool, device=student_hidden_BTE.device)
    if mask_BT is not None:
        mask_N = mask_BT.reshape(-1).to(mask_N)
    student_NE = _rows(student_hidden_BTE, weight, mask_N.numel(), "mask")
    teacher_NE = _rows(teacher_hidden_BTE, teacher_weight, mask_N.numel(), "student hidden states")
    teacher = (
        teacher_NE.detach(),
        teacher_weight.detach(),
        None if teacher_bias is None else teacher_bias.detach(),
    )
    chunk = _chunk(chunk, weight)
    loss = _ChunkedKL.apply(
        student_NE,
        weight,
        bias,
        teacher,
        mask_N,
        softcap,
        logit_scale,
        chunk,
        rows or kl_rows,
        torch.is_grad_enabled(),
    )
    return loss, mask_N.sum()


def kl_rows(
    known_nE: Tensor,
    teacher: tuple[Tensor, Tensor | None],
    hidden_nE: Tensor,
    student: tuple[Tensor, Tensor | None],
    skip_n1: Tensor,
    softcap: float | None,
    scale: float | None,
    wanted: bool,
) -> tuple[Tensor, Tensor | None]:
    """The divergence of n rows, summed, from hidden states and both heads (weight, bias); with `wanted` also its gradient in
    what the student's head gives, in the weight's dtype where no bias sums it."""
    log_p = _logits(known_nE, *teacher, softcap, scale)[0].log_softmax(-1)
    logits, slope = _logits(hidden_nE, *student, softcap, scale)
    log_q = logits.log_softmax(-1)
    p = log_p.exp()
    total = (p * (log_p - log_q)).masked_fill(skip_n1, 0).sum()
    if not wanted:
        return total, None
    grad = log_q.exp_().sub_(p).masked_fill_(skip_n1, 0)
    grad = grad if slope is None else grad * slope
    return total, grad.to(student[0].dtype) if student[1] is None else grad


def _head(head: Tensor | nn.Linear, vocab_size: int | None) -> tuple[Tensor, Tensor | None]:
    if isinstance(head, nn.Module) and type(head) is not nn.Linear:
        # an adapter around the head would be skipped without a word if only its weight were read
        raise ValueError(
            f"head is a {type(head).__name__}: pass an nn.Linear or the weight [vocabulary, width]"
        )
    weight, bias = (head, None) if isinstance(head, Tensor) else (head.weight, head.bias)
    if vocab_size is None:
        return weight, bias
    if not 0 < vocab_size <= weight.shape[0]:
        raise ValueError(
            f"vocab_size is {vocab_size}: the head has {weight.shape[0]} rows, give 1..{weight.shape[0]}"
        )
    return weight[:vocab_size], None if bias is None else bias[:vocab_size]


def _rows(hidden: Tensor, weight: Tensor, rows: int, what: str) -> Tensor:
    if hidden.shape[-1] != weight.shape[1]:
        raise ValueError(f"hidden width is {hidden.shape[-1]}: the head expects {weight.shape[1]}")
    hidden_NE = hidden.reshape(-1, hidden.shape[-1])
    if hidden_NE.shape[0] != rows:
        raise ValueError(f"hidden has {hidden_NE.shape[0]} positions and {what} {rows}: they must be equal")
    return hidden_NE


def _chunk(chunk: int | None, weight: Tensor) -> int:
    if chunk is None:
        return max(16, _CHUNK_ELEMENTS // weight.shape[0])
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}: give at least 1 row")
    return chunk


def _dtype(hidden: Tensor) -> torch.dtype:
    """The dtype of the head's matmul: autocast's where it is on, as for any linear layer."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None, scale: float | None
) -> tuple[Tensor, Tensor | None]:
    """Wide logits of one chunk, and their derivative in the head's output (None where it is 1)."""
    with torch.autocast(hidden.device.type, enabled=False):
        logits = wide(hidden @ weight.T)
    if bias is not None:
        logits = logits + bias
    if scale is not None:
        logits = logits * scale
    if softcap is None:
        return logits, None if scale is None else torch.full(
            (), scale, dtype=logits.dtype, device=logits.device
        )
    squashed = torch.tanh(logits / softcap)
    return squashed * softcap, (1 - squashed.square()) * (1.0 if scale is None else scale)


def _nll(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Loss per row (0 where ignored) and the log of the normaliser, `[n, 1]`."""
    lse = logits.logsumexp(-1, keepdim=True)
    picked = logits.gather(-1, targets.clamp(min=0)[:, None])
    return (lse - picked).squeeze(-1).masked_fill(targets == IGNORE, 0), lse


class _Gradients:
    """Accumulates the gradients of a chunked head from the gradients of its logits."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: Sequence[bool]):
        self.hidden = torch.empty_like(hidden) if needs[0] else None
        self.weight = torch.zeros_like(weight, dtype=wide(hidden[:0]).dtype) if needs[1] else None
        self.bias = (
            torch.zeros_like(bias, dtype=wide(hidden[:0]).dtype) if bias is not None and needs[2] else None
        )

    @property
    def wanted(self) -> bool:
        return not (self.hidden is None and self.weight is None and self.bias is None)

    def add(self, rows: slice, grad: Tensor, hidden: Tensor, weight: Tensor) -> None:
        if self.bias is not None:
            self.bias += grad.sum(0)
        narrow = grad.to(weight.dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            if self.hidden is not None:
                self.hidden[rows] = narrow @ weight
            if self.weight is not None:
                self.weight += narrow.T @ hidden

    def save(self, ctx: Any, weight: Tensor, bias: Tensor | None) -> None:
        ctx.weight_dtype, ctx.bias_dtype = weight.dtype, None if bias is None else bias.dtype
        ctx.save_for_backward(self.hidden, self.weight, self.bias)


def _scaled(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    hidden, weight, bias = ctx.saved_tensors
    return (
        None if hidden is None else (hidden * grad).to(hidden.dtype),
        None if weight is None else (weight * grad).to(ctx.weight_dtype),
        None if bias is None else (bias * grad).to(ctx.bias_dtype),
    )


class _ChunkedCE(torch.autograd.Function):
    """Sum of the cross-entropy; the output is a scalar, so its gradients can be formed while the logits exist."""

    @staticmethod
    def forward(ctx, hidden_NE, weight_CE, bias_C, targets_N, softcap, scale, chunk, learn):  # type: ignore[no-untyped-def]
        dtype = _dtype(hidden_NE)
        gradients = _Gradients(hidden_NE, weight_CE, bias_C, ctx.needs_input_grad if learn else (False,) * 3)
        weight = weight_CE.to(dtype)
        total = torch.zeros((), dtype=wide(hidden_NE[:0]).dtype, device=hidden_NE.device)
        for start in range(0, hidden_NE.shape[0], chunk):
            rows = slice(start, start + chunk)
            targets = targets_N[rows]
            skip = (targets == IGNORE)[:, None]
            hidden = hidden_NE[rows].to(dtype).masked_fill(skip, 0)  # an uncounted row may hold anything
            logits, slope = _logits(hidden, weight, bias_C, softcap, scale)
            nll, lse = _nll(logits, targets)
            total += nll.sum()
            if not gradients.wanted:
                continue
            grad = logits.sub_(lse).exp_()
            grad.scatter_add_(-1, targets.clamp(min=0)[:, None], grad.new_full((len(targets), 1), -1.0))
            grad = grad.masked_fill_(skip, 0)
            gradients.add(rows, grad if slope is None else grad * slope, hidden, weight)
        gradients.save(ctx, weight_CE, bias_C)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return *_scaled(ctx, grad), None, None, None, None, None


class _ChunkedKL(torch.autograd.Function):
    """Sum of KL(teacher || student); its gradient in the student's logits is q - p."""

    @staticmethod
    def forward(ctx, hidden_NE, weight_CE, bias_C, teacher, mask_N, softcap, scale, chunk, run, learn):  # type: ignore[no-untyped-def]
        dtype = _dtype(hidden_NE)
        gradients = _Gradients(hidden_NE, weight_CE, bias_C, ctx.needs_input_grad if learn else (False,) * 3)
        teacher_NE, teacher_weight, teacher_bias = teacher
        weight, teacher_weight = weight_CE.to(dtype), teacher_weight.to(dtype)
        total = torch.zeros((), dtype=wide(hidden_NE[:0]).dtype, device=hidden_NE.device)
        for start in range(0, hidden_NE.shape[0], chunk):
            rows = slice(start, start + chunk)
            skip = ~mask_N[rows, None]
            hidden = hidden_NE[rows].to(dtype).masked_fill(skip, 0)  # an uncounted row may hold anything
            known = teacher_NE[rows].to(dtype).masked_fill(skip, 0)
            heads = (teacher_weight, teacher_bias), (weight, bias_C)
            value, grad = run(known, heads[0], hidden, heads[1], skip, softcap, scale, gradients.wanted)
            total += value
            if grad is not None:
                gradients.add(rows, grad, hidden, weight)
        gradients.save(ctx, weight_CE, bias_C)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return *_scaled(ctx, grad), None, None, None, None, None, None, None
