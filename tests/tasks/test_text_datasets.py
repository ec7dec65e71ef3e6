"""Texts with labels, and tokens with labels, from files and through a tokenizer."""

from collections.abc import Callable
from pathlib import Path

import pytest

from trainwright.base.errors import ConfigError, ConfigKeyError
from trainwright.data import (
    DataError,
    Dataset,
    PreprocessorsContainer,
    SequenceLabelingDataset,
    TextClassificationDataset,
    TextGenerationDataset,
    TextNormalizer,
    TextTokenizer,
)

TOKENIZER = TextTokenizer.train(["good bad day"], level="char")


@pytest.fixture
def reviews(tmp_path: Path, make: Callable) -> Path:
    make("csv", tmp_path / "train.csv", ["text", "label"], [["good day", "pos"], ["bad", "neg"], ["day", "pos"]])
    make("jsonl", tmp_path / "test.jsonl", [{"text": "bad day", "label": "neutral"}])
    return tmp_path


def test_texts_and_classes(reviews: Path) -> None:
    train = TextClassificationDataset.load(reviews, "train", TOKENIZER)
    assert train.config.id2label == {0: "neg", 1: "neutral", 2: "pos"}
    assert train[0] == {"token_ids": TOKENIZER.encode("good day"), "labels": 2}
    batch = train.data_collator([train[0], train[1]])
    assert batch["labels"].tolist() == [2, 0]
    assert batch["token_ids"][1].tolist() == [*TOKENIZER.encode("bad"), 0, 0, 0, 0, 0]
    assert batch["attention_mask"].sum(dim=1).tolist() == [10, 5]
    short = TextClassificationDataset.load(reviews, "train", TOKENIZER, max_length=4)
    assert len(short[0]["token_ids"]) == 4


def test_the_tokenizer_may_come_after_the_collator_is_taken(reviews: Path) -> None:
    dataset = Dataset.load(reviews, split="train")
    collator = dataset.data_collator
    with pytest.raises(ConfigError, match=r"TextClassificationDataset: .*tokenizer"):
        dataset[0]
    own_padding = TextTokenizer(TOKENIZER.config, TOKENIZER.vocabulary)
    own_padding.config.pad_token = "d"
    dataset.preprocessor = PreprocessorsContainer([own_padding, TextNormalizer(lowercase=True)])
    batch = collator([dataset[0], dataset[1]])
    assert batch["token_ids"][1, -1] == own_padding.pad_token_id == TOKENIZER.token_id("d")


def test_the_text_normalizer_comes_first(tmp_path: Path, make: Callable) -> None:
    make("csv", tmp_path / "train.csv", ["text", "label"], [["GO\u2003ＯＤ", 1], ["bad", 0]])
    plain = Dataset.load(tmp_path, "train", TOKENIZER)
    normal = Dataset.load(tmp_path, "train", PreprocessorsContainer([TOKENIZER, TextNormalizer(lowercase=True)]))
    assert TOKENIZER.decode(normal[0]["token_ids"]) == ["go od"]
    assert plain[0]["token_ids"] != normal[0]["token_ids"]


def test_classes_that_are_numbers(tmp_path: Path, make: Callable) -> None:
    make("csv", tmp_path / "train.csv", ["text", "label"], [["a", 10], ["b", 9], ["c", 2]])
    dataset = Dataset.load(tmp_path, "train", TOKENIZER)
    assert dataset.config.id2label == {0: "2", 1: "9", 2: "10"}
    assert [sample["labels"] for sample in dataset] == [2, 1, 0]
    named = Dataset.load(tmp_path, "train", TOKENIZER, id2label={2: "two", 9: "nine", 10: "ten"}, max_size=1)
    assert [sample["labels"] for sample in named] == [10]


def test_labels_may_be_the_ids_of_named_classes(tmp_path: Path, make: Callable) -> None:
    make("jsonl", tmp_path / "train.jsonl", [{"text": "a", "label": 1}, {"text": "b", "label": "neg"}])
    dataset = Dataset.load(tmp_path, "train", TOKENIZER, id2label=["neg", "pos"])
    assert [sample["labels"] for sample in dataset] == [1, 0]


