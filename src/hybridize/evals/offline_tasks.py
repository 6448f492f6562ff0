"""Questions that are made of any held-out text, so that no download is needed; each task has a near and a far form.

Near: everything that the answer needs lies within the last `reach / 2` tokens, which a sliding window of `reach` keys
and a terraced one of blocks of `reach / 2` show to every query. Far: what decides lies more than `reach` tokens back,
where neither shows it directly. A chain of layers can still pass something on, so a far question is one that attention
to near keys does not answer by itself; the same model with its far branch removed says how much leaks.

cloze_near      Which of four passages of 16 tokens goes on a passage of 32 tokens? Three come from other documents. A
                choice counts by its mean log-likelihood a token. Chance 1/4.
cloze_far       A passage of up to 128 tokens, then `reach` tokens of another document, then the question which of four
                passages of 32 tokens goes on the first. The near text says nothing about that, and passages differ in how
                likely they are anyhow: a choice counts by how much the first passage raises its log-likelihood over
                that after the near text alone. Chance 1/4.
last_word_near  The last word of a sentence, which stood earlier behind the same word before it ("a new transport ... the
last_word_far   new transport."); in the far form no mention of it is nearer than `reach`. Right if greedy decoding gives
                exactly its tokens. `chance` is a guess among the words of the context. From the sentence alone a model
                guesses some of them, so compare with the same model without its far branch, not with `chance`.
                After LAMBADA (arXiv 1606.06031), with text at hand and a word that the context holds.
recall_near     Four sentences "The KEY is VALUE." of random words amid other text, then "The KEY is": which of the four
recall_far      values follows? Both forms have the same length; only where the list stands differs. Chance 1/4.

All lengths are tokens of the tokenizer given. Questions of a task come in one order that the tokenizer, the documents,
their order, the seed, reach and length fix: asking for more adds to them.
"""

from __future__ import annotations

import bisect
import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hybridize.data.encoding import starts_with_bos

Reach = Literal["near", "far"]
Ids = tuple[int, ...]

CHOICES = 4
CLOZE_NEAR_CONTEXT, CLOZE_NEAR_TOKENS = 32, 16
CLOZE_FAR_CONTEXT, CLOZE_FAR_TOKENS = 128, 32
SHORTEST_CONTEXT = 64  # tokens before a last word
PER_DOCUMENT = 3  # last words that one document gives at most
PAIR, QUERY = "The {key} is {value}.\n", "The {key} is"
WORDS = [
    "apple",
    "river",
    "stone",
    "cloud",
    "table",
    "horse",
    "paper",
    "metal",
    "glass",
    "wheel",
    "bridge",
    "garden",
    "window",
    "mirror",
    "candle",
    "forest",
    "island",
    "mountain",
    "valley",
    "desert",
    "ocean",
    "engine",
    "hammer",
    "ladder",
    "basket",
    "bottle",
    "button",
    "pocket",
    "pencil",
    "letter",
    "ticket",
    "coffee",
    "butter",
    "cheese",
    "orange",
    "lemon",
    "pepper",
    "sugar",
    "silver",
    "copper",
    "golden",
    "purple",
    "yellow",
    "winter",
    "summer",
    "spring",
    "autumn",
    "morning",
    "evening",
    "thunder",
    "shadow",
    "castle",
    "market",
    "temple",
    "school",
    "doctor",
    "farmer",
    "singer",
    "writer",
    "soldier",
    "pilot",
    "rabbit",
    "tiger",
    "eagle",
    "turtle",
]

_WORD = re.compile(r"[^\W\d_]+")
_SENTENCE_END = re.compile(r"(?P<before>[^\W\d_]+)\s+(?P<word>[^\W\d_]{4,})(?=[.!?](?:\s|$))")


@dataclass(frozen=True)
class Question:
    """`choices[answer]` is what continues `context`. One choice alone: greedy decoding has to give it.

    With a `baseline`, a choice counts by how much likelier it is after `context` than after `baseline`.
    """

    context: Ids
    choices: tuple[Ids, ...]
    answer: int
    chance: float
    baseline: Ids | None = None


