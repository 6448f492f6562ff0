"""Every training loss of the library, each with its scale-free form: `attention`, `vocabulary`.

Sums and softmaxes are float32 whatever the input (float64 stays float64).
"""

from hybridize.losses.attention import output_mse, tiled_weight_cross_entropy, weight_cross_entropy
from hybridize.losses.vocabulary import (
    IGNORE,
    count_targets,
    kl_rows,
    logits_kl,
    next_token_ce,
    shift,
    token_nll,
)

__all__ = [
    "IGNORE",
    "count_targets",
    "kl_rows",
    "logits_kl",
    "next_token_ce",
    "output_mse",
    "shift",
    "tiled_weight_cross_entropy",
    "token_nll",
    "weight_cross_entropy",
]
