"""The documents do not rot: their programs run, their commands are accepted, their links lead somewhere."""

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.toys import Classifier, file_config, points
from trainwright import DefaultTrainer, LazyCall

REPOSITORY = Path(__file__).parents[2]
PAGES = [*sorted(REPOSITORY.glob("*.md")), *sorted((REPOSITORY / "docs").rglob("*.md"))]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def page_name(page: Path) -> str:
    return page.relative_to(REPOSITORY).as_posix()


def blocks(page: Path, language: str) -> list[tuple[int, list[str]]]:
    """The number of the first line of each fenced block, from 0, and its lines."""
    found, lines, inside = [], page.read_text(encoding="utf-8").splitlines(), False
    for number, line in enumerate(lines):
        if not inside and line.strip() == f"```{language}":
            found.append((number + 1, []))
            inside = True
        elif inside and line.strip() == "```":
            inside = False
        elif inside:
            found[-1][1].append(line)
    return found


def as_program(page: Path) -> str:
    """All blocks of a page, in order, each on the lines that it has there, so a traceback shows the page's line."""
    lines: list[str] = []
    for start, block in blocks(page, "python"):
        lines += [""] * (start - len(lines)) + block
    return "\n".join(lines) + "\n"


def files(page: Path) -> dict[str, str]:
    """The blocks that are files, by the name in their first line, ``# config.py``."""
    found = {}
    for _, block in blocks(page, "python"):
        if block and (name := re.fullmatch(r"# (\w+\.py)", block[0])):
            found[name[1]] = "\n".join(block) + "\n"
    return found


def write_files(page: Path, folder: Path) -> None:
    folder.mkdir()
    for name, text in files(page).items():
        (folder / name).write_text(text, encoding="utf-8")


COMMANDS = [
    (page_name(page), line)
    for page in PAGES
    for _, block in blocks(page, "bash")
    for line in block
    if line.startswith("trainwright ")
]


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=page_name)
@pytest.mark.exhaustive(every=12)
def test_the_programs_of_a_page_run(page: Path, run_python: Callable, tmp_path: Path) -> None:
    write_files(page, tmp_path / "work")
    program = tmp_path / "work" / f"{page.stem}.md.py"
    program.write_text(as_program(page), encoding="utf-8")
    done = run_python("-W", "error", program, cwd=tmp_path / "work")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("page", [p for p in PAGES if "config.py" in files(p)], ids=page_name)
def test_the_configuration_file_of_a_page_trains_as_it_is_pasted(page: Path, train: Callable, tmp_path: Path) -> None:
    write_files(page, tmp_path / "pasted")
    done = train("config.py", cwd=tmp_path / "pasted")
    assert re.search(r"Acc@1 \d", done.stdout)


def test_the_pages_that_begin_with_a_configuration_file_are_among_them() -> None:
    assert {page_name(page) for page in PAGES if "config.py" in files(page)} >= {"README.md", "docs/config.md"}


