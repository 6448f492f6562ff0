"""The offline tasks: what their questions hold, that they stay the same, and scores of models whose sight is known."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.models.hybrids import hybrid
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from hybridize.evals.offline import Likelihood, TaskResult, _is_right, run_offline, score_continuations
from hybridize.evals.offline_tasks import (
    CLOZE_FAR_TOKENS,
    CLOZE_NEAR_TOKENS,
    TASKS,
    WORDS,
    Corpus,
    Frame,
    Question,
)

REACH = 64
FRAME = Frame(REACH, 4 * REACH, seed=0)
NAMES = [f"name{c}{d}" for c in "abcdefgh" for d in "abcdefgh"]
VERBS = [f"verb{c}{d}" for c in "abcdefgh" for d in "abcde"]


def document(seed: int, sentences: int = 90) -> str:
    """Sentences "the VERB NAME.", where the document gives every verb a name of its own that comes back with it."""
    rng = random.Random(seed)
    name_of = dict(zip(VERBS, rng.sample(NAMES, len(VERBS)), strict=True))
    chosen = rng.choices(rng.sample(VERBS, 30), k=sentences)
    return " ".join(f"the {verb} {name_of[verb]}." for verb in chosen)


DOCUMENTS = [document(seed) for seed in range(8)]


def make_tokenizer(bos: bool = False) -> PreTrainedTokenizerFast:
    """Words and full stops; a word the vocabulary lacks is one token all the same."""
    words = ["<pad>", "<s>", "</s>", "<unk>", ".", "the", "The", "is", "\n", *NAMES, *VERBS, *WORDS]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.Split(" ", "removed"),
            pre_tokenizers.Punctuation(),
        ]
    )
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="module")
def corpus(tokenizer: PreTrainedTokenizerFast) -> Corpus:
    return Corpus(DOCUMENTS, tokenizer)


def ask(corpus: Corpus, name: str, samples: int = 20, frame: Frame = FRAME) -> list[Question]:
    return list(itertools.islice(TASKS[name].questions(corpus, frame), samples))


class Copier(nn.Module):
    """An induction head without layers: it predicts the token that last followed the current one, or the current two,
    among the last `sight` tokens, and else words at random (the same ones for the same inputs)."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, sight: int) -> None:
        super().__init__()
        self.vocabulary, self.sight = len(tokenizer), sight
        self.anchor = nn.Parameter(torch.zeros(1))

    @property
    def device(self) -> torch.device:
        return self.anchor.device

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        use_cache: bool,
        logits_to_keep: int,
    ) -> Any:
        assert not use_cache and not torch.is_grad_enabled() and not self.training
        rows, columns = input_ids.shape
        logits = torch.zeros(rows, columns, self.vocabulary)
        for b in range(rows):
            first = columns - int(attention_mask[b].sum())
            assert position_ids[b, first:].tolist() == list(range(columns - first))
            ids = input_ids[b].tolist()
            for t in range(columns - logits_to_keep, columns):
                visible = range(max(first, t - self.sight + 1), t)
                for s in visible:  # later matches outdo earlier ones, matches of two tokens those of one
                    if ids[s] == ids[t]:
                        longer = s > visible[0] and ids[s - 1] == ids[t - 1]
                        logits[b, t, ids[s + 1]] = 1 + s / columns + 3 * longer
        return SimpleNamespace(logits=10 * logits[:, columns - logits_to_keep :])


def by_name(results: list[TaskResult]) -> dict[str, TaskResult]:
    return {result.name: result for result in results}


