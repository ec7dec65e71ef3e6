"""The recipe with low precision, where its libraries are installed: the numbers of a plain loop, an exact resume."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.examples.test_recipes import recipe as load
from tests.toys import assert_equal_weights

RECIPE = load("low_precision")


@pytest.mark.filterwarnings("ignore")  # of these libraries
@pytest.mark.parametrize("kind", RECIPE.KINDS)
def test_low_precision_is_that_of_a_plain_loop_and_resumes_exactly(kind: str, tmp_path: Path) -> None:
    pytest.importorskip(RECIPE.KINDS[kind], reason=f"pip install {RECIPE.KINDS[kind].replace('_', '-')}")
    if kind == "liger" and not torch.cuda.is_available():
        pytest.skip("needs a GPU, and Triton")

    torch.manual_seed(0)
    model = RECIPE.changed(RECIPE.Classifier(), kind)
    optimizer = RECIPE.optimizer_of(model, kind)
    inputs, labels = RECIPE.data().tensors
    for _ in range(4):
        for start in range(0, len(labels), 32):
            model(inputs[start : start + 32], labels[start : start + 32])["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()

    whole = RECIPE.build(kind, tmp_path / "whole")
    whole.train()
    weights = dict(model.named_parameters())
    for name, weight in whole.model.named_parameters():
        assert torch.equal(weight, weights[name]), name

    RECIPE.build(kind, tmp_path / "cut", num_epochs=2).train()
    resumed = RECIPE.build(kind, tmp_path / "cut", resume=True)
    resumed.train()
    assert_equal_weights(resumed.model, whole.model)
    RECIPE.Classifier().load_state_dict(
        load_file(tmp_path / "cut/final_epoch/model.safetensors")
    )  # the unchanged model
