"""Which mixer serves which attention of a spec."""

from __future__ import annotations

from hybridize.mixers.gdn import GdnMixer
from hybridize.mixers.gla import GlaMixer
from hybridize.mixers.kda import KdaMixer
from hybridize.mixers.lightning import LightningMixer
from hybridize.mixers.linear import LinearMixer
from hybridize.mixers.mamba2 import Mamba2Mixer
from hybridize.mixers.rwkv7 import Rwkv7Mixer
from hybridize.mixers.softmax import SoftmaxMixer
from hybridize.mixers.types import GroupShape, Mixer
from hybridize.mixers.windowed_linear import WindowedLinearMixer
from hybridize.spec import GroupSpec

MIXERS: dict[str, type[Mixer]] = {
    "softmax": SoftmaxMixer,
    "linear": LinearMixer,
    "windowed_linear": WindowedLinearMixer,
    "lightning": LightningMixer,
    "gla": GlaMixer,
    "gdn": GdnMixer,
    "mamba2": Mamba2Mixer,
    "rwkv7": Rwkv7Mixer,
    "kda": KdaMixer,
}


def build_mixer(spec: GroupSpec, shape: GroupShape) -> Mixer:
    """The mixer of one resolved head group."""
    if spec.attention not in MIXERS:
        raise ValueError(f"attention {spec.attention!r} has no mixer here; there are {', '.join(MIXERS)}")
    return MIXERS[spec.attention](spec, shape)
