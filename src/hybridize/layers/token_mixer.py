"""`TokenMixer` replaces a model's attention module: the projections stay, head groups mix the tokens.

It works in three calls, `project -> attend -> finish`, shared by the plain forward, transfer and probes.

Legend: B rows, T tokens, E width, H query heads, G KV heads, D head dim, V value dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from hybridize.layers.family import LayerShape, Projections
from hybridize.layers.placing import place
from hybridize.mixers.recurrent import RecurrentMixer
from hybridize.mixers.registry import build_mixer
from hybridize.mixers.softmax import SoftmaxMixer
from hybridize.mixers.types import GroupShape, Mixer
from hybridize.ops import softmax
from hybridize.ops.sequences import Sequences
from hybridize.ops.types import HYBRID, Ablation, Removal, State
from hybridize.spec import GroupSpec, LayerSpec
from hybridize.windows import Window

Mode = Literal["hybrid", "softmax_only", "far_only", "linear_only", "sinks_only", "none"]
Scope = Literal["mixed", "all"]
SINKS_ONLY = 8
"""`sinks_only` sees the first 8 positions (DESIGN D12)."""


@dataclass
class Call:
    """What one forward pass of the model hands to its layers: the sequences and, with a cache, the states.

    `states[layer][group]` is read and replaced by the layers; None where nothing is kept. `enter` brings a `[B, T, ...]`
    tensor of the caller into the shape that the layers see (None: the same).
    """

    sequences: Sequences
    states: list[list[State | None]] | None = None
    shape: tuple[int, int] | None = None
    enter: Callable[[Tensor], Tensor] | None = None

    def lay(self, where: Tensor | None) -> Tensor | None:
        """A mask that broadcasts to the caller's `[B, T, H]`, in the layers' shape."""
        if where is None or self.shape is None or self.enter is None or where.shape[:2] == (1, 1):
            return where
        device = self.sequences.device
        return self.enter(where.to(device).expand(*self.shape, where.shape[-1]))


@dataclass(frozen=True)
class Effective:
    """A temporary change of what a layer computes: ablations at evaluation (DESIGN D12), dropped windows in training (D11).

    `where` (bool, broadcast to `[B, T, H]`) confines a mode to some queries and heads of the groups that have both
    branches; with `keep_empty` queries without a far key are left alone. `window_size` is that of their windows where it is
    not the spec's.
    """

    mode: Mode = "hybrid"
    removal: Removal = "zero"
    scope: Scope = "mixed"
    where: Tensor | None = field(default=None, compare=False)
    keep_empty: bool = False
    window_size: int | None = None


Intercept = Callable[["TokenMixer", Tensor, Tensor, Tensor, Sequences], Tensor]


class TokenMixer(nn.Module):
    """Takes over the children of an attention module under their names and adds `groups`.

    `family` projects and finishes, `shape` gives the layer's numbers, `spec` its resolved head groups.
    """

    def __init__(self, attention: nn.Module, family: Projections, shape: LayerShape, spec: LayerSpec) -> None:
        super().__init__()
        for name, child in attention.named_children():
            self.add_module(name, child)
        self.family, self.shape = family, shape
        self.expanded = spec.expand
        self._projected: Any = shape  # what the projections give: the teacher's shape, or more KV heads
        if spec.expand:
            family.expand(self, shape)
            self._projected = replace(cast(Any, shape), kv_heads=shape.heads)
        self.effective = Effective()
        self.intercept: Intercept | None = None
        self._build(spec)
        whole = self._group_shape(shape.heads, self.kv_heads)
        self._sinks_only = SoftmaxMixer(GroupSpec(attention="softmax", heads=shape.heads), whole)
        self._sinks_only.window = Window("sliding", 0, sinks=SINKS_ONLY)

    @property
    def kv_heads(self) -> int:
        """Key and value heads after an expansion."""
        return int(self._projected.kv_heads)

    def _group_shape(self, heads: int, kv_heads: int) -> GroupShape:
        shape = self.shape
        rest = shape.softcap, shape.window, shape.hidden, shape.layers, shape.normed
        return GroupShape(shape.layer, heads, kv_heads, shape.head_dim, shape.scale, *rest)

    def _build(self, spec: LayerSpec) -> None:
        shape = self.shape
        per_kv = shape.heads // self.kv_heads
        _check_heads([int(group.heads) for group in spec.groups], shape, per_kv)
        self.spec = spec
        self.groups = nn.ModuleList()
        self.slices: list[tuple[slice, slice]] = []
        head = 0
        for group in spec.groups:
            count = int(group.heads)
            mixer = build_mixer(group, self._group_shape(count, count // per_kv))
            self.groups.append(mixer)
            self.slices.append((slice(head, head + count), slice(head // per_kv, (head + count) // per_kv)))
            head += count
        like = next(self.parameters(), None)
        for mixer in self.mixers:
            conv = mixer.short_conv if isinstance(mixer, RecurrentMixer) else None
            for part in (mixer.q_norm, mixer.k_norm, mixer.output_norm, mixer.output_gate, conv):
                if part is not None and like is not None:
                    part.to(like.dtype)

    def check_respec(self, spec: LayerSpec) -> None:
        """Raise ValueError for a spec that expands the KV heads where this layer does not, or the other way round, and for
        groups that do not fit the heads."""
        if spec.expand != self.expanded:
            raise ValueError(
                f"layer {self.shape.layer}: heads: expand changes the projections; a change of spec cannot do that"
            )
        _check_heads(
            [int(group.heads) for group in spec.groups], self.shape, self.shape.heads // self.kv_heads
        )

    def respec(self, spec: LayerSpec) -> None:
        """Compute `spec` from now on. Parameters that keep their name and shape keep their values; new ones start as new.

        Raises ValueError where `check_respec` does.
        """
        self.check_respec(spec)
        if spec == self.spec:
            return
        before = self.groups.state_dict()
        device = next(self.parameters()).device
        self._build(spec)
        self.groups.to(device)
        now = self.groups.state_dict()
        kept = {
            name: value for name, value in before.items() if name in now and now[name].shape == value.shape
        }
        self.groups.load_state_dict(kept, strict=False)
        self.groups.requires_grad_(False).train(self.training)

    @property
    def mixers(self) -> list[Mixer]:
        """The head groups' mixers, in head order."""
        return [cast(Mixer, group) for group in self.groups]

    @property
    def mixed(self) -> bool:
        """Whether the layer has both a softmax and a linear branch."""
        return any(mixer.near for mixer in self.mixers) and any(mixer.far for mixer in self.mixers)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        hybrid_call: Call | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """`[B, T, E]` to `[B, T, E]`. `hybrid_call` comes from the model; without one every row is one sequence."""
        if attention_mask is not None:
            raise ValueError(
                "attention_mask reached a token mixer; call the hybrid model, which turns masks into lengths"
            )
        if hybrid_call is None:
            rows, length = hidden_states.shape[:2]
            hybrid_call = Call(Sequences.dense(rows, length, device=hidden_states.device))
        sequences = hybrid_call.sequences.on(hidden_states.device)
        states = hybrid_call.states[self.shape.layer] if hybrid_call.states is not None else None
        q, k, v = self.project(hidden_states, position_embeddings, sequences, states)
        if self.intercept is not None:
            return self.family.finish(self, self.intercept(self, q, k, v, sequences)), None
        where = hybrid_call.lay(self.effective.where)
        o = self.attend(q, k, v, sequences, states, where, x_BTE=hidden_states)
        y = self.finish(o, hidden_states)
        return (torch.zeros_like(y) if self._silent() else y), None

    def project(
        self,
        x_BTE: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        sequences: Sequences,
        states: list[State | None] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q `[B, T, H, D]`, k and v `[B, T, G, D]` as the groups take them: convolved, normalised, with their positions, scaled.

        `states` (one a group) go into `attend` next: the convolutions read and replace their own part.
        """
        q, k, v = self.family.heads(self, self._projected, x_BTE)

        def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
            return self.family.rotate(q, k, position_embeddings)

        rotated = self.shape.rope
        if all(_plain(group.spec) for group in self.mixers):
            return *(rotate(q, k) if rotated else (q, k)), v
        q, k, v = self.convolve(q, k, v, sequences, states)
        parts = []
        for mixer, (heads, kv_heads) in zip(self.mixers, self.slices, strict=True):
            own = mixer.normalise(q[:, :, heads], k[:, :, kv_heads])
            parts.append(place(mixer.spec, *own, sequences, rotate, rotated=rotated, training=self.training))
        q, k = (_joined(x) for x in zip(*parts, strict=True))
        # under autocast the family's rotation gives float32: kernels want one dtype, the one that bf16 inference has
        return q.to(v.dtype), k.to(v.dtype), v

    def convolve(
        self,
        q_BTHD: Tensor,
        k_BTGD: Tensor,
        v_BTGV: Tensor,
        sequences: Sequences,
        states: list[State | None] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v after the short convolutions of the groups that have one; `states` are read and replaced."""
        if not any(_convolves(mixer) for mixer in self.mixers):
            return q_BTHD, k_BTGD, v_BTGV
        parts = []
        for index, (mixer, (heads, kv_heads)) in enumerate(zip(self.mixers, self.slices, strict=True)):
            qkv = q_BTHD[:, :, heads], k_BTGD[:, :, kv_heads], v_BTGV[:, :, kv_heads]
            if isinstance(mixer, RecurrentMixer):
                state = states[index] if states is not None else None
                q, k, v, state = mixer.convolve(*qkv, sequences, state, keep_state=states is not None)
                if states is not None:
                    states[index] = state
                qkv = q, k, v
            parts.append(qkv)
        q, k, v = (_joined(x) for x in zip(*parts, strict=True))
        return q, k, v

    def finish(self, o_BTHV: Tensor, x_BTE: Tensor) -> Tensor:
        """The layer's output `[B, T, E]`: the groups' norms and gates, then the output projection."""
        if any(mixer.dressed for mixer in self.mixers):
            parts = [
                mixer.dress(o_BTHV[:, :, heads], x_BTE)
                for mixer, (heads, _) in zip(self.mixers, self.slices, strict=True)
            ]
            o_BTHV = _joined(parts)
        return self.family.finish(self, o_BTHV)

    def attend(
        self,
        q_BTHD: Tensor,
        k_BTGD: Tensor,
        v_BTGV: Tensor,
        sequences: Sequences,
        states: list[State | None] | None = None,
        where: Tensor | None = None,
        x_BTE: Tensor | None = None,
    ) -> Tensor:
        """`o_BTHV` of all groups; `states` (one a group) are read and replaced; `where` confines the ablation in force."""
        outputs = []
        for index, (group, (heads, kv_heads)) in enumerate(zip(self.mixers, self.slices, strict=True)):
            q, k, v = q_BTHD[:, :, heads], k_BTGD[:, :, kv_heads], v_BTGV[:, :, kv_heads]
            mixer, ablation = self._ablated(group, heads, where)
            if mixer is None:
                outputs.append(q.new_zeros(*q.shape[:3], v.shape[-1]))
                continue
            state = states[index] if states is not None else None
            o, state = mixer.attend(
                q, k, v, sequences, state, x_BTE=x_BTE, keep_state=states is not None, ablation=ablation
            )
            if states is not None:
                states[index] = state
            outputs.append(o)
        return _joined(outputs)

    @property
    def teacher_window(self) -> Window | None:
        """The sliding window of the attention that was replaced; None where it saw everything."""
        return Window("sliding", self.shape.window) if self.shape.window is not None else None

    @property
    def keeps_projections(self) -> bool:
        """Whether q, k and v are the teacher's own; `position: rope` in a layer of the teacher that has none changes them."""
        turned = not self.shape.rope and any(group.position == "rope" for group in self.spec.groups)
        return self.spec.keeps_projections and not turned

    @property
    def is_the_teachers(self) -> bool:
        """Whether the layer computes its teacher's own attention, with whatever weights."""
        changed = any(group.window is not None or group.own_parameters for group in self.spec.groups)
        return self.spec.is_softmax and self.keeps_projections and not changed

    def teacher(self, q_BTHD: Tensor, k_BTGD: Tensor, v_BTGV: Tensor, sequences: Sequences) -> Tensor:
        """`o_BTHV` of the attention that was replaced: softmax over the teacher's own window.

        Raises ValueError where the layer's q, k or v are no longer the teacher's (recurrent attention, own norms, other
        positions, expanded heads).
        """
        if not self.keeps_projections:
            raise ValueError(
                f"layer {self.shape.layer} no longer projects as its teacher does; load the teacher itself"
            )
        return softmax.forward(
            q_BTHD,
            k_BTGD,
            v_BTGV,
            self.teacher_window,
            scale=self.shape.scale,
            softcap=self.shape.softcap,
            sequences=sequences,
        ).o

    def _touched(self) -> bool:
        return self.effective.mode != "hybrid" and (self.mixed or self.effective.scope == "all")

    def _silent(self) -> bool:
        return self.effective.mode == "none" and self._touched()

    def _ablated(self, group: Mixer, heads: slice, where: Tensor | None) -> tuple[Mixer | None, Ablation]:
        """The mixer that runs in place of `group` (None: its output is zero) and the ablation inside it."""
        mode = self.effective.mode
        if not self._touched() or mode == "none":
            return group, HYBRID
        if mode == "sinks_only":
            return (self._sinks_only, HYBRID) if group.near else (None, HYBRID)
        if group.near and group.far:
            if where is not None and where.shape[-1] > 1:
                where = where[..., heads]
            return group, Ablation(mode, self.effective.removal, where, self.effective.keep_empty)
        if where is not None:
            return group, HYBRID
        kept = group.near if mode == "softmax_only" else group.far
        return (group, HYBRID) if kept else (None, HYBRID)


def _plain(spec: GroupSpec) -> bool:
    """Whether q, k and v are the teacher's own."""
    own = spec.position is not None or spec.qk_norm or spec.short_conv is not None
    return not own and spec.logit_scale is None


def _convolves(mixer: Mixer) -> bool:
    return isinstance(mixer, RecurrentMixer) and mixer.short_conv is not None


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """The groups' heads side by side."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 2)


def _check_heads(counts: list[int], shape: LayerShape, per_kv: int) -> None:
    """A stored spec may have been edited, or made for another model."""
    if sum(counts) != shape.heads or any(count % per_kv for count in counts):
        raise ValueError(
            f"groups of layer {shape.layer} hold {counts} query heads; they must add up to {shape.heads} in multiples of {per_kv}"
        )