def test_numbers_that_may_be_no_classes(tmp_path: Path, make: Callable) -> None:
    def load(*values: object) -> TextClassificationDataset:
        make("jsonl", tmp_path / "train.jsonl", [{"text": "a", "label": value} for value in values])
        return TextClassificationDataset.load(tmp_path, "train", TOKENIZER)

    whole = load(0.0, 1.0, 1, "1")
    assert (whole.config.id2label, [sample["labels"] for sample in whole]) == ({0: "0", 1: "1"}, [0, 1, 1, 1])
    assert load(0.5, 1.0, -1).config.id2label == {0: "-1", 1: "0.5", 2: "1"}
    assert load(True, False).config.id2label == {0: "False", 1: "True"}
    with pytest.raises(DataError, match="true or false"):
        load(0, 1, True)
    for value in (-1, -100):
        with pytest.raises(DataError, match=f"train.*the label {value} .*missing.*set id2label"):
            load(0, 1, value)
        named = TextClassificationDataset.load(tmp_path, "train", TOKENIZER, id2label=[value, 0, 1])
        assert [sample["labels"] for sample in named] == [1, 2, 0]


def test_bad_rows_are_named(reviews: Path) -> None:
    with open(reviews / "train.csv", "a", encoding="utf-8") as file:
        file.write(" ,pos\nfine,posi\n")
    with pytest.raises(DataError) as caught:
        Dataset.load(reviews, "train", id2label=["neg", "pos"])
    assert "train.csv, line 5: the text is ' '" in str(caught.value)
    assert "train.csv, line 6: the label 'posi' is not in id2label. Did you mean 'pos'?" in str(caught.value)


def test_a_missing_label_is_no_class(tmp_path: Path, make: Callable) -> None:
    rows = [["a", label] for label in ("pos", " pos", "neg", "", "NaN", "<NA>")]
    make("csv", tmp_path / "train.csv", ["text", "label"], rows)
    make("jsonl", tmp_path / "test.jsonl", [{"text": "a", "label": label} for label in (float("nan"), "nan", None)])
    for split, faults in (("train", "3 of 6 rows"), ("test", "3 of 3 rows")):
        with pytest.raises(DataError, match=rf"(?s)the label is missing .*{faults}"):
            Dataset.load(tmp_path, split)
    make("csv", tmp_path / "train.csv", ["text", "label"], rows[:3])
    dataset = Dataset.load(tmp_path, "train", TOKENIZER)
    assert (dataset.config.id2label, [sample["labels"] for sample in dataset]) == ({0: "neg", 1: "pos"}, [1, 1, 0])
    make("jsonl", tmp_path / "test.jsonl", [{"text": "a", "label": "nan"}])  # also the code of a language
    assert Dataset.load(tmp_path, "test", TOKENIZER, id2label=["nan"])[0]["labels"] == 0


@pytest.fixture
def tags(tmp_path: Path, make: Callable) -> Path:
    rows = [{"tokens": ["good", "x_1", "day"], "labels": ["O", "B-X", "I-X"]}, {"tokens": ["bad"], "labels": ["O"]}]
    make("jsonl", tmp_path / "train.jsonl", rows)
    return tmp_path


def test_tokens_and_labels(tags: Path) -> None:
    dataset = SequenceLabelingDataset.load(tags, "train", TOKENIZER)
    assert dataset.config.id2label == {0: "B-X", 1: "I-X", 2: "O"}
    assert dataset.config.is_iob_schema is True
    sample = dataset[0]
    assert len(sample["token_ids"]) == len(sample["labels"]) == 12
    assert sample["labels"] == [-100, 2, -100, -100, -100, 0, -100, -100, 1, -100, -100, -100]
    every = SequenceLabelingDataset.load(tags, "train", TOKENIZER, label_all_tokens=True)
    assert every[0]["labels"] == [-100, 2, 2, 2, 2, 0, 0, 0, 1, 1, 1, -100]
    words = SequenceLabelingDataset.load(tags, "train", TextTokenizer.train(["good x_1"], level="word"))
    assert words[0]["labels"] == [-100, 2, 0, 1, -100]  # a word that is unknown has its label all the same
    batch = dataset.data_collator([dataset[0], dataset[1]])
    assert batch["labels"][1].tolist() == [-100, 2, -100, -100, -100] + [-100] * 7
    # A cut text has as many labels.
    sample = SequenceLabelingDataset.load(tags, "train", TOKENIZER, max_length=7)[0]
    assert sample["labels"] == [-100, 2, -100, -100, -100, 0, -100]
    assert len(sample["token_ids"]) == 7


def test_other_names_and_schemes(tmp_path: Path, make: Callable) -> None:
    make("jsonl", tmp_path / "train.json", [{"words": ["a", "b"], "pos": ["NOUN", " VERB"]}])
    dataset = Dataset.load(tmp_path, "train", TOKENIZER, tokens_field="words", tags_field="pos")
    assert dataset.config.is_iob_schema is False
    assert dataset.config.id2label == {0: "NOUN", 1: "VERB"}


