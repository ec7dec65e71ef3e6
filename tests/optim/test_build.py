import copy

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from trainwright.base.errors import ConfigError, ConfigKeyError, ConfigTypeError
from trainwright.config import LazyCall
from trainwright.optim import (
    WarmupCosineLR,
    build_lr_scheduler,
    build_optimizer,
    get_default_optimizer_params,
    reduce_param_groups,
)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))


def documented(**changes: object) -> DictConfig:
    """The optimizer of the documents."""
    return LazyCall(torch.optim.AdamW)(
        params=LazyCall(get_default_optimizer_params)(
            clip_grad_max_norm=1.0, clip_grad_norm_type=2.0, weight_decay_norm=0.0, weight_decay_bias=0.0
        ),
        **{"lr": 1e-4, "weight_decay": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "do_bias_correction": True, **changes},
    )


class Uncopyable:
    def __deepcopy__(self, memo):
        raise AssertionError("copied")


def sgd_with(params, lr, carried):
    assert isinstance(carried, Uncopyable)
    return torch.optim.SGD(params, lr=lr)


def test_the_documented_optimizer_trains_the_model_it_is_given():
    cfg, net = documented(), model()
    before = copy.deepcopy(cfg)
    optimizer = build_optimizer(cfg, net)
    assert cfg == before
    assert type(optimizer) is torch.optim.AdamW
    groups = [
        (len(group["params"]), group["weight_decay"], group["clip_grad_max_norm"]) for group in optimizer.param_groups
    ]
    assert groups == [(1, 0.01, 1.0), (3, 0.0, 1.0)]
    assert optimizer.param_groups[0]["betas"] in ((0.9, 0.999), [0.9, 0.999])
    net(torch.randn(2, 3)).square().sum().backward()
    optimizer.step()


def test_a_configuration_may_be_locked_or_plain():
    root = DictConfig({"base": 0.5, "optim": documented(lr="${base}")}, flags={"allow_objects": True})
    OmegaConf.set_struct(root, True)
    OmegaConf.set_readonly(root, True)
    assert build_optimizer(root.optim, model()).param_groups[0]["lr"] == 0.5
    assert root.optim.do_bias_correction is True
    assert OmegaConf.is_readonly(root.optim)
    assert OmegaConf.is_struct(root.optim)

    cfg = {
        "_target_": "torch.optim.SGD",
        "params": {"_target_": "trainwright.optim.get_default_optimizer_params", "base_lr": 0.3},
        "lr": 0.1,
    }
    assert [group["lr"] for group in build_optimizer(cfg, model()).param_groups] == [0.3]
    assert set(cfg["params"]) == {"_target_", "base_lr"}

    root = DictConfig({"optim": documented(weigth_decay=1.0)}, flags={"allow_objects": True})
    with pytest.raises(ConfigTypeError, match=r"(?s)optim.*weigth_decay"):
        build_optimizer(root.optim, model())


def test_parameters_are_those_of_the_model_or_those_given():
    net = model()
    optimizer = build_optimizer({"_target_": torch.optim.SGD, "lr": 0.1, "do_bias_correction": True}, net)
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in net.parameters()}

    net = model()
    optimizer = build_optimizer({"_target_": torch.optim.SGD, "params": net[0].parameters(), "lr": 0.1}, net)
    assert optimizer.param_groups[0]["params"] == list(net[0].parameters())
    groups = [{"params": list(net[0].parameters()), "lr": 0.5}, {"params": list(net[1].parameters())}]
    optimizer = build_optimizer({"_target_": torch.optim.SGD, "params": groups, "lr": 0.1}, net)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]

    parameter = nn.Parameter(torch.ones(1))
    optimizer = build_optimizer(
        {"_target_": torch.optim.SGD, "params": {"_target_": lambda: [parameter]}, "lr": 0.1}, model()
    )
    assert optimizer.param_groups[0]["params"][0] is parameter


def test_objects_are_not_copied_and_built_ones_given_back():
    cfg = LazyCall(sgd_with)(lr=0.1, carried=Uncopyable(), do_bias_correction=True)
    assert isinstance(build_optimizer(cfg, model()), torch.optim.SGD)

    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    assert build_optimizer(optimizer, net) is optimizer
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    assert build_lr_scheduler(schedule, optimizer) is schedule


