"""Numbers and sentences of the report."""

from __future__ import annotations

import math

import pytest
from tests.report.example_results import example

from hybridize.report.schema import PerplexityEntry, Results, Row
from hybridize.report.summary import (
    format_bytes,
    format_length,
    format_nats,
    format_number,
    format_seconds,
    shorten,
    stage_sentences,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (7.341, "7.34"),
        (14.94, "14.9"),
        (99.96, "100"),
        (192.4, "192"),
        (12_400.2, "12,400"),
        (0.0512, "0.0512"),
        (0, "0"),
        (3.2e-5, "3.20e-05"),
        (4e9, "4.00e+09"),
        (math.inf, "infinite"),
        (math.nan, "not a number"),
        (None, "–"),
    ],
)
def test_numbers(value: float | None, text: str) -> None:
    assert format_number(value) == text


def test_units() -> None:
    assert [format_bytes(n) for n in (None, 0, 1023, 1024, 10_321_920, 1_509_949_440, 2**60)] == [
        "–", "0 B", "1023 B", "1.00 KiB", "9.84 MiB", "1.41 GiB", "1,048,576 TiB",
    ]  # fmt: skip
    assert [format_length(n) for n in (512, 1024, 1000, 65_536)] == ["512", "1K", "1,000", "64K"]
    assert [format_seconds(s) for s in (3.21, 42, 59.9, 60, 119.9, 312, 3599, 3600, 11_040)] == [
        "3.2 s", "42 s", "1 min 00 s", "1 min 00 s", "2 min 00 s", "5 min 12 s", "59 min 59 s", "1 h 00 min", "3 h 04 min",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0234, "+0.023"),
        (0.1, "+0.100"),
        (-0.00041, "−0.0004"),
        (0.00996, "+0.010"),
        (-0.00004, "0"),
        (0, "0"),
        (8.913, "+8.913"),
        (9.9961, "+10.00"),
        (-123.4, "−123.40"),
        (3e7, "+3.00e+07"),
        (-3e7, "−3.00e+07"),
        (math.inf, "infinite"),
        (-math.inf, "−infinite"),
        (math.nan, "not a number"),
        (None, "–"),
    ],
)
def test_nats(value: float | None, text: str) -> None:
    assert format_nats(value) == text


def test_shorten() -> None:
    assert shorten("two\n lines") == "two lines"
    assert shorten("x" * 34) == "x" * 34
    short = shorten("teacher, sliding window of 216 keys and 4 sinks", 30)
    assert short == "teacher, sliding win…d 4 sinks" and len(short) == 30


def row(name: str, value: float, kind: str = "stage", spread: float | None = 0.01) -> Row:
    entry = PerplexityEntry(perplexity=value, tokens=1000)
    if spread is not None:
        entry.low, entry.high = value * (1 - spread), value * (1 + spread)
    return Row(name=name, kind=kind, perplexity={"text": entry})  # type: ignore[arg-type]


def sentences(*rows: Row) -> list[str]:
    return stage_sentences(Results(title="t", model="m", rows=list(rows)))


def test_every_stage_has_its_sentence() -> None:
    found = stage_sentences(example())
    assert found == [
        "Perplexity on docstrings goes from 14.9 (teacher) to 192 (swapped).",
        "After transfer: 192 to 33.8, 68% of the remaining gap to the teacher (in nats per token).",
        "After LoRA: 33.8 to 24.6, 39% of the remaining gap to the teacher (in nats per token).",
        "Passkeys found at 1K tokens: 100% (teacher), 15% (after LoRA).",
        "Control (teacher, same fine-tuning): 14.9 to 13.7, so tuning on such text alone lowers perplexity.",
        "Generation state at 64K tokens: 9.84 MiB a sequence, where the teacher keeps 1.41 GiB, 1/146 of it.",
    ]


def test_gap_is_measured_in_nats() -> None:
    """From 100 to 10·√10 towards 10 is half the way in nats."""
    found = sentences(row("teacher", 10, "teacher"), row("a", 100), row("b", 1000**0.5))
    assert "50% of the remaining gap" in found[1]


def test_no_gain_is_claimed_where_there_is_none() -> None:
    teacher = row("teacher", 10, "teacher")
    assert (
        sentences(teacher, row("a", 20), row("b", 19.9))[1]
        == "B: 20.0 to 19.9, within the error of the measurement."
    )
    assert sentences(teacher, row("a", 20), row("b", 30))[1] == "B: 20.0 to 30.0, worse."
    assert sentences(teacher, row("a", math.inf, spread=None), row("b", 30))[1] == "B: infinite to 30.0."
    assert sentences(teacher, row("a", 9), row("b", 8))[1] == "B: 9.00 to 8.00."
    assert "100% of the remaining gap" in sentences(teacher, row("a", 20), row("b", 8))[1]


def test_rows_alone() -> None:
    assert sentences() == sentences(Row(name="x")) == sentences(row("a", 3)) == []
    assert sentences(row("a", 20), row("b", 10)) == ["B: 20.0 to 10.0."]
