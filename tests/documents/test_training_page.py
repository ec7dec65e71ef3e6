"""The page about training: own hooks, own steps, own metrics."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from trainwright.hooks import HookBase

SHORT = ["train.train_epoch=0", "train.log_period=1", "train.output_dir=output"]
LOGGER = 'import logging\n\nlogger = logging.getLogger("libai." + __name__)  # as my_train_net.py has it\n\n\n'

LOAD_THE_CONFIG = """\
cfg = LazyConfig.load(args.config_file)
cfg = LazyConfig.apply_overrides(cfg, args.opts)
default_setup(cfg, args)"""

# What an own trainer without arguments may be: it has its model and its data itself.
MYTRAINER = """
import torch
from trainwright.engine import TrainerBase
from trainwright.events import get_event_storage


class _mytrainer(TrainerBase):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(8.0))

    def run_step(self, get_batch):
        loss = self.weight**2
        loss.backward()
        with torch.no_grad():
            self.weight -= 0.01 * self.weight.grad
        self.weight.grad = None
        get_event_storage().put_scalar("total_loss", loss)
"""


@pytest.fixture
def my_train_net(page_project: Path, page_text: Callable) -> Path:
    """tools/my_train_net.py, and the module of its hook."""
    imports = {
        "import ...": "import logging\n"
        "from trainwright import hooks\n"
        "from trainwright.config import LazyConfig, default_argument_parser\n"
        "from trainwright.engine import default_setup\n"
        "from trainwright.base import dist",
        "from libai.engine import DefaultTrainer": "from trainwright.engine import DefaultTrainer",
    }
    program = page_text("training/my_train_net", imports=imports, elided=[None, LOAD_THE_CONFIG])
    (page_project / "tools").mkdir()
    (page_project / "tools" / "my_train_net.py").write_text(program)
    hook = "from trainwright.engine import HookBase\n" + LOGGER + page_text("training/info_hook")
    (page_project / "path_to_myhook.py").write_text(hook + "\n\nmyhook = InfoHook\n")
    (page_project / "path_to_mytrainer.py").write_text(MYTRAINER)
    return page_project


def test_an_own_trainer_and_an_own_hook_make_the_run(
    my_train_net: Path, run_python: Callable, read_rows: Callable, no_workers: list[str]
) -> None:
    arguments = ["--config-file", "configs/config.py", *no_workers, *SHORT]
    # From the project's folder, whose modules the configuration imports.
    done = run_python("-m", "tools.my_train_net", *arguments, "train.train_iter=250", cwd=my_train_net)

    said = re.findall(r"libai\.path_to_myhook INFO\] (.*)", (my_train_net / "output" / "log.txt").read_text())
    assert said == ["start training at 0", "iteration 0!", "iteration 100!", "iteration 200!", "end training ad 250"]
    assert f" {said[1]}\n" in done.stdout
    rows = read_rows(my_train_net / "output")
    assert [row["iteration"] for row in rows] == list(range(250))
    losses = [row["total_loss"] for row in rows]
    assert losses[0] == 64
    assert losses[-1] < losses[0] / 100, "the own step was made"
    assert "lr" in rows[-1], "and the page's hooks ran around it"
    assert (my_train_net / "output" / "model_final").is_dir()
    assert not (my_train_net / "output" / "model_best").exists(), "no evaluation is in the page's list of hooks"


RUN_WITH_MY_STEP = """
from trainwright.config import LazyConfig, default_argument_parser
from trainwright.engine import DefaultTrainer, default_setup


class MyTrainer(DefaultTrainer):
    def __init__(self, cfg):
        super().__init__(cfg)
        self._trainer = MyEagerTrainer(self.model, self.train_loader, self.optimizer)


args = default_argument_parser().parse_args()
cfg = LazyConfig.apply_overrides(LazyConfig.load(args.config_file), args.opts)
default_setup(cfg, args)
trainer = MyTrainer(cfg)
print("results", trainer.train())
print("previous output", trainer._trainer.previous_output["losses"].item())
print("newest loss", trainer.storage.history("total_loss").latest())
"""


def test_an_own_step_keeps_the_previous_output(
    page_project: Path,
    page_text: Callable,
    run_python: Callable,
    train: Callable,
    read_rows: Callable,
    no_workers: list[str],
) -> None:
    step = page_text(
        "training/my_eager_trainer",
        elided=[
            "data = get_batch(next(self._data_loader_iter))",
            "loss_dict['losses'].backward()\nself.write_metrics(loss_dict, data_time=0.0)\nself.update()",
        ],
    )
    imports = "from collections.abc import Callable\nfrom trainwright.engine import EagerTrainer\n\n\n"
    (page_project / "my_train_net.py").write_text(imports + step + RUN_WITH_MY_STEP)
    arguments = [*no_workers, *SHORT, "train.train_iter=12"]
    done = run_python("my_train_net.py", "--config-file", "configs/config.py", *arguments, cwd=page_project)

    said = dict(re.findall(r"^(previous output|newest loss) (.*)$", done.stdout, flags=re.MULTILINE))
    assert float(said["previous output"]) == float(said["newest loss"]) > 0
    accuracy = read_rows(page_project / "output")[-1]["Acc@1"]
    assert f"results {{'Acc@1': {accuracy}}}" in done.stdout, "train() returns the last evaluation"
    # It is the step of the library written out, so it trains the same weights.
    train("configs/config.py", *arguments, "train.output_dir=reference", cwd=page_project)
    mine, reference = (page_project / name / "model_final" / "model.safetensors" for name in ("output", "reference"))
    assert mine.read_bytes() == reference.read_bytes()


def test_a_metric_put_inside_the_model_is_in_metrics_json(
    page_project: Path, page_text: Callable, model_py: str, train: Callable, read_rows: Callable, no_workers: list[str]
) -> None:
    put = page_text(
        "training/metrics_in_a_model",
        imports={
            "from libai.utils.events import get_event_storage": "from trainwright.events import get_event_storage"
        },
        elided=["value = (logits.argmax(1) == labels).float().mean()"],
    )
    import_line, _, inside = put.partition("\n")
    after = "        logits = self.linear_relu_stack(inputs)\n"
    assert after in model_py
    indented = "".join(f"        {line}\n" if line else "\n" for line in inside.splitlines())
    model = f"{import_line}\n{model_py.replace(after, after + indented)}"
    (page_project / "modeling" / "model.py").write_text(model)
    train("configs/config.py", *no_workers, *SHORT, "train.train_iter=40", cwd=page_project)
    values = [row["some_accuracy"] for row in read_rows(page_project / "output") if "some_accuracy" in row]
    assert len(values) == 40
    assert 0 <= values[0] < 0.5 < values[-1] <= 1


def test_the_pages_hook_base_is_ours(page_text: Callable) -> None:
    namespace: dict = {}
    exec(page_text("training/hook_base"), namespace)
    moments = [name for name in vars(namespace["HookBase"]) if not name.startswith("_")]
    assert moments == ["before_train", "after_train", "before_step", "after_step"]
    assert all(callable(getattr(HookBase, moment)) for moment in moments)
