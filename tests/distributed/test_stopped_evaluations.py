"""SIGTERM to one process, or the end of ``max_time``, in an evaluation of several: all leave it before the same batch.

The training is saved, and the resumed run evaluates and ends bit for bit as one that was not stopped.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from tests.distributed.layout_runs import APIS, Texts, build_language, file_config, settings
from tests.ranks import on_ranks
from tests.torchrun import started
from tests.toys import Classifier, points, quiet
from trainwright import DefaultTrainer, LazyCall, Trainer
from trainwright.evaluation import DatasetEvaluator, PPLEvaluator
from trainwright.hooks import Callback
from trainwright.parallel import get_rank

UPDATES, PERIOD, BATCHES = 6, 2, 80
SECOND, FINAL = 2, 3  # evaluations, from 1
TIMINGS = {"time", "data_time", "eta_seconds", "total_throughput"}


class Watch(Callback):
    """Counts the batches of evaluations; in one of them, before a batch of one rank, calls a function."""

    def __init__(self, evaluation: int = 0, rank: int = 0, call: Any = None, *, requests_at: int = 0) -> None:
        super().__init__()
        self.at, self.call, self.requests_at = (evaluation, rank), call, requests_at
        self.num_evaluations, self.num_batches = 0, [0]

    def on_train_batch_end(self, batch: Any, logs: Any) -> None:
        if logs["global_step"] == self.requests_at and get_rank() == 1:
            self.trainercontrol.should_evaluate = True

    def on_eval_begin(self, logs: Any) -> None:
        self.num_evaluations += 1
        self.num_batches.append(0)

    def on_eval_batch_begin(self, batch: Any, logs: Any) -> None:
        self.num_batches[-1] += 1
        if self.call is not None and (self.num_evaluations, get_rank()) == self.at and self.num_batches[-1] == 35:
            self.call()


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class Shares:
    """Batches of this rank alone: the first one has half as many."""

    is_sharded, dataset = True, object()

    def __len__(self) -> int:
        raise TypeError("unknown")

    def __iter__(self) -> Iterator[Any]:
        return iter(DataLoader(points(2 * BATCHES * (1 + get_rank()), seed=get_rank()), batch_size=4))


class Spread(DatasetEvaluator):
    """Processes the batches of all ranks on the first one: it has no ``merge_state``."""

    def reset(self) -> None:
        self.total = 0.0

    def process(self, inputs: Any, outputs: Any) -> None:
        self.total += float(outputs["prediction_scores"].std())

    def evaluate(self) -> dict[str, float]:
        return {"spread": self.total}


class Net(Classifier):
    """In training and evaluation a loss and scores."""

    def __init__(self) -> None:
        super().__init__((4, 8, 2), dropout=0.3, seed=0)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores_BC = self.body(inputs)
        return {"prediction_scores": scores_BC, "loss": F.cross_entropy(scores_BC, labels)}


def classifier(api: str, folder: Path, watch: Watch, *, test: str = "points", **more: Any) -> Any:
    if api == "objects":
        handler = {"metrics_handler": Spread()} if test == "spread" else {}
        config = quiet(
            folder, num_epochs=1, batch_size=4, eval_strategy="step", eval_steps=PERIOD, save_steps=1000,
            eval_batch_size=4, resume_from_checkpoint=True, log_steps=1, learning_rate=0.1, device_str="cpu",
            num_dataloader_workers=0, metrics=None if handler else ["accuracy"], **more,
        )  # fmt: skip
        tests = {"eval_dataloader": Shares()} if test == "shares" else {"eval_dataset": points(8 * BATCHES)}
        return Trainer(Net(), config, points(8 * UPDATES), callbacks=[watch], **tests, **handler)
    from tests import toys

    cfg = toys.file_config(
        folder, Net, lambda: points(8 * UPDATES), lambda: points(8 * BATCHES), train_iter=UPDATES,
        train_micro_batch_size=4, test_micro_batch_size=4, eval_period=PERIOD, resume=True, log_period=1,
        checkpointer={"period": 1000}, **more,
    )  # fmt: skip
    cfg._set_flag("allow_objects", True)
    if test == "shares":
        cfg.dataloader.test = [LazyCall(Shares)()]
    if test == "spread":
        del cfg.train.evaluation.evaluator
        cfg.train.evaluation.evaluator = LazyCall(Spread)()
    trainer = DefaultTrainer(cfg)
    trainer.add_callback(watch)
    return trainer


def language(api: str, folder: Path, watch: Watch, **layout: Any) -> Any:
    data = int(os.environ["WORLD_SIZE"])
    for name in ("pipeline_parallel_size", "tensor_parallel_size"):
        data //= layout.get(name, 1)
    texts, rows = Texts(4 * data * UPDATES), 4 * data * BATCHES + 4  # the first data rank has one batch more
    if api == "objects":
        config = settings(
            folder, batch_size=4, eval_strategy="step", eval_steps=PERIOD, save_steps=1000, tensorboard=None,
            resume_from_checkpoint=True, evaluate_with_generate=False, log_steps=1, eval_batch_size=4,
            early_stopping=None, **layout,
        )  # fmt: skip
        return Trainer(build_language(plain=True), config, texts, Texts(rows, seed=1), callbacks=[watch])
    cfg = file_config(folder, layout, texts, 4, data, updates=UPDATES, eval_samples=rows)
    cfg.train.update({"eval_period": PERIOD, "resume": True, "log_period": 1, "evaluation": {"enabled": True}})
    cfg.train.evaluation.evaluator = LazyCall(PPLEvaluator)()
    trainer = DefaultTrainer(cfg)
    trainer.add_callback(watch)
    return trainer


def outcome(trainer: Any, folder: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (folder / "metrics.json").read_text(encoding="utf-8").splitlines()]
    (pointer,) = folder.rglob("last_checkpoint")
    checkpoint = pointer.parent / pointer.read_text()
    return {
        "results": trainer.last_eval_results,
        "rows": [{name: value for name, value in row.items() if name not in TIMINGS} for row in lines],
        "tensors": {file.name: file.read_bytes() for file in checkpoint.glob("*.safetensors")},
    }


def stop_and_resume(folder: Path, build: Any, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for number, case in enumerate(cases):
        api, rank, evaluation, requests_at = (
            case.pop(name, usual) for name, usual in (("api", "objects"), ("rank", 1), ("at", SECOND), ("requests", 0))
        )
        whole, stopped = folder / f"{number}-whole", folder / f"{number}"
        trainer = build(api, whole, Watch(requests_at=requests_at), **case)
        trainer.train()
        expected = outcome(trainer, whole)

        watch = Watch(evaluation, rank, terminate, requests_at=requests_at)
        trainer, code = build(api, stopped, watch, **case), None
        try:
            trainer.train()
        except SystemExit as end:
            code = end.code
        saved, done = next(stopped.rglob("last_checkpoint")).read_text(), trainer.iterations_done
        trainer = build(api, stopped, Watch(requests_at=requests_at), **case)
        start = trainer.start_iter
        trainer.train()
        is_equal = {name: value == expected[name] for name, value in outcome(trainer, stopped).items()}
        found.append({
            "code": code, "batches": watch.num_batches, "done": (done, start), "saved": saved, "is_equal": is_equal
        })  # fmt: skip
    return found


CASES: dict[Any, dict[str, dict[str, Any]]] = {
    classifier: {
        "data": {},
        "the final one": {"at": FINAL},
        "one that a callback requests": {"requests": 3, "rank": 0},
        "uneven shares": {"test": "shares"},
        "uneven shares, the rank that has fewer": {"test": "shares", "rank": 0},
        "an evaluator on the first rank": {"test": "spread"},
        "averaged weights": {"ema": {"decay": 0.9}},
    },
    language: {
        "ZeRO 1": {"zero_stage": 1},
        "ZeRO 3": {"zero_stage": 3},
        "pipeline": {"pipeline_parallel_size": 2},
    },
}


@pytest.mark.parametrize(
    "apis",
    [
        (*APIS, *APIS),
        pytest.param(APIS[:1], marks=pytest.mark.exhaustive),
        pytest.param(APIS[1:], marks=pytest.mark.exhaustive),
    ],
    ids=["in turn", *APIS],
)
@pytest.mark.parametrize("build", CASES, ids=lambda build: build.__name__)
def test_all_ranks_leave_an_evaluation_before_one_batch_and_a_resume_makes_it(
    build: Any, apis: tuple[str, ...], tmp_path: Path
) -> None:
    cases = [{"api": api, **case} for api, case in zip(cycle(apis), CASES[build].values(), strict=False)]
    ranks = on_ranks(stop_and_resume, tmp_path, build, cases, timeout=200)
    for (name, case), one, other in zip(CASES[build].items(), *ranks, strict=True):
        evaluation, full, cut = case.get("at", SECOND), one["batches"][1], one["batches"][-1]
        assert (one["code"], other["code"]) == (143, 143), name
        if case.get("test") == "shares":
            assert cut <= full < other["batches"][-1] < 2 * full == other["batches"][1], name
        else:
            assert cut < full, name
            assert cut == other["batches"][-1], name
        assert len(one["batches"]) == len(other["batches"]) == evaluation + 1, "an evaluation after the stopped one"
        done = case.get("requests", evaluation * PERIOD)
        assert (one["done"], other["done"]) == ((done, done), (done, done)), name
        assert set(one["is_equal"].values()) == set(other["is_equal"].values()) == {True}, (name, one["is_equal"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", [
    {"pipeline_parallel_size": 2}, {"pipeline_parallel_size": 2, "zero_stage": 2}, {"tensor_parallel_size": 2}
])  # fmt: skip
@pytest.mark.parametrize("api", APIS)
def test_four_ranks_of_uneven_shares_leave_an_evaluation_together(
    api: str, layout: dict[str, int], tmp_path: Path
) -> None:
    ranks = on_ranks(stop_and_resume, tmp_path, language, [{"api": api, **layout}], world_size=4, timeout=200)
    assert len({rank[0]["batches"][1] for rank in ranks}) == 2
    assert len({rank[0]["batches"][-1] for rank in ranks}) == 1
    assert {rank[0]["code"] for rank in ranks} == {143}
    assert all({*rank[0]["is_equal"].values()} == {True} for rank in ranks)


def fail_in_evaluation(folder: Path, cases: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    found = []
    for number, (api, case) in enumerate(cases):
        watch = Watch(1, 1, fail)
        trainer = classifier(api, folder / str(number), watch, **case)
        try:
            trainer.train()
        except Exception as error:
            found.append((str(error), watch.num_batches[-1]))
    return found


def fail() -> None:
    raise ZeroDivisionError("simulated")


def test_an_error_on_one_rank_ends_the_evaluation_of_the_others_before_their_last_batch(tmp_path: Path) -> None:
    cases = [(api, {"test": test}) for api in APIS for test in ("points", "spread", "shares")]
    ranks = on_ranks(fail_in_evaluation, tmp_path, cases)
    for case, one, other in zip(cases, *ranks, strict=True):
        assert "simulated" in one[0], case
        assert "simulated" in other[0], case
        assert other[1] == 35, case
        assert one[1] < BATCHES, case


def pause(folder: Path, apis: list[str]) -> list[Any]:
    """``max_time`` is over in the second evaluation, and in the final one of the next start."""
    found, clock = [], time.perf_counter
    for api in apis:
        whole = classifier(api, folder / f"{api}-whole", Watch())
        whole.train()
        starts = []
        for evaluation in (SECOND, 2, 0):
            watch = Watch(evaluation, 1, lambda: setattr(time, "perf_counter", lambda: clock() + 3600.0))
            trainer = classifier(api, folder / api, watch, max_time=3600.0)
            trainer.train()
            time.perf_counter = clock
            starts.append((trainer.iterations_done, trainer.stop_reason, watch.num_batches[-1] < BATCHES))
        expected, resumed = outcome(whole, folder / f"{api}-whole"), outcome(trainer, folder / api)
        found.append((starts, {name: resumed[name] == value for name, value in expected.items()}))
    return found


def test_the_end_of_max_time_ends_an_evaluation_too(tmp_path: Path) -> None:
    for found in on_ranks(pause, tmp_path, [*APIS]):
        for starts, is_equal in found:
            assert starts == [(4, "max_time", True), (6, "max_time", True), (6, None, False)]
            assert set(is_equal.values()) == {True}, is_equal


def main() -> None:
    """A training whose evaluation takes a minute; reports its first batches."""
    folder = Path(sys.argv[1])

    class Slow(Callback):
        def on_eval_batch_end(self, batch: Any, logs: Any) -> None:
            (folder / f"evaluates{get_rank()}").write_text(str(os.getpid()))
            time.sleep(0.5)

    trainer = classifier("objects", folder / "run", Slow())
    trainer.train()


@pytest.mark.parametrize("is_to_one", [False, True])
def test_torchrun_ends_within_seconds_where_an_evaluation_takes_a_minute(is_to_one: bool, tmp_path: Path) -> None:
    process = started(Path(__file__), tmp_path)
    try:
        end = time.monotonic() + 60
        while not all((tmp_path / f"evaluates{rank}").exists() for rank in range(2)):
            assert time.monotonic() < end
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.05)
        time.sleep(1)
        start = time.monotonic()
        if is_to_one:
            os.kill(int((tmp_path / "evaluates1").read_text()), signal.SIGTERM)
        else:
            process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert time.monotonic() - start < 15, output
    assert (tmp_path / "run" / "checkpoints" / "last_checkpoint").read_text() == str(PERIOD)


if __name__ == "__main__":
    main()
