"""The steps of a recipe: training stages, the choice of layers that keep softmax, and edits of the spec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, PlainSerializer, PlainValidator, model_validator

from hybridize.problems import nearest
from hybridize.recipe.stages import DistillStep, FinetuneStep, LongContextStep, TransferStep
from hybridize.select.rules import SCORED, STANDARD_ERROR, count_kept, is_share
from hybridize.spec import Frozen, Normalizer
from hybridize.windows import Window


def _parse_keep(value: Any) -> Any:
    """`1/4` (a share of the layers, rounded down) or a count."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"write a share of the layers such as 1/4, or how many, not {value!r}")
    count_kept(10**6, value)
    return value


Keep = Annotated[int | str, BeforeValidator(_parse_keep, json_schema_input_type=int | str)]


def _parse_floor(value: Any) -> Any:
    if value != STANDARD_ERROR and not is_share(value):
        raise ValueError(f"{value!r} is neither a number in [0, 1] nor {STANDARD_ERROR}")
    return value


Floor = Annotated[
    float | str, BeforeValidator(_parse_floor, json_schema_input_type=float | Literal["standard_error"])
]


class RecallProbe(Frozen):
    """Synthetic recall: `samples` texts a task and length (by default up to 2,048 tokens, as far as the teacher's positions
    go), or tasks of lm-eval by name, `samples` questions each."""

    tasks: tuple[str, ...] | None = Field(default=None, min_length=1)
    lengths: tuple[Annotated[int, Field(ge=64)], ...] | None = Field(default=None, min_length=1)
    samples: int = Field(default=32, ge=2)  # one has no standard error, by which ranking by noise is refused
    lm_eval: tuple[str, ...] | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.lm_eval is not None and (self.tasks or self.lengths):
            raise ValueError("lm_eval replaces tasks and lengths; leave them out")
        if self.tasks is not None:
            from hybridize.select.recall_tasks import check_tasks

            check_tasks(self.tasks)
        return self


class KnowledgeProbe(Frozen):
    """Held-out cloze, `samples` questions a task, or tasks of lm-eval by name, `samples` questions each."""

    tasks: tuple[str, ...] | None = Field(default=None, min_length=1)
    samples: int = Field(default=500, ge=1)
    lm_eval: tuple[str, ...] | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.lm_eval is not None and self.tasks:
            raise ValueError("lm_eval replaces tasks; leave them out")
        if self.tasks is not None:
            from hybridize.evals.offline_tasks import TASKS

            for task in self.tasks:
                if task not in TASKS:
                    raise ValueError(f"tasks contains {task!r}; {nearest(task, list(TASKS))}")
        return self


class SelectStep(Frozen):
    """Choose the layers that keep softmax: they become the spec's `kept`, rebuilt from the teacher (DESIGN D13).

    `rule`: `halo` and `jet` replace one layer of the teacher at a time and score recall and knowledge (or take `scores`, a
    file of a former sweep); `kl` restores one softmax layer at a time and ranks by the loss after a short `distill`;
    `uniform` and `tail` place them evenly in the whole or the second half; `given` takes `layers`. `keep` is a share of
    the layers (rounded down) or a count. `cap` bounds the ratio of `halo` (the published code: 50), `floor` is the least
    loss of knowledge that it divides by, a number or `standard_error`. `spread` keeps the best layer of each even block in place
    of the best anywhere, under the rules that measure.
    """

    kind: ClassVar[str] = "select"
    needs_teacher: ClassVar[bool] = True

    rule: Literal["halo", "jet", "kl", "uniform", "tail", "given"] = "halo"
    keep: Keep = "1/4"
    layers: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(default=None, min_length=1)
    cap: float | None = Field(default=None, gt=0, allow_inf_nan=False, strict=True)
    floor: Floor | None = None
    spread: bool = False
    scores: str | None = None
    recall: RecallProbe = RecallProbe()
    knowledge: KnowledgeProbe = KnowledgeProbe()
    distill: DistillStep | None = None

    @model_validator(mode="before")
    @classmethod
    def _given_counts(cls, value: Any) -> Any:
        """`layers` says how many are kept."""
        if isinstance(value, Mapping) and value.get("layers") and "keep" not in value:
            return {**value, "keep": len(value["layers"])}
        return value

    @model_validator(mode="after")
    def _fits_its_rule(self) -> Self:
        if (self.rule == "given") != (self.layers is not None):
            raise ValueError("layers: names the layers of rule: given, and of no other rule")
        if self.layers is not None and len(set(self.layers)) != len(self.layers):
            raise ValueError(f"layers is {list(self.layers)}, which names a layer twice")
        if self.layers is not None and self.keep != len(self.layers):
            raise ValueError(f"keep is {self.keep!r}, but layers names {len(self.layers)}; leave keep out")
        if (self.rule == "kl") != (self.distill is not None):
            raise ValueError(
                "distill: the short distillation of rule: kl, such as {tokens: 2M}, and of no other rule"
            )
        if self.scores is not None and self.rule not in ("halo", "jet"):
            raise ValueError(f"scores: rule: {self.rule} reads none; only halo and jet do")
        if self.cap is not None and self.rule != "halo":
            raise ValueError(f"cap: bounds the ratio of rule: halo; {self.rule} has none")
        if self.floor is not None and self.rule != "halo":
            raise ValueError(f"floor: bounds the loss of knowledge in rule: halo; {self.rule} has none")
        if self.spread and self.rule not in SCORED:
            raise ValueError(f"spread: goes by scores; rule: {self.rule} has none")
        if self.distill is not None and self.distill.lora is not None:
            raise ValueError(
                "distill: low-rank updates change the modules that the sweep puts back; leave lora out"
            )
        return self

    def count(self, layers: int) -> int:
        """How many of `layers` layers are kept, at least one. Raises ValueError for more than there are."""
        return count_kept(layers, self.keep)


class EditStep(Frozen):
    """A change of the spec without training: linear attention gains `window`, or windows are replaced by it.

    `normalizer` (default: separate, g = 0.5, for linear attention; unchanged for layers that mix already) says how the
    branches are mixed from now on. A mass bias is calibrated on the training text.
    """

    kind: ClassVar[str] = "edit"
    needs_teacher: ClassVar[bool] = False

    window: Window
    normalizer: Normalizer | None = None


class StepEntry(Frozen):
    """A step as YAML writes it: a mapping with one key, the step's name."""

    transfer: TransferStep | None = None
    finetune: FinetuneStep | None = None
    distill: DistillStep | None = None
    long_context: LongContextStep | None = None
    select: SelectStep | None = None
    edit: EditStep | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_key(cls, value: Any) -> Any:
        if not isinstance(value, Mapping) or len(value) != 1:
            raise ValueError(f"is {value!r}; write one mapping such as `- transfer: {{tokens: 20M}}`")
        return {name: {} if body is None else body for name, body in value.items()}


AnyStep = TransferStep | FinetuneStep | DistillStep | LongContextStep | SelectStep | EditStep
KINDS = tuple(StepEntry.model_fields)


def _parse_step(value: Any) -> AnyStep:
    if isinstance(value, AnyStep):
        return value
    entry = StepEntry.model_validate(value)
    (step,) = (each for name in KINDS if (each := getattr(entry, name)) is not None)
    return step


def _dump_step(step: AnyStep) -> dict[str, Any]:
    return {step.kind: step.model_dump(mode="json")}


Step = Annotated[
    AnyStep,
    PlainValidator(_parse_step, json_schema_input_type=StepEntry),
    PlainSerializer(_dump_step, return_type=dict[str, Any]),
]
