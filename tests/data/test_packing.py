"""Rows: exact lengths, boundaries, masks, determinism, the cache, errors."""

import json
import random

import numpy as np
import pytest

from hybridize.data import DataSpec, build_rows, check_tokenizer
from hybridize.data.encoding import tokenizer_fingerprint

EOS = 2


@pytest.fixture
def source(tmp_path):
    """300 texts of 1 to 60 words; the first word of each is its own number."""
    generator = random.Random(0)
    lines = []
    for number in range(300):
        words = [f"w{number}"] + [f"w{generator.randrange(300, 400)}" for _ in range(generator.randrange(60))]
        lines.append(json.dumps({"text": " ".join(words)}))
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(lines))
    return path


def spec_of(path, **changes):
    return DataSpec(source=str(path), **{"length": 32, **changes})


def test_rows_are_full_and_hold_the_texts_in_order(source, tokenizer):
    rows = build_rows(spec_of(source, shuffle=False, validation=0, test=0), tokenizer, "train")
    expected = []
    for line in source.read_text().splitlines():
        expected += [*tokenizer(json.loads(line)["text"])["input_ids"], EOS]
    stream = np.asarray(rows.tokens_NT).ravel()
    assert rows.tokens_NT.shape == (len(expected) // 32, 32)
    assert stream.tolist() == expected[: len(expected) // 32 * 32], "only the remainder at the end is dropped"
    assert rows.tokens_available == stream.size and rows.epochs(3 * stream.size) == 3.0


def test_no_label_across_a_document_boundary(source, tokenizer):
    rows = build_rows(spec_of(source), tokenizer, "train")
    inside = 0
    for index in range(len(rows)):
        row = rows.row(index)
        after_eos = np.flatnonzero(row.input_ids[:-1] == EOS) + 1
        assert row.starts.tolist() == [0, *after_eos.tolist()]
        assert (row.labels[row.starts] == -100).all()
        others = np.setdiff1d(np.arange(32), row.starts)
        assert (row.labels[others] == row.input_ids[others]).all(), (
            "everything else, eos included, is a target"
        )
        inside += len(row.starts) - 1
    assert inside > 50
    with pytest.raises(IndexError):
        rows.row(len(rows))


def test_splits_are_disjoint_and_shares_add_up(source, tokenizer):
    firsts = {}
    for split in ("train", "validation", "test"):
        rows = build_rows(spec_of(source, validation=0.1, test=0.1), tokenizer, split)
        stream = np.asarray(rows.tokens_NT).ravel()
        firsts[split] = set(stream[rows.starts].tolist())
    assert not firsts["train"] & firsts["test"] and not firsts["train"] & firsts["validation"]
    assert not firsts["validation"] & firsts["test"]
    assert 290 <= sum(map(len, firsts.values())) <= 300


def test_same_spec_same_rows_and_every_change_shows(source, tokenizer, monkeypatch, tmp_path):
    first = build_rows(spec_of(source), tokenizer, "train")
    monkeypatch.setenv("HYBRIDIZE_CACHE", str(tmp_path / "another"))
    again = build_rows(spec_of(source), tokenizer, "train")
    assert first.fingerprint == again.fingerprint and (first.tokens_NT == again.tokens_NT).all()
    others = [spec_of(source, seed=1), spec_of(source, length=31), spec_of(source, shuffle=False)]
    prints = {build_rows(spec, tokenizer, "train").fingerprint for spec in others}
    assert len(prints | {first.fingerprint}) == 4


def test_a_cap_takes_the_first_rows(source, tokenizer):
    everything = build_rows(spec_of(source), tokenizer, "train")
    capped = build_rows(spec_of(source), tokenizer, "train", 100)
    assert capped.tokens_available == 128, "rounded up to whole rows"
    assert (capped.tokens_NT == everything.tokens_NT[:4]).all()
    assert (
        build_rows(spec_of(source), tokenizer, "train", 10**9).tokens_available == everything.tokens_available
    )
    with pytest.raises(ValueError, match="tokens is 0"):
        build_rows(spec_of(source), tokenizer, "train", 0)


def test_rows_come_from_the_cache_and_a_truncated_one_is_made_again(source, tokenizer, cache, caplog):
    first = build_rows(spec_of(source), tokenizer, "train")
    calls = []
    progress = lambda *call: calls.append(call)  # noqa: E731
    build_rows(spec_of(source), tokenizer, "train", progress=progress)
    assert not calls, "nothing was tokenised"
    (folder,) = [path for path in (cache / "rows").iterdir() if not path.name.startswith(".")]
    tokens, data = folder / "tokens.bin", (folder / "tokens.bin").read_bytes()
    tokens.unlink()  # the old file stays mapped by `first`
    tokens.write_bytes(data[:-4])
    again = build_rows(spec_of(source), tokenizer, "train", progress=progress)
    assert calls and "tokens.bin is truncated" in caplog.text
    assert (again.tokens_NT == first.tokens_NT).all() and again.fingerprint == first.fingerprint
    assert [path.name for path in (cache / "rows").iterdir()] == [folder.name]


def test_prompts_are_masked(tmp_path, tokenizer):
    path = tmp_path / "pairs.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": "w1 w2", "response": f"w{n} w5"}) + "\n" for n in range(100))
    )
    spec = spec_of(path, length=10, shuffle=False, validation=0, test=0)
    row = build_rows(spec, tokenizer, "train").row(0)
    w = lambda n: 5 + n  # noqa: E731
    assert row.input_ids.tolist() == [w(1), w(2), w(0), w(5), EOS, w(1), w(2), w(1), w(5), EOS]
    assert row.labels.tolist() == [-100, -100, w(0), w(5), EOS, -100, -100, w(1), w(5), EOS]
    row = build_rows(spec.model_copy(update={"mask_prompt": False}), tokenizer, "train").row(0)
    assert row.labels.tolist() == [-100, w(2), w(0), w(5), EOS, -100, w(2), w(1), w(5), EOS]


