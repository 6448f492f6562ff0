"""First values that depend on data: the bias of mass mixing (DESIGN D3).

g = sigma(lse_near - ln Z_far - b) follows the teacher when ln Z_far + b is the teacher's far lse. The scale of phi is
arbitrary, so without b the masses of the two branches could not be compared and the far branch might be bypassed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridize.data.batching import Batch
from hybridize.layers.token_mixer import TokenMixer
from hybridize.mixers.windowed_linear import WindowedLinearMixer
from hybridize.models.modeling import HybridForCausalLM
from hybridize.ops import softmax, windowed_linear
from hybridize.ops.sequences import Sequences
from hybridize.ops.types import EPSILON
from hybridize.spec import SeparateNormalizer


@torch.no_grad()
def calibrate_mass(model: HybridForCausalLM, batch: Batch) -> None:
    """Set every mass bias b_h to the mean of (teacher's far lse - ln Z_far) over the batch's tokens with far keys."""
    mixing = [mixer for mixer in model.mixers if any(_mixes_by_mass(group) for group in mixer.mixers)]
    if not mixing:
        return

    def intercept(mixer: TokenMixer, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> Tensor:
        for group, (heads, kv_heads) in zip(mixer.mixers, mixer.slices, strict=True):
            if _mixes_by_mass(group):
                assert isinstance(group, WindowedLinearMixer) and group.mix.logit is not None
                qkv = q[:, :, heads], k[:, :, kv_heads], v[:, :, kv_heads]
                bias_H = _bias(mixer, group, qkv, sequences)
                group.mix.logit.copy_(torch.where(bias_H.isfinite(), bias_H, group.mix.logit))
        return mixer.teacher(q, k, v, sequences)

    with model.intercepted(intercept):
        model.hidden_states(batch.input_ids_BT.to(model.device), position_ids=batch.position_ids_BT)


def _mixes_by_mass(group: object) -> bool:
    if not isinstance(group, WindowedLinearMixer):
        return False
    normalizer = group.spec.normalizer
    return isinstance(normalizer, SeparateNormalizer) and normalizer.mix == "mass"


def _bias(
    mixer: TokenMixer, group: WindowedLinearMixer, qkv: tuple[Tensor, Tensor, Tensor], sequences: Sequences
) -> Tensor:
    """`[H]`, NaN for a head without any far mass in the batch."""
    options = {"scale": group.shape.scale, "softcap": group.shape.softcap, "sequences": sequences}
    whole = softmax.forward(*qkv, mixer.teacher_window, return_aux=True, **options).aux["lse"]  # type: ignore[arg-type]
    mix = group.mix.mix(qkv[0].device)
    maps = group.map_q.map(), group.map_k.map()
    masses = windowed_linear.forward(*qkv, *maps, group.window, mix, return_aux=True, **options).aux  # type: ignore[arg-type]
    near = masses["shift"] + masses["near_den"].clamp_min(EPSILON).log()
    far = whole + torch.log1p(-torch.exp((near - whole).clamp_max(0)))
    bias_BTH = far - masses["far_den"].clamp_min(EPSILON).log()
    has_far = group.window.has_far(sequences.tensor("position")).view(sequences.shape)[..., None]
    counts = has_far & bias_BTH.isfinite()
    return torch.where(counts, bias_BTH, 0).sum((0, 1)) / counts.sum((0, 1))
