"""The page of a diagnosis: the answer first, every part where it was measured, nothing where it was not, nothing unescaped."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from rich.console import Console
from tests.report import example_diagnosis as examples
from tests.report.example_diagnosis import NASTY, interval, rendered
from tests.report.pages import Page, check_loads_nothing, check_references

from hybridize.report.diagnosis import (
    Diagnosis,
    Interval,
    Label,
    LayerEntry,
    ModelEntry,
    RunDiagnosis,
    load_diagnosis,
    save_diagnosis,
)
from hybridize.report.diagnosis_html import render_diagnosis_html, render_diagnosis_table, write_diagnosis
from hybridize.report.diagnosis_maps import heads_plot, passkey_plot, share_map
from hybridize.report.diagnosis_plots import (
    ablation_plot,
    gain_plot,
    loss_rise_plot,
    need_plot,
    norms_plot,
    position_plot,
)
from hybridize.report.diagnosis_tables import counted, model_groups, side_by_side
from hybridize.report.diagnosis_text import LINEAR, WINDOW, rising, top_layers, where

SECTIONS = [
    "Why",
    "The models",
    "What is lost without each part",
    "Layer by layer",
    "Does the text need its far past?",
    "Along the document",
    "Passkeys",
    "The linear branch during training",
    "What was diagnosed",
]


def run_of(diagnosis: Diagnosis) -> RunDiagnosis:
    return diagnosis.runs[0]


def without_plots(run: RunDiagnosis) -> RunDiagnosis:
    """Plots take most of the time, and some tests are not about them."""
    models = [
        model.model_copy(
            update={
                "passkey_cells": [],
                "texts": {
                    name: entry.model_copy(
                        update={
                            "by_position": [],
                            "far_delta": None,
                            "useful_delta": None,
                            "other_delta": None,
                        }
                    )
                    for name, entry in model.texts.items()
                },
            }
        )
        for model in run.models
    ]
    return run.model_copy(update={"models": models, "layers": None, "gain": []})


def page_of(run: RunDiagnosis) -> Page:
    return Page(render_diagnosis_html(Diagnosis(runs=[run])))


def terminal(diagnosis: Diagnosis, width: int = 200) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(render_diagnosis_table(diagnosis))
    return capture.get()


def test_full_page() -> None:
    html = rendered("full")
    page = Page(html)
    assert re.findall(r"<h2>(.*?)</h2>", html) == [*SECTIONS, "What made this"]
    plots = 2 + 6 + 2 + 2 + 1 + 2
    assert page.elements["svg"] == page.elements["figure"] == page.elements["figcaption"] == plots
    labels = [value for tag, name, value in page.attributes if tag == "svg" and name == "aria-label"]
    assert len(set(labels)) == plots
    assert ("html", "lang", "en") in page.attributes
    for value in (
        "+0.189", "+0.118", "+0.109 to +0.127", "reference",  # both removals on docstrings, renormalize's interval
        "204,800 tokens", "179,200 tokens", "40 keys", "1,000 questions", "chance 25%", "7.12 MiB", "1.41 GiB",
        "teacher, sliding 216 + 4 sinks", "teacher, same fine-tuning", "6 min 52 s, NVIDIA H200",
    ):  # fmt: skip
        assert value in page.text, value
    for model in run_of(examples.full()).models:
        assert model.name in page.text


def test_the_answer_comes_first() -> None:
    """A reader in a hurry: the word, the plain answer, the sentence, where, the window, before anything else."""
    text = Page(rendered("full")).text
    head = text[: text.index("Why")]
    run = run_of(examples.full())
    expected = [
        "Balanced",
        "The linear branch is used.",
        run.verdict.sentence,
        "Where",
        "Most in layer 6",
        "window Used",
    ]
    places = [head.index(words) for words in expected]
    assert places == sorted(places) and len(head) < 600
    reasons = text[text.index("Why") : text.index("The models")]
    assert all(reason in reasons for reason in run.verdict.reasons)
    assert "gain, renormalize 0.118 0.114 to 0.122" in reasons and "balanced share 0.25" in reasons
    assert "bound need" not in reasons


@pytest.mark.parametrize("linear", get_args(Label))
def test_every_verdict_has_a_word_a_sign_and_a_colour(linear: str) -> None:
    run = run_of(examples.minimal())
    for window in WINDOW:
        run.verdict.linear, run.verdict.window = linear, window  # type: ignore[assignment]
        page = page_of(run)
        answer = LINEAR[linear]
        assert f"{answer.sign} {answer.word} {answer.plain[0].upper()}{answer.plain[1:]}." in page.text
        assert f"Softmax window {WINDOW[window].capitalize()}" in page.text
        assert ("section", "class", f"verdict {linear}") in page.attributes
    assert f".{linear} {{ --tone:" in rendered("minimal")
    assert answer.word.lower() in terminal(Diagnosis(runs=[run]))


def test_bypassed_and_used_cannot_be_confused() -> None:
    assert "is not used" in LINEAR["bypassed"].plain
    assert [label for label, answer in LINEAR.items() if "branch is used" in answer.plain] == [
        "balanced", "weak", "inconclusive",
    ]  # fmt: skip
    assert "cannot tell" in LINEAR["inconclusive"].plain


@pytest.mark.parametrize("name", ["full", "three", "nasty"])
def test_pages_load_nothing_and_refer_to_themselves(name: str) -> None:
    check_loads_nothing(rendered(name))
    check_references(rendered(name))


@pytest.mark.parametrize("name", ["minimal", "plain_teacher"])
def test_small_pages(name: str) -> None:
    html = rendered(name)
    check_loads_nothing(html)
    found = re.findall(r"<h2>(.*?)</h2>", html)
    expected = {
        "minimal": ["The models", "What was diagnosed"],
        "plain_teacher": ["Why", "The models", "Along the document", "What was diagnosed"],
    }
    assert found == expected[name]
    page = Page(html)
    assert page.elements["svg"] == (name == "plain_teacher")
    assert "far Δ" not in page.text and "less the student's" not in page.text


def test_runs_side_by_side() -> None:
    html = rendered("three")
    diagnosis = examples.three()
    page = Page(html)
    assert re.findall(r"<h2>(.*?)</h2>", html) == [
        "Side by side",
        *(run.name for run in diagnosis.runs),
        "What made this",
    ]
    for i, run in enumerate(diagnosis.runs, start=1):
        assert page.ids[f"run-{i}"] == 1
        assert html.count(f'href="#run-{i}"') == 2, "from the verdict and from the table"
        assert (
            html.index(run.verdict.sentence)
            < html.index("<h2>Side by side</h2>")
            < html.index(f'id="run-{i}"')
        )
    assert [re.sub("<.*?>", "", h) for h in re.findall(r"<h3>.*?</h3>", html)].count("The models") == 3
    assert "A quick diagnosis" in page.text and "head by head" not in [*page.ids]
    side = page.text[page.text.index("Side by side") : page.text.index("Small print")]
    assert (
        "linear branch Bypassed Weak Balanced" in side and "most used in layers none 7, 6, 8 6, 7, 8" in side
    )


def test_side_by_side_cells() -> None:
    groups = dict(side_by_side(examples.three()))
    assert list(groups) == [
        "verdict", "docstrings", "code", "passkey at 1K", "tasks, mean of arc_easy, far_recall", "state at 64K",
    ]  # fmt: skip
    rows = {row.measure: [cell.value for cell in row.cells] for row in groups["docstrings"]}
    assert rows["softmax_only, renormalize: far Δ"] == ["+0.0010", "+0.024", "+0.118"]
    assert rows["softmax_only, zero: far Δ"] == ["+0.0016", "+0.038", "+0.189"]
    assert rows["teacher, sliding 216 + 4 sinks: far Δ"] == ["−0.029", "−0.0060", "+0.088"]
    intervals = next(row.cells[1].interval for row in groups["docstrings"] if "renormalize" in row.measure)
    assert intervals == "+0.019 to +0.029"


def test_runs_may_differ_in_what_they_have() -> None:
    diagnosis = Diagnosis(
        runs=[
            *examples.minimal().runs,
            without_plots(run_of(examples.full())),
            *examples.plain_teacher().runs,
        ]
    )
    text = Page(render_diagnosis_html(diagnosis)).text
    assert "linear branch Inconclusive Balanced Not applicable" in text
    assert "most used in layers" not in text


def test_no_run() -> None:
    assert "No run was diagnosed." in Page(render_diagnosis_html(Diagnosis(runs=[]))).text


@pytest.mark.parametrize(
    ("part", "section"),
    [
        ("layers", "Layer by layer"),
        ("gain", "The linear branch during training"),
        ("need", None),
        ("far_from", None),
        ("notes", None),
        ("fingerprints", None),
        ("seconds", None),
        ("device", None),
        ("recipe", None),
        ("teacher", None),
    ],
)
def test_each_optional_part_may_be_missing(part: str, section: str | None) -> None:
    default = RunDiagnosis.model_fields[part].get_default(call_default_factory=True)
    run = run_of(examples.full())
    base = without_plots(run).model_copy(update={part: default})
    if part not in ("layers", "gain"):
        assert len(page_of(base).text) < len(page_of(without_plots(run)).text) or part in (
            "far_from",
            "device",
        )
    if section is not None:
        assert section not in page_of(base).text and section in Page(rendered("full")).text


@pytest.mark.parametrize(
    "part", ["heads", "near_norm", "far_norm", "cosine", "far_share", "far_share_by_position"]
)
def test_layers_may_lack_measures(part: str) -> None:
    run = without_plots(run_of(examples.full()))
    layers = run_of(examples.full()).layers
    assert layers is not None
    default = LayerEntry.model_fields[part].get_default(call_default_factory=True)
    changed = layers.model_copy(update={part: default})
    expected = 6 if part.endswith("norm") else 5  # one line of the norms is left
    assert page_of(run.model_copy(update={"layers": changed})).elements["svg"] == expected


@pytest.mark.parametrize("part", ["texts", "passkey", "tasks", "state_bytes"])
def test_models_may_lack_measures(part: str) -> None:
    run = without_plots(run_of(examples.full()))
    one = [m.model_copy(update={part: {}}) if m.mode == "softmax_only" else m for m in run.models]
    everywhere = [model.model_copy(update={part: {}}) for model in run.models]
    assert "–" in page_of(run.model_copy(update={"models": one})).text
    groups = [group.head for group in model_groups(run.model_copy(update={"models": everywhere}))]
    heads = {"texts": {"docstrings", "code"}, "state_bytes": {"state"}}.get(part, {part})
    assert groups and not heads & set(groups)
    page_of(run.model_copy(update={"models": everywhere}))


def test_a_run_without_models() -> None:
    run = run_of(examples.full()).model_copy(update={"models": []})
    page = page_of(run)
    assert "The models" in page.text and page.elements["svg"] == 6 + 2
    assert terminal(Diagnosis(runs=[run]))


def test_text_is_escaped() -> None:
    page = Page(rendered("nasty"))
    assert page.elements["script"] == page.elements["b"] == page.elements["i"] == 0
    name = " ".join(NASTY.split())
    assert page.text.count(name) >= 2 * 6
    assert "infinite" in page.text and "not a number" in page.text
    labels = [value for tag, key, value in page.attributes if key == "aria-label"]
    assert f"Models of {NASTY}" in labels


def test_names_are_not_markup_in_a_terminal() -> None:
    run = run_of(examples.minimal())
    run.name = run.models[0].name = run.verdict.sentence = "[bold]x[/bold] [/]"
    assert terminal(Diagnosis(runs=[run])).count("[bold]x[/bold] [/]") == 3
    assert terminal(Diagnosis(runs=[run, run])).count("[bold]x[/bold] [/]") == 2


def test_terminal_tables() -> None:
    text = terminal(examples.full())
    assert "runs/ssd: balanced, the linear branch is used" in text and examples.BALANCED.sentence in text
    line = next(line for line in text.splitlines() if "softmax_only, renormalize" in line)
    assert re.findall(r"[+−]?[\d.]+(?:%| [KMG]iB)?", line) == [
        "8.75", "+0.118", "6.36", "+0.165", "0%", "59.6%", "7.12 MiB",
    ]  # fmt: skip
    side = terminal(examples.three(), width=100)
    assert re.search(r"linear branch +│ +Bypassed │ +Weak │ +Balanced", side)
    assert max(map(len, side.splitlines())) <= 100


def test_where() -> None:
    run = run_of(examples.minimal())
    assert where(run) == top_layers(run) == ""

    def layers(*rises: Interval | None) -> RunDiagnosis:
        entry = LayerEntry(text="t", tokens=1, removal="zero", loss_rise=list(rises))
        return run.model_copy(update={"layers": entry})

    found = layers(
        interval(0.1, 0.2), interval(0.02, 0.01), None, interval(0.05, 0.01), interval(0.003, 0.001)
    )
    assert rising(found.layers) == [3, 1, 4]  # type: ignore[arg-type]
    assert where(found, most=2) == (
        "Most in layer 3 (+0.050 nats) and layer 1 (+0.020): so much the loss rises without that layer's linear branch. "
        "3 of 4 layers with two branches raise it by more than the error."
    )
    assert top_layers(found) == "3, 1, 4"
    bare = [None if e is None else Interval(value=e.value) for e in found.layers.loss_rise]
    single = found.model_copy(update={"layers": found.layers.model_copy(update={"loss_rise": bare})})
    assert where(single).endswith("No intervals: one row of text.") and top_layers(single) == "0, 3, 1"
    nowhere = layers(interval(0.1, 0.2), None)
    assert where(nowhere).startswith("Nowhere:") and top_layers(nowhere) == "none"
    bare = layers(Interval(value=0.1), Interval(value=0.3))
    assert where(bare).startswith("Most in layer 1 (+0.300 nats) and layer 0") and "No intervals" in where(
        bare
    )
    assert where(layers(None, None)) == ""


def test_why() -> None:
    """A bound stands beside a figure of its name; a reason that only repeats the sentence is left out."""
    run = run_of(examples.minimal())
    run.verdict.sentence, run.verdict.reasons = "Nothing to say.", ["Nothing to say."]
    assert "Why" not in page_of(run).text
    run.verdict.figures = {"need": interval(0.31, 0.01), "gain_share": interval(-0.5, 0.1)}
    run.verdict.thresholds = {"need": 0.02, "tokens": 300}
    text = page_of(run).text
    assert "measured value bound need 0.310 0.300 to 0.320 0.02 gain share −0.500 −0.600 to −0.400 –" in text
    assert "threshold bound tokens 300" in text


def test_roles_not_names_stand_in_plots() -> None:
    run = run_of(examples.full())
    for model in run.models:
        if model.kind in ("teacher", "student"):
            model.name = "smollm2-135m"
    text = texts_of(position_plot(run, "code", "k"))
    assert "teacher" in text and "student" in text and "smollm2" not in text
    assert "smollm2-135m student" in Page(render_diagnosis_html(Diagnosis(runs=[without_plots(run)]))).text


def test_a_student_alone_is_compared_with_nobody() -> None:
    run = run_of(examples.minimal())
    run.models[0].texts["notes.txt"].far_delta = Interval(value=0.0, low=0.0, high=0.0)
    assert "far Δ" not in page_of(run).text.lower().replace("δ", "Δ") and "reference" not in page_of(run).text


def test_counts() -> None:
    assert [counted(c, "keys") for c in ([], [0], [40, 40], [1000, 40])] == [
        "",
        "",
        "40 keys",
        "40 to 1,000 keys",
    ]


def texts_of(svg: str) -> str:
    return Page(svg).text


def test_plots_say_what_they_show() -> None:
    run = run_of(examples.full())
    assert run.layers is not None
    expected = {
        ablation_plot(run, "code", "k"): [
            "softmax_only", "+0.264", "+0.165", "teacher, sliding", "+0.058", "−0.190", "far_only", "none", "+10.78",
            "removal: renormalize", "loss less the student's (nats a token)",
        ],
        need_plot(run, "docstrings", "k"): ["softmax_only, zero", "tokens that the far past helps", "+0.585", "+0.066"],
        position_plot(run, "code", "k"): [
            "loss (nats a token)", "less the student's", "position in the document (tokens)", "student",
            "softmax_only, renormalize", "teacher, same fine-tuning", "1K",
        ],
        loss_rise_plot(run.layers, "k"): ["rise of the loss (nats a token)", "layer (from 0)", "6", "7", "8"],
        norms_plot(run.layers, "k"): ["root mean square", "window", "linear branch"],
        heads_plot(run.layers, "k"): ["head (from 0)", "layer (from 0)", "rise of the loss (nats a token)"],
        share_map(run.layers, "k"): ["position of the query (tokens)", "share of the weights", "512"],
        passkey_plot(run, "k"): ["teacher", "student", "softmax_only, zero", "4/4", "depth of the key in the prompt (%)"],
        gain_plot(run.gain[0], "k"): ["linear gain (nats)", "loss (nats)", "optimizer step"],
    }  # fmt: skip
    for svg, words in expected.items():
        text = texts_of(svg)
        for word in words:
            assert word in text, (word, text[:200])


def test_the_gap_by_position_is_a_difference() -> None:
    """The lower panel reaches below 0, where the teacher is better; a loss would not."""
    text = texts_of(position_plot(run_of(examples.full()), "code", "k"))
    assert "−0.2" in text and "0.0" in text


def test_plots_leave_out_what_is_missing() -> None:
    run = run_of(examples.full())
    zero_only = run.model_copy(update={"models": [m for m in run.models if m.removal != "renormalize"]})
    svg = texts_of(ablation_plot(zero_only, "code", "k"))
    assert "+0.264" in svg and "renormalize" not in svg
    teacher = run.model_copy(update={"models": run.models[:1]})
    assert "less the student's" not in texts_of(position_plot(teacher, "code", "k"))
    assert (
        ablation_plot(run, "other", "k")
        == need_plot(run, "other", "k")
        == position_plot(run, "other", "k")
        == ""
    )
    assert passkey_plot(run_of(examples.minimal()), "k") == ""
    empty = LayerEntry(text="t", tokens=1, removal="zero", loss_rise=[], heads=[None, []])
    assert (
        loss_rise_plot(empty, "k")
        == heads_plot(empty, "k")
        == share_map(empty, "k")
        == norms_plot(empty, "k")
        == ""
    )


def test_only_layers_beyond_the_error_are_filled_and_named() -> None:
    rises: list[Interval | None] = [interval(0.5, 0.6), interval(0.2, 0.1), interval(0.1, 0.05)]
    svg = loss_rise_plot(LayerEntry(text="t", tokens=1, removal="zero", loss_rise=rises), "k")
    bold = re.findall(r"<text[^>]*font-weight: 700[^>]*>(.*?)</text>", svg)
    assert bold == ["1", "2"]


def test_ablations_of_one_removal_share_a_bar() -> None:
    """`removal` may be absent where both ways are the same: the side by side table then shows it under both."""
    run = run_of(examples.full())
    models: list[ModelEntry] = [
        m.model_copy(update={"removal": None}) for m in run.models if m.removal != "renormalize"
    ]
    changed = run.model_copy(update={"models": models})
    rows = dict(side_by_side(Diagnosis(runs=[changed])))["docstrings"]
    values = {row.measure: row.cells[0].value for row in rows}
    assert values["softmax_only, zero: far Δ"] == values["softmax_only, renormalize: far Δ"] == "+0.189"
    assert texts_of(ablation_plot(changed, "docstrings", "k")).count("+0.189") == 1


def test_same_diagnosis_gives_the_same_page() -> None:
    assert render_diagnosis_html(examples.full()) == rendered("full")


@pytest.mark.parametrize("name", sorted(examples.EXAMPLES))
def test_page_is_written_beside_the_json(tmp_path: Path, name: str) -> None:
    """From the JSON alone, infinities included."""
    save_diagnosis(examples.EXAMPLES[name](), tmp_path)
    if name in ("three", "nasty"):  # their pages take long, and their JSON is what differs
        assert render_keys(load_diagnosis(tmp_path)) == render_keys(examples.EXAMPLES[name]())
        return
    assert write_diagnosis(tmp_path) == tmp_path / "report.html"
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == rendered(name)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["report.html", "report.json"]


def render_keys(diagnosis: Diagnosis) -> str:
    return diagnosis.model_dump_json()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"version": 2, "runs": []}', "version"),
        ('{"runs": [{"nam', "the file"),
        ('{"runs": [{}]}', "runs.0.name"),
    ],
)
def test_bad_json_is_one_clear_line(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "report.json").write_text(content)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        write_diagnosis(tmp_path)
    assert "\n" not in str(caught.value) and "diagnose again" in str(caught.value)
    assert not (tmp_path / "report.html").exists()


def test_missing_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"run `hybridize diagnose` first"):
        write_diagnosis(tmp_path)


def test_no_model_library_is_imported() -> None:
    code = "import sys, hybridize.report.diagnosis_html; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
