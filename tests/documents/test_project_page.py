"""The page of the custom MNIST project: its files as it has them, and what it says they do."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml


def lr_of(row: dict, *, warmup: int, total: int) -> float:
    """What WarmupCosineLR(warmup_factor=0.001, alpha=0.01) gives on the default rate, 1e-4."""

    def cosine(step: int) -> float:
        return 1e-4 * (0.99 * (1 + math.cos(math.pi * step / total)) / 2 + 0.01)

    step = row["iteration"]
    if step >= warmup:
        return cosine(step)
    return 1e-7 + (cosine(warmup) - 1e-7) * step / warmup


@pytest.mark.slow
def test_the_project_runs_as_the_page_says(
    page_project: Path, train: Callable, read_rows: Callable, data_here: list[str]
) -> None:
    done = train("configs/config.py", *data_here, cwd=page_project, timeout=300)

    folder = page_project / "output" / "MNIST"
    rows = read_rows(folder)
    # 20 epochs of 1,437 samples by 128: 225 iterations; a row every 10, an evaluation every 100 and at the end.
    assert [row["iteration"] for row in rows] == [*range(9, 225, 10), 224, 225]
    assert [row["iteration"] for row in rows if "Acc@1" in row] == [99, 199, 225]
    assert "Acc@5" not in rows[-1], "topk=(1,)"
    assert rows[-1]["Acc@1"] > 85
    for row in rows[:-1]:
        if "lr" in row:
            assert row["lr"] == pytest.approx(lr_of(row, warmup=3, total=225), rel=1e-6)
    assert "recomputes 3 blocks" in done.stdout, "recompute_grad"
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert saved["train"]["amp"]["enabled"] is True
    assert saved["train"]["test_micro_batch_size"] == 32
    assert saved["train"]["evaluation"]["eval_metric"] == "Acc@1", "what evaluation=dict(enabled=True) leaves out"
    assert (folder / "model_final" / "model.safetensors").is_file()


def test_warmup_ratio_is_the_share_of_rising_iterations(
    page_project: Path, train: Callable, read_rows: Callable, no_workers: list[str]
) -> None:
    short = ["train.train_epoch=2", "train.warmup_ratio=0.5", "train.log_period=1"]
    train("configs/config.py", *no_workers, *short, cwd=page_project)
    rates = [row["lr"] for row in read_rows(page_project / "output" / "MNIST") if "lr" in row]
    assert len(rates) == 23
    assert rates[:13] == sorted(rates[:13])
    assert rates[12:] == sorted(rates[12:], reverse=True)
    expected = [lr_of({"iteration": step}, warmup=12, total=23) for step in range(23)]
    assert rates == pytest.approx(expected, rel=1e-6)


def test_a_model_can_be_configured_by_a_dict(
    page_project: Path, page_text: Callable, model_py: str, config_py: str, train: Callable, no_workers: list[str]
) -> None:
    short = [*no_workers, "train.train_epoch=0", "train.train_iter=3"]
    train("configs/config.py", *short, "train.output_dir=by_keyword", cwd=page_project)

    piece = page_text("project/configurable")
    decorator, call = "    @configurable\n", "model = LazyCall(NeuralNetwork)(cfg)\n"
    assert decorator in piece
    assert call in piece
    model = model_py.replace("    def __init__", f"{decorator}    def __init__")
    (page_project / "modeling" / "model.py").write_text("from trainwright.config import configurable\n" + model)
    # The page's cfg={ num_classes=10 } is not Python; dict(num_classes=10) is what it means.
    config = config_py.replace(
        "model = LazyCall(NeuralNetwork)(num_classes=10)\n", f"cfg = dict(num_classes=10)\n{call}"
    )
    assert call in config
    (page_project / "configs" / "config.py").write_text(config)
    train("configs/config.py", *short, "train.output_dir=by_dict", cwd=page_project)

    weights = [page_project / name / "model_final" / "model.safetensors" for name in ("by_keyword", "by_dict")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_the_pages_whole_train_section_is_a_train_py(
    page_project: Path, page_text: Callable, config_py: str, train: Callable, read_rows: Callable, no_workers: list[str]
) -> None:
    imports = (
        "from trainwright.config import LazyCall\n"
        "from trainwright.evaluation import ClsEvaluator\n"
        "from trainwright.optim import WarmupCosineLR"
    )
    own = page_text("project/train", imports={"from libai.config import LazyCall": imports})
    (page_project / "configs" / "train.py").write_text(own, encoding="utf-8")
    short = [*no_workers, "train.train_iter=6", "train.log_period=2"]

    # Imported, and changed by the page's update: a plain dict here.
    train("configs/config.py", *short, "train.train_epoch=0", "train.output_dir=imported", cwd=page_project)
    assert read_rows(page_project / "imported")[-1].keys() == {"Acc@1", "iteration"}

    # Or taken by get_config, and not changed.
    unchanged = config_py[: config_py.index("from configs.train import train")].replace("# configs/config.py\n", "")
    by_get_config = 'from trainwright.config import get_config\ntrain = get_config("configs/train.py").train\n'
    (page_project / "configs" / "config.py").write_text(unchanged + by_get_config)
    train("configs/config.py", *short, cwd=page_project)
    rows = read_rows(page_project / "output")
    assert [row["iteration"] for row in rows] == [1, 3, 5, 6]
    assert rows[-1].keys() == {"Acc@1", "Acc@5", "iteration"}
    saved = yaml.safe_load((page_project / "output" / "config.yaml").read_text())
    assert saved["train"]["checkpointer"]["max_to_keep"] == 100
