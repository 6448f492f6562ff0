"""The words of HALO's steps: defaults, what they stand for, and every way in which a recipe of them says no."""

import pytest
from tests.convert import halo

from hybridize.convert.budget_notes import budget_notes
from hybridize.recipe import (
    Constant,
    Cosine,
    DistillStep,
    LongContextStep,
    Plateau,
    Recipe,
    RecipeError,
    SelectStep,
    TransferStep,
    load_recipe,
)

LIGHTNING, KEPT = halo.LIGHTNING, halo.KEPT
SOFTMAX = {"attention": "softmax"}
WINDOWED = {"attention": "windowed_linear", "window": {"kind": "sliding", "size": 8}}
MIXER = {"transfer": {"tokens": "1M", "train": "mixer"}}
SELECT = {"select": {}}


def problems(*steps, spec=LIGHTNING, kept=None, **more):
    raw = {"spec": {"all": spec, **({"kept": kept} if kept else {})}, "steps": list(steps), **more}
    with pytest.raises(RecipeError) as caught:
        Recipe.from_dict(raw)
    return caught.value.problems


def test_the_published_values_are_the_defaults():
    transfer = TransferStep.model_validate({"tokens": 1, "train": "mixer"})
    assert transfer.rate == Cosine(cosine=(1e-3, 1e-5)) and transfer.betas == (0.9, 0.95)
    assert (transfer.objective.mixer_mse, transfer.objective.output_mse) == (
        1,
        0,
    ) and transfer.weight_decay == 0
    distill = DistillStep.model_validate({"tokens": 1})
    assert (
        distill.rate == Cosine(cosine=(1e-4, 1e-5))
        and distill.betas == (0.9, 0.95)
        and distill.train == "all"
    )
    long = LongContextStep.model_validate({"tokens": 1, "length": 128})
    assert long.rate == Constant() and long.max_lr == 1e-5 and long.objective == "ce"
    assert long.optimizer_steps(128) == 1 and long.row_length(64) == 128
    select = SelectStep()
    assert (select.rule, select.count(30), select.count(28), select.count(3)) == ("halo", 7, 7, 1)
    assert SelectStep.model_validate({"rule": "given", "layers": [3, 1]}).count(4) == 2


def test_rates():
    assert TransferStep.model_validate({"tokens": 1, "train": "mixer", "lr": 1e-3}).rate == Plateau()
    fixed = DistillStep.model_validate({"tokens": 1, "schedule": {"kind": "constant", "warmup": 5}})
    assert fixed.rate == Constant(warmup=5) and fixed.max_lr == 1e-4
    falling = LongContextStep.model_validate({"tokens": 1, "length": 64, "lr": {"cosine": [1e-4, 1e-5]}})
    assert falling.rate == Cosine(cosine=(1e-4, 1e-5)) == falling.as_finetune().rate
    same = LongContextStep.model_validate({"tokens": 1, "length": 64})
    assert same.as_finetune().rate == Constant() and same.as_finetune().full


def test_a_recipe_survives_the_round_trip():
    raw = {"spec": {"all": LIGHTNING, "kept": KEPT}, "steps": [
        MIXER,
        {"select": {"rule": "kl", "keep": 3, "distill": {"tokens": "1M", "lr": 1e-3}}},
        {"distill": {"tokens": "1M", "lora": {}}},
        {"long_context": {"tokens": "1M", "length": 2048, "objective": "kl"}},
    ]}  # fmt: skip
    recipe = Recipe.from_dict(raw)
    assert Recipe.from_dict(recipe.to_dict()).to_dict() == recipe.to_dict()


