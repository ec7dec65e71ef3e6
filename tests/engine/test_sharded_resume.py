"""Runs on a sharded model resume bit for bit in the same layout, and exactly in another one."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.test_pipeline_step import samples
from tests.parallel.test_pipeline import build_gpt
from tests.ranks import on_ranks
from tests.toys import quiet
from trainwright import Trainer
from trainwright.base.dist import is_main_process, synchronize
from trainwright.engine import state as engine_state

LAYOUTS: dict[str, tuple[int, list[dict[str, Any]]]] = {
    "stages or shards": (2, [{"pipeline_parallel_size": 2}, {"zero_stage": 3, "batch_size": 2}]),
    "parts": (2, [{"tensor_parallel_size": 2}]),
    "all": (8, [{"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "zero_stage": 2, "batch_size": 2}]),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["stages or shards", *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("parts", "all"))]
)
def test_a_run_resumes_bitwise_in_its_layout_and_passes_from_one_process_to_it_and_back(
    tmp_path: Path, kind: str
) -> None:
    size, layouts = LAYOUTS[kind]
    losses, weights = train(str(tmp_path / "one"), steps=4)
    forget(tmp_path / "one", "4")
    for number in range(len(layouts)):
        shutil.copytree(tmp_path / "one", tmp_path / f"from-one-{number}", symlinks=True)
    ranks = on_ranks(resume_each, str(tmp_path), layouts, world_size=size, timeout=300)
    for number in range(len(layouts)):
        found: Content = {}
        for rank in ranks:
            unbroken, resumed, from_one = rank[number]
            assert resumed[0] == unbroken[0]
            assert all(torch.equal(resumed[1][name], value) for name, value in unbroken[1].items())
            assert from_one[0] == pytest.approx(losses, abs=1e-5)
            found |= from_one[1]
        back = train(str(tmp_path / f"from-one-{number}"), steps=4)[1]
        assert all(torch.equal(back[name], value) for name, value in found.items())
        for name in weights.keys() - {f"blocks.{block}.k.bias" for block in range(4)}:  # their gradients are rounding
            torch.testing.assert_close(back[name], weights[name], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_the_float32_average_of_bfloat16_weights_resumes_bitwise_from_shards(tmp_path: Path) -> None:
    layouts = [{"pipeline_parallel_size": 2}, {"zero_stage": 3, "batch_size": 2}]
    for of_rank in on_ranks(resume_bfloat16, str(tmp_path), layouts, world_size=2, timeout=300):
        for unbroken, resumed in of_rank:
            assert {value.dtype for value in unbroken.values()} == {torch.bfloat16}
            assert all(torch.equal(resumed[name], value) for name, value in unbroken.items())


def test_random_states_go_to_the_same_share_of_the_data_in_another_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    def given(layout: list[int], rank: int, share: int, shares: int, saved: list[int], place: int | None = None) -> Any:
        monkeypatch.setattr(engine_state, "_layout", lambda: layout)
        monkeypatch.setattr(engine_state, "get_rank", lambda: rank)
        monkeypatch.setattr(engine_state, "get_data_parallel_rank", lambda: share)
        monkeypatch.setattr(engine_state, "get_averaging_rank", lambda: share if place is None else place)
        monkeypatch.setattr(engine_state, "get_data_parallel_size", lambda: shares)
        monkeypatch.setattr(engine_state, "get_world_size", lambda: layout[0])
        return engine_state._sources(saved)

    stages = [4, 2, 2, 1]
    assert [{*given(stages, rank, rank % 2, 2, stages).values()} for rank in range(4)] == [{0}, {1}, {2}, {3}]
    found = [given([4, 1, 2, 2], rank, rank // 2, 2, stages) for rank in range(4)]
    assert [(one["random"], one["data"], one["hooks"]) for one in found] == [(0, 0, 0), (0, 0, 1), (1, 1, 2), (1, 1, 3)]
    found = [given([3], rank, rank, 3, stages) for rank in range(3)]
    assert [(one["random"], one["data"], one["hooks"]) for one in found] == [
        (0, 0, None),
        (1, 0, None),
        (None, 0, None),
    ]
    assert [given([2], rank, rank, 2, [4, 1, 1, 2])["random"] for rank in range(2)] == [0, 2]
    context = [4, 1, 4, 1, 2]
    found = [given(context, rank, rank // 2, 2, [2], place=rank) for rank in range(4)]
    assert [(one["random"], one["data"]) for one in found] == [(0, 0), (1, 0), (None, 1), (None, 1)]
    found = [given([2], rank, rank, 2, context) for rank in range(2)]
    assert [(one["random"], one["data"]) for one in found] == [(0, 0), (1, 2)]


Content = dict[str, torch.Tensor]


def train(
    folder: str, *, steps: int, dtype: torch.dtype = torch.float32, decay: float = 0.5, **settings: Any
) -> tuple[list[float], Content]:
    """Train up to ``steps`` from where the folder's last checkpoint is; returns the losses and the weights."""
    dropout, batch_size = settings.pop("dropout", 0.0), settings.pop("batch_size", 4)
    config = quiet(
        Path(folder), max_steps=steps, batch_size=batch_size, learning_rate=1e-2, weight_decay=0.1, log_steps=1,
        save_steps=2, seed=5, resume_from_checkpoint=True, eval_strategy="no", evaluate_with_generate=False,
        ema={"decay": decay}, lr_scheduler_type="linear", **settings,
    )  # fmt: skip
    model = build_gpt().to(dtype)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = dropout
    trainer = Trainer(model, config, train_dataset=samples())
    trainer.train()
    history = trainer.storage.histories().get("total_loss")  # none if nothing was left to train
    losses = [] if history is None else [value for value, _ in history.values()]
    weights = {name: full(value) for name, value in model.state_dict().items()}
    trainer.checkpointer.close()
    return losses, weights


def full(value: Any) -> torch.Tensor:
    value = value.detach()
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()


def forget(folder: Path, step: str) -> None:
    """Remove the checkpoint of the last step, as if the run had been killed before it."""
    synchronize()
    if is_main_process():
        for path in (folder / "final_epoch", folder / "checkpoints" / step):
            path.unlink() if path.is_symlink() else shutil.rmtree(path)
        (folder / "checkpoints" / "last_checkpoint").write_text("2")
    synchronize()


def resume_each(base: str, layouts: list[dict[str, Any]]) -> list[Any]:
    """For each layout: an unbroken run with dropout, its resume, and the resume of a run of one process."""
    found = []
    for number, layout in enumerate(layouts):
        folder = Path(base, str(number))
        unbroken = train(str(folder), steps=4, dropout=0.1, **layout)
        forget(folder, "4")
        resumed = train(str(folder), steps=4, dropout=0.1, **layout)
        found.append((unbroken, resumed, train(f"{base}/from-one-{number}", steps=4, **layout)))
    return found


def resume_bfloat16(base: str, layouts: list[dict[str, Any]]) -> list[tuple[Content, Content]]:
    """For each layout: the averages of an unbroken run and of its resume."""
    found = []
    for number, layout in enumerate(layouts):
        folder, settings = Path(base, str(number)), {"dtype": torch.bfloat16, "decay": 0.999, **layout}
        _, unbroken = train(str(folder), steps=4, **settings)
        forget(folder, "4")
        found.append((unbroken, train(str(folder), steps=4, **settings)[1]))
    return found
