"""Texts that ask for something said before: RULER's needles (`evals.ruler_tasks`), and a dense list of pairs.

pairs   "amber-falcon: 4821907" lines up to the length, then eight of the keys again, from all over the list and in no
        order; the value of each is asked for, the right ones before it shown. After the key-value and multi-query recall
        tasks of the literature on linear attention (arXiv 2312.04927).

A text depends on seed, task, length and index alone.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

from hybridize.evals.haystacks import Haystack
from hybridize.evals.ruler_tasks import TASKS, Form, Niah, distinct, longest, make_sample
from hybridize.problems import nearest
from hybridize.select.rows import Row, row_of_text

PAIRS = "pairs"
QUERIES = 8
# Those that ask for one value, so that an answer has one right form.
RECALL_TASKS = (
    PAIRS,
    *(name for name, task in TASKS.items() if isinstance(task, Niah) and task.values == task.queries == 1),
)
HEAD, AGAIN = "Here is a list of codes.\n", "\nThe codes of some of them again.\n"


def check_tasks(tasks: tuple[str, ...]) -> None:
    """Raises ValueError for none, and for names that are not in `RECALL_TASKS`."""
    if not tasks:
        raise ValueError(f"tasks is empty; name some of {', '.join(RECALL_TASKS)}")
    for task in tasks:
        if task not in RECALL_TASKS:
            raise ValueError(f"tasks contains {task!r}; {nearest(task, RECALL_TASKS)}")


def needs_essays(tasks: tuple[str, ...]) -> bool:
    return any(task != PAIRS and TASKS[task].haystack == "essays" for task in tasks)


def recall_row(
    tokenizer: Any, task: str, length: int, index: int, *, seed: int = 0, essays: Haystack | None = None
) -> Row:
    """Sample `index` of a task as a row of at most `length` tokens, whose answers are predicted.

    Raises ValueError where `length` is too short for the task.
    """
    if task == PAIRS:
        return _pairs(tokenizer, length, index, seed)
    sample = make_sample(task, length, index, form=Form(tokenizer), essays=essays, seed=seed)
    answer = f" {sample.references[0]}"
    begin = len(sample.text)
    return row_of_text(tokenizer, sample.text + answer, [(begin, begin + len(answer))])


def _pairs(tokenizer: Any, length: int, index: int, seed: int) -> Row:
    keys = distinct(random.Random(f"{seed}:{PAIRS}:{index}:keys"), "words")
    values = distinct(random.Random(f"{seed}:{PAIRS}:{index}:values"), "numbers")
    pairs: list[tuple[str, str]] = []

    def text(count: int) -> tuple[str, list[tuple[int, int]]]:
        """The whole text with `count` pairs, and where the answers stand in it."""
        pairs.extend(itertools.islice(zip(keys, values, strict=True), max(0, count - len(pairs))))
        rng = random.Random(f"{seed}:{PAIRS}:{index}:{count}")
        # One from each of eight even parts of the list, so that every distance is asked for.
        bounds = [j * count // QUERIES for j in range(QUERIES + 1)]
        asked = [pairs[rng.randrange(a, b)] for a, b in itertools.pairwise(bounds)]
        rng.shuffle(asked)
        whole = HEAD + "".join(f"{key}: {value}\n" for key, value in pairs[:count]) + AGAIN
        spans = []
        for key, value in asked:
            whole += f"{key}:"
            spans.append((len(whole), len(whole) + 1 + len(value)))
            whole += f" {value}\n"
        return whole.removesuffix("\n"), spans

    def tokens(count: int) -> int:
        return len(tokenizer(text(count)[0], verbose=False).input_ids)

    if (least := tokens(QUERIES)) > length:
        raise ValueError(f"length is {length}; {PAIRS} needs at least {least} tokens with this tokenizer")
    return row_of_text(tokenizer, *text(longest(tokens, QUERIES, length, slack=length // 128)))
