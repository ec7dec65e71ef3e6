import json
import logging
import os
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.toys import Tied
from trainwright import checkpoint
from trainwright.base.errors import MissingFileError
from trainwright.checkpoint import CheckpointError, CheckpointTypeError
from trainwright.models import init_weights
from trainwright.optim.weight_average import WeightAverage

# A save is on disk when it returns.
Checkpointer = partial(checkpoint.Checkpointer, asynchronous=False)


def two_layers(hidden=4):
    return nn.Sequential(nn.Linear(2, hidden), nn.BatchNorm1d(hidden), nn.Linear(hidden, 3))


def equal(first, second):
    return all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())


def test_wrappers_leave_no_trace_in_the_names(tmp_path):
    model = two_layers()
    Checkpointer(nn.DataParallel(model), tmp_path).save("wrapped")
    Checkpointer(torch.compile(model, backend="eager"), tmp_path).save("compiled")
    for name in ("wrapped", "compiled"):
        assert set(load_file(tmp_path / name / "model.safetensors")) == set(model.state_dict())
        other = nn.DataParallel(two_layers())
        Checkpointer(other).load(tmp_path / name)
        assert equal(model, other.module)


def with_compiled_part():
    model = two_layers()
    model[0] = torch.compile(model[0], backend="eager")
    return model


@pytest.mark.parametrize("saves", [two_layers, with_compiled_part])
@pytest.mark.parametrize("loads", [two_layers, with_compiled_part])
def test_a_compiled_part_leaves_no_trace_in_the_names(tmp_path, saves, loads):
    def built(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.randn(5, 2)).sum().backward()
        optimizer.step()
        average = WeightAverage(model)
        average.update()
        return {"optimizer": optimizer, "average": average}

    model, other = saves(), loads()
    states, others = built(model), built(other)
    Checkpointer(model, tmp_path, **states).save("a")
    assert set(load_file(tmp_path / "a" / "model.safetensors")) == set(two_layers().state_dict())
    Checkpointer(other, **others).load(tmp_path / "a")
    momenta = [[state["momentum_buffer"] for state in one["optimizer"].state.values()] for one in (states, others)]
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))
    assert all(map(torch.equal, *momenta))
    third = loads()
    Checkpointer(third).load(tmp_path / "a", checkpointables=[])
    assert init_weights(third, tmp_path / "a") == []
    assert all(map(torch.equal, third.state_dict().values(), model.state_dict().values()))


def test_names_saved_inside_a_wrapper_elsewhere_are_understood(tmp_path):
    model, other = two_layers(), two_layers()
    names = {name: f"module._orig_mod.{name.replace('.', '._orig_mod.', 1)}" for name in model.state_dict()}
    torch.save({names[name]: value for name, value in model.state_dict().items()}, tmp_path / "w.pt")
    Checkpointer(other).load(tmp_path / "w.pt", checkpointables=[])
    assert equal(model, other)
    parts = [nn.ModuleDict({"module": nn.Linear(1, 1)}) for _ in range(2)]  # a part's own name stays
    Checkpointer(parts[0], tmp_path).save("a")
    Checkpointer(parts[1]).load(tmp_path / "a")
    assert equal(*parts)


def test_tied_weights_are_saved_once_and_restored_everywhere(tmp_path):
    model, tied, untied = Tied(), Tied(), Tied()
    untied.head.weight = nn.Parameter(torch.zeros(6, 4))
    Checkpointer(model, tmp_path).save("a")
    assert len(load_file(tmp_path / "a" / "model.safetensors")) == 3
    for other in (tied, untied):
        Checkpointer(other).load(tmp_path / "a")
        assert equal(model, other)
    assert tied.head.weight is tied.embedding.weight


def test_one_of_several_tied_names_is_enough(tmp_path, caplog):
    model = Tied()
    save_file(
        {"head.weight": torch.ones(6, 4), "inner.weight": torch.ones(4, 4), "inner.bias": torch.ones(4)},
        tmp_path / "w.safetensors",
    )
    with caplog.at_level(logging.INFO, "trainwright"):
        Checkpointer(model).load(tmp_path / "w.safetensors", checkpointables=[])
    assert torch.equal(model.embedding.weight, torch.ones(6, 4))
    assert "not in the file" not in caplog.text


def test_weights_of_another_shape_are_left_out_with_one_warning(tmp_path, caplog):
    model, other = two_layers(hidden=4), two_layers(hidden=4)
    other[2] = nn.Linear(4, 7)
    Checkpointer(model, tmp_path).save("a", iteration=3)
    kept = other[2].weight.clone()
    extras = Checkpointer(other).load(tmp_path / "a", checkpointables=[])
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "2.weight: shape (3, 4) there, (7, 4) in the model" in record.message
    assert "2.bias: shape (3,) there, (7,) in the model" in record.message
    assert torch.equal(other[2].weight, kept)
    assert torch.equal(other[0].weight, model[0].weight)
    assert extras == {"iteration": 3}