@pytest.mark.parametrize(("ending", "space"), [("txt", " "), ("tsv", "\t")])
def test_files_of_conll(ending: str, space: str, tmp_path: Path) -> None:
    text = "-DOCSTART- -X- O\n\nEU NNP B-ORG\nsaid VBD O \n\n\nNo DT O".replace(" ", space)
    (tmp_path / f"train.{ending}").write_text(text)
    (tmp_path / f"test.{ending}").write_text("A B-PER\n\n".replace(" ", space))
    dataset = SequenceLabelingDataset.load(tmp_path, "train")
    assert [*map(dict, dataset.data)] == [
        {"tokens": ["EU", "said"], "labels": ["B-ORG", "O"]},
        {"tokens": ["No"], "labels": ["O"]},
    ]
    assert dataset.config.id2label == {0: "B-ORG", 1: "B-PER", 2: "O"}
    (tmp_path / f"train.{ending}").write_text("a\n")
    with pytest.raises(DataError, match="line 1: must have a token and its label"):
        SequenceLabelingDataset.load(tmp_path, "train")


def test_lines_of_conll_that_are_no_tokens(tmp_path: Path) -> None:
    text = "# sent 1\r\ntokens labels\r\n# O\r\na\u00a0b B-X\r\n\r\n# sent 2\r\nc O\r\n# note to c\r\n#d\tO\r\n"
    for name, content in (("train", text), ("test", text.replace("\r\n", "\r"))):
        (tmp_path / f"{name}.txt").write_bytes(content.encode())
        dataset = SequenceLabelingDataset.load(tmp_path, name)
        assert [row["tokens"] for row in dataset.data] == [["#", "a\u00a0b"], ["c", "#d"]]
        assert [row.where.rpartition(" ")[2] for row in dataset.data] == ["3", "7"]
        assert dataset.config.id2label == {0: "B-X", 1: "O"}


CONLLU = """# text = vámonos al mar
1-2\tvámonos\t_\t_\t_\t_\t_\t_\t_\t_
1\tvamos\tir\tVERB\t_\t_\t0\troot\t_\t_
2\tnos\tnosotros\tPRON\t_\t_\t1\tobj\t_\t_
3-4\tal\t_\t_\t_\t_\t_\t_\t_\t_
3\ta\ta\tADP\t_\t_\t5\tcase\t_\t_
4\tel\tel\tDET\t_\t_\t5\tdet\t_\t_
5\tmar\tmar\tNOUN\t_\t_\t1\tobl\t_\t_
5.1\tva\tir\tVERB\t_\t_\t_\t_\t_\t_

1\tsí\tsí\tINTJ\t_\t_\t0\troot\t_\t_
"""


@pytest.mark.parametrize("ending", ["conllu", "conll", "txt"])
def test_columns_of_conll_u_are_chosen(ending: str, tmp_path: Path) -> None:
    (tmp_path / f"train.{ending}").write_text(CONLLU, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"10 columns.*tokens_column and tags_column.*line 2: 0 '1-2', 1 'vámonos'"):
        SequenceLabelingDataset.load(tmp_path, "train")
    kind = SequenceLabelingDataset if ending == "txt" else Dataset
    dataset = kind.load(tmp_path, "train", tokens_column=1, tags_column=3)
    assert [*map(dict, dataset.data)] == [
        {"tokens": ["vamos", "nos", "a", "el", "mar"], "labels": ["VERB", "PRON", "ADP", "DET", "NOUN"]},
        {"tokens": ["sí"], "labels": ["INTJ"]},
    ]
    heads = kind.load(tmp_path, "train", tokens_column=1, tags_column=-4)
    assert heads.data[0]["labels"] == ["0", "1", "5", "5", "1"]
    with pytest.raises(DataError, match=r"line 2: has 10 columns; .*\(1, 10\)"):
        kind.load(tmp_path, "train", tokens_column=1, tags_column=10)
    with pytest.raises(ConfigError, match="tags_column: got 'upos'; it must be the number"):
        kind.load(tmp_path, "train", tokens_column=1, tags_column="upos")


def test_numbers_of_tokens_are_no_tokens(tmp_path: Path) -> None:
    (tmp_path / "train.bio").write_text("1\tAda\tB-PER\tO\n2\tsings\tO\tO\n")  # such as GermEval 2014
    with pytest.raises(ConfigError, match="4 columns"):
        Dataset.load(tmp_path, "train")
    dataset = Dataset.load(tmp_path, "train", tokens_column=1, tags_column=2)
    assert dict(dataset.data[0]) == {"tokens": ["Ada", "sings"], "labels": ["B-PER", "O"]}


