"""What is imported, and when: counted in modules, as the clock of a busy machine says little."""

import ast
import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import trainwright

# What a training may use, and most do not.
OPTIONAL = {
    *("tensorboard", "torchmetrics", "torchvision", "transformers", "pandas", "matplotlib", "sklearn", "rich.live"),
    *("torch._dynamo", "torch._inductor", "torch.utils.tensorboard", "torch.distributed.checkpoint", "sympy"),
}

TINY = """
import os, tempfile, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
    def forward(self, x, labels):
        return {"loss": nn.functional.cross_entropy(self.layer(x), labels)}

def collate(samples):
    return {"x": torch.stack([x for x, _ in samples]), "labels": torch.stack([label for _, label in samples])}

data = TensorDataset(torch.ones(8, 4), torch.zeros(8, dtype=torch.long))
folder = tempfile.TemporaryDirectory()
"""
BY_OBJECTS = """
from trainwright import Trainer, TrainingConfig
config = TrainingConfig(output_dir=folder.name, num_epochs=2, batch_size=4, optimizer={optimizer!r}, learning_rate=0.01,
                        metric=None, tensorboard=None, progress_bar=False, gradient_accumulation_steps={window})
Trainer(Net(), config, train_dataset=data, data_collator=collate).train()
Trainer(Net(), config.model_copy(update={{"resume_from_checkpoint": True, "epoch_num": 4}}), train_dataset=data,
        data_collator=collate).train()
"""
BY_CONFIG = """
from trainwright import DefaultTrainer, LazyCall
for resume in (False, True):
    cfg = LazyCall(dict)()
    cfg.model = LazyCall(Net)()
    cfg.optim = LazyCall(getattr(torch.optim, {optimizer!r}))(lr=0.01)
    cfg.dataloader = LazyCall(dict)(train=DataLoader(data, batch_size=4, collate_fn=collate))
    cfg.train = dict(output_dir=folder.name, train_iter=4 + 4 * resume, log_period=1, resume=resume,
                     num_accumulation_steps={window}, train_micro_batch_size=4)
    DefaultTrainer(cfg).train()
"""
APIS = {"python_api": BY_OBJECTS, "config_files": BY_CONFIG}


@functools.cache
def loaded_after(code: str) -> set[str]:
    """The modules of a process after ``code``."""
    program = f"import sys\n{code}\nprint('LOADED', *sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("LOADED")[2].split())


Loaded = Callable[[str], set[str]]