def test_do_bias_correction_is_for_optimizers_that_take_it():
    class Adam(torch.optim.SGD):
        def __init__(self, params, lr, do_bias_correction):
            super().__init__(params, lr=lr)
            self.corrects = do_bias_correction

    cfg = {"_target_": Adam, "lr": 0.1, "do_bias_correction": False}
    assert build_optimizer(cfg, model()).corrects is False

    with pytest.raises(ConfigError, match=r"optim.do_bias_correction: got False; AdamW"):
        build_optimizer(documented(do_bias_correction=False), model())


@pytest.mark.parametrize(
    ("net", "said"),
    [
        (nn.ReLU(), r"nothing to train: ReLU has no parameters: .* nn.ModuleList"),
        (nn.Linear(2, 2).requires_grad_(False), r"nothing to train \(Linear has 2 parameters, 0 of them"),
    ],
    ids=["empty", "frozen"],
)
@pytest.mark.parametrize("whole", [False, True])
def test_nothing_to_train_is_said(net, said, whole):
    params = {"params": list(net.parameters())} if whole else {}
    with pytest.raises(ConfigError, match=said):
        build_optimizer({"_target_": torch.optim.SGD, "lr": 0.1, **params}, net)


@pytest.mark.parametrize(
    ("cfg", "said"),
    [
        (None, "optim: got NoneType"),
        ({"lr": 0.1}, "optim: got dict"),
        ({"_target_": dict}, "optim: its target built dict"),
        ({"_target_": torch.optim.SGD, "params": 3}, "optim.params: got int"),
        ({"_target_": torch.optim.SGD, "params": torch.ones(2)}, "optim.params: got Tensor"),
    ],
)
def test_what_is_no_optimizer_is_refused(cfg, said):
    with pytest.raises(ConfigTypeError, match=said):
        build_optimizer(cfg, model())


def test_a_schedule_is_built_for_the_optimizer():
    optimizer = torch.optim.SGD(model().parameters(), lr=0.1)
    cfg = LazyCall(WarmupCosineLR)(max_iter=10, warmup_factor=0.001, warmup_iter=2, alpha=0.01, warmup_method="linear")
    scheduler = build_lr_scheduler(cfg, optimizer)
    assert type(scheduler) is WarmupCosineLR
    assert scheduler.optimizer is optimizer
    assert "optimizer" not in cfg
    with pytest.raises(ConfigTypeError, match=r"train.scheduler: its target built dict"):
        build_lr_scheduler({"_target_": dict}, optimizer)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.position = nn.Parameter(torch.zeros(4))
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight  # shared


def settings_by_name(model: nn.Module, groups: list) -> dict:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        names[id(parameter)]: {key: value for key, value in group.items() if key != "params"}
        for group in groups
        for parameter in group["params"]
    }


def test_norms_biases_and_overrides_get_their_own_weight_decay():
    model = Block()
    groups = get_default_optimizer_params(
        model,
        base_lr=0.1,
        weight_decay=0.5,
        weight_decay_norm=0.25,
        weight_decay_bias=0.0,
        overrides={"position": {"lr": 1}},
    )
    assert settings_by_name(model, groups) == {
        "position": {"lr": 1, "weight_decay": 0.5},
        "embed.weight": {"lr": 0.1, "weight_decay": 0.5},
        "linear.weight": {"lr": 0.1, "weight_decay": 0.5},
        "linear.bias": {"lr": 0.1, "weight_decay": 0.0},
        "norm.weight": {"lr": 0.1, "weight_decay": 0.25},
        "norm.bias": {"lr": 0.1, "weight_decay": 0.0},
    }


NORMS = [nn.BatchNorm1d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2), nn.InstanceNorm2d(2, affine=True)]
NORMS += [nn.GroupNorm(1, 2), nn.LayerNorm(2), nn.RMSNorm(2)]


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: type(norm).__name__)
def test_every_norm_of_torch_is_known(norm):
    groups = get_default_optimizer_params(nn.Sequential(norm), weight_decay=1.0, weight_decay_norm=0.0)
    assert [group["weight_decay"] for group in groups] == [0.0]


