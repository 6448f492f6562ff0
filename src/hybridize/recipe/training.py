"""What every training stage of a recipe shares: its length in tokens, its batches, how AdamW and the learning rate run."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from hybridize.spec import Frozen

_COUNT_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def parse_count(value: Any) -> Any:
    """`20M`, `1.5B`, `4_000` or a plain number as an integer count of tokens."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"write a count such as 20M or 1.5B, not {value!r}")
    match = re.fullmatch(r"\s*(\d[\d_]*(?:\.\d+)?)\s*([KMBT]?)\s*", str(value), flags=re.IGNORECASE)
    count = float(match[1]) * _COUNT_UNITS[match[2].upper()] if match else 0.0
    if count < 1 or count != int(count):
        raise ValueError(f"write a whole count of at least 1, such as 20M or 1.5B, not {value!r}")
    return int(count)


Tokens = Annotated[int, BeforeValidator(parse_count, json_schema_input_type=int | str)]


class Cosine(Frozen):
    """A learning rate that falls from `cosine[0]` to `cosine[1]`, after `warmup` optimizer steps of linear growth."""

    cosine: tuple[float, float]
    warmup: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _falls(self) -> Self:
        if not self.cosine[0] >= self.cosine[1] >= 0 or self.cosine[0] == 0:
            raise ValueError(f"is {list(self.cosine)}; write [highest, lowest], both positive")
        return self


class Plateau(Frozen):
    """Multiply the rate by `factor` after `patience` evaluations without a better validation loss (LoLCATs, App. A)."""

    kind: Literal["plateau"] = "plateau"
    factor: float = Field(default=0.1, gt=0, lt=1)
    patience: int = Field(default=10, ge=0)
    min_lr: float = Field(default=1e-5, ge=0)


class Constant(Frozen):
    """One rate, after `warmup` optimizer steps of linear growth."""

    kind: Literal["constant"] = "constant"
    warmup: int = Field(default=0, ge=0)


def _rate_kind(value: Any) -> str:
    return "mapping" if isinstance(value, Mapping | Cosine) else "number"


LearningRate = Annotated[
    Annotated[float, Field(gt=0), Tag("number")] | Annotated[Cosine, Tag("mapping")],
    Discriminator(_rate_kind),
]


_Beta = Annotated[float, Field(ge=0, lt=1)]
Betas = tuple[_Beta, _Beta]


class Batch(Frozen):
    """`rows` sequences an optimizer step, `micro` of them a forward (all of them by default)."""

    rows: int = Field(default=8, ge=1)
    micro: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.rows % self.micro_rows:
            raise ValueError(f"micro is {self.micro}; it must divide rows, {self.rows}")
        return self

    @property
    def micro_rows(self) -> int:
        return self.micro or self.rows

    @property
    def accumulation(self) -> int:
        """Forwards an optimizer step."""
        return self.rows // self.micro_rows


class TrainingStep(Frozen):
    """What every training stage shares: its length and how AdamW runs.

    `compile` runs the layers through torch.compile while they train (`finetune`, `distill`, `long_context`, `transfer` of
    whole mixers): a minute or two at first, then fewer and larger kernels. It pays on a GPU, and most with
    `documents: joined`, where every batch has one layout.
    """

    kind: ClassVar[str]
    default_schedule: ClassVar[Plateau | Constant] = Plateau()

    tokens: Tokens | None = None
    epochs: float | None = Field(default=None, gt=0)
    lr: LearningRate
    schedule: Annotated[Plateau | Constant, Field(discriminator="kind")] | None = None
    batch: Batch = Batch()
    betas: Betas = (0.9, 0.999)
    weight_decay: float = Field(default=0.0, ge=0)
    clip: float | None = Field(default=1.0, gt=0)
    eval_every: int = Field(default=100, ge=1)
    validation_rows: int = Field(default=200, ge=1)
    activation_checkpointing: bool = False
    compile: bool = False
    keep_best: bool = True

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.tokens is None) == (self.epochs is None):
            raise ValueError("needs a length: either tokens, such as 20M, or epochs")
        if self.schedule is not None and isinstance(self.lr, Cosine):
            raise ValueError("schedule: the cosine of lr is the schedule already; leave schedule out")
        return self

    @property
    def rate(self) -> Cosine | Plateau | Constant:
        """How the learning rate moves: lr's cosine, else `schedule`, else the stage's own (a plateau or a constant)."""
        return self.lr if isinstance(self.lr, Cosine) else self.schedule or self.default_schedule

    @property
    def max_lr(self) -> float:
        return self.lr.cosine[0] if isinstance(self.lr, Cosine) else self.lr

    @property
    def trains_masters(self) -> bool:
        """Whether weights of the base model itself train, which makes the whole student float32."""
        return False

    @property
    def needs_teacher(self) -> bool:
        """Whether the stage reads the teacher beside the student."""
        return False

    def row_length(self, default: int) -> int:
        """Tokens of this stage's rows; `default` is the recipe's `data.length`."""
        return default

    def optimizer_steps(self, length: int, corpus_tokens: int | None = None) -> int | None:
        """Optimizer steps on rows of `length` tokens; None for a length in epochs of a corpus of unknown size."""
        tokens = self.tokens
        if self.epochs is not None and corpus_tokens is not None:
            tokens = math.ceil(self.epochs * corpus_tokens)
        return None if tokens is None else max(1, math.ceil(tokens / (self.batch.rows * length)))
