"""The steps of a recipe: training stages and edits of the spec, each with its budget and its options."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    PlainSerializer,
    PlainValidator,
    Tag,
    model_validator,
)

from hybridize.spec import Frozen, Normalizer
from hybridize.windows import Window

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
    kind: Literal["constant"] = "constant"


def _rate_kind(value: Any) -> str:
    return "mapping" if isinstance(value, Mapping | Cosine) else "number"


LearningRate = Annotated[
    Annotated[float, Field(gt=0), Tag("number")] | Annotated[Cosine, Tag("mapping")],
    Discriminator(_rate_kind),
]


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
    """What every training stage shares: its length and how AdamW runs."""

    kind: ClassVar[str]

    tokens: Tokens | None = None
    epochs: float | None = Field(default=None, gt=0)
    lr: LearningRate
    schedule: Annotated[Plateau | Constant, Field(discriminator="kind")] | None = None
    batch: Batch = Batch()
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    weight_decay: float = Field(default=0.0, ge=0)
    clip: float | None = Field(default=1.0, gt=0)
    eval_every: int = Field(default=100, ge=1)
    validation_rows: int = Field(default=200, ge=1)
    activation_checkpointing: bool = False
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
        """How the learning rate moves: lr's cosine, else `schedule`, else a plateau with the paper's values."""
        return self.lr if isinstance(self.lr, Cosine) else self.schedule or Plateau()

    @property
    def max_lr(self) -> float:
        return self.lr.cosine[0] if isinstance(self.lr, Cosine) else self.lr

    def optimizer_steps(self, length: int, corpus_tokens: int | None = None) -> int | None:
        """Optimizer steps on rows of `length` tokens; None for a length in epochs of a corpus of unknown size."""
        tokens = self.tokens
        if self.epochs is not None and corpus_tokens is not None:
            tokens = math.ceil(self.epochs * corpus_tokens)
        return None if tokens is None else max(1, math.ceil(tokens / (self.batch.rows * length)))


class Objective(Frozen):
    """Weights of the transfer losses. A term that is not named is 0; with none named it is the paper's output MSE.

    `against` names the student's output or weights that are compared: the whole mixture, or the linear branch alone.
    """

    output_mse: float = Field(default=0.0, ge=0)
    weight_ce: float = Field(default=0.0, ge=0)
    against: Literal["hybrid", "linear_only"] = "hybrid"

    @model_validator(mode="before")
    @classmethod
    def _paper_default(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and not {"output_mse", "weight_ce"} & set(value):
            return {**value, "output_mse": 1000.0}
        return value

    @model_validator(mode="after")
    def _some_term(self) -> Self:
        if self.output_mse == self.weight_ce == 0:
            raise ValueError("output_mse and weight_ce are both 0; give one of them a weight")
        return self


def _as_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


class TransferStep(TrainingStep):
    """Attention transfer: every layer learns its teacher's attention on the teacher's own hidden states."""

    kind: ClassVar[str] = "transfer"

    objective: Objective = Objective(output_mse=1000.0)
    train: Annotated[
        tuple[Literal["maps", "mix"], ...],
        BeforeValidator(_as_tuple, json_schema_input_type=str | list[str]),
        Field(min_length=1),
    ] = ("maps", "mix")
    lr: LearningRate = 1e-2
    block: int | None = Field(default=None, ge=1)


class Lora(Frozen):
    """Low-rank updates W + (alpha / rank) B A of the projections named by `on`; `merge` folds them in at the end."""

    rank: int = Field(default=8, ge=1)
    alpha: float = Field(default=16, gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    on: tuple[Literal["q", "k", "v", "o"], ...] = Field(default=("q", "k", "v", "o"), min_length=1)
    merge: bool = True


class WindowDropout(Frozen):
    """Scheduled sliding-window dropout (SSD, arXiv 2510.05901 section 4.3; DESIGN D11), training only.

    Epoch k trains with drop probability `p[k]` and window `window[k]`; the last value of each holds. An epoch is a pass
    over the text, or `epoch` tokens. A draw concerns the whole `batch`, a `sequence` (document) in all layers, or a
    sequence in one `layer`. A dropped softmax term is 0; the far term keeps its coefficient (`removal: renormalize`
    gives it the whole weight) and its `own` keys (`far_when_dropped: all`: every key up to the query). A query without
    far keys is never dropped. The student keeps the window of its last epoch.
    """

    p: tuple[Annotated[float, Field(ge=0, le=1)], ...] = Field(min_length=1)
    window: tuple[Annotated[int, Field(ge=1)], ...] = ()
    epoch: Tokens | None = None
    per: Literal["batch", "sequence", "layer"] = "sequence"
    far_when_dropped: Literal["own", "all"] = "own"
    removal: Literal["zero", "renormalize"] = "zero"

    def at(self, epoch: int) -> tuple[float, int | None]:
        """Drop probability and window size (None: the spec's own) of an epoch, from 0."""
        window = self.window[min(epoch, len(self.window) - 1)] if self.window else None
        return self.p[min(epoch, len(self.p) - 1)], window


class EarlyStopping(Frozen):
    """Stop after `patience` evaluations (every `eval_every` steps) in a row of which none was good.

    Good is a validation loss below all before it, while the linear gain (see `FinetuneStep.gain_rows`) keeps at least
    `min_gain` of the highest gain seen: joint training lets the linear branch fade while the loss still falls (arXiv
    2510.05901, section 4.2). `min_gain: 0` watches the loss alone. The first evaluation comes before the first step.
    """

    patience: int = Field(default=2, ge=1)
    min_gain: float = Field(default=0.5, ge=0, le=1)


class FinetuneStep(TrainingStep):
    """Next-token training of the whole student: low-rank updates (the default), or `full: true`, every weight.

    With every evaluation the linear gain is measured on the first `gain_rows` validation rows: the loss without the linear
    branch less the loss with it, on tokens whose query has a far key. 0 leaves it out.
    """

    kind: ClassVar[str] = "finetune"

    lora: Lora | None = None
    full: bool = False
    train_maps: bool = False
    lr: LearningRate = 1e-4
    window_dropout: WindowDropout | None = None
    early_stopping: EarlyStopping | None = None
    gain_rows: int = Field(default=8, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _lora_by_default(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and value.get("lora") is None and not value.get("full"):
            return {**value, "lora": {}}
        return value

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.full and self.lora is not None:
            raise ValueError("lora and full exclude each other; leave one out")
        return self

    @model_validator(mode="after")
    def _comparable(self) -> Self:
        dropout = self.window_dropout
        if dropout is not None and len(set(dropout.window)) > 1 and (self.keep_best or self.early_stopping):
            raise ValueError(
                "window_dropout.window changes, so losses of different epochs belong to different models; set keep_best: false "
                "and leave early_stopping out"
            )
        if self.early_stopping is not None:
            if not self.keep_best:
                raise ValueError(
                    "early_stopping needs keep_best: true, which ends with the best evaluation's weights"
                )
            if self.early_stopping.min_gain > 0 and self.gain_rows == 0:
                raise ValueError(
                    "early_stopping.min_gain watches the linear gain; set gain_rows to at least 1, or min_gain: 0"
                )
        return self


class EditStep(Frozen):
    """A change of the spec without training: linear attention gains `window`, or windows are replaced by it.

    `normalizer` (default: separate, g = 0.5, for linear attention; unchanged for layers that mix already) says how the
    branches are mixed from now on. A mass bias is calibrated on the training text.
    """

    kind: ClassVar[str] = "edit"

    window: Window
    normalizer: Normalizer | None = None


class StepEntry(Frozen):
    """A step as YAML writes it: a mapping with one key, the step's name."""

    transfer: TransferStep | None = None
    finetune: FinetuneStep | None = None
    edit: EditStep | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_key(cls, value: Any) -> Any:
        if not isinstance(value, Mapping) or len(value) != 1:
            raise ValueError(f"is {value!r}; write one mapping such as `- transfer: {{tokens: 20M}}`")
        return {name: {} if body is None else body for name, body in value.items()}


def _parse_step(value: Any) -> TransferStep | FinetuneStep | EditStep:
    if isinstance(value, TransferStep | FinetuneStep | EditStep):
        return value
    entry = StepEntry.model_validate(value)
    step = entry.transfer or entry.finetune or entry.edit
    assert step is not None
    return step


def _dump_step(step: TrainingStep | EditStep) -> dict[str, Any]:
    return {step.kind: step.model_dump(mode="json")}


Step = Annotated[
    TransferStep | FinetuneStep | EditStep,
    PlainValidator(_parse_step, json_schema_input_type=StepEntry),
    PlainSerializer(_dump_step, return_type=dict[str, Any]),
]