@pytest.fixture(scope="module")
def loaded_with_torch() -> Iterator[Loaded]:
    """The modules that code loads in a process that has imported torch: a fork of one, without the import's time."""
    program = """
import os, sys, torch
while code := sys.stdin.readline():
    if not os.fork():
        before = {*sys.modules}
        exec(eval(code))
        print("LOADED", *({*sys.modules} - before), flush=True)
        break
    print("EXIT", os.wait()[1], flush=True)
"""
    command = [sys.executable, "-W", "ignore", "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def loaded(code: str) -> set[str]:
            print(repr(code), file=process.stdin, flush=True)
            before = line = ""
            while not line.startswith("EXIT"):
                before, line = line, process.stdout.readline()
            assert line == "EXIT 0\n"
            return set(before.split()[1:])

        yield loaded
        process.stdin.close()


class TestNames:
    def test_the_package_is_a_table_of_names(self) -> None:
        loaded = loaded_after("import trainwright")
        own = {name for name in loaded if name.startswith("trainwright")}
        assert own == {"trainwright", "trainwright.base", "trainwright.base.lazy_names"}
        assert not {"torch", "omegaconf", "numpy", "pydantic", "yaml"} & loaded

    def test_a_package_loads_no_torch_before_a_name_of_it_is_used(self) -> None:
        packages = ("config", "engine", "evaluation", "models", "ops", "optim", "checkpoint")
        loaded = loaded_after("import " + ", ".join(f"trainwright.{name}" for name in packages))
        assert not {"torch", "omegaconf", "pydantic"} & loaded

    def test_the_collector_is_as_it_was_after_an_import(self) -> None:
        for before in ("enable", "disable"):
            loaded_after(
                f"import gc, trainwright.base.lazy_names as names\ngc.{before}()\nfrom trainwright import LazyCall\n"
                "try:\n    names.on_first_use('trainwright', {'Nothing': 'trainwright.nowhere'})('Nothing')\n"
                "except ModuleNotFoundError as error:\n    assert error.name == 'trainwright.nowhere'\n"
                f"else:\n    assert False\nassert gc.isenabled() == {before == 'enable'}"
            )


class TestCommandLine:
    @pytest.mark.parametrize(
        "arguments", ["'--help'", "'--version'", "'train', '--help'", "'checkpoint', '--help'", "'launch', '--help'"]
    )
    def test_help_loads_no_torch(self, arguments: str) -> None:
        code = f"from trainwright.cli.main import main\ntry:\n    main([{arguments}])\nexcept SystemExit:\n    pass"
        assert not {"torch", "numpy", "pydantic"} & loaded_after(code)

    def test_the_help_of_all_commands_loads_nothing_of_a_run(self) -> None:
        loaded = loaded_after("from trainwright.cli.main import main\nmain(['--help'])")
        assert {name for name in loaded if name.startswith("trainwright")} <= {
            "trainwright",
            "trainwright.base",
            "trainwright.cli",
            "trainwright.cli.commands",
            "trainwright.cli.main",
            "trainwright.base.lazy_names",
            "trainwright.base.terminal",
        }


class TestBothAPIs:
    def test_the_python_api(self, loaded_with_torch: Loaded) -> None:
        loaded = loaded_with_torch("from trainwright import Trainer")
        assert not {"omegaconf", "pydantic", "yaml", "antlr4"} & loaded
        assert OPTIONAL & loaded == set()
        others = ("config_trainer", "data.tokenizer", "evaluation.bleu", "models.gpt")
        others += ("optim.build", "config.lazy")
        assert {f"trainwright.{other}" for other in others} & loaded == set()

    def test_its_settings(self) -> None:
        assert not {"torch", "omegaconf"} & loaded_after("from trainwright import TrainingConfig")

    def test_config_files(self, loaded_with_torch: Loaded) -> None:
        loaded = loaded_with_torch("from trainwright import DefaultTrainer, LazyCall")
        assert not {"pydantic"} & loaded
        assert OPTIONAL & loaded == set()

    def test_configurations_alone(self) -> None:
        assert not {"torch", "numpy", "pydantic", "hydra"} & loaded_after(
            "from trainwright import LazyCall, LazyConfig"
        )


ROOMS = """
import trainwright.events, trainwright.models as models
from trainwright.evaluation import TMMetrics, TorchMetricsHandler, build_metric, metrics_handler_for
build_metric("f1").compute([1], [1])
metrics_handler_for("text_classification")(["f1"])
[getattr(models, name) for name in models.__all__]
"""


def test_events_models_and_metrics_need_no_optional_package(loaded_with_torch: Loaded) -> None:
    of_metrics = {"seqeval", "sacrebleu", "rouge_score", "rapidfuzz"}
    of_models = {"timm", "huggingface_hub", "PIL", "tokenizers"}
    assert (OPTIONAL | of_metrics | of_models | {"tqdm"}) & loaded_with_torch(ROOMS) == set()


class TestWholeTrainings:
    """From the first step over a checkpoint to a resumed run."""

    @pytest.mark.exhaustive(every=6)
    @pytest.mark.parametrize("api", APIS)
    @pytest.mark.parametrize(("optimizer", "window"), [("Adam", 1), ("SGD", 2), ("RMSprop", 1)])
    def test_load_neither_the_compiler_nor_what_they_do_not_use(
        self, api: str, optimizer: str, window: int, loaded_with_torch: Loaded
    ) -> None:
        loaded = loaded_with_torch(TINY + APIS[api].format(optimizer=optimizer, window=window))
        written = {"tensorboard", "torch.utils.tensorboard"} if api == "config_files" else set()  # one of its writers
        assert OPTIONAL & loaded == written
        assert api == "config_files" or "omegaconf" not in loaded

    @pytest.mark.exhaustive
    def test_a_compiled_model_does_load_it(self) -> None:
        program = BY_OBJECTS.format(optimizer="Adam", window=1)
        assert "torch._dynamo" in loaded_after(TINY + program.replace("Net()", "torch.compile(Net(), backend='eager')"))


@pytest.mark.slow
def test_no_file_imports_the_compiler_or_an_optional_package_at_its_top() -> None:
    for path in Path(trainwright.__file__).parent.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name in OPTIONAL or name.split(".")[0] in OPTIONAL], path
