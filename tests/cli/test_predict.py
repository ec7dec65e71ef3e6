"""``trainwright predict``: the predictions of a model for files equal those of its ``predict`` in Python."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from trainwright import Trainer, TrainingConfig
from trainwright.cli.main import main
from trainwright.data import TextTokenizer
from trainwright.models import BertTextClassification, BertTextClassificationConfig, Model

TEXTS = ["the cat sat", "a dog ran away", "the dog sat"]
SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that trained a model with a preprocessor; the model itself is beside it."""
    pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("predict")
    tokenizer = TextTokenizer.train(TEXTS, vocab_size=40)
    torch.manual_seed(0)
    settings = {"id2label": {0: "cat", 1: "dog"}, "vocab_size": tokenizer.vocab_size, "max_position_embeddings": 32}
    model = BertTextClassification(BertTextClassificationConfig(**settings, **SIZES))
    model.preprocessor = tokenizer
    data = [
        {**{k: v[0] for k, v in tokenizer([text], return_tensors="torch").items()}, "labels": 0} for text in TEXTS[:1]
    ]
    config = TrainingConfig(output_dir=folder / "run", num_epochs=1, batch_size=1, metrics=None, print_steps=1)
    Trainer(model, config, data, data).train()
    model.save(folder / "model")
    (folder / "texts.txt").write_text("\n".join([*TEXTS, "", "the cat"]))
    return folder


def predict(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    capsys.readouterr()
    assert main(["predict", *map(str, arguments)]) == code
    said = capsys.readouterr()
    return said.err if code else said.out


def test_a_run_and_a_model_predict_each_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = Model.load(run / "model").predict([*TEXTS, "the cat"])
    assert main(["checkpoint", "export", str(run / "run"), "--output", str(run / "exported")]) == 0
    for source in (run / "run", run / "run" / "final_epoch", run / "model", run / "exported"):
        lines = predict(capsys, source, run / "texts.txt", "--json", "--batch-size", 2).splitlines()
        rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
        assert [row["input"].rpartition(":")[2] for row in rows] == ["1", "2", "3", "5"]
        assert [row["label"] for row in rows] == [output["label"] for output in expected]


def test_a_table_and_a_file(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head, *rows = predict(capsys, run / "model", run / "texts.txt").splitlines()
    assert head.split()[0] == "input"
    assert len(rows) == 4
    predict(capsys, run / "model", run / "texts.txt", "--output", tmp_path / "p.jsonl")
    assert len((tmp_path / "p.jsonl").read_text().splitlines()) == 4


def test_the_checkpoint_that_predicts_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for source, used in (
        (run / "run", run / "run" / "checkpoints" / "model_best"),
        (run / "run" / "final_epoch", run / "run" / "final_epoch"),
        (run / "model", run / "model"),
    ):
        assert main(["predict", str(source), str(run / "texts.txt"), "--json"]) == 0
        assert f"Model: {used}\n" in capsys.readouterr().err


def test_images_are_passed_as_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image_module = pytest.importorskip("PIL.Image")
    from trainwright.data import ImageProcessor
    from trainwright.models import CRNNImage2Text, CRNNImage2TextConfig

    model = CRNNImage2Text(CRNNImage2TextConfig(id2label={0: "", 1: "a", 2: "b"}))
    model.preprocessor = ImageProcessor(size=(32, 32), gray_scale=True, mean=[0.5], std=[0.5])
    model.save(tmp_path / "model")
    image_module.new("L", (32, 32)).save(tmp_path / "a.png")
    (row,) = predict(capsys, tmp_path / "model", tmp_path / "a.png", "--json").splitlines()
    expected = Model.load(tmp_path / "model").predict([str(tmp_path / "a.png")])[0]
    assert json.loads(row) == {"input": str(tmp_path / "a.png"), **expected}
    assert f"no such file. Did you mean '{tmp_path / 'a.png'}'?" in predict(
        capsys, tmp_path / "model", tmp_path / "b.png", code=2
    )
    assert "reads files, not text" in predict(capsys, tmp_path / "model", "-", code=2)


def test_a_run_without_a_preprocessor_names_what_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(4, 2), torch.tensor([0, 1, 0, 1]))
    config = TrainingConfig(output_dir=tmp_path / "run", num_epochs=1, batch_size=4, print_steps=1)
    Trainer(torch.nn.Linear(2, 2), config, data, data).train()
    said = predict(capsys, tmp_path / "run", __file__, code=2)
    assert "model_config.yaml" in said
    assert "trainwright eval" in said


def test_a_model_of_the_users_own_is_imported(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = (run / "model" / "model_config.yaml").read_text()
    copied = tmp_path / "model"
    copied.mkdir()
    (copied / "model_config.yaml").write_text(config.replace("bert_text_classification", "my_own_bert"))
    said = predict(capsys, copied, run / "texts.txt", code=2)
    assert "--import FILE.py" in said
    assert "no such file" in predict(capsys, copied, run / "texts.txt", "--import", "nowhere.py", code=2)


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        (["nowhere", "a.txt"], "no such run"),
        (["{run}/model", "{run}/text.txt"], "Did you mean '{run}/texts.txt'?"),
        (["{run}/model", "{run}/texts.txt", "--device", "cudaa"], "--device: got 'cudaa'"),
        (["{run}/run", "{run}/texts.txt", "--checkpoint", "epoc_1"], "Did you mean 'epoch_1'?"),
        (["{run}/model", "{run}/model/model.safetensors"], "is no text in UTF-8"),
    ],
)
def test_wrong_arguments(run: Path, arguments: list[str], fact: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert fact.format(run=run) in predict(capsys, *(text.format(run=run) for text in arguments), code=2)
