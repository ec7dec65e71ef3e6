"""Whether the batches of several processes are the same."""

import torch

from tests.ranks import on_ranks
from trainwright.base.dist import gather_over_pipeline
from trainwright.base.errors import ConfigError
from trainwright.parallel.batch_comparison import check_same, shapes_of
from trainwright.parallel.layout import Layout
from trainwright.parallel.mesh import use_layout

IDS = torch.arange(16).view(2, 8)


def test_shapes_do_not_depend_on_values_but_on_types() -> None:
    assert shapes_of({"ids": IDS}) == shapes_of({"ids": IDS + 1})
    assert shapes_of({"ids": IDS}) != shapes_of({"ids": IDS.float()})
    assert shapes_of({"ids": IDS}) != shapes_of({"labels": IDS})


def differences() -> dict[str, str]:
    """The message of each pair of batches: the one of the first stage, that of the second one."""
    mesh = use_layout(Layout(pipeline=2), "cpu")
    assert mesh is not None
    pairs = {
        "same": ({"ids": IDS, "empty": IDS[:0]}, {"ids": IDS.clone(), "empty": IDS[:0]}),
        "values": ({"ids": IDS, "labels": IDS}, {"ids": IDS, "labels": IDS + 1}),
        "shapes": ({"ids": IDS}, {"ids": IDS.view(4, 4)}),
        "names": ({"ids": IDS}, {"tokens": IDS}),
        "tuples": ((IDS, IDS), (IDS, IDS + 1)),
    }
    found = {}
    for name, pair in pairs.items():
        try:
            check_same([pair[0], pair[mesh.pipeline_rank]], gather_over_pipeline, "Pipeline stages")
        except ConfigError as error:
            found[name] = str(error).partition(". All of them")[0].partition("batches: ")[2]
    return found


def test_different_batches_are_an_error_on_all_stages() -> None:
    expected = {
        "values": "'labels' differ",
        "shapes": "'ids' differ",
        "names": "its fields differ",
        "tuples": "its fields differ",
    }
    assert on_ranks(differences) == [expected, expected]
