"""The page's structure, what it leaves out, what it escapes, and that it loads nothing."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from rich.console import Console
from tests.report.example_results import example
from tests.report.pages import Page, check_loads_nothing, check_references

from hybridize.report.html import render_html, render_table, write_report
from hybridize.report.schema import (
    Curve,
    Generation,
    LayerErrors,
    LayerHistory,
    PasskeyEntry,
    PerplexityEntry,
    PositionEntry,
    Results,
    Row,
    load_results,
    save_results,
)


def bare() -> Results:
    return Results(title="Bare", model="tiny", rows=[Row(name="teacher", kind="teacher")])


def without_plots() -> Results:
    """Plots take most of the time, and some tests are not about them."""
    results = example().model_copy(update={"layers": None, "curves": []})
    for row in results.rows:
        row.by_position = {}
    return results


def test_full_page() -> None:
    results = example()
    page = Page(render_html(results))
    assert page.elements["h1"] == page.elements["main"] == 1
    assert page.elements["script"] == 0
    assert page.elements["title"] == 1 + 6, "the page's own and one a figure"
    assert page.elements["svg"] == page.elements["figure"] == page.elements["figcaption"] == 2 + 2 + 2
    labels = [value for tag, name, value in page.attributes if tag == "svg" and name == "aria-label"]
    assert len(set(labels)) == 6 and all(labels)
    assert ("meta", "content", "width=device-width, initial-scale=1") in page.attributes
    assert ("html", "lang", "en") in page.attributes
    for heading in (
        "How well each layer",
        "Perplexity by position",
        "What the models write",
        "Training",
        "Cost",
    ):
        assert heading in page.text
    for row in results.rows:
        assert row.name in page.text
    for value in ("14.9", "192", "24.6", "100%", "1.41 GiB", "9.84 MiB", "14.5 to 15.4", "1 min 58 s"):
        assert value in page.text


def test_axes_carry_units() -> None:
    svgs = re.findall(r"<svg.*?</svg>", render_html(example()), flags=re.DOTALL)
    expected = [
        ("layer (from 0)", "MSE / teacher's variance"),
        ("optimizer step", "layer (from 0)"),
        ("position in the document (tokens)", "perplexity"),
        ("position in the document (tokens)", "perplexity"),
        ("optimizer step", "1000 x MSE"),
        ("optimizer step", "cross-entropy (nats per token)"),
    ]
    for svg, labels in zip(svgs, expected, strict=True):
        text = Page(svg).text
        assert all(label in text for label in labels)


def test_loads_nothing_from_outside() -> None:
    check_loads_nothing(render_html(example()))


def test_ids_are_unique_and_references_resolve() -> None:
    check_references(render_html(example()))


def test_same_results_give_the_same_page() -> None:
    assert render_html(example()) == render_html(example())


def test_bare_results_leave_every_section_out() -> None:
    page = Page(render_html(bare()))
    assert (
        page.elements["h2"] == page.elements["svg"] == page.elements["details"] == page.elements["pre"] == 0
    )
    assert page.elements["table"] == 1 and "teacher" in page.text


@pytest.mark.parametrize("part", sorted(set(Results.model_fields) - {"version", "title", "model", "rows"}))
def test_each_optional_part_may_be_missing(part: str) -> None:
    default = Results.model_fields[part].get_default(call_default_factory=True)
    base = example() if part in ("layers", "curves") else without_plots()
    page = Page(render_html(base.model_copy(update={part: default})))
    assert page.elements["h1"] == 1


@pytest.mark.parametrize("part", ["perplexity", "passkey", "state_bytes", "by_position"])
def test_rows_may_lack_measures(part: str) -> None:
    results = example() if part == "by_position" else without_plots()
    setattr(results.rows[2], part, {})
    everywhere = results.model_copy(
        update={"rows": [row.model_copy(update={part: {}}) for row in results.rows]}
    )
    for changed in (results, everywhere):
        assert Page(render_html(changed)).elements["table"] == 2
    if part != "by_position":
        assert "–" in Page(render_html(results)).text


def test_text_is_escaped() -> None:
    nasty = "<script>alert('x')</script> & \"<b>\""
    row = Row(
        name=nasty,
        kind="teacher",
        perplexity={nasty: PerplexityEntry(perplexity=3, tokens=1)},
        by_position={nasty: [PositionEntry(start=0, end=64, perplexity=3, tokens=64)]},
    )
    results = Results(
        title=nasty,
        model=nasty,
        recipe=nasty,
        recipe_text=nasty,
        spec=nasty,
        rows=[row],
        curves=[Curve(stage=nasty, unit=nasty, steps=[1, 2], loss=[2, 1])],
        generations=[Generation(prompt=nasty, teacher=nasty, student=nasty)],
        notes=[nasty],
        versions={nasty: nasty},
        fingerprints={nasty: nasty},
        commands=[nasty],
    )
    html = render_html(results)
    page = Page(html)
    assert page.elements["script"] == page.elements["b"] == 0
    assert page.text.count(nasty) >= 12


def test_dollar_signs_are_not_mathematics() -> None:
    results = bare()
    results.curves = [Curve(stage="pay $1 or $2", unit="cost ($)^2 $\\frac$", steps=[1, 2], loss=[1, 2])]
    results.rows[0].name = "$x_1$ \\alpha"
    results.rows[0].by_position = {"a": [PositionEntry(start=0, end=64, perplexity=3, tokens=64)]}
    text = Page(render_html(results)).text
    assert "cost ($)^2 $\\frac$" in text and text.count("$x_1$ \\alpha") == 2


def test_non_finite_values_render_and_survive_json(tmp_path: Path) -> None:
    results = example()
    results.rows[1].perplexity["docstrings"] = PerplexityEntry(
        perplexity=math.inf, low=math.nan, high=math.inf, tokens=9
    )
    results.rows[1].by_position["docstrings"][0].perplexity = math.inf
    results.layers = LayerErrors(
        before=[math.inf, 0.5, 0.0],
        after=[math.nan, 0.1, 0.0],
        history=LayerHistory(steps=[0, 1], mse=[[math.inf, 0.5, 0.0], [math.nan, 0.1, 0.0]]),
    )
    results.curves[0].loss[3] = math.nan
    save_results(results, tmp_path)
    again = load_results(tmp_path)
    assert again.rows[1].perplexity["docstrings"].perplexity == math.inf
    assert math.isnan(again.layers.after[0])  # type: ignore[union-attr]
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert page.elements["svg"] == 6 and "infinite" in page.text


@pytest.mark.parametrize(
    "layers",
    [
        LayerErrors(before=[1.0], after=[1.0], history=LayerHistory(steps=[0], mse=[[1.0]])),
        LayerErrors(before=[0.0, 0.0], after=[0.0, 0.0], history=LayerHistory(steps=[0], mse=[[0.0, 0.0]])),
        LayerErrors(before=[1.0, 2.0], after=[0.5, 0.5], history=LayerHistory(steps=[], mse=[])),
        LayerErrors(before=[], after=[]),
    ],
)
def test_degenerate_layers(layers: LayerErrors) -> None:
    results = bare()
    results.layers = layers
    Page(render_html(results))


def test_results_round_trip(tmp_path: Path) -> None:
    results = example()
    path = save_results(results, tmp_path / "run")
    assert load_results(tmp_path / "run") == results
    assert [file.name for file in path.parent.iterdir()] == ["results.json"]


def test_report_is_written_beside_the_results(tmp_path: Path) -> None:
    save_results(example(), tmp_path)
    path = write_report(tmp_path)
    assert path == tmp_path / "report.html"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["report.html", "results.json"]


def test_entries_come_from_objects_with_the_same_names() -> None:
    class Accuracy:
        accuracy, low, high, samples, length = 0.5, 0.3, 0.7, 20, 1024

    assert PasskeyEntry.model_validate(Accuracy()) == PasskeyEntry(
        accuracy=0.5, low=0.3, high=0.7, samples=20
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"version": 2, "title": "a", "model": "b", "rows": []}', "version"),
        ('{"title": "a", "model": "b", "rows": [{"name": "x", "colour": 1}]}', "rows.0.colour"),
        ('{"title": "a", "mod', "the file"),
        ("", "the file"),
    ],
)
def test_bad_results_are_one_clear_line(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        write_report(tmp_path)
    assert "\n" not in str(caught.value) and "evaluate the run again" in str(caught.value)
    assert not (tmp_path / "report.html").exists()


def test_missing_results(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"which has no results\.json"):
        write_report(tmp_path)


def test_terminal_table() -> None:
    console = Console(width=160)
    with console.capture() as capture:
        console.print(render_table(bare()))
    assert "teacher" in capture.get()
    with console.capture() as capture:
        console.print(render_table(example()))
    text = capture.get()
    line = next(line for line in text.splitlines() if "after LoRA" in line)
    assert re.findall(r"[\d.]+(?:%| [KMG]iB)?", line) == [
        "24.6",
        "56.6",
        "25%",
        "15%",
        "9.84 MiB",
        "9.84 MiB",
    ]
    assert "docstrings" in text and "64K" in text


def test_square_brackets_are_not_markup() -> None:
    results = bare()
    results.rows[0].name = "teacher [bold]x[/bold] [/]"
    console = Console(width=160)
    with console.capture() as capture:
        console.print(render_table(results))
    assert "teacher [bold]x[/bold] [/]" in capture.get()
