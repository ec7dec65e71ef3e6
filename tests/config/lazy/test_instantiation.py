"""Building what a configuration describes."""
# ruff: noqa: C408 - configurations are written with dict(...), as users write them

import functools
from dataclasses import dataclass

import pytest
from omegaconf import DictConfig, OmegaConf

from trainwright.config import ConfigKeyError, ConfigTypeError, LazyCall, LazyConfig, instantiate


class Part:
    def __init__(self, size=1, inner=None, **more):
        self.size, self.inner, self.more = size, inner, more


def strict(*, learning_rate, momentum=0.0):
    return learning_rate, momentum


def fails(value):
    raise RuntimeError(f"cannot use {value}")


def builds_inside(node):
    return instantiate(node)


@dataclass
class Shape:
    channels: int = 1


def test_a_target_may_be_an_object_or_a_dotted_path_in_plain_and_config_mappings():
    assert instantiate({"_target_": Part, "size": 2}).size == 2
    assert instantiate({"_target_": "fractions.Fraction", "numerator": 1, "denominator": 2}) == 0.5
    assert instantiate(OmegaConf.create({"_target_": "fractions.Fraction", "numerator": 3})) == 3


def test_what_describes_nothing_comes_back_as_it_is():
    thing, plain, config = object(), {"a": [1]}, OmegaConf.create({"a": {"b": "${nowhere}"}})
    assert instantiate(thing) is thing
    assert instantiate(plain) is plain
    assert instantiate(config) is config
    assert instantiate(None) is None
    assert instantiate(thing, size=1) is thing


def test_lists_and_mappings_are_walked_for_nodes():
    node = LazyCall(Part)(size=3)
    assert [getattr(x, "size", x) for x in instantiate([node, 1, {"_target_": Part}])] == [3, 1, 1]
    assert instantiate((node,))[0].size == 3
    assert instantiate({"a": {"b": node}})["a"]["b"].size == 3
    assert instantiate(OmegaConf.create({"a": [node]}))["a"][0].size == 3
    built = instantiate(LazyCall(Part)(inner=[node, 7]))
    assert type(built.inner) is list
    assert built.inner[0].size == 3


def test_interpolations_are_resolved_also_after_edits_and_in_a_mapping_without_nodes():
    cfg = OmegaConf.create({"base": 2}, flags={"allow_objects": True})
    cfg.model = LazyCall(Part)(size="${base}", inner=LazyCall(Part)(size="${..size}", inner=dict(width="${base}")))
    cfg.base = 5
    built = instantiate(cfg.model)
    assert (built.size, built.inner.size, built.inner.inner.width) == (5, 5, 5)
    assert isinstance(built.inner.inner, DictConfig)


def test_a_given_keyword_replaces_a_child_before_it_would_be_built():
    node = LazyCall(Part)(inner=LazyCall(fails)(value=1))
    assert instantiate(node, inner="mine").inner == "mine"
    assert instantiate(node, inner=None, cfg=3).more == {"cfg": 3}


def test_recursive_false_leaves_children_as_configs():
    node = LazyCall(Part)(inner=LazyCall(Part)(size=2), _recursive_=False)
    assert isinstance(instantiate(node).inner, DictConfig)


def test_partial_gives_the_target_itself_or_with_arguments_bound():
    assert instantiate(LazyCall(strict)(_partial_=True)) is strict
    bound = instantiate(LazyCall(strict)(momentum=0.5, _partial_=True))
    assert isinstance(bound, functools.partial)
    assert bound(learning_rate=1) == (1, 0.5)


def test_objects_are_passed_on_and_never_copied():
    class Uncopyable:
        def __deepcopy__(self, memo):
            raise AssertionError("copied")

    thing = Uncopyable()
    node = LazyCall(Part)(inner=LazyCall(Part)(inner=thing), size=[thing])
    built = instantiate(node)
    assert built.inner.inner is thing
    assert built.size[0] is thing
    assert instantiate(LazyCall(Part)(inner=Shape(3))).inner == Shape(3)


