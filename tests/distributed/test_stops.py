"""SIGTERM to one process, under each layout: all save and stop at one iteration, and a resumed run ends bit for bit."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.layout_runs import APIS, Record, Texts, build_language, file_config, settings
from tests.kinds import only_in_torture
from tests.ranks import on_ranks
from trainwright import DefaultTrainer, Trainer
from trainwright.hooks import HookBase
from trainwright.hooks.signals import TrainingTerminated
from trainwright.parallel import get_rank

UPDATES = 9
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "data": {},
        "ZeRO 1": {"zero_stage": 1},
        "ZeRO 2": {"zero_stage": 2},
        "ZeRO 3": {"zero_stage": 3},
        "tensor": {"tensor_parallel_size": 2},
        "pipeline": {"pipeline_parallel_size": 2},
        "interleaved": {"pipeline_parallel_size": 2, "pipeline_schedule": "Interleaved1F1B"},
    },
    4: {
        "hybrid": {"zero_stage": 3, "replicate_size": 2},
        "tensor, ZeRO 3": {"tensor_parallel_size": 2, "zero_stage": 3},
        "pipeline, data": {"pipeline_parallel_size": 2},
        "pipeline, ZeRO 2": {"pipeline_parallel_size": 2, "zero_stage": 2},
        "tensor, pipeline": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    },
}


class Stop(HookBase):
    """Sends SIGTERM to one process, in its third iteration."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def before_step(self) -> None:
        if self.trainer.iter == 2 and get_rank() == self._rank:
            os.kill(os.getpid(), signal.SIGTERM)


def run(api: str, folder: Path, layout: dict[str, Any], *, stops: int | None = None, resume: bool = False) -> Any:
    """The iterations done, the losses, and whether SIGTERM has ended the training."""
    data = max(1, int(os.environ["WORLD_SIZE"]) // layout.get("tensor_parallel_size", 1))
    data //= layout.get("pipeline_parallel_size", 1)
    texts = Texts(4 * 2 * data * UPDATES)
    trainer: Any
    if api == "objects":
        config = settings(
            folder, batch_size=4, gradient_accumulation_steps=2, save_steps=1000, max_grad_norm=1.0,
            resume_from_checkpoint=resume, tensorboard=None, **layout,
        )  # fmt: skip
        trainer = Trainer(build_language(plain=True), config, train_dataset=texts)
    else:
        cfg = file_config(folder, layout, texts, 4, data, 2, updates=UPDATES)
        cfg.train.resume = resume
        trainer = DefaultTrainer(cfg)
    record, is_ended = Record(), False
    trainer.register_hooks([record, None if stops is None else Stop(stops)])
    try:
        trainer.train()
    except TrainingTerminated:
        is_ended = True
    return trainer.iterations_done, record.losses, is_ended


def stop_and_resume(folder: Path, layouts: list[dict[str, Any]]) -> list[list[Any]]:
    """For each layout, on the APIs in turn: an uninterrupted run, one that is stopped, and its resumption."""
    found = []
    for number, layout in enumerate(layouts):
        api, rank = APIS[number % 2], int(os.environ["WORLD_SIZE"]) - 1 - number % 2
        whole, stopped = folder / f"{number}-whole", folder / f"{number}"
        found.append([
            run(api, whole, layout), run(api, stopped, layout, stops=rank), run(api, stopped, layout, resume=True)
        ])  # fmt: skip
    return found


@pytest.mark.parametrize(
    ("world_size", "names"),
    [
        (2, ["pipeline"]),
        pytest.param(4, ["tensor, pipeline"], marks=pytest.mark.exhaustive),
        pytest.param(2, [*LAYOUTS[2]], marks=only_in_torture),
        pytest.param(4, [*LAYOUTS[4]], marks=only_in_torture),
    ],
    ids=["2", "4", "2-all", "4-all"],
)
def test_all_stop_at_one_iteration_and_resume_bit_for_bit(tmp_path: Path, world_size: int, names: list[str]) -> None:
    layouts = [LAYOUTS[world_size][name] for name in names]
    ranks = on_ranks(stop_and_resume, tmp_path, layouts, world_size=world_size, timeout=200)
    for number, name in enumerate(names):
        (whole, stopped, resumed), *others = (rank[number] for rank in ranks)
        assert stopped[2], name
        assert 2 < stopped[0] < UPDATES, name
        assert all(other[1][0] == stopped[0] for other in others), (name, "not one iteration")
        assert (whole[0], resumed[0]) == (UPDATES, UPDATES), name
        assert stopped[1] + resumed[1] == whole[1], name
        expected, found = (last_tensors(tmp_path / folder) for folder in (f"{number}-whole", f"{number}"))
        assert expected, name
        assert found == expected, name


def last_tensors(folder: Path) -> dict[str, bytes]:
    (pointer,) = folder.rglob("last_checkpoint")
    return {file.name: file.read_bytes() for file in (pointer.parent / pointer.read_text()).glob("*.safetensors")}