@pytest.mark.parametrize("stray", ["o", "b-X", "Label", "-"])
def test_a_stray_label_is_named_once_with_its_place(
    stray: str, tags: Path, make: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    with open(tags / "train.jsonl", "a") as file:
        file.write(f'{{"tokens": ["z", "z"], "labels": ["O", "{stray}"]}}\n' * 2)
    make("jsonl", tags / "test.jsonl", [{"tokens": ["a"], "labels": ["O"]}])
    for split in ("train", "test"):
        assert SequenceLabelingDataset.load(tags, split).config.is_iob_schema is True
    assert caplog.text.count(f"the label {stray!r}") == 1
    assert f"train.jsonl, line 3: the label {stray!r} is of no scheme of spans" in caplog.text
    caplog.clear()
    assert SequenceLabelingDataset.load(tags, "train", is_iob_schema=False).config.is_iob_schema is False
    assert not caplog.text


@pytest.mark.parametrize("value", [["x", "y"], ["x"], {"id": 1}])
def test_a_list_is_no_label(value: object, tmp_path: Path, make: Callable) -> None:
    kind = type(value).__name__
    make("jsonl", tmp_path / "train.jsonl", [{"text": "a", "label": "x"}, {"text": "b", "label": value}])
    with pytest.raises(DataError, match=rf"(?s)train\.jsonl, line 2: the label .* is a {kind}; .*1 of 2 rows"):
        Dataset.load(tmp_path, "train")
    make("jsonl", tmp_path / "train.jsonl", [{"tokens": ["a", "b"], "labels": ["O", value]}])
    with pytest.raises(DataError, match=rf"train\.jsonl, line 1: the label .* is a {kind}"):
        Dataset.load(tmp_path, "train")


def test_a_single_class_is_a_warning(tmp_path: Path, make: Callable, caplog: pytest.LogCaptureFixture) -> None:
    make("csv", tmp_path / "train.csv", ["text", "label"], [["a", "_"], ["b", "_"]])
    Dataset.load(tmp_path, "train")
    assert "all labels are '_'" in caplog.text
    caplog.clear()
    Dataset.load(tmp_path, "train", id2label=["_"])  # as the user says
    assert not caplog.text


def test_direction_marks_are_no_part_of_a_class(tmp_path: Path, make: Callable) -> None:
    make("csv", tmp_path / "train.csv", ["text", "label"], [["a", "\u200fبد"], ["b", "بد\u202c "], ["c", "خوب"]])
    dataset = Dataset.load(tmp_path, "train", TOKENIZER)
    assert dataset.config.id2label == {0: "بد", 1: "خوب"}
    assert [sample["labels"] for sample in dataset] == [0, 0, 1]


def test_ignored_labels_of_tokens_are_no_class(tmp_path: Path, make: Callable) -> None:
    make("jsonl", tmp_path / "train.jsonl", [{"tokens": ["a", "b", "d"], "labels": [0, -100, 1]}])
    dataset = SequenceLabelingDataset.load(tmp_path, "train", TOKENIZER)
    assert dataset.config.id2label == {0: "0", 1: "1"}
    assert dataset[0]["labels"] == [-100, 0, -100, 1, -100]  # of special tokens, too


def test_bad_labelings_are_named(tmp_path: Path, make: Callable) -> None:
    rows = [
        {"tokens": ["a"], "labels": ["O"]},
        {"tokens": ["a", "b"], "labels": ["O"]},
        {"tokens": "a", "labels": ["O"]},
        {"tokens": [], "labels": []},
        {"tokens": [1], "labels": ["O"]},
        {"tokens": ["a"], "labels": ["B-PRE"]},
        {"tokens": ["a", "b"], "labels": ["O", None]},
    ]
    make("jsonl", tmp_path / "train.jsonl", rows)
    with pytest.raises(DataError) as caught:
        Dataset.load(tmp_path, "train", id2label=["O", "B-PER"])
    for part in (
        "line 2: has 2 tokens and 1 labels",
        "line 3: tokens and labels must be lists",
        "line 4: tokens and labels must be lists, with at least one token",
        "line 5: each token must be text",
        "line 6: the label 'B-PRE' is not in id2label. Did you mean 'B-PER'?",
        "... and 1 more",
        "6 of 7 rows",
    ):
        assert part in str(caught.value)


GENERATION_TOKENIZER = TextTokenizer.train(["abcdef\n"], level="char", add_eos=False)
BOS, EOS = GENERATION_TOKENIZER.bos_token_id, GENERATION_TOKENIZER.eos_token_id


def ids(text: str) -> list[int]:
    return GENERATION_TOKENIZER.encode(text, add_special_tokens=False)


def test_plain_texts(tmp_path: Path, make: Callable) -> None:
    make("jsonl", tmp_path / "train.jsonl", [{"text": "abc"}, {"text": "d"}])
    dataset = TextGenerationDataset.load(tmp_path, "train", GENERATION_TOKENIZER)
    assert dataset[0] == {"token_ids": [BOS, *ids("abc"), EOS], "labels": [-100, *ids("abc"), EOS]}
    batch = dataset.data_collator([dataset[0], dataset[1]])
    assert batch["labels"][1].tolist() == [-100, *ids("d"), EOS, -100, -100]
    assert batch["attention_mask"][1].tolist() == [1, 1, 1, 0, 0]


def test_the_answer_is_learned_and_the_prompt_is_not(tmp_path: Path, make: Callable) -> None:
    make("csv", tmp_path / "train.csv", ["source", "target"], [["abc", "de"]])
    sample = TextGenerationDataset.load(tmp_path, "train", GENERATION_TOKENIZER)[0]
    assert sample["token_ids"] == [BOS, *ids("abc\nde"), EOS]
    assert sample["labels"] == [-100] * 5 + [*ids("de"), EOS]
    assert GENERATION_TOKENIZER.encode("abc\n") == sample["token_ids"][:5]  # how a prompt is written
    other = TextGenerationDataset.load(tmp_path, "train", GENERATION_TOKENIZER, separator="[EOS]")[0]
    assert other["token_ids"] == [BOS, *ids("abc"), EOS, *ids("de"), EOS]
    # The tokenizers own length holds for the whole.
    make("csv", tmp_path / "train.csv", ["source", "target"], [["abc", "de"]])
    tokenizer = TextTokenizer(GENERATION_TOKENIZER.config, GENERATION_TOKENIZER.vocabulary, max_length=6)
    assert TextGenerationDataset.load(tmp_path, "train", tokenizer)[0]["token_ids"] == [BOS, *ids("a\nde"), EOS]


def test_what_is_too_long_loses_the_end_of_its_source_first(tmp_path: Path, make: Callable) -> None:
    make("csv", tmp_path / "train.csv", ["source", "target"], [["abcabc", "defdef"]])

    def sample(max_length: int) -> dict[str, list[int]]:
        return TextGenerationDataset.load(tmp_path, "train", GENERATION_TOKENIZER, max_length=max_length)[0]

    assert sample(12)["token_ids"] == [BOS, *ids("abc\ndefdef"), EOS]
    assert sample(9)["token_ids"] == [BOS, *ids("\ndefdef"), EOS]
    assert sample(7)["token_ids"] == [BOS, *ids("\ndefd"), EOS]
    for max_length in range(4, 15):
        found = sample(max_length)
        assert len(found["token_ids"]) == len(found["labels"]) == min(max_length, 15)


def test_a_text_file_is_cut_into_samples(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("abcdef\nabc", encoding="utf-8")
    dataset = Dataset.load(tmp_path, "train", GENERATION_TOKENIZER, block_size=4)
    assert isinstance(dataset, TextGenerationDataset)
    assert [row["text"] for row in dataset.data] == ["abcd", "ef\na", "bc"]
    assert dataset.data[1].where == f"{tmp_path / 'train.txt'}, from character 4"
    assert GENERATION_TOKENIZER.decode([sample["token_ids"] for sample in dataset]) == ["abcd", "ef\na", "bc"]


def test_what_is_wrong_is_reported(tmp_path: Path, make: Callable) -> None:
    make("jsonl", tmp_path / "train.jsonl", [{"source": "a", "target": ""}, {"source": 1, "target": "b"}])
    with pytest.raises(DataError) as caught:
        TextGenerationDataset.load(tmp_path, "train")
    assert "line 1: target must be text, and not empty" in str(caught.value)
    assert "line 2: source must be text, and not empty" in str(caught.value)
    make("jsonl", tmp_path / "test.jsonl", [{"source": "a", "targt": "b"}])
    with pytest.raises(ConfigKeyError, match=r"no column 'target'. Did you mean 'targt'\?"):
        TextGenerationDataset.load(tmp_path, "test")