def test_chat_template_targets_are_the_replies(tmp_path, tokenizer):
    turns = [("user", "w1"), ("assistant", "w2 w3"), ("user", "w4"), ("assistant", "w5")]
    messages = [{"role": role, "content": content} for role, content in turns]
    path = tmp_path / "chat.jsonl"
    path.write_text((json.dumps({"messages": messages}) + "\n") * 4)
    rows = build_rows(spec_of(path, length=17, validation=0, test=0), tokenizer, "train")
    row = rows.row(0)
    assert tokenizer.decode(row.input_ids) == (
        "<s> user w1 </s> <s> assistant w2 w3 </s> <s> user w4 </s> <s> assistant w5 </s>"
    )
    learnt = tokenizer.decode(row.labels[row.labels != -100])
    assert learnt == "w2 w3 </s> w5 </s>", "replies with their end marks, one eos at the end, no roles"
    assert row.starts.tolist() == [0] and rows.starts.tolist() == [0, 17, 34, 51]


def test_chat_template_on_prompt_and_response_and_its_errors(tmp_path, tokenizer):
    path = tmp_path / "pairs.jsonl"
    path.write_text((json.dumps({"prompt": "w1", "response": "w2"}) + "\n") * 4)
    spec = spec_of(path, length=8, chat_template=True, validation=0, test=0)
    row = build_rows(spec, tokenizer, "train").row(0)
    assert tokenizer.decode(row.input_ids) == "<s> user w1 </s> <s> assistant w2 </s>"
    assert tokenizer.decode(row.labels[row.labels != -100]) == "w2 </s>"

    lonely = tmp_path / "lonely.jsonl"
    lonely.write_text(json.dumps({"messages": [{"role": "user", "content": "w1"}]}))
    with pytest.raises(ValueError, match="no assistant reply"):
        build_rows(spec_of(lonely), tokenizer, "train")
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        build_rows(spec_of(lonely), tokenizer, "train")


def test_bos_only_where_the_tokenizer_itself_adds_it(source, tokenizer):
    from tokenizers import processors

    plain = tokenizer_fingerprint(tokenizer)
    spec = spec_of(source, shuffle=False, validation=0, test=0)
    assert build_rows(spec, tokenizer, "train").row(0).input_ids[0] != 1
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A", special_tokens=[("<s>", 1)]
    )
    rows = build_rows(spec, tokenizer, "train")
    stream = np.asarray(rows.tokens_NT).ravel()
    assert (stream[rows.starts] == 1).all() and (stream == 1).sum() == len(rows.starts)
    changed = tokenizer_fingerprint(tokenizer)
    assert changed != plain
    tokenizer(["w1", "w1 w2"], padding=True, truncation=True, max_length=5)
    assert tokenizer_fingerprint(tokenizer) == changed, "padding of an earlier call is not identity"


def test_errors(tmp_path, source, tokenizer):
    with pytest.raises(ValueError, match=r"length is 100000, but the train text .* no full row"):
        build_rows(spec_of(source, length=100_000), tokenizer, "train")
    with pytest.raises(ValueError, match=r"did you mean 'docstrings'"):
        build_rows(spec_of("docstring"), tokenizer, "train")
    with pytest.raises(ValueError, match="no such file"):
        build_rows(spec_of(tmp_path / "absent.jsonl"), tokenizer, "train")
    single = tmp_path / "single.txt"
    single.write_text("w1 " * 100)
    with pytest.raises(ValueError, match=r"no test text: 1 documents, all in other splits"):
        build_rows(spec_of(single), tokenizer, "test")
    assert len(build_rows(spec_of(single), tokenizer, "train")) == 3


def test_tokenizer_must_fit_the_model(tokenizer):
    check_tokenizer(tokenizer, len(tokenizer))
    check_tokenizer(tokenizer, len(tokenizer) + 64)
    with pytest.raises(
        ValueError, match=rf"ids up to {len(tokenizer) - 1}, but the model's vocab_size is 100"
    ):
        check_tokenizer(tokenizer, 100)


@pytest.mark.parametrize(
    "bad",
    [
        {"length": 1},
        {"sorce": "x"},
        {"validation": 0.6},
        {"fields": {"prompt": "q"}},
        {"fields": {"txt": "q"}},
        {"fields": {"text": "a"}, "chat_template": True},
    ],
)
def test_spec_refuses(bad):
    with pytest.raises(ValueError):
        DataSpec(**bad)


def test_joined_rows_are_one_text_each(source, tokenizer):
    isolated = build_rows(spec_of(source), tokenizer, "train")
    joined = build_rows(spec_of(source, documents="joined"), tokenizer, "train")
    assert joined.fingerprint != isolated.fingerprint
    for index in range(len(joined)):
        row = joined.row(index)
        assert row.starts.tolist() == [0]
        assert (row.labels[1:] == row.input_ids[1:]).all() and row.labels[0] == -100
        assert (row.input_ids == isolated.row(index).input_ids).all()


def test_share_of_tokens_from_a_position_on(source, tokenizer):
    rows = build_rows(spec_of(source), tokenizer, "train")
    starts = [rows.row(index).starts for index in range(len(rows))]
    positions = np.concatenate([np.arange(32) - np.repeat(s, np.diff([*s, 32])) for s in starts])
    for position in (0, 1, 7, 31, 32):
        assert rows.share_from(position) == pytest.approx((positions >= position).mean())
    joined = build_rows(spec_of(source, documents="joined"), tokenizer, "train")
    assert joined.share_from(8) == pytest.approx(24 / 32)
