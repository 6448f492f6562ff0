"""The training stages of a recipe: attention transfer, fine-tuning, distillation, long contexts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from hybridize.recipe.training import Betas, Constant, Cosine, LearningRate, Plateau, Tokens, TrainingStep
from hybridize.spec import Frozen

INSIDE, WHOLE = ("output_mse", "weight_ce"), ("mixer_mse", "hidden_l2")
PAPER_BETAS = (0.9, 0.95)


class Objective(Frozen):
    """Weights of the transfer losses. A term that is not named is 0; with none named it is the paper's output MSE.

    `output_mse` and `weight_ce` compare inside a layer that still has the teacher's q, k and v (before o_proj); `against`
    names what of the student is compared: the whole mixture, or the linear branch alone. For whole mixers there are
    `mixer_mse`, the mean over B, T and the width after o_proj (HALO, arXiv 2601.22156, Eq. 7), and `hidden_l2`, the mean
    over tokens of the 2-norm of the difference (MOHAWK, arXiv 2408.10189; the residual is the same in both and cancels).
    """

    output_mse: float = Field(default=0.0, ge=0)
    weight_ce: float = Field(default=0.0, ge=0)
    mixer_mse: float = Field(default=0.0, ge=0)
    hidden_l2: float = Field(default=0.0, ge=0)
    against: Literal["hybrid", "linear_only"] = "hybrid"

    @model_validator(mode="before")
    @classmethod
    def _paper_default(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and not {*INSIDE, *WHOLE} & set(value):
            return {**value, "output_mse": 1000.0}
        return value

    @model_validator(mode="after")
    def _some_term(self) -> Self:
        if not any(getattr(self, term) for term in (*INSIDE, *WHOLE)):
            raise ValueError(f"{', '.join((*INSIDE, *WHOLE))} are all 0; give one of them a weight")
        return self

    @property
    def inside(self) -> list[str]:
        """The terms with a weight that compare inside a layer."""
        return [term for term in INSIDE if getattr(self, term)]

    @property
    def whole(self) -> list[str]:
        """The terms with a weight that compare whole mixers."""
        return [term for term in WHOLE if getattr(self, term)]


def _as_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


class TransferStep(TrainingStep):
    """Attention transfer: every layer learns its teacher's attention on the teacher's own hidden states.

    `train: mixer` trains all parameters of the layers that have some beyond the teacher's (projections, norms, gates), by
    `mixer_mse` unless the objective says otherwise, with the rates and betas of HALO's first stage.
    """

    kind: ClassVar[str] = "transfer"

    objective: Objective = Objective(output_mse=1000.0)
    train: Annotated[
        tuple[Literal["maps", "mix", "mixer"], ...],
        BeforeValidator(_as_tuple, json_schema_input_type=str | list[str]),
        Field(min_length=1),
    ] = ("maps", "mix")
    lr: LearningRate = 1e-2
    block: int | None = Field(default=None, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _mixer_defaults(cls, value: Any) -> Any:
        if not isinstance(value, Mapping) or _as_tuple(value.get("train")) not in (("mixer",), ["mixer"]):
            return value
        published = {"objective": {"mixer_mse": 1.0}, "betas": PAPER_BETAS}
        rate = {} if "schedule" in value else {"lr": {"cosine": (1e-3, 1e-5)}}
        return {**published, **rate, **value}

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if self.whole_mixers and self.train != ("mixer",):
            raise ValueError(
                f"train is {list(self.train)}; mixer means everything in a layer and stands alone"
            )
        if self.whole_mixers and (self.objective.inside or self.objective.against != "hybrid"):
            raise ValueError(
                "objective: train: mixer compares whole mixers; give mixer_mse or hidden_l2 alone"
            )
        if not self.whole_mixers and self.objective.whole:
            raise ValueError(
                f"objective: {self.objective.whole[0]} compares whole mixers; it goes with train: mixer alone"
            )
        if self.compile and not self.whole_mixers:
            raise ValueError("compile: true goes with train: mixer; maps and mix train inside the attention")
        return self

    @property
    def whole_mixers(self) -> bool:
        return "mixer" in self.train

    @property
    def trains_masters(self) -> bool:
        return self.whole_mixers

    @property
    def needs_teacher(self) -> bool:
        return self.whole_mixers


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

    @property
    def trains_masters(self) -> bool:
        return self.full

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


class DistillStep(TrainingStep):
    """Distillation of the whole student: the token mean of KL(teacher || student) over next-token distributions.

    `train` names what trains: `all` weights, or the token `mixers` alone; with `lora`, low-rank updates of the projections
    and the head groups' own parameters. Rates and betas are those of HALO's second stage (arXiv 2601.22156, Table 5).
    """

    kind: ClassVar[str] = "distill"
    default_schedule: ClassVar[Plateau | Constant] = Constant()

    train: Literal["all", "mixers"] = "all"
    lora: Lora | None = None
    lr: LearningRate = Cosine(cosine=(1e-4, 1e-5))
    betas: Betas = PAPER_BETAS

    @model_validator(mode="before")
    @classmethod
    def _scheduled(cls, value: Any) -> Any:
        """A `schedule` without a rate takes the default cosine's highest one."""
        if isinstance(value, Mapping) and value.get("schedule") is not None and "lr" not in value:
            return {**value, "lr": 1e-4}
        return value

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.lora is not None and self.train == "mixers":
            raise ValueError("lora and train: mixers exclude each other; leave one out")
        return self

    @property
    def trains_masters(self) -> bool:
        return self.lora is None

    @property
    def needs_teacher(self) -> bool:
        return True


class LongContextStep(TrainingStep):
    """Full training on rows of another `length`, by next-token loss (`ce`, as HALO's published code) or by `kl` against the
    teacher; one rate unless `lr` or `schedule` says otherwise."""

    kind: ClassVar[str] = "long_context"
    default_schedule: ClassVar[Plateau | Constant] = Constant()

    length: int = Field(ge=2)
    objective: Literal["ce", "kl"] = "ce"
    lr: LearningRate = 1e-5
    betas: Betas = PAPER_BETAS

    @property
    def trains_masters(self) -> bool:
        return True

    @property
    def needs_teacher(self) -> bool:
        return self.objective == "kl"

    def row_length(self, default: int) -> int:
        return self.length

    def as_finetune(self) -> FinetuneStep:
        """The same training as a `finetune` of every weight."""
        shared = {name: getattr(self, name) for name in TrainingStep.model_fields}
        if not isinstance(self.lr, Cosine):
            shared["schedule"] = self.rate
        return FinetuneStep(**shared, full=True, train_maps=True, gain_rows=0)
