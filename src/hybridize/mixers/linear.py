"""Linear attention with learnt feature maps for queries and keys."""

from __future__ import annotations

from torch import Tensor

from hybridize.mixers.feature_map import FeatureMapWeights
from hybridize.mixers.types import GroupShape, Mixer
from hybridize.ops import linear
from hybridize.ops.linear import LinearState
from hybridize.ops.sequences import Sequences
from hybridize.ops.types import HYBRID, Ablation, State
from hybridize.spec import GroupSpec


def build_maps(spec: GroupSpec, shape: GroupShape) -> tuple[FeatureMapWeights, FeatureMapWeights]:
    """The query and the key map of a group. Noise seeds differ by layer and by map."""
    feature_map = spec.feature_map
    assert feature_map is not None and feature_map.features is not None
    key_heads = shape.heads if feature_map.k_map_heads == "query" else shape.kv_heads

    def build(heads: int, seed: int) -> FeatureMapWeights:
        assert feature_map is not None and feature_map.features is not None
        return FeatureMapWeights(
            heads,
            shape.head_dim,
            feature_map.features,
            feature_map.act,
            two_sided=feature_map.two_sided,
            bias=feature_map.bias,
            noise=feature_map.init == "identity_noise",
            seed=seed,
        )

    return build(shape.heads, 2 * shape.layer), build(key_heads, 2 * shape.layer + 1)


class LinearMixer(Mixer):
    near, far = False, True

    def __init__(self, spec: GroupSpec, shape: GroupShape) -> None:
        super().__init__(spec, shape)
        self.map_q, self.map_k = build_maps(spec, shape)

    def attend(
        self,
        q_BTHD: Tensor,
        k_BTGD: Tensor,
        v_BTGV: Tensor,
        sequences: Sequences,
        state: State | None = None,
        *,
        x_BTE: Tensor | None = None,
        keep_state: bool = False,
        ablation: Ablation = HYBRID,
    ) -> tuple[Tensor, State | None]:
        assert state is None or isinstance(state, LinearState)
        maps = self.map_q.map(), self.map_k.map()
        if sequences.is_step and state is not None:
            result = linear.step(q_BTHD, k_BTGD, v_BTGV, *maps, state)
            return result.o, result.state
        result = linear.forward(
            q_BTHD, k_BTGD, v_BTGV, *maps, sequences=sequences, state=state, return_state=keep_state
        )
        return result.o, result.state

    def coefficients(
        self, q_BTHD: Tensor, k_BTGD: Tensor, rows: slice, x_BTE: Tensor | None = None
    ) -> Tensor:
        return linear.coefficients(q_BTHD, k_BTGD, self.map_q.map(), self.map_k.map(), rows)
