"""The recipe format: what it accepts, and every way in which it says no."""

import copy
import json

import pytest
import yaml

from hybridize.recipe import (
    Constant,
    Cosine,
    FinetuneStep,
    Plateau,
    Recipe,
    RecipeError,
    TransferStep,
    copy_recipe,
    json_schema,
    list_recipes,
    load_recipe,
    recipe_path,
)

HYBRID = "{attention: windowed_linear, window: {kind: terraced, size: 64}}"


def write(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return path


def problems(tmp_path, text, overrides=None):
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(tmp_path, text), overrides)
    assert all("\n" not in problem for problem in caught.value.problems)
    return caught.value.problems


def one_step(step, spec=HYBRID, more=""):
    return f"spec:\n  all: {spec}\ndata: {{length: 1024}}\n{more}\nsteps:\n  - {step}\n"


@pytest.mark.parametrize("name", [file.name for file in list_recipes()])
def test_shipped_recipe_is_valid_headed_and_survives_a_round_trip(name):
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.header.command.startswith("hybridize ") and recipe.header.cost and recipe.header.source
    assert name in recipe.header.command
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))).to_dict() == recipe.to_dict()


def test_shipped_recipes_are_all_there():
    expected = {"demo", "lolcats-smollm2-135m", "control-smollm2-135m", "lolcats-llama3-8b", "lolcats-mistral-7b",
                "lolcats-llama3.1-70b", "lolcats-llama3.1-405b"}  # fmt: skip
    assert expected <= {file.name for file in list_recipes()}


def test_yaml_written_from_a_recipe_reads_back_the_same(tmp_path):
    recipe = load_recipe("lolcats-smollm2-135m")
    assert load_recipe(write(tmp_path, recipe.to_yaml())).to_dict() == recipe.to_dict()


def test_published_hyperparameters_of_8b():
    recipe = load_recipe("lolcats-llama3-8b")
    (group,) = recipe.spec.all.groups
    assert (group.window.kind, group.window.size, group.feature_map.features) == ("terraced", 64, 128)
    assert group.normalizer.gamma == 0.1
    transfer, finetune = recipe.steps
    assert isinstance(transfer, TransferStep) and isinstance(finetune, FinetuneStep)
    assert (transfer.max_lr, finetune.max_lr) == (1e-2, 1e-4)
    assert transfer.rate == Plateau(factor=0.1, patience=10, min_lr=1e-5) and transfer.eval_every == 100
    assert (transfer.batch.rows, transfer.batch.micro_rows, transfer.batch.accumulation) == (8, 1, 8)
    assert (finetune.lora.rank, finetune.lora.alpha, finetune.lora.on) == (8, 16, ("q", "k", "v", "o"))
    assert transfer.objective.output_mse == 1000 and transfer.objective.weight_ce == 0
    assert transfer.clip == 1.0 and transfer.weight_decay == 0 and recipe.seed == 42
    assert recipe.data.mask_prompt


def test_405b_is_a_recipe_that_convert_must_refuse():
    recipe = load_recipe("lolcats-llama3.1-405b")
    assert recipe.steps[0].objective.weight_ce == 1 and recipe.steps[1].lora.dropout == 0.5
    with pytest.raises(RecipeError, match=r"needs 24 GPUs.*block-wise transfer"):
        recipe.check_supported()
    load_recipe("lolcats-smollm2-135m").check_supported()


def test_every_problem_at_once_each_with_its_path_and_the_nearest_name(tmp_path):
    found = problems(
        tmp_path,
        """
sped: {}
spec:
  all: {attention: windowd_linear, windw: {kind: terraced, size: 64}, normalizer: {kind: shared, gama: 0.2}}
  layers:
    0-3: {attention: softmax, window: {kind: terrace, sizee: 3}}
data: {lenght: 512}
precision: fp16
steps:
  - transfer: {tokens: 20X, objectve: {}, train: map, lr: {cosin: [1e-2, 1e-4]}}
  - tranfer: {tokens: 1M}
  - finetune: {tokens: 1M, lora: {on: [q, w]}, batch: {rows: 8, micro: 3}}
""",
    )
    for expected in (
        "sped: unknown key; did you mean 'spec'?",
        "spec.all.attention: 'windowd_linear' is not allowed; did you mean 'windowed_linear'?",
        "spec.all.windw: unknown key; did you mean 'window'?",
        "spec.all.normalizer.gama: unknown key; did you mean 'gamma'?",
        "spec.layers['0-3'].window.kind: 'terrace' is not allowed; did you mean 'terraced'?",
        "spec.layers['0-3'].window.sizee: unknown key; did you mean 'size'?",
        "data.lenght: unknown key; did you mean 'length'?",
        "precision: 'fp16' is not allowed; did you mean 'bf16'?",
        "steps[0].transfer.objectve: unknown key; did you mean 'objective'?",
        "steps[0].transfer.lr.cosin: unknown key; did you mean 'cosine'?",
        "steps[0].transfer.train: 'map' is not allowed; did you mean 'maps'?",
        "steps[1].tranfer: unknown step; did you mean 'transfer'?",
        "steps[2].finetune.lora.on[1]: 'w' is not allowed; allowed are q, k, v, o",
        "steps[2].finetune.batch: micro is 3; it must divide rows, 8",
    ):
        assert expected in found
    assert any(problem.startswith("steps[0].transfer.tokens: write a whole count") for problem in found)


