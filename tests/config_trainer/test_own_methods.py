"""Methods of a user's DefaultTrainer: a wrong signature or a wrong part is an error before the first step."""

from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.toys import Classifier, file_config, points
from trainwright import DefaultTrainer, LazyConfig
from trainwright.base.errors import ConfigError
from trainwright.cli.train import main
from trainwright.evaluation import ClsEvaluator, DatasetEvaluator
from trainwright.events import EventWriter
from trainwright.hooks import HookBase, LRScheduler


class Silent(EventWriter):
    """It writes nothing: its method has another name."""

    def log(self) -> None:
        pass


class WithoutProcess(DatasetEvaluator):
    def update(self, inputs: Any, outputs: Any) -> None:
        pass

    def evaluate(self) -> dict[str, Any]:
        return {}


class WithoutInputs(DatasetEvaluator):
    def process(self, outputs: Any) -> None:  # type: ignore[override]
        pass

    def evaluate(self) -> dict[str, Any]:
        return {}


class Forgets(DefaultTrainer):
    def __init__(self, cfg: Any) -> None:
        self.alpha = 0.1


class SetsLate(DefaultTrainer):
    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        self.period = 3

    def build_hooks(self) -> Any:
        assert self.period
        return super().build_hooks()


def trainer_with(**methods: Any) -> type[DefaultTrainer]:
    return type("Mine", (DefaultTrainer,), methods)


@pytest.mark.parametrize(
    ("methods", "facts"),
    [
        ({"build_optimizer": lambda self, model: None}, r"takes \(model\); write @classmethod.*\(cls, cfg, model\)"),
        ({"build_model": lambda cfg: None}, r"takes \(\); write @classmethod.*build_model\(cls, cfg\)"),
        ({"build_train_loader": lambda self, cfg: None}, r"build_train_loader\(cls, cfg, tokenizer=None\)"),
        ({"get_batch": lambda self, batch: batch}, r"get_batch\(cls, data, input_placement_device=None"),
        ({"get_batch": lambda self, data, *rest: data}, "calls it on the class. Write @classmethod"),
        ({"test": lambda self: {}}, r"test\(cls, cfg, test_loaders, model, evaluator=None\)"),
        ({"train_step": lambda self, batch: {}}, r"takes \(batch\); write def train_step\(self, model, inputs\)"),
        ({"build_model": classmethod(lambda cls, cfg: None)}, "it must return a torch.nn.Module. Is its"),
        ({"build_model": classmethod(lambda cls, cfg: Classifier)}, r"Call it: Classifier\(...\)"),
        ({"build_optimizer": classmethod(lambda cls, cfg, model: None)}, "build_optimizer returned None"),
        ({"build_optimizer": classmethod(lambda cls, cfg, model: ([1], [2]))}, "build_lr_scheduler, or train"),
        ({"build_optimizer": classmethod(lambda cls, cfg, model: torch.optim.SGD)}, r"Call it: SGD\(...\)"),
        ({"build_test_loader": classmethod(lambda cls, cfg, t: DataLoader(points()))}, r"list of loaders, \[loader\]"),
        ({"build_train_loader": classmethod(lambda cls, cfg, t: None)}, "build_train_loader returned None"),
        ({"build_lr_scheduler": classmethod(lambda cls, cfg, one: {"scheduler": 1})}, "return the one in 'scheduler'"),
        ({"build_lr_scheduler": classmethod(lambda cls, cfg, one: [one])}, "returned list; it must return a schedule"),
        ({"get_batch": classmethod(lambda cls, data, *rest: None)}, "get_batch returned None.*statement missing"),
        ({"get_batch": classmethod(lambda cls, data, *rest: (1, 2))}, "get_batch returned tuple; it must"),
        ({"build_evaluator": classmethod(lambda cls, cfg: ClsEvaluator)}, r"call it: ClsEvaluator\(...\)"),
        ({"build_evaluator": classmethod(lambda cls, cfg: WithoutProcess())}, "WithoutProcess has no process"),
        ({"build_evaluator": classmethod(lambda cls, cfg: WithoutInputs())}, r"\(inputs, outputs\). Write def process"),
        ({"build_writers": lambda self: None}, "build_writers returned NoneType"),
        ({"build_writers": lambda self: [Silent()]}, r"Silent has no write: write def write\(self, storage=None\)"),
        ({"build_writers": lambda self: [Silent]}, r"EventWriter object: Silent\(...\)"),
    ],
)  # fmt: skip
def test_a_wrong_method_is_an_error_with_the_line_to_write(methods: dict[str, Any], facts: str, tmp_path: Path) -> None:
    cfg = file_config(tmp_path, Classifier, points, points, train_iter=2, train_micro_batch_size=8)
    with pytest.raises(TypeError, match=facts):
        trainer_with(**methods)(cfg).train()