@pytest.fixture(scope="module")
def project(mnist_project: Path, train: Callable, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project that has run, with the configuration under the names that pages give it."""
    folder = tmp_path_factory.mktemp("documents") / "mnist"
    shutil.copytree(mnist_project, folder, symlinks=True)
    config = (folder / "configs" / "config.py").read_text()
    (folder / "configs" / "my_project.py").write_text(config)
    (folder / "config.py").write_text(config.replace("parents[1]", "parent"))
    train("config.py", "train.output_dir=output", "train.train_epoch=0", "train.train_iter=5", cwd=folder)
    (folder / "examples").mkdir()
    (folder / "examples" / "mnist").symlink_to(folder)
    return folder


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=[f"{page}-{command}" for page, command in COMMANDS])
@pytest.mark.exhaustive(every=12)
def test_the_commands_of_a_page_run(
    page: str, command: str, project: Path, train: Callable, run_python: Callable, tmp_path: Path
) -> None:
    shutil.copytree(project, tmp_path / "mnist", symlinks=True)
    _, name, *arguments = shlex.split(command.partition("  #")[0])
    if name == "launch" and "--to" not in arguments:
        arguments += ["train.train_epoch=0", "train.train_iter=5"]
    if name != "train":
        code = 1 if name == "diff" or arguments[:1] == ["diff"] else 0
        run_python("-m", "trainwright.cli.main", name, *arguments, cwd=tmp_path / "mnist", code=code)
        return
    shortened = [argument.strip("'\"") for argument in arguments] + ["train.train_epoch=0", "train.train_iter=5"]
    train(*shortened, cwd=tmp_path / "mnist")


ARGUMENTS = {
    "alpha": 0.01,
    "eta_min": 1e-5,
    "step_size": 2,
    "gamma": 0.5,
    "milestones": [0.5],
    "end_learning_rate": 1e-5,
    "power": 2.0,
}


def test_the_schedules_of_the_table_are_built_as_it_writes_them(tmp_path: Path) -> None:
    text = (REPOSITORY / "docs" / "training.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| `(Warmup\w+)\((.*)\)` \|", text, re.MULTILINE)
    assert len(table) == 6
    for name, arguments in table:
        given = {argument: ARGUMENTS[argument] for argument in arguments.split(", ")}
        schedule = LazyCall(f"trainwright.optim.{name}")(**given)
        cfg = file_config(tmp_path / name, Classifier, points, train_iter=4, warmup_ratio=0.5, scheduler=schedule)
        cfg.train.train_micro_batch_size = 8
        trainer = DefaultTrainer(cfg)
        assert type(trainer.lr_scheduler).__name__ == name
        assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.001 * trainer.cfg.optim.lr)


def test_links_lead_somewhere() -> None:
    def exists(page: Path, link: str) -> bool:
        path, _, anchor = link.partition("#")
        target = page if not path else page.parent / path
        return target.exists() and (not anchor or anchor in anchors(target))

    broken = []
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        links = [link for link in LINK.findall(text) if not re.match(r"[a-z]+:", link)]
        broken += [f"{page_name(page)}: {link}" for link in links if not exists(page, link)]
    assert broken == []


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def without_numbers(line: str) -> str:
    return re.sub(r"\d[\d.,:e-]*", "N", re.sub(r"^[\d:]{8} ", "", line)).replace("  N/N", " N/N").rstrip(" …")


@pytest.mark.slow
def test_the_output_of_the_demo_is_what_it_prints(train: Callable, mnist_project: Path, tmp_path: Path) -> None:
    project = tmp_path / "mnist"
    shutil.copytree(mnist_project, project, symlinks=True)
    config = project / "configs" / "config.py"
    config.write_text(config.read_text().replace("train_epoch=40", "train_epoch=3"))
    done = train("configs/config.py", "train.output_dir=output/MNIST", cwd=project)
    printed = [without_numbers(line) for line in done.stdout.splitlines()]
    (shown,) = [lines for _, lines in blocks(REPOSITORY / "README.md", "text") if lines[0] == "Training"]
    assert [line for line in shown if not any(one.startswith(without_numbers(line)) for one in printed)] == []


NUMBER = re.compile(r"\d+\.\d+(?:e-?\d+)?|\d[\d,]*")


def is_shown(shown: str, printed: str) -> bool:
    """Whether a page shows a printed line: the same words, and numbers to a hundredth. ``…`` stands for the rest."""
    start, has_rest = shown.removesuffix("…").rstrip(), shown.endswith("…")
    printed = re.sub(r"^[\d:]{8} ", "", printed)
    words, found = NUMBER.split(start), NUMBER.split(printed)
    number = len(words) - 1
    if found[:number] != words[:number] or len(found) <= number or not found[number].startswith(words[number]):
        return False
    if not has_rest and (len(found) > len(words) or found[number] != words[number]):
        return False
    numbers = zip(NUMBER.findall(start), NUMBER.findall(printed), strict=False)
    return all(float(b.replace(",", "")) == pytest.approx(float(a.replace(",", "")), rel=0.01) for a, b in numbers)


def test_the_first_page_shows_what_its_program_prints(run_python: Callable, tmp_path: Path) -> None:
    page, program = REPOSITORY / "docs" / "index.md", tmp_path / "digits.py"
    program.write_text(as_program(page), encoding="utf-8")
    done = run_python(program, cwd=tmp_path)
    printed = (done.stdout + done.stderr).splitlines()
    (shown,) = [lines for _, lines in blocks(page, "text")]
    assert [line for line in shown if line.strip() != "…" and not any(is_shown(line, one) for one in printed)] == []
    assert not is_shown("Epoch 1/5  total_loss 1.748  …", "Epoch 1/5  total_loss 1.837  accuracy 0.6638")
