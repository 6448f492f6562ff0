"""Every file format, field mappings, and the errors a person meets."""

import json

import pyarrow
import pyarrow.parquet as parquet
import pytest

from hybridize.data.readers import _pieces, read_files, stream_hub
from hybridize.data.spec import DataSpec


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_text_jsonl_and_parquet_in_a_folder(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.txt").write_text("\ufeffplain text\n", encoding="utf-8")
    write_jsonl(tmp_path / "b.jsonl", [{"text": "one"}, {"text": "  "}, {"text": "two"}])
    parquet.write_table(pyarrow.table({"content": ["three", None, "four"]}), tmp_path / "c.parquet")
    (tmp_path / "notes.md").write_text("ignored")
    assert [document.text for document in read_files(tmp_path)] == [
        "one",
        "two",
        "three",
        "four",
        "plain text",
    ]


def test_equal_texts_share_a_group(tmp_path):
    one, two, three = read_files(
        write_jsonl(tmp_path / "b.jsonl", [{"text": "x"}, {"text": "y"}, {"text": "x"}])
    )
    assert one.group == three.group != two.group


def test_file_names_declare_splits(tmp_path):
    for name in ("train-0", "validation", "val_1", "dev", "test", "testimony", "other"):
        (tmp_path / f"{name}.txt").write_text(name)
    splits = {document.text: document.split for document in read_files(tmp_path)}
    assert splits == {
        "train-0": "train",
        "validation": "validation",
        "val_1": "validation",
        "dev": "validation",
        "test": "test",
        "testimony": None,
        "other": None,
    }


def test_a_long_text_is_cut_at_empty_lines():
    paragraphs = [f"{number} " + "word " * 200 for number in range(1000)]
    pieces = list(_pieces("\n\n".join(paragraphs)))
    assert 100 <= len(pieces) <= 200 and all(piece[0].isdigit() for piece in pieces)
    assert "\n\n".join(pieces).split() == " ".join(paragraphs).split()


def test_a_text_without_empty_lines_is_cut_between_words_and_a_short_one_little(monkeypatch):
    text = "word " * 40_000
    pieces = list(_pieces(text))
    assert max(map(len, pieces)) <= 4_000 and {*" ".join(pieces).split()} == {"word"}
    assert len(list(_pieces("word " * 700))) == 1
    monkeypatch.setattr("hybridize.data.readers._LONGEST", 500)
    monkeypatch.setattr("hybridize.data.readers._SHORTEST", 100)
    assert max(map(len, _pieces(text))) <= 500


def test_prompt_and_response_layouts(tmp_path):
    alpaca = [
        {"instruction": "Add", "input": "1 2", "output": "3"},
        {"instruction": "Hi", "input": "", "output": "Ho"},
    ]
    one, two = read_files(write_jsonl(tmp_path / "alpaca.jsonl", alpaca))
    assert (one.prompt, one.response, two.prompt) == ("Add\n\n1 2", "3", "Hi")
    custom = write_jsonl(
        tmp_path / "custom.jsonl", [{"q": "why", "a": "because", "text": "no"}, {"q": "w", "a": None}]
    )
    (document,) = read_files(custom, {"prompt": "q", "response": "a"})
    assert (document.prompt, document.response, document.text) == ("why", "because", None)


def test_messages_layouts(tmp_path):
    chat = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    pairs = [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}]
    (one,) = read_files(write_jsonl(tmp_path / "a.jsonl", chat))
    (two,) = read_files(write_jsonl(tmp_path / "b.jsonl", pairs))
    assert one.messages == two.messages == tuple(chat[0]["messages"])


@pytest.mark.parametrize(
    ("content", "fields", "message"),
    [
        ('{"text": "a"}\n\n{"text": \n', None, r"x\.jsonl:3: not valid JSON"),
        ('{"text": "a"}\n["b"]\n', None, r"x\.jsonl:2: must be a JSON object, not list"),
        ('{"body": "a", "id": 1}', None, r"the fields are body, id\. Name it, as in fields: \{text: body\}"),
        (
            '{"body": "a"}',
            {"text": "bodi"},
            r"no field 'bodi' for text; the fields are body; did you mean 'body'",
        ),
        (
            '{"text": "a"}\n{"txt": "b"}',
            None,
            r"x\.jsonl:2: the field 'text' is missing; this record has txt",
        ),
        ('{"text": 7}', None, r"field 'text' must hold a string, not int"),
        ('{"messages": [{"role": "user"}]}', None, r"every message needs a role and a content"),
        ('{"text": " "}', None, r"holds no text"),
        ("", None, r"holds no text"),
        ('{"text": "a\xff"}', None, r"x\.jsonl:1: not valid JSON"),
    ],
)
def test_bad_jsonl(tmp_path, content, fields, message):
    path = tmp_path / "x.jsonl"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=message):
        read_files(path, fields)


def test_other_bad_files(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        read_files(tmp_path / "nothing.jsonl")
    with pytest.raises(ValueError, match=r"holds no \.txt, \.jsonl, \.parquet file"):
        read_files(tmp_path)
    (tmp_path / "a.csv").write_text("a,b")
    with pytest.raises(ValueError, match=r"\.csv is not one of"):
        read_files(tmp_path / "a.csv")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 this is not parquet")
    with pytest.raises(ValueError, match="not a readable parquet file"):
        read_files(tmp_path / "a.parquet")
    (tmp_path / "a.txt").write_bytes(b"abc\xff")
    with pytest.raises(ValueError, match="byte 3 is not UTF-8"):
        read_files(tmp_path / "a.txt")


def hub_texts(spec, split):
    return [document.text for document in stream_hub(spec, split)]


def test_a_dataset_streams_and_lacking_splits_are_carved_out_of_train(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    folder = tmp_path / "dataset"
    folder.mkdir()
    texts = [f"document {number}" for number in range(200)]
    write_jsonl(folder / "train.jsonl", [{"text": text} for text in texts])
    write_jsonl(folder / "test.jsonl", [{"text": "held out"}])
    spec = DataSpec(source=str(folder), validation=0.2, test=0.3)
    train, validation, test = (hub_texts(spec, split) for split in ("train", "validation", "test"))
    assert test == ["held out"]
    assert sorted(train + validation) == sorted(texts) and 20 <= len(validation) <= 60
    assert hub_texts(spec, "train") == train
    everything = [
        hub_texts(spec.model_copy(update={"split": "train"}), split)
        for split in ("train", "validation", "test")
    ]
    assert sorted(text for texts_of_split in everything for text in texts_of_split) == sorted(texts) and all(
        everything
    )
    with pytest.raises(ValueError, match="hub dataset"):
        hub_texts(DataSpec(source=str(tmp_path / "absent")), "train")