def test_steps_of_other_systems_are_unknown(tmp_path):
    (problem,) = problems(tmp_path, one_step("pretrain: {tokens: 1M}"))
    allowed = "distill, edit, finetune, long_context, select, transfer"
    assert problem == f"steps[0].pretrain: unknown step; allowed are {allowed}"


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("transfer:", "steps[0].transfer: needs a length: either tokens, such as 20M, or epochs"),
        ("transfer: {tokens: 1M, epochs: 2}", "steps[0].transfer: needs a length: either tokens, such as 20M, or epochs"),
        ("finetune: {tokens: 1M, full: true, lora: {}}", "steps[0].finetune: lora and full exclude each other; leave one out"),
        ("transfer: {tokens: 1M, objective: {output_mse: 0}}",
         "steps[0].transfer.objective: output_mse, weight_ce, mixer_mse, hidden_l2 are all 0; give one of them a weight"),
        ("transfer: {tokens: 1M, train: []}", "steps[0].transfer.train: "),
        ("transfer: {tokens: 1M, lr: fast}", "steps[0].transfer.lr: "),
        ("transfer: {tokens: 1M, lr: {cosine: [1e-5, 1e-3]}}", "steps[0].transfer.lr: "),
        ("transfer: {tokens: 1M, lr: {cosine: [1e-3, 1e-5]}, schedule: {kind: constant}}",
         "steps[0].transfer: schedule: the cosine of lr is the schedule already; leave schedule out"),
        ("finetune: {tokens: 1M, lora: {rank: 0}}", "steps[0].finetune.lora.rank: "),
        ("transfer", "steps[0]: is 'transfer'; write one mapping such as"),
        ("{transfer: {tokens: 1M}, finetune: {tokens: 1M}}", "steps[0]: is "),
    ],
)  # fmt: skip
def test_bad_steps(tmp_path, step, message):
    (problem,) = problems(tmp_path, one_step(step))
    assert problem.startswith(message)


@pytest.mark.parametrize(
    ("spec", "length", "needs"),
    [
        ("{attention: windowed_linear, window: {kind: terraced, size: 64}}", 128, 129),
        ("{attention: windowed_linear, window: {kind: sliding, size: 64}}", 64, 65),
        ("{attention: windowed_linear, window: {kind: sliding, size: 64, sinks: 4}}", 68, 69),
    ],
)
def test_training_length_without_a_far_key(tmp_path, spec, length, needs):
    text = one_step("transfer: {tokens: 1M}", spec)
    (problem,) = problems(tmp_path, text, [f"data.length={length}"])
    assert problem.startswith("data.length: ") and problem.endswith(f"needs at least {needs}")
    assert load_recipe(write(tmp_path, text), {"data.length": needs}).data.length == needs


def test_transfer_needs_something_to_train(tmp_path):
    (problem,) = problems(tmp_path, one_step("transfer: {tokens: 1M}", "{attention: softmax}"))
    assert problem == "steps[0].transfer.train: nothing to train; the spec has no maps and no mix"
    fixed = "{attention: windowed_linear, window: {kind: sliding, size: 4}, normalizer: {kind: separate, mix: fixed}}"
    (problem,) = problems(tmp_path, one_step("transfer: {tokens: 1M, train: mix}", fixed))
    assert "no mix" in problem


def test_a_swap_without_steps_is_a_recipe(tmp_path):
    assert (
        load_recipe(write(tmp_path, f"spec: {{all: {HYBRID}}}\ndata: {{length: 16}}\nsteps: []")).steps == ()
    )


@pytest.mark.parametrize(
    ("text", "count"), [("20M", 20_000_000), ("1.5B", 1_500_000_000), ("4_000", 4000), ("2k", 2000)]
)
def test_token_counts(tmp_path, text, count):
    assert load_recipe(write(tmp_path, one_step(f"transfer: {{tokens: {text}}}"))).steps[0].tokens == count


@pytest.mark.parametrize("text", ["0", "-5", "1.5", "20 MB", "true", "[1]"])
def test_wrong_token_counts(tmp_path, text):
    (problem,) = problems(tmp_path, one_step(f"transfer: {{tokens: {text}}}"))
    assert problem.startswith("steps[0].transfer.tokens: write a ")


def test_optimizer_steps_round_up_and_need_a_token_count():
    step = TransferStep(tokens=20_000_000)
    assert step.optimizer_steps(1024) == 2442
    assert TransferStep(tokens=1).optimizer_steps(1024) == 1
    epochs = TransferStep(epochs=2)
    assert epochs.optimizer_steps(1024) is None
    assert epochs.optimizer_steps(1024, corpus_tokens=8 * 1024 * 10) == 20


