"""Training: a loop that drives a stage, its optimizer, checkpoints and logs. It knows no mixer and no model."""

from hybridize.train.loop import train
from hybridize.train.optim import Constant, Cosine, Plateau
from hybridize.train.stage import NonFiniteError, Stage, StepResult, TrainConfig, TrainResult

__all__ = [
    "Constant",
    "Cosine",
    "NonFiniteError",
    "Plateau",
    "Stage",
    "StepResult",
    "TrainConfig",
    "TrainResult",
    "train",
]
