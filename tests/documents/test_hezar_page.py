"""The page about Hezar's trainer: its examples, on plates that are rendered here and served by a hub on loopback."""

import csv
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.toys import assert_equal_weights, tokens
from trainwright import Trainer, TrainerConfig
from trainwright.checkpoint import verify
from trainwright.data import ImageProcessor, ImageProcessorConfig
from trainwright.models import CRNNImage2Text, CRNNImage2TextConfig, Model

DIGITS, LETTERS = "۰۱۲۳۴۵۶۷۸۹", "بجدسصطقلمنوهی"
BASE, PLATES = "hezarai/crnn-base-fa-64x256", "hezarai/persian-license-plate-v1"
IMPORTS = {
    "from hezar.models import CRNNImage2TextConfig, CRNNImage2Text": (
        "from trainwright.models import CRNNImage2TextConfig, CRNNImage2Text"
    ),
    "from hezar.preprocessors import Preprocessor": "from trainwright.data import Preprocessor",
    "from hezar.data import Dataset": "from trainwright.data import Dataset",
    "from hezar.trainer import Trainer, TrainerConfig": "from trainwright import Trainer, TrainerConfig",
}


def render(text: str, path: Path) -> None:
    """A plate of 256 x 64 pixels."""
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.truetype(Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf"), 36)
    picture = Image.new("L", (256, 64), 255)
    ImageDraw.Draw(picture).text((12, 8), text, font=font, fill=0, direction="ltr" if _has_raqm() else None)
    picture.save(path)


def _has_raqm() -> bool:
    from PIL import features

    return bool(features.check("raqm"))


@pytest.fixture
def plates(hub: Any) -> list[str]:
    """The data set's repository on the hub; its texts."""
    folder = hub.folder("datasets", PLATES)
    (folder / "images").mkdir(parents=True)
    draw = random.Random(0)
    texts = []
    for split, count in (("train", 4), ("test", 2)):
        with open(folder / f"{split}.csv", "w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(["image_path", "label"])
            for number in range(count):
                digits = [draw.choice(DIGITS) for _ in range(7)]
                text = "".join([*digits[:2], draw.choice(LETTERS), *digits[2:]])
                render(text, folder / "images" / f"{split}{number}.png")
                rows.writerow([f"images/{split}{number}.png", text])
                texts.append(text)
    (folder / "dataset_config.yaml").write_text(
        "name: ocr\nid2label:\n  0: ''\n" + "".join(f"  {i}: {c}\n" for i, c in enumerate(DIGITS + LETTERS, 1)),
        encoding="utf-8",
    )
    return texts


@pytest.fixture
def base_model(hub: Any) -> CRNNImage2Text:
    """The base model's repository on the hub: a model with its preprocessor."""
    torch.manual_seed(3)
    id2label = dict(enumerate(["", *DIGITS, *LETTERS]))
    model = CRNNImage2Text(CRNNImage2TextConfig(id2label=id2label))
    model.preprocessor = ImageProcessor(
        ImageProcessorConfig(size=(256, 64), gray_scale=True, mean=[0.5], std=[0.5], rescale=1 / 255)
    )
    model.save(hub.folder("models", BASE))
    return model


def test_the_simple_example(
    page_text: Callable[..., str], plates: list[str], base_model: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    source = page_text("hezar/simple_example", imports=IMPORTS).replace("num_epochs=20", "num_epochs=2")
    before, training = source.split("trainer.train()")
    assert training.strip() == ""
    names: dict[str, Any] = {}
    exec(compile(before, "page", "exec"), names)
    trainer = names["trainer"]
    assert_equal_weights(trainer.model, base_model)
    assert len(trainer.train_dataset) == 4
    trainer.train()
    assert trainer.state.global_step == 2
    assert set(trainer.last_eval_results) == {"loss", "cer"}
    assert trainer.last_eval_results["cer"] >= 0
    output = tmp_path / "crnn-plate-fa-v1"
    assert [verify(output / name).iteration for name in ("epoch_1", "epoch_2")] == [0, 1]
    assert verify(output / "checkpoints" / "model_best")
    assert list((output / "logs").glob("events.out.tfevents.*"))
    assert trainer.load_csv_logs()["eval_cer"]
    # A checkpoint is a model: loaded with its preprocessor, it reads pictures by their paths.
    model = Model.load(output / "final_epoch")
    picture = next((Path(names["train_dataset"].folder()) / "images").glob("train0.png"))
    assert isinstance(model.predict([str(picture)])[0]["text"], str)


def test_weights_of_a_base_model_fit_a_model_with_a_head(
    page_text: Callable[..., str], hub: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from trainwright.models import BertTextClassification, BertTextClassificationConfig

    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 32, "max_position_embeddings": 20}
    torch.manual_seed(1)
    base = BertTextClassification(BertTextClassificationConfig(id2label={0: "a", 1: "b", 2: "c"}, **sizes))
    base.save(hub.folder("models", "hezarai/bert-base-fa"))
    source = page_text("hezar/init_weights")
    source = source.replace(
        "trainer_config = TrainerConfig(\n    ...,\n    init_weights_from=base_model_path,\n    ...\n)",
        "trainer_config = TrainerConfig(\n    **rest,\n    init_weights_from=base_model_path,\n)",
    ).replace(
        "trainer = Trainer(\n    trainer_config,\n    ...\n)", "trainer = Trainer(\n    trainer_config,\n    **parts\n)"
    )

    def classifier(config: Any) -> Any:
        return BertTextClassification(config)

    names: dict[str, Any] = {
        "BertTextClassification": classifier,
        "BertTextClassificationConfig": lambda id2label: BertTextClassificationConfig(id2label=id2label, **sizes),
        "id2label": {0: "no", 1: "yes"},
        "TrainerConfig": TrainerConfig,
        "Trainer": lambda config, **parts: Trainer(config, names["model"], **parts),
        "rest": {"output_dir": tmp_path, "task": "text_classification", "num_dataloader_workers": 0},
        "parts": {"train_dataset": tokens()},
    }
    exec(compile(source, "page", "exec"), names)
    model = names["trainer"].model
    fitting = [n for n, p in model.state_dict().items() if p.shape == base.state_dict()[n].shape]
    assert len(fitting) < len(model.state_dict())  # the head has another number of classes
    assert all(torch.equal(model.state_dict()[name], base.state_dict()[name]) for name in fitting)


@pytest.mark.parametrize("name", ["resume", "resume_save_steps", "mixed_precision"])
def test_settings_that_the_page_shows(page_text: Callable[..., str], name: str, tmp_path: Path) -> None:
    source = page_text(f"hezar/{name}").replace("    ...,\n", "    **rest,\n", 1).replace("    ...\n", "")
    names: dict[str, Any] = {"TrainerConfig": TrainerConfig, "rest": {"output_dir": tmp_path, "task": "image2text"}}
    exec(compile(source, "page", "exec"), names)
    config = names["trainer_config"]
    shown = {
        "resume": ("resume_from_checkpoint", True),
        "resume_save_steps": ("save_steps", 1000),
        "mixed_precision": ("mixed_precision", "bf16"),
    }
    field, value = shown[name]
    assert getattr(config, field) == value
