"""Data sets of tasks in subsets, joined and mixed: they keep their collator, and the Trainer gives them its parts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import ChainDataset, ConcatDataset, Subset, random_split

from tests.toys import Stream, assert_equal_weights
from trainwright import Trainer, TrainerConfig
from trainwright.base.errors import ConfigError
from trainwright.data import (
    Dataset,
    SequenceLabelingDataset,
    TextTokenizer,
    build_nlp_test_loader,
    build_nlp_train_loader,
    build_nlp_train_val_test_loader,
)
from trainwright.models import (
    BertSequenceLabeling,
    BertSequenceLabelingConfig,
    BertTextClassification,
    BertTextClassificationConfig,
)

TOKENIZER = TextTokenizer.train(["a b"])
SMALL = {
    "vocab_size": TOKENIZER.vocab_size,
    "hidden_size": 8,
    "num_attention_heads": 1,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "max_position_embeddings": 16,
}


@pytest.fixture
def texts(tmp_path: Path, make: Callable) -> Callable[..., Any]:
    rows = [{"text": "a b " * (1 + n % 3), "label": "xy"[n % 2]} for n in range(16)]
    make("jsonl", tmp_path / "texts" / "train.jsonl", rows)
    return lambda **settings: Dataset.load(tmp_path / "texts", **settings)


def trained(folder: Path, train: Any, evaluated: Any, task: str = "text_classification", **parts: Any) -> Trainer:
    torch.manual_seed(0)
    model: Any = BertTextClassification(BertTextClassificationConfig(id2label=["x", "y"], **SMALL))
    if task == "sequence_labeling":
        model = BertSequenceLabeling(BertSequenceLabelingConfig(id2label=["B-X", "I-X", "O", "o"], **SMALL))
    settings = {"num_epochs": 1, "batch_size": 4, "device": "cpu", "num_dataloader_workers": 0, "progress_bar": False}
    config = TrainerConfig(output_dir=str(folder), task=task, seed=0, **settings)
    trainer = Trainer(model, config, train, evaluated, preprocessor=TOKENIZER, **parts)
    trainer.results = trainer.train()
    return trainer


WRAPPED = {
    "a subset": lambda data: Subset(data, range(16)),
    "a subset of a subset": lambda data: Subset(Subset(data, range(16)), range(16)),
    "joined": lambda data: ConcatDataset([Subset(data, range(8)), Subset(data, range(8, 16))]),
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_a_wrapped_data_set_trains_as_itself(wrap: Any, tmp_path: Path, texts: Any) -> None:
    plain = trained(tmp_path / "plain", texts(), texts())
    other = trained(tmp_path / "wrapped", wrap(texts()), {"all": wrap(texts())})
    assert_equal_weights(plain.model, other.model)
    assert {name.removeprefix("all/"): value for name, value in other.results.items()} == plain.results


def test_parts_and_mixtures_of_a_data_set(tmp_path: Path, texts: Any) -> None:
    train, evaluated = random_split(texts(), [0.75, 0.25], torch.Generator().manual_seed(0))
    assert trained(tmp_path / "split", train, evaluated).state.global_step == 3
    mixture = {"one": (texts(), 0.5), "other": (texts(), 0.5)}
    assert trained(tmp_path / "mixture", mixture, evaluated).state.global_step == 8
    assert trained(tmp_path / "list", train, [*evaluated]).state.global_step == 3  # samples as those of the training


def test_loaders_of_configurations_use_the_collator_of_the_data_set(texts: Any) -> None:
    def lengths(loader: Any) -> list[int]:
        return [len(batch["token_ids"][0]) for batch, _ in zip(loader, range(4), strict=False)]

    data = texts(preprocessor=TOKENIZER)
    for dataset in (data, Subset(data, range(16)), ConcatDataset([data, data]), [data, data]):
        assert lengths(build_nlp_test_loader(dataset, 4, num_workers=0)) == [8, 8, 8, 8]
        train, _, _ = build_nlp_train_loader(dataset, 16, num_workers=0)
        assert lengths(train) == [8, 8, 8, 8]
    mixture = {"one": [data, 0.5], "other": [data, 0.5]}
    assert lengths(build_nlp_train_loader(mixture, 32, num_workers=0)[0]) == [8] * 4
    parts = build_nlp_train_val_test_loader(data, [[0.5, 0.25, 0.25]], train_batch_size=8, num_workers=0)
    assert [lengths(part)[0] for part in parts] == [8, 8, 4]


def test_streams_that_are_joined_use_their_collator() -> None:
    class Longest(Stream):
        def data_collator(self, samples: list[Any]) -> Any:
            return max(map(len, samples))

    def streams() -> list[Any]:
        return [Longest([[1], [1, 2]]), Longest([[1, 2, 3], [1]])]

    assert [*build_nlp_test_loader(ChainDataset(streams()), 2, num_workers=0)] == [2, 3]
    train, _, _ = build_nlp_train_loader({"one": [streams()[0], 1.0], "other": [streams()[1], 1.0]}, 40, num_workers=0)
    assert next(iter(train)) == 3


def test_data_sets_of_different_kinds_need_a_collator(tmp_path: Path, texts: Any, make: Callable) -> None:
    make("jsonl", tmp_path / "tags" / "train.jsonl", [{"tokens": ["a"], "labels": ["O"]}])
    both = ConcatDataset([texts(), SequenceLabelingDataset.load(tmp_path / "tags")])
    with pytest.raises(ConfigError, match=r"TextPaddingDataCollator, SequenceLabelingDataCollator.*data_collator="):
        trained(tmp_path / "run", both, texts())
    with pytest.raises(ConfigError, match=r"TextPaddingDataCollator, collate"):
        build_nlp_test_loader([texts(), [{"token_ids": [1]}]], 4, num_workers=0)
    assert len(build_nlp_test_loader([texts(), [1]], 17, num_workers=0, collate_fn=len)) == 1


def test_labels_of_a_wrapped_data_set_are_compared_with_the_models(tmp_path: Path, texts: Any) -> None:
    with pytest.raises(ConfigError, match=r"the label .* in TextClassificationDataset, and . in the model"):
        trained(tmp_path, Subset(texts(id2label=["y", "x"]), range(8)), texts())


def test_the_scheme_of_a_wrapped_data_set_is_the_one_that_it_declares(tmp_path: Path, make: Callable) -> None:
    rows = [
        {"tokens": ["a", "b", "a"], "labels": ["B-X", "I-X", "O"]},
        {"tokens": ["b", "a"], "labels": ["O", "o"]},
    ] * 4
    make("jsonl", tmp_path / "tags" / "train.jsonl", rows)

    def load() -> Any:
        return SequenceLabelingDataset.load(tmp_path / "tags", id2label=["B-X", "I-X", "O", "o"], is_iob_schema=False)

    plain = trained(tmp_path / "plain", load(), load(), "sequence_labeling")
    wrapped = trained(tmp_path / "wrapped", Subset(load(), range(8)), load(), "sequence_labeling")
    assert plain.results == wrapped.results