def test_missing_and_unexpected_names_are_logged_by_module(tmp_path, caplog):
    model = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    weights = {"body.weight": (2, 2), "body.bias": (2,), "old.a": (1,), "old.b": (1,)}
    save_file({name: torch.ones(shape) for name, shape in weights.items()}, tmp_path / "w.safetensors")
    with caplog.at_level(logging.INFO, "trainwright"):
        Checkpointer(model).load(tmp_path / "w.safetensors", checkpointables=[])
    (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert "in the model, not in the file: head.{weight, bias}" in warning
    assert "in the file, not in the model: old.{a, b}" in caplog.text


def test_weights_of_which_nothing_fits_are_an_error(tmp_path):
    save_file({"encoder.weight": torch.ones(2, 2)}, tmp_path / "w.safetensors")
    with pytest.raises(
        CheckpointError,
        match=r"encoder\.weight(.|\n)*0\.weight",
    ):
        Checkpointer(two_layers()).load(tmp_path / "w.safetensors", checkpointables=[])


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), "not in the checkpoint: 1.{weight, bias}"),
        (nn.Sequential(nn.Linear(2, 3, bias=False)), "not in the model: 0.bias"),
        (nn.Sequential(nn.Linear(2, 4)), "0.weight: shape (3, 2) there, (4, 2) in the model"),
        (nn.Sequential(nn.Linear(2, 3)).half(), "0.weight: torch.float32 there, torch.float16 in the model"),
    ],
)
def test_a_full_load_takes_no_other_model_and_leaves_it_as_it_was(tmp_path, other, says):
    Checkpointer(nn.Sequential(nn.Linear(2, 3)), tmp_path).save("a")
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(CheckpointError) as raised:
        Checkpointer(other).load(tmp_path / "a")
    assert says in str(raised.value)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in before.items())


class WithExtraState(nn.Linear):
    def __init__(self, extra_state):
        super().__init__(2, 2)
        self.extra_state = extra_state

    def get_extra_state(self):
        return self.extra_state

    def set_extra_state(self, state):
        self.extra_state = state


@pytest.mark.parametrize("extra_state", [{"steps": (1, 2), "scale": torch.ones(2)}, torch.arange(3), None])
def test_extra_state_of_modules_is_saved_too(tmp_path, extra_state):
    Checkpointer(WithExtraState(extra_state), tmp_path).save("a")
    other = WithExtraState("other")
    Checkpointer(other).load(tmp_path / "a")
    assert repr(other.extra_state) == repr(extra_state)


def test_extra_state_that_cannot_be_saved_is_refused_with_its_place(tmp_path):
    with pytest.raises(CheckpointTypeError, match=r"_extra_state: got <class 'object'>"):
        Checkpointer(WithExtraState(object()), tmp_path).save("a")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("model", [nn.Linear(2, 2, device="meta"), nn.LazyLinear(2)])
def test_a_model_without_data_is_refused_at_both_ends(tmp_path, model):
    Checkpointer(nn.Linear(2, 2), tmp_path).save("a")
    with pytest.raises(CheckpointTypeError, match=r"model\.weight: got a"):
        Checkpointer(model, tmp_path).save("b")
    with pytest.raises(CheckpointTypeError, match=r"model\.weight: got a"):
        Checkpointer(model).load(tmp_path / "a", checkpointables=[])


@pytest.mark.parametrize("wrap", [lambda state: state, lambda state: {"state_dict": state, "epoch": 3}])
def test_a_plain_torch_file_gives_its_weights(tmp_path, wrap):
    model, other = two_layers(), two_layers()
    torch.save(wrap(model.state_dict()), tmp_path / "w.pth")
    assert Checkpointer(other).load(tmp_path / "w.pth", checkpointables=[]) == {}
    assert equal(model, other)


@pytest.mark.parametrize(
    ("name", "content", "options", "fact"),
    [
        *(("w.pt", content, {"checkpointables": []}, "expected") for content in ([1, 2], {"a": 3}, torch.ones(2))),
        ("w.bin", {}, {"checkpointables": []}, r"w\.bin: "),
        ("w.safetensors", {"0.weight": torch.ones(2)}, {}, r"checkpointables=\[\]"),  # weights are no full checkpoint
    ],
)
def test_a_file_that_holds_no_weights_or_only_weights_is_named(tmp_path, name, content, options, fact):
    if name.endswith("safetensors"):
        save_file(content, tmp_path / name)
    else:
        torch.save(content, tmp_path / name)
    with pytest.raises(CheckpointError, match=fact):
        Checkpointer(two_layers()).load(tmp_path / name, **options)