def test_a_window_does_near_tasks_and_fails_far_ones(tokenizer: PreTrainedTokenizerFast) -> None:
    full, cut = (
        by_name(run_offline(Copier(tokenizer, sight), tokenizer, DOCUMENTS, samples=40, reach_tokens=REACH))
        for sight in (10_000, REACH)
    )
    assert list(full) == list(TASKS)
    for name, result in full.items():
        assert result.low > result.chance, f"{name}: a model that sees everything is above chance"
        assert result.samples == len(result.scores) and result.correct == sum(result.scores)
        assert 0 < result.low <= result.accuracy <= result.high <= 1
        if result.reach == "near":
            assert cut[name].accuracy > 0.85 * result.accuracy
        else:
            assert cut[name].low <= max(result.chance, 0.2) and cut[name].high < result.low
    half = by_name(
        run_offline(
            Copier(tokenizer, REACH // 2),
            tokenizer,
            DOCUMENTS,
            samples=40,
            reach_tokens=REACH,
            names=["recall_near", "last_word_near"],
        )
    )
    assert half["recall_near"].accuracy == full["recall_near"].accuracy, "half the reach is enough for near"
    assert half["last_word_near"].accuracy > 0.85 * full["last_word_near"].accuracy


def test_near_questions_hold_their_answer_in_half_the_reach(corpus: Corpus) -> None:
    for question in ask(corpus, "cloze_near"):
        assert len(question.context) + CLOZE_NEAR_TOKENS <= REACH // 2
    is_, (full_stop,) = corpus.encode("is")[0], corpus.encode(".")
    for question in ask(corpus, "recall_near"):
        tail = question.context[-(REACH // 2) + 1 :]
        assert all(choice[0] in tail for choice in question.choices)
        at = question.context.index(question.context[-2])
        assert question.context[at + 1] == is_ and question.context[at + 3] == full_stop
        assert question.context[at + 2] == question.choices[question.answer][0]
    for question in ask(corpus, "last_word_near"):
        tail = question.context[-(REACH // 2) :]
        before, (word,) = question.context[-1], question.choices[0]
        assert (before, word) in itertools.pairwise(tail)


def test_far_questions_hold_their_answer_beyond_the_reach_alone(corpus: Corpus) -> None:
    for question in ask(corpus, "recall_far"):
        near = question.context[-REACH:]
        assert not any(choice[0] in near for choice in question.choices)
        assert all(choice[0] in question.context for choice in question.choices)
    for question in ask(corpus, "last_word_far"):
        before, (word,) = question.context[-1], question.choices[0]
        assert word not in question.context[-REACH:]
        assert (before, word) in itertools.pairwise(question.context)
        assert 0 < question.chance < 0.1 and len(question.context) < FRAME.length
    for question in ask(corpus, "cloze_far"):
        assert question.baseline == question.context[-REACH:]
        assert {len(choice) for choice in question.choices} == {CLOZE_FAR_TOKENS}
        texts = [corpus.tokens(i)[0] for i in range(len(DOCUMENTS))]
        homes = [_home(texts, choice) for choice in question.choices]
        assert len({*homes, _home(texts, question.baseline)}) == 5, "every passage has a document of its own"
        start = question.context[:-REACH]
        assert _home(texts, start + question.choices[question.answer]) == homes[question.answer]


def _home(texts: list[list[int]], passage: tuple[int, ...]) -> int:
    """The document that holds a passage."""
    (home,) = [
        i
        for i, ids in enumerate(texts)
        if any(tuple(ids[s : s + len(passage)]) == passage for s in range(len(ids)))
    ]
    return home


@pytest.mark.parametrize("name", list(TASKS))
def test_more_samples_only_add(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    def questions(samples: int, seed: int = 0) -> list[Question]:
        return ask(Corpus(DOCUMENTS, tokenizer), name, samples, Frame(REACH, 4 * REACH, seed))

    many = questions(12)
    assert len(many) == 12 and many[:5] == questions(5)
    assert many != questions(12, seed=1)
    answers = {question.answer for question in many}
    assert len(answers) > 1 or len(many[0].choices) == 1, "the right choice has no fixed place"


def test_forms_of_recall_differ_in_place_alone(corpus: Corpus) -> None:
    for near, far in zip(ask(corpus, "recall_near"), ask(corpus, "recall_far"), strict=True):
        assert sorted(near.context) == sorted(far.context) and near.context != far.context
        assert (near.choices, near.answer) == (far.choices, far.answer)


def test_questions_begin_as_the_tokenizer_begins_texts() -> None:
    corpus = Corpus(DOCUMENTS, make_tokenizer(bos=True))
    for name in TASKS:
        for question in ask(corpus, name, 3):
            assert question.context[0] == 1 and 1 not in question.context[1:]
            assert len(question.context) + max(map(len, question.choices)) <= FRAME.length
            assert question.baseline is None or question.baseline[0] == 1


def test_what_a_baseline_makes_likely_does_not_count() -> None:
    """The second choice is likelier in both contexts, but the first gains more."""
    question = Question((1,), ((2,), (3,)), 0, 0.5, baseline=(4,))
    found = [Likelihood(value, False) for value in (-3.0, -1.0, -5.0, -1.5)]
    assert _is_right(question, found)
    assert not _is_right(replace(question, baseline=None), found[:2])
    assert not _is_right(question, [found[0], found[1], Likelihood(-3.1, False), found[3]])


def test_likelihoods_are_those_of_the_model_in_every_batch() -> None:
    model = hybrid("every-kind")
    rng = random.Random(0)
    rows = [
        (tuple(rng.choices(range(3, 128), k=n)), tuple(rng.choices(range(3, 128), k=k)))
        for n, k in [(9, 3), (30, 1), (4, 5), (17, 2), (25, 3)]
    ]
    rows += [(rows[1][0], (token,)) for token in range(3, 9)]
    steps: list[tuple[int, int]] = []
    model.train()
    together = score_continuations(
        model, rows, pad_token_id=0, batch_size=4, on_progress=lambda *s: steps.append(s)
    )
    assert model.training and steps == [(4, 5), (5, 5)], "one pass for all that follows one context"
    model.eval()
    for (context, continuation), found in zip(rows, together, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([context + continuation])).logits[0].double().log_softmax(-1)
        at = range(len(context) - 1, len(context) + len(continuation) - 1)
        logs = [logits[t, token].item() for t, token in zip(at, continuation, strict=True)]
        assert found.mean == pytest.approx(sum(logs) / len(logs), rel=1e-4)
        assert found.greedy == all(
            logits[t].argmax() == token for t, token in zip(at, continuation, strict=True)
        )
    best = max(range(128), key=lambda token: logits_of(model, rows[1][0])[token])
    assert score_continuations(model, [(rows[1][0], (best,))], pad_token_id=0)[0].greedy


@torch.no_grad()
def logits_of(model: Any, context: tuple[int, ...]) -> list[float]:
    values: list[float] = model(torch.tensor([context])).logits[0, -1].tolist()
    return values


def test_a_diverged_model_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    model = Copier(tokenizer, 10)
    model.forward = lambda **inputs: SimpleNamespace(logits=torch.full((1, 1, 9), torch.nan))  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="NaN logits"):
        score_continuations(model, [((1, 2), (3,))], pad_token_id=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"names": ["cloze_naer"]}, "names contains 'cloze_naer'; did you mean 'cloze_near'"),
        ({"samples": 0}, "samples is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"max_length": 100}, "max_length is 100; it must be at least 192"),
        ({"reach_tokens": 40}, "reach_tokens is 40; cloze_near needs at least 48"),
        (
            {"reach_tokens": 50, "names": ["recall_near"]},
            "reach_tokens is 50; recall_near needs at least 60",
        ),
        ({"reach_tokens": 16, "names": ["cloze_far"]}, "max_length is 64; cloze_far needs 81"),
        ({"documents": []}, "documents is empty"),
        ({"documents": "text"}, "documents is empty or one string"),
        ({"documents": DOCUMENTS[:3]}, "documents has 3 texts, too few of"),
        (
            {"documents": ["no words come back. " * 200], "names": ["last_word_far"]},
            "no question for 'last_word_far'",
        ),
    ],
)
def test_bad_input(tokenizer: PreTrainedTokenizerFast, arguments: dict[str, Any], message: str) -> None:
    defaults: dict[str, Any] = {"documents": DOCUMENTS, "reach_tokens": REACH, "samples": 2}
    with pytest.raises(ValueError, match=message):
        run_offline(Copier(tokenizer, 10), tokenizer, **defaults | arguments)