def test_biases_of_other_names_are_not_decayed_as_transformers_decides():
    from transformers import Trainer

    model = nn.ModuleDict({
        "attention": nn.MultiheadAttention(4, 2, add_bias_kv=True),
        "lstm": nn.LSTM(4, 2),
        "relative_attention_bias": nn.Embedding(3, 2),
        "parametrized": torch.nn.utils.parametrizations.weight_norm(nn.Linear(2, 2), "bias"),
    })  # fmt: skip
    found = settings_by_name(model, get_default_optimizer_params(model, weight_decay=0.5, weight_decay_bias=0.0))
    decayed = {name for name, settings in found.items() if settings["weight_decay"]}
    assert decayed == found.keys() & Trainer.get_decay_parameter_names(None, model)
    assert {"attention.in_proj_bias", "attention.bias_k", "lstm.bias_ih_l0"} <= found.keys() - decayed


def test_every_trainable_parameter_is_in_one_group():
    model = Block()
    model.norm.requires_grad_(False)
    groups = get_default_optimizer_params(model, weight_decay=0.5, weight_decay_bias=0.0)
    grouped = [id(parameter) for group in groups for parameter in group["params"]]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == {id(parameter) for parameter in model.parameters() if parameter.requires_grad}

    model = Block()
    (group,) = get_default_optimizer_params(model)
    assert set(group) == {"params"}
    assert torch.optim.AdamW([group], lr=0.5).param_groups[0]["lr"] == 0.5


def test_overrides_stay_as_they_are_and_name_parameters():
    overrides = {"weight": {"lr": 0.2}}
    model = nn.Linear(2, 2)
    groups = get_default_optimizer_params(model, weight_decay_bias=0.0, overrides=overrides)
    assert overrides == {"weight": {"lr": 0.2}}
    assert settings_by_name(model, groups)["bias"] == {"weight_decay": 0.0}

    with pytest.raises(ConfigKeyError, match=r"overrides\['positon'\].*Block.*Did you mean 'position'"):
        get_default_optimizer_params(Block(), overrides={"positon": {"lr": 1.0}})


def test_clipping_settings_are_complete_and_in_every_group():
    groups = get_default_optimizer_params(
        Block(), weight_decay_bias=0.0, weight_decay_norm=0.0, clip_grad_max_norm=1.0, clip_grad_norm_type=1
    )
    assert {(group["clip_grad_max_norm"], group["clip_grad_norm_type"]) for group in groups} == {(1.0, 1.0)}

    assert set(get_default_optimizer_params(Block(), clip_grad_norm_type=2.0)[0]) == {"params"}
    assert get_default_optimizer_params(Block(), clip_grad_max_norm=0.5)[0]["clip_grad_norm_type"] == 2.0

    with pytest.raises(ConfigError, match=r"(?s)clip_grad_max_norm: got 0.*clip_grad_norm_type: got -1"):
        get_default_optimizer_params(Block(), clip_grad_max_norm=0, clip_grad_norm_type=-1)


@pytest.mark.parametrize("override", [{"lr": 0.2}, {"weight_decay": 0.1}, {}])
def test_biases_that_are_set_in_two_places_are_a_value_error(override):
    with pytest.raises(ValueError, match=r"weight_decay_bias=0.0 and overrides\['bias'\]"):
        get_default_optimizer_params(nn.Linear(2, 2), weight_decay_bias=0.0, overrides={"bias": override})


def test_settings_of_a_parameter_in_several_groups_are_merged_and_the_later_one_wins():
    a, b, c = (nn.Parameter(torch.tensor(float(n))) for n in range(3))
    given = [
        {"params": [a, b], "lr": 1.0},
        {"params": [c], "lr": 1.0, "weight_decay": 0.0},
        {"params": [a], "weight_decay": 0.0},
        {"params": b, "lr": 2.0},
    ]
    reduced = reduce_param_groups(given)
    assert [[p.item() for p in group["params"]] for group in reduced] == [[0.0, 2.0], [1.0]]
    assert [{k: v for k, v in g.items() if k != "params"} for g in reduced] == [
        {"lr": 1.0, "weight_decay": 0.0},
        {"lr": 2.0},
    ]
