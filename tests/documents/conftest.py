"""The documents' examples: the text of a page's code block, made a program by what a user may change in it."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

PAGES = Path(__file__).with_name("pages")


@pytest.fixture(scope="session")
def page_text() -> Callable[..., str]:
    """``page_text("training/info_hook", imports={old: new}, elided=[…])``: the block as the page has it, but for
    the lines that import and for what the page leaves out, which it writes as ``...`` or as a comment.
    """

    def text(name: str, *, imports: dict[str, str] | None = None, elided: Sequence[str | None] = ()) -> str:
        lines = (PAGES / f"{name}.txt").read_text(encoding="utf-8").splitlines()
        for old, new in (imports or {}).items():
            assert old.startswith(("import ", "from ")), f"not an import: {old}"
            lines[lines.index(old)] = new
        fillings = iter(elided)
        for number, line in enumerate(lines):
            if line.strip() == "..." or line.endswith("= # compute the value from inputs"):
                filling = next(fillings, None)
                indent = line[: len(line) - len(line.lstrip())]
                lines[number] = line if filling is None else filling.replace("\n", f"\n{indent}").join([indent, ""])
        assert next(fillings, None) is None, "more to fill in than the page leaves out"
        return "\n".join(lines) + "\n"

    return text


@pytest.fixture(scope="session")
def model_py(page_text: Callable[..., str]) -> str:
    return page_text("project/model", imports={"import oneflow.nn as nn": "import torch.nn as nn"})


@pytest.fixture(scope="session")
def dataset_py(page_text: Callable[..., str]) -> str:
    both = "import DistTensorData, Instance"
    return page_text(
        "project/dataset",
        imports={
            "import oneflow as flow": "import torch as flow",
            "from flowvision import transforms": "from trainwright.data import transforms",
            "from flowvision import datasets": "from trainwright.data import datasets",
            "from oneflow.utils.data import Dataset": "from torch.utils.data import Dataset",
            f"from libai.data.structures {both}": f"from trainwright.data {both}",
        },
    )


@pytest.fixture(scope="session")
def config_py(page_text: Callable[..., str]) -> str:
    """The three pieces of ``configs/config.py``."""
    lazy_call = {"from libai.config import LazyCall": "from trainwright.config import LazyCall"}
    loaders = "import build_image_train_loader, build_image_test_loader"
    return (
        page_text("project/config_model", imports=lazy_call)
        + page_text(
            "project/config_dataloader",
            imports={**lazy_call, f"from libai.data.build {loaders}": f"from trainwright.data {loaders}"},
        )
        + page_text("project/config_train")
    )


@pytest.fixture
def page_project(tmp_path: Path, model_py: str, dataset_py: str, config_py: str) -> Path:
    """The project of the Chinese page; its ``configs/train.py`` gives the library's defaults."""
    defaults = 'from trainwright.config import get_config\n\ntrain = get_config("common/train.py").train\n'
    files = {
        "modeling/model.py": model_py,
        "dataset/dataset.py": dataset_py,
        "configs/config.py": config_py,
        "configs/train.py": defaults,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


@pytest.fixture(scope="session")
def data_here(digits: Path) -> list[str]:
    """Overrides: the page's data folder, /workspace/quickstart/data/, is another one here."""
    return [f"dataloader.train.dataset.0.path={digits}", f"dataloader.test.0.dataset.path={digits}"]


@pytest.fixture(scope="session")
def no_workers(data_here: list[str]) -> list[str]:
    """``data_here``, and overrides that spare the start of worker processes."""
    return [*data_here, "dataloader.train.num_workers=0", "dataloader.test.0.num_workers=0"]
