"""Freezing, held against loops written by hand."""

import copy
import io
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import TensorDataset

from tests.toys import quiet
from trainwright import Trainer, TrainingConfig
from trainwright.base.errors import ConfigError, ConfigTypeError
from trainwright.models.eval_mode import set_training_mode
from trainwright.optim import LayerFreezer, build_optimizer, freeze_bn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.norm(self.linear(x)).relu())


class Net(nn.Module):
    """Nested, with a parameter outside of any layer and a weight that stands in two layers."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(width))
        self.encode = nn.Linear(width, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.norm = nn.LayerNorm(width)
        self.decode = nn.Linear(width, width)
        self.decode.weight = self.encode.weight
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.decode(self.norm(self.blocks(self.encode(x) + self.shift))))


LAYERS = ["encode", "blocks", "norm", "decode", "head"]
BATCHES = [torch.randn(8, 6, generator=torch.Generator().manual_seed(step)) for step in range(4)]


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype = torch.float32) -> None:
    torch.manual_seed(1)
    for batch in BATCHES:
        model.train()
        loss_of(model, batch.to(dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)


# Against a loop by hand.


@pytest.mark.exhaustive(every=6)
@pytest.mark.parametrize("draw", range(12))
@pytest.mark.parametrize("how", ["by_names", "by_idx", "set_slice"])
def test_frozen_layers_stay_and_the_others_learn_as_in_a_loop_by_hand(draw: int, how: str) -> None:
    """By hand: a gradient and a step of the trainable parameters alone, and norms in evaluation mode."""
    chosen = random.Random(draw)
    # A bias before a norm has no gradient but rounding, which AdamW makes steps of unless it is far below its eps.
    model = Net().double()
    by_hand = copy.deepcopy(model)
    before = state_of(model)
    frozen = chosen.sample(LAYERS, chosen.randrange(1, len(LAYERS)))
    if how == "by_names":
        LayerFreezer(model).by_names(frozen)
    elif how == "by_idx":
        LayerFreezer(model).by_idx([LAYERS.index(n) - chosen.choice([0, len(LAYERS)]) for n in frozen])
    else:
        end = chosen.choice([1, 2, 3, 4, -1, -2, -3, -4])
        frozen = LAYERS[:end]
        LayerFreezer(model).set_slice(end)
    train(model, adamw(model), torch.float64)

    still = {name for name in before if name.split(".")[0] in frozen}
    if {"encode", "decode"} & set(frozen):
        still |= {"encode.weight", "decode.weight"}  # one tensor
    learning = [parameter for name, parameter in by_hand.named_parameters() if name not in still]
    optimizer = torch.optim.AdamW(learning, lr=0.1, weight_decay=0.5)
    torch.manual_seed(1)
    for batch in BATCHES:
        by_hand.train()
        for name, module in by_hand.named_modules():
            if isinstance(module, nn.BatchNorm1d) and name.split(".")[0] in frozen:
                module.eval()
        gradients = torch.autograd.grad(loss_of(by_hand, batch.double()), learning)
        for parameter, gradient in zip(learning, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()

    after = state_of(model)
    for name, expected in by_hand.state_dict().items():
        if name in still:
            assert torch.equal(after[name], before[name]), name
        else:
            torch.testing.assert_close(after[name], expected, rtol=1e-6, atol=1e-6)
            assert not torch.equal(after[name], before[name]), name


@pytest.mark.parametrize("optimizer_of", [adamw, lambda m: torch.optim.SGD(m.parameters(), 0.1, 0.9, weight_decay=0.5)])
def test_freezing_in_the_middle_stops_decay_momentum_and_gradients_that_are_there(optimizer_of: Callable) -> None:
    model = Net()
    optimizer = optimizer_of(model)
    train(model, optimizer)
    loss_of(model, BATCHES[0]).backward()
    LayerFreezer(model).by_names(["blocks", "shift"])
    assert model.shift.grad is None
    before = state_of(model)
    optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer)
    after = state_of(model)
    assert {n for n in before if torch.equal(before[n], after[n])} == {"shift", *(n for n in before if "blocks" in n)}


def test_what_is_let_go_learns_as_if_it_had_never_been_frozen() -> None:
    model = Net()
    never = copy.deepcopy(model)
    freezer = LayerFreezer(model)
    freezer.set_all()
    model.eval()
    model.train()
    freezer.set_all(freeze=False)
    assert freezer.show_frozen_layers() == []
    assert [m.training for m in model.modules()] == [m.training for m in never.modules()]
    train(model, adamw(model))
    train(never, adamw(never))
    assert same(state_of(model), state_of(never))


# What the freezer says.


def test_layers_are_reported_as_they_are_now(capsys: pytest.CaptureFixture[str]) -> None:
    freezer = LayerFreezer(Net())
    assert (freezer.layer_names, freezer.layer_count) == (LAYERS, 5)
    freezer.by_idx([-1])
    assert freezer.status("head") == freezer.status(4) == freezer.status(-1) == ["frozen", "frozen"]
    assert freezer.status("norm") == ["unfrozen", "unfrozen"]
    assert capsys.readouterr().out.splitlines()[-1] == "layer norm: unfrozen, unfrozen"
    assert LayerFreezer(nn.Sequential(nn.ReLU())).status(0) == []

    model = Net()
    freezer = LayerFreezer(model)
    freezer.by_names(["blocks.1.linear"])
    assert freezer.show_frozen_layers() == ["blocks"]
    freezer.by_names("encode")
    assert freezer.show_frozen_layers() == ["encode", "blocks", "decode"], "its weight stands in decode, too"
    assert freezer.status("decode") == ["frozen", "unfrozen"]

    model = Net()
    freezer = LayerFreezer(model)
    freezer.by_names(["head"])
    model.head = nn.Linear(6, 2)
    model.extra = nn.Linear(1, 1)
    assert freezer.show_frozen_layers() == []
    assert freezer.layer_names[-1] == "extra"


def test_slices_sets_and_whole_numbers() -> None:
    model = Net()
    LayerFreezer(model).set_slice(-1)
    assert [n for n, p in model.named_parameters() if p.requires_grad] == ["shift", "head.weight", "head.bias"]
    LayerFreezer(model).set_all()
    assert not any(p.requires_grad for p in model.parameters())

    model = nn.Sequential(nn.Linear(2, 2))
    model[0].codes = nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)
    LayerFreezer(model).set_all()
    LayerFreezer(model).set_all(freeze=False)
    assert [p.requires_grad for p in model.parameters()] == [True, True, False]


# Errors. None changes anything.


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        (lambda f: f.by_idx([0, 5, -6]), IndexError, r"Net has no layer 5, -6; it has 5: give 0 to 4, or -1 to -5"),
        (lambda f: f.status(7), ValueError, "no layer 7"),
        (lambda f: f.by_idx([0, "1"]), TypeError, r"by_idx: got '1'; it must be a whole number"),
        (lambda f: f.by_idx([True]), TypeError, "by_idx: got True"),
        (lambda f: f.by_names(["head", "haed"]), ValueError, r"by_names: Net has no layer 'haed'. Did you mean 'head'"),
        (lambda f: f.by_names(["blocks.0.lin"]), KeyError, r"Did you mean 'blocks.0.linear'"),
        (
            lambda f: f.by_names(["haed", "xyz"]),
            ValueError,
            r"(?s)'haed'.*'xyz'. Allowed: blocks, decode, encode, head",
        ),
        (lambda f: f.by_names(["head", ""]), ValueError, "no layer ''"),
        (lambda f: f.by_names([0]), TypeError, "by_names: got 0; it must be the name"),
        (lambda f: f.status("haed"), ValueError, "status: Net has no layer 'haed'"),
        (lambda f: f.set_slice(0), ValueError, "set_slice: got 0, which is none of the 5 layers; give 1 to 5"),
        (lambda f: f.set_slice(-5), ValueError, "set_slice: got -5"),
        (lambda f: f.set_slice(1.5), TypeError, "set_slice: got 1.5"),
    ],
)
def test_what_the_model_does_not_have_is_said(call: Callable, kind: type[Exception], said: str) -> None:
    freezer = LayerFreezer(Net())
    with pytest.raises(kind, match=said):
        call(freezer)
    assert freezer.show_frozen_layers() == []


@pytest.mark.parametrize("model", [nn.Linear(2, 2), DataParallel(nn.Linear(2, 2))])
def test_a_model_without_layers_is_said(model: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"LayerFreezer.model: Linear has no layers.*requires_grad_"):
        LayerFreezer(model)


def test_a_model_that_is_none_or_wholly_frozen_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigTypeError, match=r"LayerFreezer.model: got dict"):
        LayerFreezer({})
    with pytest.raises(ConfigTypeError, match=r"freeze_bn.model: got dict"):
        freeze_bn({})

    model = Net()
    LayerFreezer(model).set_all()
    with pytest.raises(ConfigError, match="nothing to train"):
        build_optimizer({"_target_": torch.optim.SGD, "lr": 0.1}, model)
    with pytest.raises(ConfigError, match="no trainable parameter"):
        Trainer(model, TrainingConfig(output_dir=str(tmp_path)), TensorDataset(BATCHES[0], torch.zeros(8).long()))


# BatchNorm.


def norms() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 6),
        nn.BatchNorm1d(6),
        nn.Sequential(nn.BatchNorm1d(6, momentum=None, affine=False), nn.Dropout(0.1)),
    )


def test_batch_norm_normalizes_by_statistics_that_stay_and_learns_its_scale_as_by_hand() -> None:
    model, by_hand = norms(), norms()
    for value in model.buffers():
        value += 3
    by_hand.load_state_dict(model.state_dict())
    before = state_of(model)
    assert freeze_bn(model) == 2
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))

    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    torch.manual_seed(1)
    for batch in BATCHES:
        by_hand.train()
        by_hand[1].eval()
        by_hand[2][0].eval()
        loss_of(by_hand, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = state_of(model)
    assert same(after, state_of(by_hand))
    assert {name for name in after if torch.equal(after[name], before[name])} == {n for n, _ in model.named_buffers()}


def test_a_layer_that_is_let_go_leaves_evaluation_mode() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.1)), nn.Linear(6, 2))
    freezer = LayerFreezer(model)
    freezer.by_idx(0)
    model[0].eval()
    set_training_mode(model)
    assert [module.training for module in model[0].modules()] == [False] * 3
    freezer.by_idx(0, freeze=False)
    assert all(module.training for module in model.modules())


def test_letting_a_layer_go_leaves_batch_norm_as_freeze_bn_has_it_and_the_other_way_round() -> None:
    model = norms()
    freezer = LayerFreezer(model)
    for first, second in [
        (freezer.set_all, lambda f: freeze_bn(model, f)),
        (lambda f: freeze_bn(model, f), freezer.set_all),
    ]:
        first(True)
        second(True)
        first(False)
        model.train()
        assert not model[1].training
        second(False)
        assert model[1].training


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickled(m)], ids=["deepcopy", "pickle"])
def test_a_copy_is_frozen_for_itself(copied: Callable) -> None:
    model = norms()
    freeze_bn(model)
    other = copied(model).train()
    assert not other[1].training
    freeze_bn(other, freeze=False)
    assert other[1].training
    assert not model.train()[1].training


def pickled(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


# Wrappers.


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


@pytest.mark.exhaustive(every=3)
@pytest.mark.parametrize("wrap", [DataParallel, compiled, lambda m: DataParallel(compiled(m))])
def test_wrapped_models_are_frozen_by_their_own_names(wrap: Callable) -> None:
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    for one in (wrap(model), plain):
        freezer, optimizer = LayerFreezer(one), adamw(one)
        assert freezer.layer_names == LAYERS
        freezer.by_names(["encode"])
        freeze_bn(one)
        train(one, optimizer)
        freezer.by_names(["head"])  # between steps, which a compiled model has to notice
        freezer.by_names(["encode"], freeze=False)
        train(one, optimizer)
    assert same(state_of(model), state_of(plain))


@pytest.mark.parametrize("is_later", [False, True], ids=["before", "after"])
def test_data_parallel_processes_train_what_is_not_frozen(process_group: None, is_later: bool) -> None:
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    for one in (plain,) if is_later else (plain, model):
        LayerFreezer(one).by_names(["blocks"])
    wrapped = DistributedDataParallel(model, find_unused_parameters=is_later)
    if is_later:
        LayerFreezer(wrapped).by_names(["blocks"])
    assert LayerFreezer(wrapped).show_frozen_layers() == ["blocks"]
    train(wrapped, adamw(wrapped))
    train(plain, adamw(plain))
    assert same(state_of(model), state_of(plain))


def test_what_would_leave_gradients_unexchanged_is_refused(process_group: None) -> None:
    model = Net()
    LayerFreezer(model).by_names(["head"])
    freezer = LayerFreezer(compiled(DistributedDataParallel(model)))
    freezer.by_names(["head"])  # is so already
    with pytest.raises(ConfigError, match=r"2 parameters.*Freeze before wrapping.*find_unused"):
        freezer.by_names(["encode"])
    with pytest.raises(ConfigError, match=r"2 parameters would join it. Unfreeze before wrapping"):
        freezer.set_all(freeze=False)
    assert freezer.show_frozen_layers() == ["head"]


# In a run.


def run(folder: Path, *, max_steps: int, resume: bool) -> nn.Module:
    torch.manual_seed(0)
    model = Net()
    LayerFreezer(model).by_names(["encode"])
    freeze_bn(model)
    data = TensorDataset(torch.cat(BATCHES), torch.arange(32) % 3)
    config = quiet(
        folder, num_epochs=3, max_steps=max_steps, save_steps=2, lr=0.1, weight_decay=0.5, resume_from_checkpoint=resume
    )
    trainer = Trainer(model, config, data, data)
    trainer.train()
    return model


def test_a_frozen_run_that_is_resumed_is_the_uninterrupted_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    before = state_of(Net())
    whole = state_of(run(tmp_path / "whole", max_steps=12, resume=False))
    run(tmp_path / "parts", max_steps=5, resume=False)
    assert same(state_of(run(tmp_path / "parts", max_steps=12, resume=True)), whole)
    still = {name for name in whole if torch.equal(whole[name], before[name])}
    kept = ("encode.", "decode.weight", "running", "num_batches_tracked")
    assert still == {name for name in before if any(part in name for part in kept)}