def test_a_path_that_does_not_exist_names_the_nearest_checkpoint(tmp_path):
    Checkpointer(two_layers(), tmp_path).save("model_0000009")
    with pytest.raises(MissingFileError, match=r"model_000009: .*'model_0000009'"):
        Checkpointer(two_layers()).load(tmp_path / "model_000009")
    with pytest.raises(MissingFileError, match="There is no checkpoint in"):
        Checkpointer(two_layers()).load(tmp_path / "elsewhere" / "x")


def test_expanded_buffers_come_back(tmp_path):
    class Positions(nn.Module):
        def __init__(self, value):
            super().__init__()
            self.register_buffer("same", torch.arange(4.0).expand(3, 4))
            self.register_buffer("other", torch.tensor([value]).expand(3, 4))
            self.layer = nn.Linear(1, 1)

    saved, model = Positions(1.0), Positions(2.0)
    weight = model.layer.weight
    Checkpointer(saved, tmp_path).save("model_0000009", iteration=9)
    Checkpointer(model, tmp_path).load(tmp_path / "model_0000009")
    for name, value in saved.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert model.layer.weight is weight


class Bank(nn.Module):
    """A memory that gets its shape in training, and loads whatever was saved."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.zeros(0, 2))

    def forward(self, inputs):
        self.rows = torch.cat([self.rows, inputs.detach()])
        return inputs + self.rows.mean(0)

    def _load_from_state_dict(self, state, prefix, *more):
        self.rows = torch.zeros_like(state[f"{prefix}rows"])
        super()._load_from_state_dict(state, prefix, *more)


class HookedBank(Bank):
    _load_from_state_dict = nn.Module._load_from_state_dict

    def __init__(self):
        super().__init__()
        self.register_load_state_dict_pre_hook(make_rows)


def make_rows(module, state, prefix, *more):
    module.rows = torch.zeros_like(state[f"{prefix}rows"])


class Root(nn.Sequential):
    """Its own ``load_state_dict`` does it."""

    def load_state_dict(self, state_dict, strict=True, assign=False):
        self.rows = torch.zeros_like(state_dict["rows"])
        return super().load_state_dict(state_dict, strict, assign)


def with_root():
    model = Root(nn.Linear(2, 2))
    model.register_buffer("rows", torch.zeros(0, 2))
    model.register_forward_hook(lambda module, inputs, output: Bank.forward(module, output))
    return model


def quantized():
    model = two_layers().train()
    model.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
    return torch.ao.quantization.prepare_qat(model)


SELF_LOADING = {
    "bank": lambda: nn.Sequential(nn.Linear(2, 2), Bank(), nn.BatchNorm1d(2)),
    "compiled": lambda: nn.Sequential(torch.compile(nn.Sequential(nn.Linear(2, 2), Bank()), backend="eager")),
    "hooked": lambda: nn.Sequential(nn.Linear(2, 2), HookedBank()),
    "root": with_root,
    "quantized": quantized,
}


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore:.*reduce_range", "ignore:.*qconfig")
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("kind", SELF_LOADING)
def test_modules_that_load_themselves_load_what_they_saved(tmp_path, kind, strict):
    model = SELF_LOADING[kind]()
    for _ in range(3):
        model(torch.randn(4, 2))
    Checkpointer(model, tmp_path).save("a")
    other = SELF_LOADING[kind]()
    Checkpointer(other).load(tmp_path / "a", None if strict else [])
    assert equal(model, other)
    if kind != "quantized":
        assert any(len(buffer) == 12 for buffer in other.buffers() if buffer.dim() == 2)
    assert torch.equal(model(torch.ones(3, 2)), other(torch.ones(3, 2)))


def test_the_other_modules_of_such_a_model_are_checked_as_usual(tmp_path):
    Checkpointer(nn.Sequential(nn.Linear(2, 2), Bank()), tmp_path).save("a")
    other = nn.Sequential(nn.Linear(2, 3), Bank())
    with pytest.raises(CheckpointError, match=r"0\.weight: shape \(2, 2\) there, \(3, 2\) in the model"):
        Checkpointer(other).load(tmp_path / "a")


def test_a_file_of_weights_that_is_missing_is_named_with_the_list(tmp_path):
    model, index = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), tmp_path / "model.safetensors.index.json"
    names = {name: f"model-0000{1 + (name[0] == '1')}-of-00002.safetensors" for name in model.state_dict()}
    first = {name: value for name, value in model.state_dict().items() if name[0] == "0"}
    save_file(first, tmp_path / names["0.weight"])
    index.write_text(json.dumps({"weight_map": names}))
    with pytest.raises(MissingFileError, match=r"index\.json: 1 of the 2 files .* model-00002-of-00002\.safetensors"):
        Checkpointer(model).load(tmp_path, [])