def test_published_budgets_of_qwen3():
    steps = {size: load_recipe(f"halo-qwen3-{size}").steps for size in ("1.7b", "4b", "8b")}
    assert [step.max_lr for _, _, step, _ in steps.values()] == [1e-4, 5e-5, 3e-5]
    transfer, select, distill, long = steps["1.7b"]
    lengths = (512, 512, 16384)
    steps_of = [step.optimizer_steps(n) for step, n in zip((transfer, distill, long), lengths, strict=True)]
    assert steps_of == [20_000, 20_000, 500]
    assert (transfer.batch.rows, distill.batch.rows, long.batch.rows, long.length) == (32, 96, 128, 16384)
    assert transfer.rate == Cosine(cosine=(1e-3, 1e-5), warmup=50) and long.rate == Constant(warmup=50)
    assert select.count(28) == 7 and select.count(36) == 9
    bases = [load_recipe(f"halo-qwen3-{size}").spec.kept.groups[0].logit_scale.base for size in steps]
    assert bases == [500, 600, 900]
    with pytest.raises(RecipeError, match="8 GPUs"):
        load_recipe("halo-qwen3-8b").check_supported()


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ({"transfer": {"tokens": 1, "train": ["mixer", "maps"]}},
         "steps[0].transfer: train is ['mixer', 'maps']; mixer means everything in a layer and stands alone"),
        ({"transfer": {"tokens": 1, "train": "mixer", "objective": {"output_mse": 1}}},
         "steps[0].transfer: objective: train: mixer compares whole mixers; give mixer_mse or hidden_l2 alone"),
        ({"transfer": {"tokens": 1, "objective": {"mixer_mse": 1}}},
         "steps[0].transfer: objective: mixer_mse compares whole mixers; it goes with train: mixer alone"),
        ({"distill": {"tokens": 1, "train": "mixers", "lora": {}}},
         "steps[0].distill: lora and train: mixers exclude each other; leave one out"),
        ({"distill": {}}, "steps[0].distill: needs a length"),
        ({"long_context": {"tokens": 1}}, "steps[0].long_context.length: is required"),
        ({"select": {"rule": "uniform", "spread": True}}, "steps[0].select: spread: goes by scores; rule: uniform has none"),
        ({"select": {"recall": {"samples": 1}}}, "steps[0].select.recall.samples: should be greater than or equal to 2, not 1"),
        ({"select": {"rule": "given"}}, "steps[0].select: layers: names the layers of rule: given"),
        ({"select": {"layers": [1]}}, "steps[0].select: layers: names the layers of rule: given"),
        ({"select": {"rule": "given", "layers": [1, 1]}}, "steps[0].select: layers is [1, 1], which names a layer twice"),
        ({"select": {"rule": "given", "layers": [1], "keep": 2}}, "steps[0].select: keep is 2, but layers names 1"),
        ({"select": {"rule": "hallo"}}, "steps[0].select.rule: 'hallo' is not allowed; did you mean 'halo'?"),
        ({"select": {"keep": "5/4"}}, "steps[0].select.keep: keep is '5/4'"),
        ({"select": {"keep": 0.25}}, "steps[0].select.keep: write a share of the layers such as 1/4"),
        ({"select": {"rule": "kl"}}, "steps[0].select: distill: the short distillation of rule: kl"),
        ({"select": {"rule": "kl", "distill": {"tokens": 1, "lora": {}}}},
         "steps[0].select: distill: low-rank updates change the modules"),
        ({"select": {"rule": "tail", "scores": "a.json"}}, "steps[0].select: scores: rule: tail reads none"),
        ({"select": {"rule": "jet", "cap": 50}}, "steps[0].select: cap: bounds the ratio of rule: halo"),
        ({"select": {"recall": {"lm_eval": ["fda"], "lengths": [512]}}}, "steps[0].select.recall: lm_eval replaces"),
        ({"select": {"recal": {}}}, "steps[0].select.recal: unknown key; did you mean 'recall'?"),
    ],
)  # fmt: skip
def test_bad_steps(step, message):
    (problem,) = problems(step, kept=KEPT)
    assert problem.startswith(message)


def test_every_problem_of_a_selection_at_once():
    assert problems(SELECT, SELECT) == [
        "steps[1].select: the layers have been chosen in steps[0] already; one select a recipe",
        "steps[0].select: spec.kept is missing; it says what the chosen layers compute, such as kept: {attention: softmax, "
        "position: none}",
        "steps[0].select: rule: halo measures layers that have learnt something; put a transfer before it, or give scores",
    ]
    for rule in ({"rule": "uniform"}, {"rule": "given", "layers": [0]}, {"scores": "scores.jsonl"}):
        raw = {"spec": {"all": LIGHTNING, "kept": KEPT}, "steps": [{"select": rule}]}
        Recipe.from_dict(raw)  # no training comes before