def test_an_error_of_a_target_names_path_target_and_cause_once_and_keeps_its_type():
    cfg = OmegaConf.create({"a": LazyCall(Part)(inner=[LazyCall(fails)(value=1)])}, flags={"allow_objects": True})
    with pytest.raises(RuntimeError) as caught:
        instantiate(cfg.a)
    text = str(caught.value)
    assert text.startswith("a.inner.0: error while calling ")
    assert "fails(...) [set in " in text
    assert text.endswith("RuntimeError: cannot use 1")
    assert str(caught.value.__cause__) == "cannot use 1"

    with pytest.raises(RuntimeError) as caught:
        instantiate(LazyCall(builds_inside)(node=LazyCall(fails)(value=2), _recursive_=False))
    assert str(caught.value).count("error while calling") == 1
    assert "fails" in str(caught.value)


def test_plain_containers_know_the_path_of_what_is_in_them():
    node = {"_target_": Part, "inner": {"heads": [1, {"_target_": fails, "value": 3}]}}
    for cfg, path in [
        (node, "inner.heads.1"),
        ([0, node], "1.inner.heads.1"),
        ({"model": node}, "model.inner.heads.1"),
    ]:
        with pytest.raises(RuntimeError, match=f"^{path}: error while calling"):
            instantiate(cfg)


def test_an_error_that_is_no_plain_message_is_the_original_with_a_note():
    class UnusualError(Exception):
        def __init__(self, code, reason):
            super().__init__(reason)
            self.code = code

    def refuses(error):
        raise error

    cfg = OmegaConf.create({"model": LazyCall(refuses)()}, flags={"allow_objects": True})
    for original in (UnusualError(7, "no"), OSError(28, "No space left")):
        with pytest.raises(type(original)) as caught:
            instantiate(cfg.model, error=original)
        assert caught.value is original
        (note,) = caught.value.__notes__
        assert note.startswith("model: error while calling ")
    with pytest.raises(KeyError) as caught:
        instantiate(cfg.model, error=KeyError("width"))
    assert "KeyError: 'width'" in str(caught.value)


def test_a_value_that_cannot_be_had_names_its_key():
    cfg = OmegaConf.create({"m": LazyCall(Part)(size="${nowhere.at.all}")}, flags={"allow_objects": True})
    with pytest.raises(ConfigKeyError, match=r"m\.size .*nowhere"):
        instantiate(cfg.m)
    with pytest.raises(ConfigKeyError, match="size"):
        instantiate(LazyCall(Part)(size="???"))
    with pytest.raises(ConfigTypeError, match="callable"):
        instantiate({"_target_": 5})


class Switched:
    def __init__(
        self,
        plain=False,
        typed: bool = False,
        either: bool | None = None,
        mode: "bool | str" = False,
        name: str = "a",
    ) -> None:
        self.values = [plain, typed, either, mode, name]


@pytest.mark.parametrize("argument", ["plain", "typed", "either"])
def test_a_text_is_no_true_or_false_of_a_call(argument: str) -> None:
    cfg = OmegaConf.create({"model": LazyCall(Switched)(plain=False, typed=True, either=None, mode=False, name="b")})
    LazyConfig.apply_overrides(cfg, ["model.mode=maybe", "model.name=no"])  # may be texts
    assert instantiate(cfg.model).values == [False, True, None, "maybe", "no"]
    LazyConfig.apply_overrides(cfg, [f"model.{argument}=maybe"])
    fact = (
        rf"model .*override 'model.{argument}=maybe'.*Switched takes true or false as {argument}; got 'maybe' \(str\)"
    )
    with pytest.raises(ConfigTypeError, match=fact):
        instantiate(cfg.model)


def test_a_text_in_a_python_file_is_refused_only_where_the_type_is_declared() -> None:
    assert instantiate(LazyCall(Switched)(plain="auto")).values[0] == "auto"
    with pytest.raises(ConfigTypeError, match="takes true or false as typed; got 'auto'"):
        instantiate(LazyCall(Switched)(typed="auto"))
