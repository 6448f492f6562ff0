"""Recipes: a spec, the steps that train it, the data and the budgets, as one YAML file.

The format is public: `json_schema()` exports it, unknown keys are refused, and every problem of a file is reported at
once, each with its path and the nearest valid name. The comment lines that head a shipped recipe carry its command, cost
and source.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

import yaml
from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    PlainSerializer,
    PlainValidator,
    PrivateAttr,
    Tag,
    ValidationError,
    model_validator,
)

from hybridize.data.spec import DataSpec
from hybridize.problems import describe
from hybridize.spec import Frozen, GroupSpec, HybridSpec, SeparateNormalizer, first_far_position

_COUNT_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


class RecipeError(ValueError):
    """A recipe that cannot be used; `problems` holds one line for each thing that is wrong."""

    def __init__(self, source: str, problems: list[str]) -> None:
        self.source = source
        self.problems = problems
        super().__init__(f"{source}: " + "; ".join(problems))


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


class FinetuneStep(TrainingStep):
    """Next-token training of the whole student: low-rank updates (the default), or `full: true`, every weight."""

    kind: ClassVar[str] = "finetune"

    lora: Lora | None = None
    full: bool = False
    train_maps: bool = False
    lr: LearningRate = 1e-4

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


class StepEntry(Frozen):
    """A step as YAML writes it: a mapping with one key, the step's name."""

    transfer: TransferStep | None = None
    finetune: FinetuneStep | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_key(cls, value: Any) -> Any:
        if not isinstance(value, Mapping) or len(value) != 1:
            raise ValueError(f"is {value!r}; write one mapping such as `- transfer: {{tokens: 20M}}`")
        return {name: {} if body is None else body for name, body in value.items()}


def _parse_step(value: Any) -> TransferStep | FinetuneStep:
    if isinstance(value, TransferStep | FinetuneStep):
        return value
    entry = StepEntry.model_validate(value)
    step = entry.transfer or entry.finetune
    assert step is not None
    return step


def _dump_step(step: TrainingStep) -> dict[str, Any]:
    return {step.kind: step.model_dump(mode="json")}


Step = Annotated[
    TransferStep | FinetuneStep,
    PlainValidator(_parse_step, json_schema_input_type=StepEntry),
    PlainSerializer(_dump_step, return_type=dict[str, Any]),
]


class Evaluation(Frozen):
    """What is measured on the teacher, right after the swap and after every step. It changes nothing that is trained.

    Held-out perplexity on the test split of the recipe's own data and of the other `texts`, `rows` rows each; passkeys at
    `passkey` lengths (`samples` keys a length); `control` also gives the teacher the same fine-tuning steps.
    """

    texts: tuple[str, ...] = ("code",)
    rows: int = Field(default=100, ge=1)
    passkey: tuple[Annotated[int, Field(ge=64)], ...] = ()
    samples: int = Field(default=20, ge=1)
    control: bool = False
    prompts: tuple[str, ...] = ("The moon is", "To bake bread, first")
    new_tokens: int = Field(default=48, ge=1)


@dataclass(frozen=True)
class Header:
    """The comment lines that head a recipe: the command, two or more spaces, the cost; then the source; then notes."""

    command: str = ""
    cost: str = ""
    source: str = ""
    notes: str = ""


