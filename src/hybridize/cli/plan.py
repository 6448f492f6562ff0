"""`hybridize plan`: what a recipe needs on a model, before anything is downloaded or trained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hybridize.cli.common import RecipeOption, SetOption, human_bytes, human_count, print_table, write_json

if TYPE_CHECKING:
    from hybridize import Plan


def plan(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Hub id, folder, GGUF file or alias such as smollm2-135m.")
    ],
    recipe: RecipeOption,
    set_: SetOption = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the plan as JSON ('-': print it).")
    ] = None,
) -> None:
    """Parameters, cache bytes, training memory, tokens and disk, from the model's config alone."""
    import hybridize

    result = hybridize.plan(model, hybridize.load_recipe(recipe, set_))
    if json_file is not None:
        write_json(result.to_dict(), json_file)
    if str(json_file) != "-":
        _print(result)


def _print(plan: Plan) -> None:
    print_table(
        f"{plan.recipe} on {plan.model}",
        ("", "parameters"),
        [
            (f"{plan.model_type}: {plan.layers} layers, {plan.heads} heads, {plan.kv_heads} KV heads of {plan.head_dim}",
             human_count(plan.parameters)),
            ("new feature maps", human_count(plan.map_parameters)),
            ("new mixing weights", human_count(plan.mix_parameters)),
            ("new projections, norms, gates", human_count(plan.own_parameters)),
        ],
    )  # fmt: skip
    print_table(
        "cache of one sequence",
        ("tokens", "teacher", "student", "ratio"),
        [
            (
                f"{row.length:,}",
                human_bytes(row.teacher),
                human_bytes(row.student),
                f"{row.student / row.teacher:.2%}",
            )
            for row in plan.states
        ],
    )
    print_table(
        "training (activations are an estimate)",
        ("stage", "trains", "tokens", "steps", "weights", "gradients", "optimizer", "activations", "total"),
        [
            (
                stage.name,
                human_count(stage.trainable),
                human_count(stage.tokens) if stage.epochs is None else f"{stage.epochs:g} epochs",
                stage.optimizer_steps,
                human_bytes(stage.memory.weights),
                human_bytes(stage.memory.gradients),
                human_bytes(stage.memory.optimizer),
                human_bytes(stage.memory.activations),
                human_bytes(stage.memory.total),
            )
            for stage in plan.stages
        ],
    )
    typer.echo(
        f"disk: {human_bytes(plan.student_disk)} student, {human_bytes(plan.checkpoint_disk)} a checkpoint"
    )
    for note in plan.notes:
        typer.echo(f"note: {note}")
    for problem in plan.unsupported:
        typer.secho(f"convert would refuse: {problem}", fg="yellow")
