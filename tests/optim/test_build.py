import copy

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from trainwright.config import LazyCall
from trainwright.config.errors import ConfigError, ConfigTypeError
from trainwright.optim import WarmupCosineLR, build_lr_scheduler, build_optimizer, get_default_optimizer_params


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


def test_it_can_be_built_from_a_part_of_a_locked_configuration():
    root = DictConfig({"base": 0.5, "optim": documented(lr="${base}")}, flags={"allow_objects": True})
    OmegaConf.set_struct(root, True)
    OmegaConf.set_readonly(root, True)
    assert build_optimizer(root.optim, model()).param_groups[0]["lr"] == 0.5
    assert root.optim.do_bias_correction is True
    assert OmegaConf.is_readonly(root.optim)
    assert OmegaConf.is_struct(root.optim)


def test_a_fault_of_the_optimizers_arguments_says_where_it_is():
    root = DictConfig({"optim": documented(weigth_decay=1.0)}, flags={"allow_objects": True})
    with pytest.raises(ConfigTypeError, match=r"(?s)optim.*weigth_decay"):
        build_optimizer(root.optim, model())


def test_dotted_strings_and_plain_dicts_do_as_well():
    cfg = {
        "_target_": "torch.optim.SGD",
        "params": {"_target_": "trainwright.optim.get_default_optimizer_params", "base_lr": 0.3},
        "lr": 0.1,
    }
    assert [group["lr"] for group in build_optimizer(cfg, model()).param_groups] == [0.3]
    assert set(cfg["params"]) == {"_target_", "base_lr"}


def test_without_params_the_whole_model_is_trained():
    net = model()
    optimizer = build_optimizer({"_target_": torch.optim.SGD, "lr": 0.1, "do_bias_correction": True}, net)
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in net.parameters()}


def test_parameters_that_are_given_are_used_as_they_are():
    net = model()
    optimizer = build_optimizer({"_target_": torch.optim.SGD, "params": net[0].parameters(), "lr": 0.1}, net)
    assert optimizer.param_groups[0]["params"] == list(net[0].parameters())
    groups = [{"params": list(net[0].parameters()), "lr": 0.5}, {"params": list(net[1].parameters())}]
    optimizer = build_optimizer({"_target_": torch.optim.SGD, "params": groups, "lr": 0.1}, net)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]


def test_params_from_a_call_that_takes_no_model():
    parameter = nn.Parameter(torch.ones(1))
    optimizer = build_optimizer(
        {"_target_": torch.optim.SGD, "params": {"_target_": lambda: [parameter]}, "lr": 0.1}, model()
    )
    assert optimizer.param_groups[0]["params"][0] is parameter


def test_objects_in_the_configuration_are_not_copied():
    cfg = LazyCall(sgd_with)(lr=0.1, carried=Uncopyable(), do_bias_correction=True)
    assert isinstance(build_optimizer(cfg, model()), torch.optim.SGD)


def test_a_built_optimizer_and_a_built_schedule_are_given_back():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    assert build_optimizer(optimizer, net) is optimizer
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    assert build_lr_scheduler(schedule, optimizer) is schedule


def test_an_optimizer_that_takes_do_bias_correction_gets_it():
    class Adam(torch.optim.SGD):
        def __init__(self, params, lr, do_bias_correction):
            super().__init__(params, lr=lr)
            self.corrects = do_bias_correction

    cfg = {"_target_": Adam, "lr": 0.1, "do_bias_correction": False}
    assert build_optimizer(cfg, model()).corrects is False


def test_do_bias_correction_cannot_be_turned_off_where_there_is_no_such_choice():
    with pytest.raises(ConfigError, match=r"optim.do_bias_correction: got False; AdamW"):
        build_optimizer(documented(do_bias_correction=False), model())


@pytest.mark.parametrize("net", [nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)], ids=["empty", "frozen"])
@pytest.mark.parametrize("whole", [False, True])
def test_nothing_to_train_is_said(net, whole):
    params = {"params": list(net.parameters())} if whole else {}
    with pytest.raises(ConfigError, match=rf"nothing to train \({type(net).__name__} has \d parameters, 0 of them"):
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
