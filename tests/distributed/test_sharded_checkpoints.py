"""Checkpoints of sharded models: every layout of processes loads those of every other layout, bit by bit."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import layouts
from tests.distributed.layouts import LAYOUTS, Content, world_size
from tests.kinds import only_in_torture
from tests.ranks import on_ranks

pytestmark = pytest.mark.slow

SMALL = ["one process", "ddp 2", "zero 2", "tp 2", "pp 2", "zero 3", "zero 2, tp 2"]
Saved = dict[tuple[str, bool], tuple[Path, tuple[Content, Content]]]


def on_all(function: Any, cases: list[tuple[str, Path, bool]]) -> dict[tuple[str, Path, bool], Any]:
    """``function`` with the cases (layout, folder, tied), one group of processes for each number of processes."""
    found = {}
    by_size = defaultdict(list)
    for case in cases:
        by_size[world_size(case[0])].append(case)
    for size, some in by_size.items():
        asked = [(layout, str(folder), is_tied) for layout, folder, is_tied in some]
        ranks = on_ranks(function, asked, world_size=size, timeout=200) if size > 1 else [function(asked)]
        for number, case in enumerate(some):
            of_ranks = [rank[number] for rank in ranks]
            found[case] = tuple({k: v for part in of_ranks for k, v in part[when].items()} for when in (0, 1))
    return found


@pytest.fixture(scope="module")
def saved_untied(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return saved_by(
        tmp_path_factory.mktemp("untied"), [(layout, False) for layout in ("zero 3", "zero 2, tp 2", "pp 2")]
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    tied = [(layout, True) for layout in ("one process", "tp 2", "pp 2")]
    return saved_by(tmp_path_factory.mktemp("sharded"), [*((layout, False) for layout in SMALL), *tied])


def saved_by(base: Path, asked: list[tuple[str, bool]]) -> Saved:
    """By layout and whether embedding and head are tied: the folder, the saved values, those one step later."""
    cases = [(layout, base / f"{number}", is_tied) for number, (layout, is_tied) in enumerate(asked)]
    found = on_all(layouts.save_all, cases)
    return {(layout, tied): (folder, values) for (layout, folder, tied), values in found.items()}


def check_matrix(saved: Saved, loading: list[str]) -> None:
    """Each layout loads each of the checkpoints, and a step later it has what the saving one has."""
    cases = [(layout, folder, tied) for (_, tied), (folder, _) in saved.items() for layout in loading]
    expected = {
        folder: tuple(with_ties(part, tied) for part in values) for (_, tied), (folder, values) in saved.items()
    }
    wrong = {}
    for (layout, folder, tied), values in on_all(layouts.load_all, cases).items():
        for when, there, found in zip(("loaded", "a step later"), expected[folder], values, strict=True):
            names = [name for name, value in found.items() if name not in there or not torch.equal(value, there[name])]
            if names:
                wrong[layout, folder.name, tied, when] = names[:3]
    assert not wrong


def with_ties(values: Content, is_tied: bool) -> Content:
    """The values with a tied tensor under both of its names."""
    names = ("embedding.", "head.")
    other = {n.replace(a, b): value for n, value in values.items() for a, b in (names, names[::-1])} if is_tied else {}
    return {**other, **values}


@pytest.mark.exhaustive
def test_every_layout_loads_every_other_one_and_continues_bitwise(saved: Saved) -> None:
    check_matrix(saved, SMALL)


@only_in_torture  # 242 loads
def test_all_layouts_tied_or_not(tmp_path: Path) -> None:
    check_matrix(saved_by(tmp_path, [(layout, is_tied) for layout in LAYOUTS for is_tied in (False, True)]), [*LAYOUTS])


def test_each_process_writes_only_its_share_and_nothing_twice(saved_untied: Saved) -> None:
    folder, (values, _) = saved_untied["zero 2, tp 2", False]
    sizes = {p.name: p.stat().st_size for p in (folder / "one").glob("optimizer-*.safetensors")}
    assert len(sizes) == 4
    tensors = sum(v.nbytes for name, v in values.items() if name.startswith("optimizer.") and "settings" not in name)
    headers = sum(8 + int.from_bytes(p.read_bytes()[:8], "little") for p in (folder / "one").glob("optimizer-*.safet*"))
    assert sum(sizes.values()) == tensors + headers
    assert max(sizes.values()) < sum(sizes.values()) / 3


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_own_reader_opens_the_tensors(saved_untied: Saved) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    for folder, (values, _) in saved_untied.values():
        expected = {n.removeprefix("model."): value for n, value in values.items() if n.startswith("model.")}
        expected |= {
            n.replace("optimizer.", "state."): value
            for n, value in values.items()
            if n.endswith(("exp_avg", "exp_avg_sq"))
        }
        state = {name: torch.zeros_like(value) for name, value in expected.items()}
        dcp.load(state, storage_reader=HuggingFaceStorageReader(str(folder / "one")), no_dist=True)
        assert all(torch.equal(state[name], value) for name, value in expected.items())
