"""`hybridize select`: a model with a recipe, a run, a file of scores; what it writes, and what it refuses."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from tests.convert import bench, halo

RECALL, KNOWLEDGE = (0.9, 0.5, 0.8, 0.2), (0.5, 0.5, 0.4, 0.5)
LINES = [
    json.dumps({"layer": layer, "recall": r, "knowledge": c})
    for layer, (r, c) in enumerate(zip(RECALL, KNOWLEDGE, strict=True))
]
TEACHER = json.dumps({"layer": None, "recall": 0.95, "knowledge": 0.5})


@pytest.fixture
def refused(cli):
    """Run what must end as one red line on stderr, and give this line."""

    def call(*arguments):
        code, out, err = cli(*arguments)
        said = [line for line in err.splitlines() if line.startswith("error: ")]
        assert code == 2 and out == "" and len(said) == 1, err
        return said[0]

    return call


@pytest.fixture
def scores(tmp_path) -> Path:
    return write(tmp_path / "scores.jsonl", *LINES, TEACHER)


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines))
    return path


def kept(out: str) -> str:
    return out.splitlines()[-1]


# A file of scores


def test_a_file_is_ranked_by_halo_and_a_quarter(cli, scores):
    code, out, _ = cli("select", scores)
    assert code == 0 and kept(out) == "rule halo: 1 of 4 layers keep softmax: 3"
    assert "teacher" in out and len(out.splitlines()) == 1 + 4 + 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rule", "jet", "--keep", "2"], "rule jet: 2 of 4 layers keep softmax: 1, 3"),
        (["--keep", "1/2"], "rule halo: 2 of 4 layers keep softmax: 1, 3"),
        (["--cap", "0.5"], "rule halo: 1 of 4 layers keep softmax: 1"),  # ties go to the lower layer
        (["--floor", "0.5"], "rule halo: 1 of 4 layers keep softmax: 3"),
        (["--rule", "uniform", "--keep", "2"], "rule uniform: 2 of 4 layers keep softmax: 1, 3"),
        (["--rule", "tail", "--keep", "2"], "rule tail: 2 of 4 layers keep softmax: 2, 3"),
        (["--rule", "jet", "--keep", "2", "--spread"], "rule jet, spread: 2 of 4 layers keep softmax: 1, 3"),
    ],
)
def test_rule_keep_and_cap(cli, scores, options, said):
    code, out, _ = cli("select", scores, *options)
    assert code == 0 and kept(out) == said


def test_what_is_written_can_be_ranked_again(cli, scores, tmp_path):
    cli("select", scores, "--cap", "0.5", "--keep", "2", "-o", tmp_path / "deep" / "first")
    first = tmp_path / "deep" / "first"
    assert sorted(path.name for path in first.iterdir()) == ["selection.json", "selection.svg"]
    plain = json.loads((first / "selection.json").read_text())
    assert (plain["rule"], plain["keep"], plain["cap"], plain["kept"]) == ("halo", "2", 0.5, [1, 2])
    for source in (first, first / "selection.json"):  # rule, keep and cap are those of the file
        assert kept(cli("select", source)[1]) == "rule halo: 2 of 4 layers keep softmax: 1, 2"
    cli("select", first, "--spread", "-o", tmp_path / "spread")
    assert kept(cli("select", tmp_path / "spread")[1]).startswith("rule halo, spread: 2 of 4")
    assert kept(cli("select", tmp_path / "spread", "--no-spread")[1]).startswith("rule halo: 2 of 4")
    out = cli("select", first, "--rule", "jet", "-o", tmp_path / "second")[1]  # a cap is halo's alone
    assert kept(out) == "rule jet: 2 of 4 layers keep softmax: 1, 3"
    cli("select", first, "--rule", "uniform", "-o", tmp_path / "third")
    assert kept(cli("select", tmp_path / "third")[1]) == "rule uniform: 2 of 4 layers keep softmax: 1, 3"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--keep", "0"], "keep is '0'; a number of layers must lie in 1..4"),
        (["--keep", ""], "keep is ''; write a share"),
        (["--keep", "5"], "keep is '5'; a number of layers must lie in 1..4"),
        (["--keep=-1"], "keep is '-1'; a share must lie in (0, 1]"),
        (["--keep", "5/4"], "keep is '5/4'; a share must lie in (0, 1]"),
        (["--keep", "1/0"], "keep is '1/0'; write a share"),
        (["--keep", "²"], "keep is '²'; write a share"),
        (["--keep", "few"], "keep is 'few'; write a share"),
        (["--cap", "0"], "cap is 0.0; it must be positive"),
        (["--cap", "nan"], "cap is nan; it must be positive"),
        (["--cap", "inf"], "cap is inf; it must be positive"),
        (["--rule", "jet", "--cap", "50"], "cap is 50.0 under the rule 'jet'; only 'halo' takes one"),
        (["--floor", "-1"], "floor is -1.0; give a number in [0, 1], or standard_error"),
        (["--floor", "noise"], "floor is 'noise'; give a number in [0, 1], or standard_error"),
        (["--floor", "standard_error"], "not every layer's knowledge has one"),
        (["--rule", "jet", "--floor", "0.1"], "floor is 0.1 under the rule 'jet'; only 'halo' takes one"),
        (["--rule", "uniform", "--spread"], "spread is on under the rule 'uniform', which has no scores"),
        (["--rule", "kl"], "scores has no loss for layer 0"),
        (["--rule", "tail", "--keep", "3"], "take the rule 'uniform'"),
        (["--set", "seed=1"], "overrides (--set) goes with a recipe"),
        (["--data", "x"], "data goes with a recipe"),
        (["--device", "cpu"], "device goes with a recipe"),
    ],
)
def test_options_that_do_not_fit_are_refused(refused, scores, options, said):
    assert said in refused("select", scores, *options)


def test_no_rule_of_another_name(cli, scores):
    code, _, err = cli("select", scores, "--rule", "given")
    assert code == 2 and "'given' is not one of" in err


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "holds no scores; a line is"),
        ([*LINES[:3], LINES[3][:-20]], "line 4 is no JSON object"),
        ([LINES[0], LINES[3]], "lacks layers 1, 2 of 4"),
        (['{"identity": {"layers": 4}}', *LINES[:2], LINES[2][:9]], "lacks layers 2, 3 of 4"),
        (['{"identity": {"layers": 2}}', *LINES], "its identity names 2 layers"),
        (['{"identity": 4}', *LINES], "identity is 4; it must be an object"),
        ([*LINES, LINES[0].replace(": 0,", f": {10**12},")], "of 1000000000001; run the sweep again"),
        ([*LINES[:3], LINES[3].replace("0.2", "NaN")], "recall holds nan (layer 3)"),
        ([*LINES[:3], LINES[3].replace("0.2", "20")], "recall holds 20.0 (layer 3)"),
        ([*LINES[:3], LINES[3].replace("0.2", '"x"')], "a score is 'x'"),
        ([*LINES[:3], LINES[3].replace("0.2", '{"value": null}')], "a score has the value None"),
        (
            [line.replace('"recall": 0.', '"recall": 0.5, "was": 0.') for line in LINES],
            "recall hardly varies",
        ),
    ],
)
def test_files_that_cannot_be_ranked_are_refused(refused, tmp_path, lines, said):
    assert said in refused("select", write(tmp_path / "scores.jsonl", *lines))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"by_layer": 5}, "by_layer must be a list"),
        ({"by_layer": [5]}, "an entry is 5"),
        ({"teacher": 5}, "teacher an object or null"),
        ({"identity": 5}, "identity is 5"),
        ({"version": 2}, "of version 2"),
        ({"rule": "hallo"}, "did you mean 'halo'?"),
        ({"rule": "given"}, "give one: uniform or tail"),
        ({"cap": "x"}, "cap is x"),
        ({"floor": True}, "floor is True"),
        ({"floor": []}, "floor is []"),
        ({"floor": {}}, "floor is {}"),
        ({"spread": "yes"}, "spread is 'yes'"),
        ({"keep": None}, "keep is None"),
    ],
)
def test_a_selection_somebody_edited_is_refused(cli, refused, scores, tmp_path, change, said):
    cli("select", scores, "-o", tmp_path / "out")
    path = tmp_path / "out" / "selection.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert said in refused("select", path)


def test_sources_and_folders_that_are_none(refused, scores, tmp_path):
    assert "there is nothing of that name" in refused("select", tmp_path / "nowhere")
    assert "holds no selection; run its recipe up to there" in refused("select", tmp_path)
    assert "which is no folder; name one" in refused("select", scores, "-o", scores)
    binary = tmp_path / "scores.bin"
    binary.write_bytes(bytes(range(256)))
    assert "holds no scores" in refused("select", binary)


# A model with a recipe, and the run it leaves


@pytest.fixture(scope="module")
def bench_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    bench.write_teacher(folder / "teacher")
    bench.write_text(folder / "text")
    return folder


@pytest.fixture
def made(bench_folder, tmp_path, monkeypatch) -> Path:
    """A folder with a teacher, a text and a recipe that ranks by a file of scores."""
    monkeypatch.setenv("HYBRIDIZE_CACHE", str(bench_folder / "cache"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    write(tmp_path / "scores.jsonl", *LINES, TEACHER)
    select = {"select": {"rule": "halo", "keep": 1, "scores": str(tmp_path / "scores.jsonl")}}
    raw = halo.plain(bench_folder / "text", [halo.STEPS[0], select, halo.STEPS[2]])
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(raw, sort_keys=False))
    shutil.copytree(bench_folder / "teacher", tmp_path / "teacher")
    yield tmp_path
    torch.set_num_threads(threads)


def test_a_recipe_runs_up_to_its_selection(cli, made):
    arguments = ("select", made / "teacher", "-r", made / "mine.yaml", "-o", made / "run")
    code, out, _ = cli(*arguments)
    assert code == 0 and kept(out) == "rule halo: 1 of 4 layers keep softmax: 3"
    step = made / "run" / "steps" / "1-select"
    assert {"selection.json", "selection.svg", "outcome.json"} <= {path.name for path in step.iterdir()}
    assert not (made / "run" / "steps" / "2-distill").exists()
    assert kept(cli(*arguments)[1]) == kept(out)  # again: nothing is trained, the same answer
    assert kept(cli("select", made / "run")[1]) == kept(out)
    out = cli("select", made / "run", "--rule", "jet", "--keep", "1/2", "-o", made / "again")[1]
    assert kept(out) == "rule jet: 2 of 4 layers keep softmax: 1, 3"
    assert json.loads((step / "selection.json").read_text())["rule"] == "halo"  # the run's own stays


def test_scores_of_a_run_that_has_not_chosen_are_ranked_as_its_recipe_asks(cli, made):
    changes = ("--set", "select.rule=jet", "--set", "select.keep=2", "--set", "select.spread=true")
    cli("select", made / "teacher", "-r", made / "mine.yaml", "-o", made / "run", *changes)
    step = made / "run" / "steps" / "1-select"
    (step / "selection.json").unlink()  # as after a sweep that was stopped before it chose
    shutil.copy(made / "scores.jsonl", step / "scores.jsonl")
    assert kept(cli("select", made / "run")[1]) == "rule jet, spread: 2 of 4 layers keep softmax: 1, 3"
    assert kept(cli("select", made / "run", "--rule", "halo", "--keep", "1")[1]).startswith(
        "rule halo: 1 of 4"
    )


def test_a_run_by_a_rule_that_measures_nothing(cli, refused, made):
    changes = ("--set", "select.rule=uniform", "--set", "select.scores=null")
    cli("select", made / "teacher", "-r", made / "mine.yaml", "-o", made / "run", *changes)
    assert kept(cli("select", made / "run")[1]) == "rule uniform: 1 of 4 layers keep softmax: 3"
    assert not (made / "run" / "steps" / "1-select" / "selection.svg").exists()
    assert "scores has no recall for layer 0" in refused("select", made / "run", "--rule", "halo")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "out is missing; it names the run folder"),
        (["-o", "run", "--rule", "jet"], "with a recipe set them there: --set select.rule=jet"),
        (["-o", "run", "--keep", "1"], "with a recipe set them there"),
        (["-o", "run", "--set", "select.keep=9"], "keep is 9; a number of layers must lie in 1..4"),
        (["-o", "run", "--set", "select.scores=nowhere"], "steps[1].select: scores is 'nowhere'; there is no such file"),
        (["-o", "run", "--set", "select.cap=-1"], "steps[1].select.cap: should be greater than 0"),
        (["-o", "run", "--set", "select.cap=true"], "steps[1].select.cap: "),
        *(
            (
                ["-o", "run", "--set", f"select.floor={floor}"],
                f"steps[1].select.floor: {shown} is neither a number in [0, 1] nor standard_error",
            )
            for floor, shown in (("-1", "-1"), ("5", "5"), ("true", "True"), ("[]", "[]"), ("noise", "'noise'"))
        ),
        (
            ["-o", "run", "--set", "select.scores=null", "--set", "select.recall={tasks: [passkey]}"],
            "steps[1].select.recall: tasks contains 'passkey'; allowed are",
        ),
        (
            ["-o", "run", "--set", "select.scores=null", "--set", "select.knowledge={tasks: [cloze_neer]}"],
            "steps[1].select.knowledge: tasks contains 'cloze_neer'; did you mean 'cloze_near'?",
        ),
        (
            ["-o", "run", "--set", "select.scores=null", "--set", "select.recall={lengths: [4096]}"],
            "steps[1].select: recall.lengths contains 4096; the teacher has 512 positions",
        ),
    ],
)  # fmt: skip
def test_nothing_trains_for_a_selection_that_cannot_be_made(refused, made, monkeypatch, options, said):
    monkeypatch.chdir(made)
    assert said in refused("select", "teacher", "-r", "mine.yaml", *options)
    assert not Path("run").exists() or not list(Path("run").glob("steps/*"))


def test_scores_of_another_model_or_too_flat_are_refused_before_training(refused, made):
    arguments = ("select", made / "teacher", "-r", made / "mine.yaml", "-o", made / "run")
    write(made / "scores.jsonl", *LINES[:3])
    assert "scores has 3 layers; the model has 4" in refused(*arguments)
    write(made / "scores.jsonl", *[line.replace(str(RECALL[i]), "0.5") for i, line in enumerate(LINES)])
    assert "recall hardly varies" in refused(*arguments)
    assert not list((made / "run").glob("steps/*"))


def test_a_damaged_selection_of_a_run_says_what_to_do(cli, refused, made):
    arguments = ("select", made / "teacher", "-r", made / "mine.yaml", "-o", made / "run")
    out = cli(*arguments)[1]
    step = made / "run" / "steps" / "1-select"
    for damage in (lambda path: path.write_text("{}"), Path.unlink):
        damage(step / "selection.json")
        said = refused(*arguments)
        assert f"remove {step / 'outcome.json'} and run the same command again" in said
        (step / "outcome.json").unlink()
        assert kept(cli(*arguments)[1]) == kept(out) and (step / "outcome.json").is_file()


def test_a_ranking_anew_leaves_a_run_alone(cli, refused, made):
    cli("select", made / "teacher", "-r", made / "mine.yaml", "-o", made / "run")
    for folder in (made / "run", made / "run" / "steps" / "1-select", made / "run" / "new"):
        said = refused("select", made / "run", "--rule", "jet", "-o", folder)
        assert "in a run, whose selection says what its model keeps; name a folder outside" in said
    assert not (made / "run" / "selection.json").exists()