def test_methods_that_return_something_else_may_have_other_forms(tmp_path: Path) -> None:
    class Right(DefaultTrainer):
        def __init__(self, cfg: Any) -> None:
            self.rate = 0.1
            super().__init__(cfg)
            self.own = 1

        @staticmethod
        def build_model(cfg: Any) -> Any:
            return Classifier()

        def build_optimizer(self, *args: Any) -> Any:  # type: ignore[override]
            return torch.optim.SGD(args[1].parameters(), lr=self.rate)

        @classmethod
        def build_lr_scheduler(cls, cfg: Any, optimizer: Any, **more: Any) -> Any:
            return None

        @classmethod
        def build_evaluator(cls, cfg: Any) -> Any:
            return None

        @classmethod
        def get_batch(cls, data: Any, *args: Any) -> Any:
            return super().get_batch(data, *args)

    cfg = file_config(tmp_path, Classifier, points, points, train_iter=2, train_micro_batch_size=8)
    cfg.train.evaluation.eval_metric = "loss"
    trainer = Right(cfg)
    trainer.train()
    assert trainer.iterations_done == 2
    assert not hasattr(trainer, "other")


def test_a_decorator_may_add_an_argument(tmp_path: Path) -> None:
    def with_size(method: Any) -> Any:
        return wraps(method)(lambda cls, cfg: method(cls, cfg, 3))

    mine = trainer_with(build_model=classmethod(with_size(lambda cls, cfg, size: Classifier())))
    mine(file_config(tmp_path, Classifier, points, train_iter=1, train_micro_batch_size=8))


def test_a_test_of_the_user_gets_any_evaluator(tmp_path: Path) -> None:
    mine = trainer_with(
        build_evaluator=lambda self, cfg: len,
        test=lambda self, cfg, loaders, model, evaluator=None: {"n": evaluator("abc")},
    )
    cfg = file_config(tmp_path, Classifier, points, points, train_iter=1, train_micro_batch_size=8)
    cfg.train.evaluation.update({"eval_metric": "n", "eval_mode": "max"})
    assert mine(cfg).train() == {"n": 3}


@pytest.mark.parametrize(
    "methods",
    [
        {"train": lambda self: self.test(self.get_batch([])), "test": lambda self, batch: {"n": batch}},
        {"run_step": lambda self: self.train_step([]), "train_step": lambda self, batch: batch},
    ],
)
def test_loops_and_steps_of_the_user_call_the_other_methods_as_they_like(
    methods: dict[str, Any], tmp_path: Path
) -> None:
    cfg = file_config(tmp_path, Classifier, points, points, train_iter=1, train_micro_batch_size=8)
    trainer_with(get_batch=classmethod(lambda cls, data, *, scale=1: data), **methods)(cfg)


def test_writers_and_test_loaders_may_be_in_any_iterable(tmp_path: Path) -> None:
    class Mine(DefaultTrainer):
        def build_writers(self) -> Any:
            yield from super().build_writers()

        @classmethod
        def build_test_loader(cls, cfg: Any, tokenizer: Any = None) -> Any:
            return dict(enumerate(super().build_test_loader(cfg, tokenizer))).values()

    trainer = Mine(file_config(tmp_path, Classifier, points, points, train_iter=1, train_micro_batch_size=8))
    assert "Acc@1" in trainer.train()
    assert len(trainer.predict())


