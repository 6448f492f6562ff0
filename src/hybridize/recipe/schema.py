"""Recipes: a spec, the steps that train it, the data and the budgets, as one YAML file.

The format is public: `json_schema()` exports it, unknown keys are refused, and every problem of a file is reported at
once, each with its path and the nearest valid name. The comment lines that head a shipped recipe carry its command, cost
and source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import Field, PrivateAttr, ValidationError, model_validator

from hybridize.data.spec import DataSpec
from hybridize.extend.window import with_window
from hybridize.problems import describe
from hybridize.recipe.steps import EditStep, FinetuneStep, Step, TrainingStep, TransferStep
from hybridize.spec import Frozen, GroupSpec, HybridSpec, SeparateNormalizer, first_far_position


class RecipeError(ValueError):
    """A recipe that cannot be used; `problems` holds one line for each thing that is wrong."""

    def __init__(self, source: str, problems: list[str]) -> None:
        self.source = source
        self.problems = problems
        super().__init__(f"{source}: " + "; ".join(problems))


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


def groups_of(spec: HybridSpec) -> list[GroupSpec]:
    """Every head group that a spec names, with its attention's defaults written out."""
    layers = [spec.all, *spec.layers.values()]
    return [group.completed() for layer in layers for group in layer.groups]


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
    def _steps_can_run(self) -> Self:
        for index, step in enumerate(self.steps):
            if isinstance(step, EditStep):
                try:
                    self.spec_before(index + 1)
                except (ValueError, ValidationError) as error:
                    reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
                    raise ValueError(f"steps[{index}].edit: {reason}") from None
        problems = (
            [*self._far_problems(), *self._nothing_to_train(), *self._nothing_to_drop()] if self.steps else []
        )
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
    def training_steps(self) -> list[TransferStep | FinetuneStep]:
        """The steps that train, in order."""
        return [step for step in self.steps if not isinstance(step, EditStep)]

    def spec_before(self, index: int) -> HybridSpec:
        """The spec that step `index` finds: `spec` with the edits of the steps before it. `len(steps)`: the last one's."""
        spec = self.spec
        for step in self.steps[:index]:
            if isinstance(step, EditStep):
                spec = with_window(spec, step.window, step.normalizer)
        return spec

    @property
    def final_spec(self) -> HybridSpec:
        """What the finished student computes."""
        return self.spec_before(len(self.steps))

    @property
    def first_far_position(self) -> int | None:
        """See `hybridize.spec.first_far_position`, of the finished student."""
        return first_far_position(groups_of(self.final_spec))

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
        """The teacher with the same fine-tuning: what the text alone buys. It stops at no gain and drops no window."""
        softmax = HybridSpec.model_validate({"all": {"attention": "softmax"}})
        plain = {"window_dropout": None, "early_stopping": None, "gain_rows": 0}
        steps = tuple(step.model_copy(update=plain) for step in self.steps if isinstance(step, FinetuneStep))
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
        """Windows, of the spec or of a schedule, that would leave the linear branch untrained at this length."""
        windows = {}
        for index, step in enumerate(self.steps):
            if not isinstance(step, TrainingStep):
                continue
            for group in groups_of(self.spec_before(index)):
                if group.attention != "windowed_linear" or group.window is None:
                    continue
                sizes = (
                    step.window_dropout.window
                    if isinstance(step, FinetuneStep) and step.window_dropout
                    else ()
                )
                for size in sizes or (group.window.size,):
                    windows[group.window.kind, size, group.window.sinks] = replace(group.window, size=size)
        return [
            f"data.length: with {self.data.length} tokens no query has a far key, so the linear branch would never train; "
            f"the {window.kind} window of {window.size} needs at least {window.first_far_position + 1}"
            for _, window in sorted(windows.items())
            if window.first_far_position >= self.data.length
        ]

    def _nothing_to_train(self) -> list[str]:
        problems = []
        for index, step in enumerate(self.steps):
            if not isinstance(step, TransferStep):
                continue
            trainable = _trainable(self.spec_before(index))
            if not trainable & set(step.train):
                without = f"the spec has no {' and no '.join(step.train)}"
                problems.append(f"steps[{index}].transfer.train: nothing to train; {without}")
            elif step.objective.against == "linear_only" and not (trainable - {"mix"}) & set(step.train):
                problems.append(
                    f"steps[{index}].transfer.train: nothing to train; objective.against: linear_only leaves mix out, add maps"
                )
        return problems

    def _nothing_to_drop(self) -> list[str]:
        problems = []
        for index, step in enumerate(self.steps):
            if not isinstance(step, FinetuneStep):
                continue
            groups = groups_of(self.spec_before(index))
            if step.window_dropout is not None and all(
                group.attention != "windowed_linear" for group in groups
            ):
                problems.append(
                    f"steps[{index}].finetune.window_dropout: the spec has no windowed_linear attention to drop windows of"
                )
            if (
                step.early_stopping is not None
                and step.early_stopping.min_gain > 0
                and all(group.attention != "windowed_linear" for group in groups)
            ):
                problems.append(
                    f"steps[{index}].finetune.early_stopping: the spec has no layer with a window and a linear branch, so there is no "
                    "linear gain to watch; set min_gain: 0"
                )
        return problems


def _trainable(spec: HybridSpec) -> set[str]:
    trainable = set()
    for group in groups_of(spec):
        if group.attention != "softmax":
            trainable.add("maps")
        fixed = isinstance(group.normalizer, SeparateNormalizer) and group.normalizer.mix == "fixed"
        if group.attention == "windowed_linear" and not fixed:
            trainable.add("mix")
    return trainable


def json_schema() -> dict[str, Any]:
    """JSON Schema of a recipe file, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Recipe.model_json_schema()}
