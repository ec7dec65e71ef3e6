import pytest
import torch
from torch import nn

from trainwright.config.errors import ConfigError, ConfigKeyError
from trainwright.optim import get_default_optimizer_params, reduce_param_groups


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


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(2),
        nn.BatchNorm3d(2),
        nn.SyncBatchNorm(2),
        nn.InstanceNorm2d(2, affine=True),
        nn.GroupNorm(1, 2),
        nn.LayerNorm(2),
        nn.RMSNorm(2),
    ],
    ids=lambda norm: type(norm).__name__,
)
def test_every_norm_of_torch_is_known(norm):
    groups = get_default_optimizer_params(nn.Sequential(norm), weight_decay=1.0, weight_decay_norm=0.0)
    assert [group["weight_decay"] for group in groups] == [0.0]


def test_every_trainable_parameter_is_in_exactly_one_group():
    model = Block()
    model.norm.requires_grad_(False)
    groups = get_default_optimizer_params(model, weight_decay=0.5, weight_decay_bias=0.0)
    grouped = [id(parameter) for group in groups for parameter in group["params"]]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == {id(parameter) for parameter in model.parameters() if parameter.requires_grad}


def test_without_settings_all_parameters_are_one_group_and_the_optimizer_keeps_its_defaults():
    model = Block()
    (group,) = get_default_optimizer_params(model)
    assert set(group) == {"params"}
    assert torch.optim.AdamW([group], lr=0.5).param_groups[0]["lr"] == 0.5


def test_overrides_of_the_caller_stay_as_they_are():
    overrides = {"weight": {"lr": 0.2}}
    model = nn.Linear(2, 2)
    groups = get_default_optimizer_params(model, weight_decay_bias=0.0, overrides=overrides)
    assert overrides == {"weight": {"lr": 0.2}}
    assert settings_by_name(model, groups)["bias"] == {"weight_decay": 0.0}


def test_an_override_of_a_name_that_does_not_exist_names_the_nearest():
    with pytest.raises(ConfigKeyError, match=r"overrides\['positon'\].*Block.*Did you mean 'position'"):
        get_default_optimizer_params(Block(), overrides={"positon": {"lr": 1.0}})


def test_the_weight_decay_of_biases_cannot_be_set_twice():
    with pytest.raises(ConfigError, match=r"weight_decay_bias=0.0 and overrides"):
        get_default_optimizer_params(Block(), weight_decay_bias=0.0, overrides={"bias": {"weight_decay": 0.1}})


def test_clipping_settings_are_written_into_every_group():
    groups = get_default_optimizer_params(
        Block(), weight_decay_bias=0.0, weight_decay_norm=0.0, clip_grad_max_norm=1.0, clip_grad_norm_type=1
    )
    assert {(group["clip_grad_max_norm"], group["clip_grad_norm_type"]) for group in groups} == {(1.0, 1.0)}


def test_a_norm_type_alone_is_no_clipping_and_a_maximum_alone_uses_the_two_norm():
    assert set(get_default_optimizer_params(Block(), clip_grad_norm_type=2.0)[0]) == {"params"}
    assert get_default_optimizer_params(Block(), clip_grad_max_norm=0.5)[0]["clip_grad_norm_type"] == 2.0


def test_clipping_values_out_of_range_are_all_named_at_once():
    with pytest.raises(ConfigError, match=r"(?s)clip_grad_max_norm: got 0.*clip_grad_norm_type: got -1"):
        get_default_optimizer_params(Block(), clip_grad_max_norm=0, clip_grad_norm_type=-1)


def test_groups_with_equal_settings_are_merged_in_order():
    a, b, c, d = (nn.Parameter(torch.tensor(float(i))) for i in range(4))
    given = [
        {"params": [a], "betas": [0.9, 0.99]},
        {"params": b},
        {"params": [c], "betas": [0.9, 0.99]},
        {"params": (d,)},
    ]
    reduced = reduce_param_groups(given)
    assert [[p.item() for p in group["params"]] for group in reduced] == [[0.0, 2.0], [1.0, 3.0]]
    assert [set(group) for group in reduced] == [{"params", "betas"}, {"params"}]
    assert given[0]["params"] == [a]


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
