"""Numbers as people write them, and one sentence on what each stage bought."""

from __future__ import annotations

import math
from itertools import pairwise

from hybridize.report.schema import PasskeyEntry, PerplexityEntry, Results, Row

ABSENT = "–"


def format_number(value: float | None) -> str:
    """Three significant digits below 1,000, separators above: 7.34, 192, 12,400."""
    if value is None:
        return ABSENT
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "infinite"
    if value == 0:
        return "0"
    if abs(value) >= 1e7 or abs(value) < 1e-3:
        return f"{value:.2e}"
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    rounded = float(f"{value:.3g}")
    return f"{rounded:.{2 - math.floor(math.log10(abs(rounded)))}f}"


def format_nats(value: float | None) -> str:
    """A difference of losses, signed: +0.023, −0.0004, +8.91. Four decimals below 0.01, two from 10 on."""
    if value is None:
        return ABSENT
    if not math.isfinite(value):
        return format_number(value).replace("infinite", "infinite" if value > 0 else "−infinite")
    size = abs(value)
    if size >= 1e6:
        return f"{value:+.2e}".replace("-", "−", 1) if value < 0 else f"{value:+.2e}"
    text = f"{value:+.{4 if size < 0.00995 else 3 if size < 9.995 else 2}f}"
    return "0" if float(text) == 0 else text.replace("-", "−")


def shorten(name: str, length: int = 34) -> str:
    """A name on one line, the middle left out where it is longer than `length` characters."""
    line = " ".join(name.split())
    if len(line) <= length:
        return line
    tail = (length - 1) // 3
    return f"{line[: length - 1 - tail].rstrip()}…{line[len(line) - tail :].lstrip()}"


def format_bytes(value: int | None) -> str:
    """Binary units: 5.27 MiB."""
    if value is None:
        return ABSENT
    if value < 1024:
        return f"{value} B"
    size = float(value)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 1024
        if size < 999.5 or unit == "TiB":
            return f"{format_number(size)} {unit}"
    raise AssertionError("unreachable")


def format_length(tokens: int) -> str:
    """Lengths in tokens: 512, 1K, 64K."""
    return f"{tokens // 1024}K" if tokens % 1024 == 0 and tokens > 0 else f"{tokens:,}"


def format_percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def format_seconds(seconds: float) -> str:
    """3.2 s, 42 s, 5 min 12 s, 3 h 04 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_interval(entry: PerplexityEntry | PasskeyEntry) -> str:
    """The 95% interval, empty where none is known."""
    if isinstance(entry, PasskeyEntry):
        return f"{format_percent(entry.low)} to {format_percent(entry.high)}"
    if entry.low is None or entry.high is None:
        return ""
    return f"{format_number(entry.low)} to {format_number(entry.high)}"


def stage_sentences(results: Results) -> list[str]:
    """What each stage bought on the first text, then passkeys, the control and the memory."""
    if not results.texts:
        return []
    text = results.texts[0]
    teacher = results.teacher
    base = teacher.perplexity.get(text) if teacher else None
    stages = [row for row in results.rows if row.kind == "stage" and text in row.perplexity]
    sentences = []
    if base is not None and stages:
        first = stages[0]
        sentences.append(
            f"Perplexity on {text} goes from {format_number(base.perplexity)} (teacher) "
            f"to {format_number(first.perplexity[text].perplexity)} ({first.name})."
        )
    for before, after in pairwise(stages):
        sentences.append(_gain(before, after, text, base))
    sentences += _passkey(results, stages)
    sentences += _control(results, text)
    sentences += _memory(results)
    return sentences


def _gain(before: Row, after: Row, text: str, teacher: PerplexityEntry | None) -> str:
    old, new = before.perplexity[text], after.perplexity[text]
    values = f"{format_number(old.perplexity)} to {format_number(new.perplexity)}"
    name = after.name[:1].upper() + after.name[1:]
    change = after.change.get(text)
    if change is not None and change.low is not None and change.high is not None:
        unsure = change.low <= 0 <= change.high
    else:
        unsure = _overlap(old, new)
    if unsure:
        return f"{name}: {values}, within the error of the measurement."
    sentence = f"{name}: {values}"
    if new.perplexity > old.perplexity:
        return sentence + ", worse."
    if teacher is None or not math.isfinite(old.perplexity) or old.perplexity <= teacher.perplexity:
        return sentence + "."
    gap = math.log(old.perplexity / teacher.perplexity)
    closed = min(1.0, math.log(old.perplexity / new.perplexity) / gap)
    return sentence + f", {format_percent(closed)} of the remaining gap to the teacher (in nats per token)."


def _overlap(a: PerplexityEntry, b: PerplexityEntry) -> bool:
    if a.low is None or a.high is None or b.low is None or b.high is None:
        return False
    return a.low <= b.high and b.low <= a.high


def _passkey(results: Results, stages: list[Row]) -> list[str]:
    teacher = results.teacher
    if teacher is None or not stages:
        return []
    common = [length for length in teacher.passkey if length in stages[-1].passkey]
    if not common:
        return []
    length = max(common)
    found, kept = teacher.passkey[length], stages[-1].passkey[length]
    return [
        f"Passkeys found at {format_length(length)} tokens: {format_percent(found.accuracy)} (teacher), "
        f"{format_percent(kept.accuracy)} ({stages[-1].name})."
    ]


def _control(results: Results, text: str) -> list[str]:
    control = next((row for row in results.rows if row.kind == "control" and text in row.perplexity), None)
    teacher = results.teacher
    if control is None or teacher is None or text not in teacher.perplexity:
        return []
    old, new = teacher.perplexity[text].perplexity, control.perplexity[text].perplexity
    sentence = f"Control ({control.name}): {format_number(old)} to {format_number(new)}"
    return [sentence + (", so tuning on such text alone lowers perplexity." if new < old else ".")]


def _memory(results: Results) -> list[str]:
    teacher = results.teacher
    student = next((row for row in reversed(results.rows) if row.kind == "stage" and row.state_bytes), None)
    if teacher is None or student is None:
        return []
    common = [length for length in teacher.state_bytes if student.state_bytes.get(length)]
    if not common:
        return []
    length = max(common)
    kept, full = student.state_bytes[length], teacher.state_bytes[length]
    share = f", 1/{full / kept:.0f} of it" if full >= 2 * kept else ""
    return [
        f"Generation state at {format_length(length)} tokens: {format_bytes(kept)} a sequence, where the teacher keeps "
        f"{format_bytes(full)}{share}."
    ]