def test_a_test_of_the_user_gets_what_build_test_loader_returns(tmp_path: Path) -> None:
    loader = DataLoader(points(), 8)  # type: ignore[arg-type]
    mine = trainer_with(
        build_test_loader=lambda self, cfg, tokenizer: loader,
        test=lambda self, cfg, loaders, model, evaluator=None: {"is_same": float(loaders is loader)},
    )
    cfg = file_config(tmp_path, Classifier, points, points, train_iter=1, train_micro_batch_size=8)
    cfg.train.evaluation.update({"eval_metric": "is_same", "eval_mode": "max"})
    assert mine(cfg).train() == {"is_same": 1}


def test_a_forgotten_return_of_a_schedule_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Mine(DefaultTrainer):
        @classmethod
        def build_lr_scheduler(cls, cfg: Any, optimizer: Any) -> Any:
            torch.optim.lr_scheduler.StepLR(optimizer, 10)

    class OnPurpose(DefaultTrainer):
        @classmethod
        def build_lr_scheduler(cls, cfg: Any, optimizer: Any) -> Any:
            return None if len(str(cfg)) else super().build_lr_scheduler(cfg, optimizer)

    cfg = file_config(tmp_path, Classifier, points, train_iter=2, train_micro_batch_size=8)
    OnPurpose(cfg)
    assert "returned None" not in caplog.text
    Mine(cfg)
    assert "Mine.build_lr_scheduler returned None, so the learning rate stays as it is" in caplog.text


class ReadsNothing(DefaultTrainer):
    @classmethod
    def build_optimizer(cls, cfg: Any, model: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.5 if cfg.train.seed else 0.1)


class ReadsRate(DefaultTrainer):
    @classmethod
    def build_optimizer(cls, cfg: Any, model: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=8 * cfg.optim.lr)


class Static(DefaultTrainer):
    @staticmethod
    def build_optimizer(cfg: Any, model: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=cfg.optim.lr)


class ReadsSelf(DefaultTrainer):
    def build_optimizer(self, cfg: Any, model: Any) -> Any:  # type: ignore[override]
        return torch.optim.SGD(model.parameters(), lr=self.cfg.optim.lr if cfg.train.seed else 0.1)


class ReadsCopy(DefaultTrainer):
    @classmethod
    def build_optimizer(cls, cfg: Any, model: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=cfg.get("optim").lr)


class PassesOn(DefaultTrainer):
    @classmethod
    def build_optimizer(cls, cfg: Any, model: Any) -> Any:
        return super().build_optimizer(cfg, model)


