"""RULER's retrieval from long contexts (arXiv 2404.06654): run it, score it, go on where a run was stopped.

The tasks and where they differ from the published generator: `ruler_tasks`. `niah` is the mean of niah_single_1, _2 and
_3, as in HALO (arXiv 2601.22156, Section 6.1).

Scoring is RULER's `string_match_all`: the share of the references that the prediction contains, case ignored, mean over
samples, in per cent. lm-eval scores these tasks in the same way and does not round; RULER rounds to two digits. Their
prompts agree too, but for `vt`: lm-eval misspells "assgined", joins the lines by spaces, and ends without RULER's space.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

from hybridize.data.encoding import tokenizer_fingerprint
from hybridize.evals.aggregate import bootstrap_interval, wilson_interval
from hybridize.evals.generation import Progress, greedy_ids, padding_id
from hybridize.evals.haystacks import Haystack, find_haystack
from hybridize.evals.ruler_records import Answer, Records, model_fingerprint
from hybridize.evals.ruler_tasks import TASKS, Form, RulerSample, least_length, make_sample
from hybridize.problems import nearest

Scorer = Literal["nvidia", "lm-eval"]

NIAH = ("niah_single_1", "niah_single_2", "niah_single_3")
GROUPS = {"niah": NIAH, "ruler": tuple(TASKS)}
DEPTH_BUCKETS = 10
BATCH_TOKENS = 16_384
"""Of one batch of prompts."""

_VERSION = 1  # raise it when a change of the generator makes former answers answers to other prompts


def run_ruler(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[str],
    lengths: Sequence[int],
    *,
    samples: int,
    batch_tokens: int = BATCH_TOKENS,
    seed: int = 0,
    folder: Path | str | None = None,
    essays: Path | str | Haystack | None = None,
    chat: bool = False,
    scorer: Scorer = "nvidia",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Ask a causal language model `samples` questions of each task at each length. RULER itself asks 500.

    Args:
        tasks: names of `ruler_tasks.TASKS`, `niah` for the three single needles, `ruler` for all.
        lengths: in tokens of this tokenizer, prompt and new tokens together.
        batch_tokens: tokens of one batch, padding included; a longer sample goes alone.
        folder: where answers are kept, a file for each task, length and settings (`ruler_records`). A later call with
            the same model and settings asks only what is missing; `samples`, `batch_tokens` and `scorer` may differ.
        essays: a file or folder of essays (`haystacks.read_essays`); None takes local prose, and results say so.
        chat: ask in the tokenizer's chat template and begin the answer. Compare models in one form.
        progress: called with samples done and to do, over all tasks and lengths.

    Returns:
        Plain values for JSON; scores are in per cent, depths in 0..1:
        `settings`: samples, seed, chat, scorer, and the fingerprints of model, tokenizer and haystack;
        `haystack`: "essays", "local prose", or None where no task hides needles in them;
        `results`: for each task and length `task, length, score, low, high, interval, samples, scores, by_depth,
            prompt_tokens, examples`. `scores` are 0..1 in the order of samples, `prompt_tokens` is their mean.
            `low..high` is the 95% interval: Wilson's where every score is 0 or 1, else a bootstrap over samples
            (`interval` says which). `by_depth`: `start, end, score, samples` of tenths of the haystack, empty for
            tasks with several needles to find. `examples`: the first right and the first wrong answer;
        `niah`: `length, score, low, high, interval, samples` where all three single needles were asked, else empty.

    Raises:
        ValueError: unknown tasks, numbers below 1, a length that a task does not fit into (the least is named), chat
            without a template, or essays that cannot be read.
    """
    names, lengths = _checked(tasks, lengths, samples, batch_tokens, scorer)
    form = Form(tokenizer, chat)
    haystack = _haystack(names, essays)
    for name in names:
        least = least_length(name, samples, form=form, essays=haystack, seed=seed)
        if min(lengths) < least:
            raise ValueError(
                f"lengths contains {min(lengths)}; {name} needs at least {least} tokens with this tokenizer, "
                f"{TASKS[name].new_tokens} of them for the answer"
            )
    identity = {
        "version": _VERSION,
        "model": model_fingerprint(model),
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "seed": seed,
        "chat": chat,
    }
    cells = [(name, length) for length in lengths for name in names]
    results, done = [], 0
    for name, length in cells:
        hay = haystack if TASKS[name].haystack == "essays" else None
        told = {"kind": hay.kind, "sha256": hay.fingerprint} if hay is not None else None
        records = Records(
            None if folder is None else Path(folder),
            {"task": name, "length": length, "haystack": told, **identity},
        )
        missing = [index for index in range(samples) if index not in records.answers]
        done += samples - len(missing)
        if progress is not None:
            progress(done, samples * len(cells))
        size = max(1, batch_tokens // length)
        for first in range(0, len(missing), size):
            batch = [
                make_sample(name, length, index, form=form, essays=hay, seed=seed)
                for index in missing[first : first + size]
            ]
            records.add(_answers(model, tokenizer, batch))
            done += len(batch)
            if progress is not None:
                progress(done, samples * len(cells))
        results.append(_result(name, length, [records.answers[i] for i in range(samples)], scorer))
    return {
        "settings": {
            "samples": samples,
            "scorer": scorer,
            "tasks": names,
            "lengths": lengths,
            "haystack": haystack.fingerprint if haystack is not None else None,
            **identity,
        },
        "haystack": haystack.kind if haystack is not None else None,
        "results": results,
        "niah": _niah(results, scorer),
    }


def string_match_all(prediction: str, references: Sequence[str]) -> float:
    """The share (0..1) of the references that the prediction contains, case ignored.

    RULER and lm-eval first strip the prediction and turn control characters into line breaks. No reference of these
    tasks holds any of those, so that changes nothing.
    """
    lowered = prediction.lower()
    return sum(reference.lower() in lowered for reference in references) / len(references)


def per_cent(shares: Sequence[float], scorer: Scorer = "nvidia") -> float:
    """The mean of shares (0..1) in per cent, rounded to two digits as RULER does, or not at all as lm-eval."""
    mean = 100 * math.fsum(shares) / len(shares)
    return round(mean, 2) if scorer == "nvidia" else mean


def check_ruler(
    tasks: Sequence[str], lengths: Sequence[int], scorer: str, essays: Path | str | None
) -> Haystack | None:
    """The haystack of these tasks (None: they need none), for `run_ruler`, before there is a model. Raises ValueError as that."""
    return _haystack(_checked(tasks, lengths, 1, 1, scorer)[0], essays)


def _checked(
    tasks: Sequence[str], lengths: Sequence[int], samples: int, batch_tokens: int, scorer: str
) -> tuple[list[str], list[int]]:
    """Names and lengths, each once, groups taken apart."""
    known = [*TASKS, *GROUPS]
    for task in tasks:
        if task not in known:
            raise ValueError(f"RULER has no task {task!r} here; {nearest(task, known)}")
    if not tasks or not lengths:
        raise ValueError("tasks or lengths is empty; give at least one task and one length in tokens")
    for argument, value in (
        ("samples", samples),
        ("batch_tokens", batch_tokens),
        *[("lengths", n) for n in lengths],
    ):
        if value < 1:
            raise ValueError(f"{argument} is or contains {value}; it must be at least 1")
    if scorer not in get_args(Scorer):
        raise ValueError(f"scorer is {scorer!r}; {nearest(scorer, get_args(Scorer))}")
    names = [name for task in tasks for name in GROUPS.get(task, (task,))]
    return list(dict.fromkeys(names)), list(dict.fromkeys(lengths))


def _haystack(names: Sequence[str], essays: Path | str | Haystack | None) -> Haystack | None:
    if not any(TASKS[name].haystack == "essays" for name in names):
        return None
    return essays if isinstance(essays, Haystack) else find_haystack(essays)


def _answers(model: Any, tokenizer: Any, batch: Sequence[RulerSample]) -> list[Answer]:
    """Greedy answers to samples of one task and length, in one batch."""
    outputs = greedy_ids(
        model,
        [sample.input_ids for sample in batch],
        max_new_tokens=TASKS[batch[0].task].new_tokens,
        pad_token_id=padding_id(tokenizer),
        batch_size=len(batch),
    )
    predictions = [tokenizer.decode(ids, skip_special_tokens=True) for ids in outputs]
    return [
        Answer(
            index=sample.index,
            depth=sample.depth,
            prompt_tokens=len(sample.input_ids),
            references=sample.references,
            prediction=prediction,
            score=string_match_all(prediction, sample.references),
        )
        for sample, prediction in zip(batch, predictions, strict=True)
    ]


def _result(name: str, length: int, answers: Sequence[Answer], scorer: Scorer) -> dict[str, Any]:
    right = islice((answer for answer in answers if answer.score == 1), 1)
    wrong = islice((answer for answer in answers if answer.score < 1), 1)
    return {
        "task": name,
        "length": length,
        **_scored([answer.score for answer in answers], scorer),
        "scores": [answer.score for answer in answers],
        "by_depth": _by_depth(answers, scorer),
        "prompt_tokens": sum(answer.prompt_tokens for answer in answers) / len(answers),
        "examples": [
            {
                "index": answer.index,
                "depth": answer.depth,
                "references": list(answer.references),
                "prediction": answer.prediction,
                "score": answer.score,
            }
            for answer in (*right, *wrong)
        ],
    }


def _scored(shares: Sequence[float], scorer: Scorer) -> dict[str, Any]:
    """`score, low, high, interval, samples` of shares in 0..1."""
    n, kind = len(shares), "wilson"
    if set(shares) <= {0.0, 1.0}:
        low, high = wilson_interval(round(sum(shares)), n)
    else:
        kind = "bootstrap"
        # One sample with part of its references says nothing about the others.
        low, high = bootstrap_interval(shares) or (0.0, 1.0)
    return {
        "score": per_cent(shares, scorer),
        "low": 100 * low,
        "high": 100 * high,
        "interval": kind,
        "samples": n,
    }


def _by_depth(answers: Sequence[Answer], scorer: Scorer) -> list[dict[str, Any]]:
    """Scores of the tenths of the haystack that a needle stood in."""
    buckets: dict[int, list[float]] = {}
    for answer in answers:
        if answer.depth is not None:
            bucket = min(int(answer.depth * DEPTH_BUCKETS), DEPTH_BUCKETS - 1)
            buckets.setdefault(bucket, []).append(answer.score)
    return [
        {
            "start": bucket / DEPTH_BUCKETS,
            "end": (bucket + 1) / DEPTH_BUCKETS,
            "score": per_cent(shares, scorer),
            "samples": len(shares),
        }
        for bucket, shares in sorted(buckets.items())
    ]


def _niah(results: Sequence[dict[str, Any]], scorer: Scorer) -> list[dict[str, Any]]:
    """The mean of the three single needles at each length that has all three; they have equally many samples."""
    means = []
    for length in dict.fromkeys(result["length"] for result in results):
        singles = [r for r in results if r["length"] == length and r["task"] in NIAH]
        if len(singles) == len(NIAH):
            shares = [share for result in singles for share in result["scores"]]
            means.append({"length": length, **_scored(shares, scorer)})
    return means
