"""ZeRO and its hybrid through both APIs: losses, norms and evaluations are those of one process."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.layout_runs import APIS, assert_equal_runs, train, train_on_ranks

ZERO_2 = {"zero_stage": 2}
ZERO_3 = {"zero_stage": 3}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"accumulation": 2},
    "untied, recomputed": {"tied": False, "recompute": True, "clip": 0.2},
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    """The runs of one process."""
    base = tmp_path_factory.mktemp("alone")
    return {
        (api, name): train(api, base / api / name, **settings) for api in APIS for name, settings in SETTINGS.items()
    }


@pytest.mark.parametrize(
    ("world_size", "runs"),
    [
        (2, [(ZERO_3, "plain"), (ZERO_2, "accumulation"), ({"zero_stage": 1}, "plain"), (ZERO_3, "accumulation")]),
        (3, [(ZERO_3, "untied, recomputed")]),
        (4, [({"zero_stage": 3, "replicate_size": 2}, "plain"), (ZERO_2, "untied, recomputed")]),
    ],
    ids=["two", "three", "four"],
)
@pytest.mark.parametrize("api", APIS)
def test_equals_one_process(
    api: str, world_size: int, runs: list[tuple[dict[str, Any], str]], alone: dict[Any, Any], tmp_path: Path
) -> None:
    calls = [(api, {"layout": layout, **SETTINGS[name]}) for layout, name in runs]
    ranks = train_on_ranks(tmp_path, calls, world_size=world_size)
    for found in ranks[:1] if world_size > 2 else ranks:
        for (_, name), run in zip(runs, found, strict=True):
            assert_equal_runs(run, alone[api, name])