@pytest.mark.parametrize(
    ("mine", "reads"), [(ReadsNothing, False), (ReadsRate, True), (Static, True), (PassesOn, True)]
)
def test_an_override_of_a_section_that_a_method_does_not_read_is_a_warning(
    mine: type[DefaultTrainer], reads: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = file_config(tmp_path, Classifier, points, train_iter=2, train_micro_batch_size=8)
    mine(cfg)
    assert "has no effect" not in caplog.text
    LazyConfig.apply_overrides(cfg, ["optim.lr=0.01"])
    mine(cfg)
    line = "optim.lr=0.01 has no effect: ReadsNothing.build_optimizer does not read cfg.optim. Use cfg.optim.lr in it"
    assert (line in caplog.text) != reads


class Quiet(HookBase):
    pass


def test_hooks_of_ones_own_alone_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cfg = file_config(tmp_path, Classifier, points, train_iter=1, train_micro_batch_size=8)
    for hooks in ([], [LRScheduler(), Quiet()], [None, Quiet()]):
        assert "none of the library's hooks" not in caplog.text
        trainer_with(build_hooks=lambda self, hooks=hooks: hooks)(cfg).train()
    assert "Mine.build_hooks returned none of the library's hooks, which save, evaluate, log and" in caplog.text
    assert "Write [*super().build_hooks(), Quiet()]" in caplog.text


def test_an_attribute_that_is_not_set_yet_says_where_to_set_it(tmp_path: Path) -> None:
    cfg = file_config(tmp_path, Classifier, points, train_iter=2, train_micro_batch_size=8)
    with pytest.raises(AttributeError, match=r"Set self.period before it"):
        SetsLate(cfg)
    with pytest.raises(AttributeError, match=r"Forgets.__init__ has not called super\(\).__init__"):
        Forgets(cfg).train()


def test_methods_of_the_python_api_are_named_as_in_config_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = {"train_dataloader": lambda self: None, "training_step": lambda self, batch, batch_idx: None}
    mine = trainer_with(compute_loss=lambda self, model, inputs: None, **own)
    mine(file_config(tmp_path, Classifier, points, train_iter=2, train_micro_batch_size=8)).train()
    assert "compute_loss is never called by the training. Here it is forward of the model" in caplog.text
    assert "train_dataloader is never called by the training. Here it is build_train_loader" in caplog.text
    assert "training_step is never called by the training. Here it is train_step(self, model, inputs)" in caplog.text
    of_lightning = trainer_with(train_step=lambda self, batch, batch_idx: None)
    with pytest.raises(ConfigError, match=r"called with \(model, inputs\): it takes \(batch, batch_idx\); write def"):
        of_lightning(file_config(tmp_path, Classifier, points, train_iter=2, train_micro_batch_size=8))


def test_main_takes_the_class_of_the_trainer_by_name() -> None:
    with pytest.raises(TypeError, match=r"main\(trainer_class=Forgets\)"):
        main(Forgets)  # type: ignore[arg-type]


def test_a_test_without_a_return_is_named_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Forgets(DefaultTrainer):
        @classmethod
        def test(cls, cfg: Any, test_loaders: Any, model: Any, evaluator: Any = None) -> Any:
            super().test(cfg, test_loaders, model, evaluator)

    class OnPurpose(DefaultTrainer):
        @classmethod
        def test(cls, cfg: Any, test_loaders: Any, model: Any, evaluator: Any = None) -> Any:
            super().test(cfg, test_loaders, model, evaluator)
            return {}

    cfg = file_config(tmp_path, Classifier, points, points, train_iter=1, train_micro_batch_size=8)
    assert OnPurpose(cfg).train() == {}
    assert "no return statement" not in caplog.text
    cfg.train.output_dir = str(tmp_path / "other")
    assert Forgets(cfg).train() == {}
    assert "Forgets.test has no return statement, so there are no results" in caplog.text


CONFIG = """
from tests.toys import Classifier, file_config, points
cfg = file_config("out", Classifier, points, points, train_iter=1, train_micro_batch_size=8)
model, dataloader, train = cfg.model, cfg.dataloader, cfg.train
"""


@pytest.mark.parametrize(
    ("methods", "line"),
    [
        ({"build_evaluator": lambda self, cfg: ClsEvaluator()}, "build_evaluator(cls, cfg)."),
        ({"build_model": lambda self, cfg: Classifier()}, "build_model(cls, cfg)."),
        ({"test": lambda self, cfg, loaders, model, evaluator=None: {}}, "test(cls, cfg, loaders, model, evaluator="),
        ({"build_evaluator": staticmethod(lambda cfg: ClsEvaluator())}, ""),
        (
            {
                "get_batch": lambda self, data, *more: DefaultTrainer.get_batch(data, *more),
                "test": classmethod(lambda cls, *given: {"Acc@1": 1.0}),
            },
            "",
        ),
    ],
)
def test_a_method_with_self_is_answered_before_an_evaluation_without_a_trainer(
    methods: dict[str, Any],
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.py").write_text(CONFIG)
    mine = trainer_with(**methods)
    assert main(["config.py"], trainer_class=mine) == 0
    assert main(["config.py", "--eval-only", "--resume"], trainer_class=mine) == (2 if line else 0)
    assert (f"Write @classmethod, and below it def {line}" in capsys.readouterr().err) is bool(line)
