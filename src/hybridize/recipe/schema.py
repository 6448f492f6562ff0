"""Recipes: a spec, the steps that train it, the data and the budgets, as one YAML file.

The format is public: `json_schema()` exports it, unknown keys are refused, and every problem of a file is reported at
once, each with its path and the nearest valid name. The comment lines that head a shipped recipe carry its command, cost
and source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import Field, PrivateAttr, ValidationError, model_validator

from hybridize.data.spec import DataSpec
from hybridize.extend.window import with_window
from hybridize.problems import describe
from hybridize.recipe import checks
from hybridize.recipe.stages import DistillStep, FinetuneStep, LongContextStep, TransferStep
from hybridize.recipe.steps import EditStep, SelectStep, Step
from hybridize.recipe.training import TrainingStep
from hybridize.select.rules import uniform
from hybridize.spec import SOFTMAX, Frozen, GroupSpec, HybridSpec, LayerSpec, first_far_position


class RecipeError(ValueError):
    """A recipe that cannot be used; `problems` holds one line for each thing that is wrong."""

    def __init__(self, source: str, problems: list[str]) -> None:
        self.source = source
        self.problems = problems
        super().__init__(f"{source}: " + "; ".join(problems))


class _Problems(ValueError):
    """Several problems of a recipe whose keys and values are all right."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("; ".join(problems))


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
    seed: int = Field(default=42, ge=0, lt=2**63 - 1000)
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
        if problems := checks.problems(self):
            raise _Problems(problems)
        return self

    @property
    def name(self) -> str:
        return self._name

    @property
    def header(self) -> Header:
        return self._header

    @property
    def training_steps(self) -> list[TransferStep | FinetuneStep | DistillStep | LongContextStep]:
        """The steps that train, in order."""
        return [step for step in self.steps if not isinstance(step, EditStep | SelectStep)]

    @property
    def stages(self) -> list[tuple[int, str, TrainingStep]]:
        """All that trains, a selection's short distillation too: the step's number, the path in the recipe, what trains."""
        found: list[tuple[int, str, TrainingStep]] = []
        for index, step in enumerate(self.steps):
            if isinstance(step, TrainingStep):
                found.append((index, f"steps[{index}].{step.kind}", step))
            elif isinstance(step, SelectStep) and step.distill is not None:
                found.append((index, f"steps[{index}].select.distill", step.distill))
        return found

    def spec_before(self, index: int) -> HybridSpec:
        """The spec that step `index` finds: `spec` with the edits of the steps before it. `len(steps)`: the last one's.

        Which layers a `select` keeps is not known here: `kept` stays apart, see `layers_before`.
        """
        spec = self.spec
        for step in self.steps[:index]:
            if isinstance(step, EditStep):
                spec = with_window(spec, step.window, step.normalizer)
        return spec

    def selected_before(self, index: int) -> SelectStep | None:
        """The select among the steps before `index`."""
        return next((step for step in self.steps[:index] if isinstance(step, SelectStep)), None)

    def assumed_before(self, index: int, layers: int) -> HybridSpec:
        """`spec_before`, with as many of `layers` layers kept as a `select` keeps. Which ones is a guess (evenly spaced)
        unless the recipe names them. Raises ValueError where it keeps more than there are."""
        spec, select = self.spec_before(index), self.selected_before(index)
        if select is None:
            return spec
        return spec.with_kept(select.layers or uniform(layers, select.count(layers)).kept)

    def layers_before(self, index: int) -> list[LayerSpec]:
        """Every kind of layer that step `index` finds, `kept` among them after a `select`."""
        spec = self.spec_before(index)
        kept = [spec.kept] if spec.kept is not None and self.selected_before(index) else []
        return [spec.all, *spec.layers.values(), *kept]

    def groups_before(self, index: int) -> list[GroupSpec]:
        """Every head group that step `index` finds, with its attention's defaults written out."""
        return [group.completed() for layer in self.layers_before(index) for group in layer.groups]

    @property
    def final_spec(self) -> HybridSpec:
        """What the finished student computes."""
        return self.spec_before(len(self.steps))

    @property
    def first_far_position(self) -> int | None:
        """See `hybridize.spec.first_far_position`, of the finished student."""
        return first_far_position(self.groups_before(len(self.steps)))

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
            found = [problem.get("ctx", {}).get("error") for problem in error.errors()]
            together = next((each.problems for each in found if isinstance(each, _Problems)), None)
            raise RecipeError(source, together or describe(error, cls, raw)) from None

    def control(self) -> Recipe:
        """The teacher with the same next-token training: what the text alone buys. It stops at no gain and drops no window.

        Steps that follow the teacher (transfer, distill, long_context by `kl`) are left out: they would leave it as it is.
        """
        plain = {"window_dropout": None, "early_stopping": None, "gain_rows": 0}
        steps = tuple(
            step.model_copy(update=plain) if isinstance(step, FinetuneStep) else step
            for step in self.steps
            if _reads_next_tokens(step)
        )
        evaluation = self.evaluation.model_copy(update={"control": False}) if self.evaluation else None
        return self.model_copy(update={"spec": SOFTMAX, "steps": steps, "evaluation": evaluation})

    @property
    def wants_control(self) -> bool:
        """Whether the teacher is to be given the same next-token training, and there is some."""
        asked = self.evaluation is not None and self.evaluation.control
        return asked and any(_reads_next_tokens(step) for step in self.steps)

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


def _reads_next_tokens(step: Step) -> bool:
    """Whether the step trains on the text's own next tokens, which changes a teacher too."""
    return isinstance(step, FinetuneStep) or (isinstance(step, LongContextStep) and step.objective == "ce")


def json_schema() -> dict[str, Any]:
    """JSON Schema of a recipe file, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Recipe.model_json_schema()}