@dataclass(frozen=True)
class Frame:
    """What fixes the questions besides the text. `length`: most tokens of a question with its answer."""

    reach: int
    length: int
    seed: int

    @property
    def near(self) -> int:
        """Tokens that every query is sure to see."""
        return self.reach // 2

    def random(self, *names: object) -> random.Random:
        """A generator of its own for every question, so that no question depends on how many there are."""
        return random.Random(f"{self.seed}:{':'.join(map(str, names))}")


class Corpus:
    """Documents and, as they are asked for, their tokens."""

    def __init__(self, documents: Sequence[str], tokenizer: Any) -> None:
        if isinstance(documents, str) or not documents:
            raise ValueError("documents is empty or one string; give a list of held-out texts")
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(
                f"tokenizer is a {type(tokenizer).__name__}, which cannot say where its tokens stand in the text; use a fast one"
            )
        self.documents = documents
        self.tokenizer = tokenizer
        self.start: Ids = (tokenizer.bos_token_id,) if starts_with_bos(tokenizer) else ()
        self._encoded: dict[int, tuple[list[int], list[tuple[int, int]]]] = {}

    def encode(self, text: str) -> Ids:
        return tuple(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def tokens(self, index: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of a document and the characters (start, end) that each stands for."""
        if index not in self._encoded:
            encoded = self.tokenizer(
                self.documents[index], add_special_tokens=False, return_offsets_mapping=True, verbose=False
            )
            self._encoded[index] = (encoded.input_ids, encoded.offset_mapping)
        return self._encoded[index]

    def passages(self, rng: random.Random, *lengths: int) -> list[Ids]:
        """A random passage of each length, every one from another document. Raises ValueError for too little text."""
        order = rng.sample(range(len(self.documents)), len(self.documents))
        passages: list[Ids] = []
        for index in order:
            if len(passages) == len(lengths):
                break
            ids, need = self.tokens(index)[0], lengths[len(passages)]
            if len(ids) >= need:
                start = rng.randrange(len(ids) - need + 1)
                passages.append(tuple(ids[start : start + need]))
        if len(passages) < len(lengths):
            raise ValueError(
                f"documents has {len(self.documents)} texts, too few of {max(lengths)} tokens or more for this task; give more or longer ones"
            )
        return passages


def cloze_near(corpus: Corpus, frame: Frame) -> Iterator[Question]:
    tokens = CLOZE_NEAR_TOKENS
    context = min(CLOZE_NEAR_CONTEXT, frame.near - tokens)
    if context < 8:
        raise ValueError(
            f"reach_tokens is {frame.reach}; cloze_near needs at least {2 * (tokens + 8)}, or leave it out of names"
        )
    for i in itertools.count():
        rng = frame.random("cloze_near", i)
        whole, *others = corpus.passages(rng, context + tokens, *[tokens] * (CHOICES - 1))
        choices, answer = _shuffled(rng, whole[context:], others)
        yield Question(corpus.start + whole[:context], choices, answer, 1 / CHOICES)


def cloze_far(corpus: Corpus, frame: Frame) -> Iterator[Question]:
    tokens = CLOZE_FAR_TOKENS
    context = min(CLOZE_FAR_CONTEXT, frame.length - frame.reach - tokens - len(corpus.start))
    if context < tokens:
        raise ValueError(
            f"max_length is {frame.length}; cloze_far needs {frame.reach + 2 * tokens + 1} for a reach of {frame.reach}"
        )
    for i in itertools.count():
        rng = frame.random("cloze_far", i)
        whole, near, *others = corpus.passages(rng, context + tokens, frame.reach, *[tokens] * (CHOICES - 1))
        choices, answer = _shuffled(rng, whole[context:], others)
        far = corpus.start + whole[:context] + near
        yield Question(far, choices, answer, 1 / CHOICES, baseline=corpus.start + near)


def recall(corpus: Corpus, frame: Frame, reach: Reach) -> Iterator[Question]:
    gap = corpus.encode("\n\n")
    for i in itertools.count():
        # The same words for both forms: what differs is where the list stands.
        rng = frame.random("recall", i)
        words = rng.sample(WORDS, 2 * CHOICES)
        keys, values = words[:CHOICES], words[CHOICES:]
        answer = rng.randrange(CHOICES)
        pairs = "".join(PAIR.format(key=k, value=v) for k, v in zip(keys, values, strict=True))
        block, query = corpus.encode(pairs), gap + corpus.encode(QUERY.format(key=keys[answer]))
        choices = tuple(corpus.encode(f" {value}") for value in values)
        need = len(block) + len(query) + max(map(len, choices))
        if reach == "near" and need > frame.near:
            raise ValueError(
                f"reach_tokens is {frame.reach}; recall_near needs at least {2 * need}, or leave it out of names"
            )
        room = frame.length - need - len(gap) - len(corpus.start)
        if room <= frame.reach:
            raise ValueError(
                f"max_length is {frame.length}; recall needs more than {frame.length - room + frame.reach} for a reach of {frame.reach}"
            )
        (filler,) = corpus.passages(rng, room)
        cut = room if reach == "near" else rng.randrange(room - frame.reach)
        context = corpus.start + filler[:cut] + gap + block + filler[cut:] + query
        yield Question(context, choices, answer, 1 / CHOICES)


def last_word(corpus: Corpus, frame: Frame, reach: Reach) -> Iterator[Question]:
    order = list(range(len(corpus.documents)))
    frame.random("last_word").shuffle(order)
    for index in order:
        found = list(_last_words(corpus, index, frame, reach))
        frame.random("last_word", index).shuffle(found)
        yield from found[:PER_DOCUMENT]


def _last_words(corpus: Corpus, index: int, frame: Frame, reach: Reach) -> Iterator[Question]:
    """Every fit last word of one document, each word once."""
    text = corpus.documents[index].lower()
    if len(text) != len(corpus.documents[index]):
        return  # lower case of a few letters has another length; their documents are left out
    ids, spans = corpus.tokens(index)
    starts, ends = [start for start, _ in spans], [end for _, end in spans]
    seen: set[str] = set()
    for match in _SENTENCE_END.finditer(text):
        word = match["word"]
        first = bisect.bisect_right(ends, match.start("word"))
        last = bisect.bisect_left(ends, match.end("word"))
        if word in seen or first < SHORTEST_CONTEXT or not _is_whole(starts, ends, first, last, match):
            continue
        begin = max(0, first - (frame.length - (last + 1 - first) - len(corpus.start)))
        context = text[starts[begin] : match.start("before")]
        mention = context.rfind(word)
        pairs = list(re.finditer(rf"\b{match['before']}\s+{word}\b", context))
        if not pairs:
            continue
        if reach == "near":
            earliest = bisect.bisect_right(ends, starts[begin] + pairs[-1].start())
            fits = earliest >= first - frame.near
        else:
            latest = bisect.bisect_left(ends, starts[begin] + mention + len(word))
            fits = latest < first - frame.reach
        if fits:
            seen.add(word)
            guess = 1 / len(set(_WORD.findall(context)))
            yield Question(corpus.start + tuple(ids[begin:first]), (tuple(ids[first : last + 1]),), 0, guess)


def _is_whole(starts: list[int], ends: list[int], first: int, last: int, match: re.Match[str]) -> bool:
    """Whether tokens first..last are the word and nothing else, but for a space before it."""
    return last < len(ends) and ends[last] == match.end("word") and starts[first] >= match.start("word") - 1


def _shuffled(rng: random.Random, right: Ids, wrong: Sequence[Ids]) -> tuple[tuple[Ids, ...], int]:
    answer = rng.randrange(len(wrong) + 1)
    return (*wrong[:answer], right, *wrong[answer:]), answer


@dataclass(frozen=True)
class OfflineTask:
    """A task by name: its questions, without end or as long as the text gives some."""

    name: str
    reach: Reach
    questions: Callable[[Corpus, Frame], Iterator[Question]]


TASKS = {
    task.name: task
    for task in (
        OfflineTask("cloze_near", "near", cloze_near),
        OfflineTask("cloze_far", "far", cloze_far),
        OfflineTask("last_word_near", "near", lambda corpus, frame: last_word(corpus, frame, "near")),
        OfflineTask("last_word_far", "far", lambda corpus, frame: last_word(corpus, frame, "far")),
        OfflineTask("recall_near", "near", lambda corpus, frame: recall(corpus, frame, "near")),
        OfflineTask("recall_far", "far", lambda corpus, frame: recall(corpus, frame, "far")),
    )
}