def test_learning_rates():
    assert TransferStep(tokens=1).rate == Plateau() and TransferStep(tokens=1).max_lr == 1e-2
    cosine = TransferStep.model_validate({"tokens": 1, "lr": {"cosine": [1e-3, 1e-5], "warmup": 10}})
    assert cosine.rate == Cosine(cosine=(1e-3, 1e-5), warmup=10) and cosine.max_lr == 1e-3
    constant = FinetuneStep.model_validate({"tokens": 1, "schedule": {"kind": "constant"}})
    assert constant.rate == Constant() and constant.max_lr == 1e-4 and constant.lora.rank == 8


def test_objective_terms_that_are_not_named_are_zero():
    assert TransferStep.model_validate({"tokens": 1}).objective.output_mse == 1000
    only_ce = TransferStep.model_validate({"tokens": 1, "objective": {"weight_ce": 1}}).objective
    assert (only_ce.output_mse, only_ce.weight_ce) == (0, 1)
    linear = TransferStep.model_validate({"tokens": 1, "objective": {"against": "linear_only"}}).objective
    assert (linear.output_mse, linear.against) == (1000, "linear_only")


def test_overrides_by_path_and_by_step(tmp_path):
    recipe = load_recipe(
        "lolcats-smollm2-135m",
        [
            "transfer.tokens=1M",
            "steps[1].finetune.lora.rank=4",
            "spec.all.window.size=32",
            "data.source=a.txt",
            "seed=7",
        ],
    )
    assert recipe.steps[0].tokens == 1_000_000 and recipe.steps[1].lora.rank == 4
    assert recipe.spec.all.groups[0].window.size == 32 and recipe.data.source == "a.txt" and recipe.seed == 7
    assert load_recipe("demo", {"transfer.lr": 0.5}).steps[0].lr == 0.5


def test_a_recipe_as_plain_data():
    raw = yaml.safe_load(recipe_path("demo").read_text("utf-8"))
    before = copy.deepcopy(raw)
    for changes in ([], ["transfer.lr=0.5"]):
        assert load_recipe(raw, changes).to_dict() == load_recipe("demo", changes).to_dict()
    assert raw == before
    with pytest.raises(RecipeError, match="did you mean 'steps'"):
        load_recipe({"spec": raw["spec"], "step": raw["steps"]})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", "write PATH=VALUE"),
        ("steps[5].transfer.tokens=1", "'5' is not an index of a list of 2"),
        ("transfer.objective.output_mse.x=1", "'x' lies below a plain value"),
        ("data.lenght=5", "did you mean 'length'"),
        ("=3", "write PATH=VALUE"),
        ("data.source=[x].txt", "override data.source: '[x].txt' is not YAML".replace("[", r"\[")),
    ],
)
def test_wrong_overrides(override, message):
    with pytest.raises(ValueError, match="(?s)" + message.replace("(", r"\(")):
        load_recipe("lolcats-smollm2-135m", [override])


def test_a_step_shorthand_that_is_ambiguous(tmp_path):
    text = one_step("transfer: {tokens: 1M}\n  - transfer: {tokens: 2M}")
    (problem,) = problems(tmp_path, text, ["transfer.tokens=3M"])
    assert "the recipe has 2 transfer steps" in problem


def test_yaml_faults(tmp_path):
    (problem,) = problems(tmp_path, "spec: [1\nsteps: {")
    assert problem.startswith("is not YAML")
    (problem,) = problems(tmp_path, "seed: 1\nseed: 2\n")
    assert problem == "is not YAML: the key 'seed' occurs twice in line 2"
    (problem,) = problems(tmp_path, "just text")
    assert problem.startswith("holds str")
    assert problems(tmp_path, "{}") == ["spec: is required", "steps: is required"]


def test_words_that_old_yaml_reads_as_booleans_and_numbers(tmp_path):
    step = load_recipe(write(tmp_path, one_step("finetune: {tokens: 1M, lora: {on: [q]}, lr: 1e-4}"))).steps[
        0
    ]
    assert step.lora.on == ("q",) and step.lr == 1e-4


def test_an_unknown_recipe_names_the_nearest():
    with pytest.raises(RecipeError, match="did you mean 'lolcats-smollm2-135m'"):
        recipe_path("lolcats-smolm2-135m")


def test_copy_never_overwrites(tmp_path):
    copied = copy_recipe("demo", tmp_path)
    assert copied.read_text() == recipe_path("demo").read_text()
    with pytest.raises(FileExistsError, match="exists"):
        copy_recipe("demo", tmp_path)
    assert copy_recipe("demo", tmp_path / "new" / "mine.yaml").name == "mine.yaml"


def test_json_schema_names_the_steps_as_yaml_writes_them():
    schema = json_schema()
    entry = schema["$defs"]["StepEntry"]
    assert (
        set(entry["properties"]) == {"transfer", "finetune", "distill", "long_context", "select", "edit"}
        and entry["additionalProperties"] is False
    )
    assert schema["additionalProperties"] is False
    json.dumps(schema)