class Recipe(Frozen):
    """One conversion. `name` is the file's stem, `header` its leading comment lines."""

    spec: HybridSpec
    data: DataSpec = DataSpec()
    seed: int = Field(default=42, ge=0)
    precision: Literal["bf16", "fp32"] = "bf16"
    devices: int = Field(default=1, ge=1)
    steps: tuple[Step, ...]
    evaluation: Evaluation | None = Evaluation()

    _name: str = PrivateAttr(default="recipe")
    _header: Header = PrivateAttr(default=Header())

    @model_validator(mode="after")
    def _steps_can_train(self) -> Self:
        problems = [*self._far_problems(), *self._nothing_to_train()] if self.steps else []
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def name(self) -> str:
        return self._name

    @property
    def header(self) -> Header:
        return self._header

    @property
    def groups(self) -> list[GroupSpec]:
        """Every head group that the spec names, with its attention's defaults written out."""
        layers = [self.spec.all, *self.spec.layers.values()]
        return [group.completed() for layer in layers for group in layer.groups]

    @property
    def first_far_position(self) -> int | None:
        """See `hybridize.spec.first_far_position`."""
        return first_far_position(self.groups)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, every default written out; `Recipe.from_dict` takes it back."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_dict(), sort_keys=False, width=110)

    @classmethod
    def from_dict(cls, raw: Any, source: str = "recipe") -> Recipe:
        """Validate plain data.

        Raises:
            RecipeError: with every problem found.
        """
        if not isinstance(raw, Mapping):
            raise RecipeError(
                source, [f"holds {type(raw).__name__}; a recipe is a mapping with the keys spec and steps"]
            )
        try:
            return cls.model_validate(raw)
        except ValidationError as error:
            raise RecipeError(source, describe(error, cls, raw)) from None

    def control(self) -> Recipe:
        """The teacher with the same fine-tuning: what the text alone buys."""
        softmax = HybridSpec.model_validate({"all": {"attention": "softmax"}})
        steps = tuple(step for step in self.steps if isinstance(step, FinetuneStep))
        evaluation = self.evaluation.model_copy(update={"control": False}) if self.evaluation else None
        return self.model_copy(update={"spec": softmax, "steps": steps, "evaluation": evaluation})

    @property
    def wants_control(self) -> bool:
        """Whether the teacher is to be given the same fine-tuning, and there is some."""
        asked = self.evaluation is not None and self.evaluation.control
        return asked and any(isinstance(step, FinetuneStep) for step in self.steps)

    def unsupported(self) -> list[str]:
        """What this recipe asks for that `convert` cannot do; `plan` works all the same."""
        problems = []
        if self.devices > 1:
            problems.append(
                f"devices: the recipe needs {self.devices} GPUs; this version trains on one device"
            )
        for index, step in enumerate(self.steps):
            if isinstance(step, TransferStep) and step.block is not None:
                problems.append(
                    f"steps[{index}].transfer.block: block-wise transfer ({step.block} layers a block) is not in this "
                    "version; leave block out to transfer all layers together"
                )
        return problems

    def check_supported(self) -> None:
        """Raises: RecipeError: naming everything in `unsupported`."""
        if problems := self.unsupported():
            raise RecipeError(self.name, problems)

    def _far_problems(self) -> list[str]:
        windows = {group.window for group in self.groups if group.attention == "windowed_linear"}
        return [
            f"data.length: with {self.data.length} tokens no query has a far key, so the linear branch would never train; "
            f"the {window.kind} window of {window.size} needs at least {window.first_far_position + 1}"
            for window in sorted(
                (w for w in windows if w is not None), key=lambda w: (w.kind, w.size, w.sinks)
            )
            if window.first_far_position >= self.data.length
        ]

    def _nothing_to_train(self) -> list[str]:
        trainable = set()
        for group in self.groups:
            if group.attention != "softmax":
                trainable.add("maps")
            fixed = isinstance(group.normalizer, SeparateNormalizer) and group.normalizer.mix == "fixed"
            if group.attention == "windowed_linear" and not fixed:
                trainable.add("mix")
        problems = []
        for index, step in enumerate(self.steps):
            if not isinstance(step, TransferStep):
                continue
            if not trainable & set(step.train):
                without = f"the spec has no {' and no '.join(step.train)}"
                problems.append(f"steps[{index}].transfer.train: nothing to train; {without}")
            elif step.objective.against == "linear_only" and not (trainable - {"mix"}) & set(step.train):
                problems.append(
                    f"steps[{index}].transfer.train: nothing to train; objective.against: linear_only leaves mix out, add maps"
                )
        return problems


def json_schema() -> dict[str, Any]:
    """JSON Schema of a recipe file, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Recipe.model_json_schema()}
