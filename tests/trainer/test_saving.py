"""What the Python API keeps: epochs by name, the best checkpoint, the newest few; and what stops it early."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.toys import assert_equal_weights, tokens
from tests.trainer.conftest import PAIRS, Scripted, config, equal, make, weights
from trainwright import Trainer, TrainerConfig
from trainwright.base.errors import ConfigError
from trainwright.checkpoint import verify
from trainwright.inspect.report.picture import draw_curves
from trainwright.models import BertTextClassification, BertTextClassificationConfig, Model, ModelCard
from trainwright.optim import LayerFreezer


@pytest.mark.exhaustive(every=2)
@pytest.mark.parametrize("metric", ["loss", "evaluation.cer", "score", "evaluation.score", "eval_loss"])
@pytest.mark.slow
def test_the_best_checkpoint_is_kept_and_loaded(metric: str, tmp_path: Path) -> None:
    settings = {"num_epochs": 4, "metric_for_best_model": metric, "load_best_model_at_end": True}
    settings |= {"greater_is_better": True} if "score" in metric else {}
    trainer = Scripted(make(), config(tmp_path, **settings), PAIRS, PAIRS)
    best_results = {"loss": 1.0, "score": -1.0, "cer": 0.1}
    assert trainer.train() == best_results
    best = tmp_path / "checkpoints" / "model_best"
    assert verify(best).iteration == 9
    assert equal(weights(best), weights(tmp_path / "epoch_2"))
    assert equal(trainer.model.state_dict(), weights(best))
    assert not equal(weights(tmp_path / "final_epoch"), weights(best))
    again = Scripted(make(), config(tmp_path, **settings, resume_from_checkpoint=True), PAIRS, PAIRS)
    assert again.train() == best_results  # nothing is left to train
    assert equal(again.model.state_dict(), weights(best))


def test_a_resume_with_fewer_epochs_than_are_done_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Killed(Scripted):
        def after_step(self) -> None:
            super().after_step()
            if self.iter == 17:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Killed(make(), config(tmp_path, num_epochs=4, save_steps=1), PAIRS, PAIRS).train()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    caplog.set_level(logging.INFO, "trainwright")
    resumed = Scripted(make(), config(tmp_path, num_epochs=2, resume_from_checkpoint=True), PAIRS, PAIRS)
    resumed.train()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert "Nothing to train: 18 of 10 iterations are done" in caplog.text


def test_a_metric_of_training_can_tell_the_best(tmp_path: Path) -> None:
    trainer = Trainer(make(), config(tmp_path, num_epochs=3, metric_for_best_model="train.accuracy"), PAIRS, PAIRS)
    trainer.train()
    accuracies = {i: value for value, i in trainer.storage.history("accuracy").values()}
    assert list(accuracies) == [4, 9, 14]
    best = max(accuracies, key=lambda i: (accuracies[i], -i))
    assert verify(tmp_path / "checkpoints" / "model_best").iteration == best


def test_epochs_have_names_beside_the_checkpoints_and_cards_in_them(tmp_path: Path) -> None:
    Trainer(make(), config(tmp_path, num_epochs=2), PAIRS, PAIRS).train()
    assert os.readlink(tmp_path / "epoch_1") == "checkpoints/05"
    assert os.readlink(tmp_path / "epoch_2") == os.readlink(tmp_path / "final_epoch") == "checkpoints/10"
    card = (tmp_path / "epoch_2" / "README.md").read_text()
    assert card.startswith("---\n")
    assert "Sequential" in card


@pytest.mark.parametrize("asynchronous_best", [True, False])
def test_only_the_newest_stay_and_the_best(asynchronous_best: bool, tmp_path: Path) -> None:
    settings = {"num_epochs": 4, "max_to_keep": 1, "eval_strategy": "epoch" if asynchronous_best else "no"}
    Scripted(make(), config(tmp_path, **settings), PAIRS, PAIRS).train()
    steps = sorted(path.name for path in (tmp_path / "checkpoints").glob("[0-9]*"))
    assert steps == ["20"]
    assert sorted(path.name for path in tmp_path.glob("*epoch*")) == ["epoch_4", "final_epoch"]
    if asynchronous_best:
        assert verify(tmp_path / "checkpoints" / "model_best").iteration == 9


def test_save_enabled_false_saves_nothing(tmp_path: Path) -> None:
    Trainer(make(), config(tmp_path, save_enabled=False), PAIRS, PAIRS).train()
    assert not (tmp_path / "checkpoints").exists()
    assert not (tmp_path / "final_epoch").exists()


def test_a_folder_that_holds_a_run_may_be_refused(tmp_path: Path) -> None:
    Trainer(make(), config(tmp_path), PAIRS).train()
    with pytest.raises(ConfigError, match=r"output_dir: .*overwrite_output_dir"):
        Trainer(make(), config(tmp_path, overwrite_output_dir=False), PAIRS)
    Trainer(make(), config(tmp_path, overwrite_output_dir=False, resume_from_checkpoint=True), PAIRS)


def test_cards_tell_the_results_of_their_own_weights(tmp_path: Path) -> None:
    Scripted(make(), config(tmp_path, num_epochs=4), PAIRS, PAIRS).train()

    def results(path: Path) -> set[str]:
        return {
            value for value in ("3.0", "1.0", "2.0", "1.5") if f"value: {value}" in (path / "README.md").read_text()
        }

    assert results(tmp_path / "epoch_1") == {"3.0"}
    assert results(tmp_path / "checkpoints" / "model_best") == {"1.0"}
    assert results(tmp_path / "final_epoch") == {"1.5"}  # saved again after the last evaluation
    assert results(tmp_path) == {"1.5"}  # of the run


def test_a_best_model_that_cannot_be_found_out_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"load_best_model_at_end: got True, but nothing is evaluated"):
        Trainer(make(), config(tmp_path, load_best_model_at_end=True), PAIRS)
    settings = config(tmp_path, load_best_model_at_end=True, metric_for_best_model="acuracy")
    with pytest.raises(ConfigError, match=r"got 'acuracy'.*'accuracy'"):
        Trainer(make(), settings, PAIRS, PAIRS).train()


def test_what_a_user_has_put_in_the_place_of_a_link_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "epoch_1").mkdir()
    (tmp_path / "epoch_1" / "mine").write_text("mine")
    Trainer(make(), config(tmp_path, num_epochs=2), PAIRS).train()
    assert (tmp_path / "epoch_1" / "mine").read_text() == "mine"
    assert "epoch_1: not a link, so it is kept" in caplog.text
    assert (tmp_path / "epoch_2").is_symlink()


def test_a_card_tells_no_place_on_this_machine(tmp_path: Path) -> None:
    Trainer(make(), config(tmp_path / "first"), PAIRS).train()
    settings = {
        "init_weights_from": tmp_path / "first" / "final_epoch",
        "tensorboard": {"log_dir": str(tmp_path / "tb")},
    }
    Trainer(make(), config(tmp_path / "next", **settings), PAIRS).train()
    for card in (tmp_path / "next").rglob("README.md"):
        assert str(tmp_path) not in card.read_text()
        assert "final_epoch" in card.read_text()


def test_layers_may_be_frozen_between_two_parts_of_a_run(tmp_path: Path) -> None:
    Trainer(make(), config(tmp_path, num_epochs=2, max_steps=5), PAIRS).train()
    model = make()
    LayerFreezer(model).by_idx([0])
    trainer = Trainer(model, config(tmp_path, num_epochs=2, resume_from_checkpoint=True), PAIRS)
    before = model[0].weight.clone()
    trainer.train()
    assert torch.equal(model[0].weight, before)
    assert trainer.state.global_step == 10
    assert not torch.equal(model[4].weight, weights(tmp_path / "epoch_1")["4.weight"])


@pytest.mark.slow
def test_the_k_best_checkpoints_are_kept_besides_the_newest(tmp_path: Path) -> None:
    settings = {"num_epochs": 4, "save_top_k": 2, "max_to_keep": 1}
    Scripted(make(), config(tmp_path, **settings), PAIRS, PAIRS).train()
    folders = sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if not path.name.startswith("."))
    assert folders == ["20", "last_checkpoint", "model_best", "model_best_10", "model_best_20"]
    assert (tmp_path / "checkpoints" / "model_best").resolve().name == "model_best_10"
    Scripted(make(), config(tmp_path, **settings), PAIRS, PAIRS).train()
    assert len(list((tmp_path / "checkpoints").glob("model_best_*"))) == 2, "the earlier run is moved aside"


def test_save_top_k_without_evaluation_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Trainer(make(), config(tmp_path, save_top_k=2), PAIRS)
    assert "save_top_k=2 has no effect: nothing is evaluated" in caplog.text


SIZES = {
    "vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
    "max_position_embeddings": 8,
}  # fmt: skip


def trained(folder: Path, **parts: Any) -> Trainer:
    model = BertTextClassification(BertTextClassificationConfig(id2label={0: "no", 1: "yes"}, **SIZES))
    config = TrainerConfig(output_dir=folder, task="text_classification", num_dataloader_workers=0)
    trainer = Trainer(model, config, tokens(), tokens(), **parts)
    trainer.train()
    return trainer


def test_a_model_is_pushed_and_loaded(hub: Any, tmp_path: Path) -> None:
    trainer = trained(tmp_path / "run")
    curves = draw_curves(tmp_path / "run")
    url = trainer.push_to_hub("me/classifier", commit_message="First")
    assert url.startswith(hub.url)
    loaded = Model.load("me/classifier")
    assert_equal_weights(loaded, trainer.model)
    folder = hub.folder("models", "me/classifier")
    card = (folder / "README.md").read_text()
    assert (folder / "curves.png").read_bytes() == curves.read_bytes()
    assert card.count("](curves.png)") == 1
    assert "text_classification" in card or "text-classification" in card
    assert str(tmp_path) not in card  # no path of this machine goes out


def test_what_is_on_the_hub_can_be_gone_on_with_and_begun_from(hub: Any, tmp_path: Path) -> None:
    trainer = trained(tmp_path / "run")
    trainer.push_to_hub("me/classifier")
    other = BertTextClassification(BertTextClassificationConfig(id2label={0: "no", 1: "yes"}, **SIZES))
    config = TrainerConfig(
        output_dir=tmp_path / "next", task="text_classification", num_dataloader_workers=0,
        init_weights_from="me/classifier",
    )  # fmt: skip
    begun = Trainer(other, config, tokens())
    assert_equal_weights(begun.model, trainer.model)


def test_a_card_of_ones_own_is_in_every_checkpoint(tmp_path: Path) -> None:
    trained(tmp_path, model_card=ModelCard(model_name="Mine", model_overview="Says yes or no."))
    for folder in ("epoch_1", "final_epoch", "checkpoints/model_best"):
        assert "Says yes or no." in (tmp_path / folder / "README.md").read_text()


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".safetensors", ".ckpt", ""])
def test_a_checkpoint_with_the_name_of_a_weights_file_is_a_warning(
    suffix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / f"model{suffix}"
    Trainer(make(), config(tmp_path / "run"), PAIRS, PAIRS).save(path)
    assert verify(path).iteration == 0
    said = f"{path} is a folder, a checkpoint with the complete state. Its file model.safetensors has"
    assert (said in caplog.text) is bool(suffix)
    assert (path / "model.safetensors").is_file()