def test_whole_models_train_after_their_kept_layers_are_chosen():
    long = {"long_context": {"tokens": "1M", "length": 64}}
    distill = {"distill": {"tokens": "1M"}}
    assert problems(MIXER, distill, long, SELECT, distill, kept=KEPT) == [
        "steps[1].distill: trains a model whose kept layers are not chosen yet; put it after steps[3].select",
        "steps[2].long_context: trains a model whose kept layers are not chosen yet; put it after steps[3].select",
    ]
    (problem,) = problems(MIXER, distill, SELECT)  # without kept layers that is what is missing
    assert problem.startswith("steps[2].select: spec.kept is missing")
    for steps in ((MIXER, SELECT, distill, long), (distill, long)):
        spec = {"all": LIGHTNING, **({"kept": KEPT} if SELECT in steps else {})}
        assert len(Recipe.from_dict({"spec": spec, "steps": list(steps)}).steps) == len(steps)


def test_the_short_distillation_of_a_selection_warms_up_in_time():
    short = {"tokens": "10K", "lr": {"cosine": [1e-3, 1e-5], "warmup": 2}}
    select = {"select": {"rule": "kl", "distill": short}}
    raw = {"spec": {"all": LIGHTNING, "kept": KEPT}, "steps": [MIXER, select], "data": {"length": 1024}}
    (note,) = (note for note in budget_notes(Recipe.from_dict(raw)) if "warm-up" in note)
    assert note.startswith(
        "steps[1].select.distill: its warm-up of 2 optimizer steps does not end within the stage's 2"
    )


@pytest.mark.parametrize("steps", [[], [MIXER]])
def test_kept_layers_that_nobody_chooses(steps):
    (problem,) = problems(*steps, kept=KEPT)
    assert problem.startswith("spec.kept: no select step chooses")


def test_nothing_to_train():
    (problem,) = problems(MIXER, spec=SOFTMAX)
    assert problem.startswith("steps[0].transfer.train: nothing to train; train: mixer is for layers")
    (problem,) = problems({"transfer": {"tokens": 1}})
    assert (
        problem
        == "steps[0].transfer.train: nothing to train; the spec has no maps and no mix; write train: mixer"
    )
    (problem,) = problems({"transfer": {"tokens": 1}}, spec=WINDOWED | {"qk_norm": True})
    assert "no longer have the teacher's q and k" in problem
    # layers that are kept do not count before they are chosen, and they do after
    (problem,) = problems(
        {"select": {"rule": "uniform"}},
        MIXER,
        spec=SOFTMAX,
        kept={"attention": "softmax", "position": "none"},
    )
    assert "nothing to train" in problem
    Recipe.from_dict(
        {"spec": {"all": SOFTMAX, "kept": KEPT}, "steps": [{"select": {"rule": "uniform"}}, MIXER]}
    )


def test_what_needs_linear_attention_says_so_of_recurrent_layers():
    (edit,) = problems({"edit": {"window": {"kind": "sliding", "size": 8}}})
    assert edit.startswith("steps[0].edit: window: the spec has no linear attention")
    finetune = {"tokens": 1, "window_dropout": {"p": [0.5]}, "early_stopping": {}}
    assert [problem.split(":")[0] for problem in problems({"finetune": finetune})] == [
        "steps[0].finetune.window_dropout",
        "steps[0].finetune.early_stopping",
    ]


def test_the_length_of_a_long_context_step_counts_for_its_far_keys():
    windowed = {"attention": "windowed_linear", "window": {"kind": "sliding", "size": 100}}
    step = {"long_context": {"tokens": 1, "length": 64}}
    (problem,) = problems(step, spec=windowed)
    assert problem.startswith("steps[0].long_context.length: with 64 tokens no query has a far key")


def test_the_control_takes_the_next_token_steps_alone(text):
    recipe = halo.recipe(text)
    (step,) = recipe.control().steps
    assert isinstance(step, LongContextStep) and recipe.control().spec.kept is None
    steps = [*halo.STEPS[:3], {"long_context": halo.STEPS[3]["long_context"] | {"objective": "kl"}}]
    asked = {"evaluation": {"control": True}}
    assert not halo.recipe(text, steps, **asked).wants_control and halo.recipe(text, **asked).wants_control


def test_the_spec_before_and_after_a_selection(text):
    recipe = halo.recipe(text)
    attentions = [[g.attention for g in recipe.groups_before(index)] for index in range(5)]
    assert attentions == [["lightning"], ["lightning"], *[["lightning", "softmax"]] * 3]
    assert recipe.assumed_before(1, 4) == recipe.spec
    assert recipe.assumed_before(2, 4).layers.keys() == {"1,3"} and recipe.assumed_before(2, 4).kept is None
