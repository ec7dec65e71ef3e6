"""What every model can do: its config, its loss, its outputs, predict."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainwright.base.errors import ConfigError, ConfigKeyError, ConfigTypeError
from trainwright.models import BertConfig, Model, ModelConfig, ModelOutput, build_model, register_model
from trainwright.models.model import _OWN, find_model
from trainwright.models.outputs import named_outputs, scalars_of
from trainwright.tasks.preprocessor import PreprocessorsContainer


def test_a_config_is_copied_and_of_its_model(tiny: Model) -> None:
    config = tiny.config
    wider = type(tiny)(config, width=5)
    assert (wider.config.width, wider.linear.in_features, config.width) == (5, 5, 2)
    with pytest.raises(ConfigKeyError, match="Did you mean 'width'"):
        type(tiny)(config, widht=5)

    with pytest.raises(ConfigTypeError, match=r"Tiny.config: got BertConfig; it must be a TinyConfig"):
        type(tiny)(BertConfig())
    with pytest.raises(ConfigTypeError, match="got dict"):
        type(tiny)({"width": 2})

    assert tiny.num_parameters == 2 * 3 + 3 + 3 + 3
    tiny.linear.weight.requires_grad_(False)
    assert tiny.num_trainable_parameters == 9
    assert tiny.device == torch.device("cpu")
    assert Model(ModelConfig()).device == torch.device("cpu")


def test_the_loss_is_cross_entropy_in_single_precision() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 3, 5), torch.tensor([[1, -100, 4], [0, 2, -100]])
    model = Model(ModelConfig())
    rows = [logits[0, 0], logits[0, 2], logits[1, 0], logits[1, 1]]
    expected = sum(-row.log_softmax(-1)[label] for row, label in zip(rows, [1, 4, 0, 2], strict=True)) / 4
    torch.testing.assert_close(model.compute_loss(logits, labels), expected)
    torch.testing.assert_close(
        model.compute_loss(logits[:, 0], torch.tensor([1, 2])), F.cross_entropy(logits[:, 0], torch.tensor([1, 2]))
    )

    logits = torch.randn(2, 5, dtype=torch.bfloat16)
    assert Model(ModelConfig()).compute_loss(logits, torch.tensor([1, 2])).dtype is torch.float32


# predict


def test_predict_takes_raw_inputs_and_arguments_by_name(tiny: Model) -> None:
    outputs = tiny.predict(["one two", "three", "a b c"])
    tiny.eval()
    batch = {"lengths": torch.tensor([[6.0, 6.0], [10.0, 0.0], [2.0, 2.0]])}
    expected = tiny(**batch)["logits"].argmax(dim=-1).tolist()
    assert [out.label for out in outputs] == [f"class {i}" for i in expected]
    assert tiny.predict("three") == outputs[1:2]
    assert tiny.predict(batch) == outputs

    assert tiny.predict(["a"], as_text=False)[0].label in (0, 1, 2)
    plain = tiny.predict(["a"], post_process=False)["logits"]
    torch.testing.assert_close(tiny.predict(["a"], post_process=False, bias=2.0)["logits"], plain + 2)
    moved = tiny.predict(["abc de"], post_process=False, offset=1.0)["logits"]
    assert torch.equal(moved, tiny.predict({"lengths": torch.tensor([[7.0, 5.0]])}, post_process=False)["logits"])
    with pytest.raises(ConfigTypeError, match=r"Tiny.predict: no argument 'ofset'. Did you mean 'offset'"):
        tiny.predict(["a"], ofset=1.0)

    batch = {"lengths": torch.ones(2, 2), "labels": torch.tensor([0, 1])}
    assert len(tiny.predict(batch)) == 2

    tensor = torch.tensor([[2.0, 2.0]])
    expected = tiny.predict({"lengths": tensor})
    assert tiny.predict(tensor, preprocess=False) == expected
    tiny.preprocessor = None
    assert tiny.predict(tensor) == expected


def test_what_a_model_lacks_is_an_error_that_says_what_to_do(tiny: Model) -> None:
    tiny.preprocessor = None
    with pytest.raises(ConfigError, match=r"list of str.*\n?.*model.preprocessor"):
        tiny.predict(["a"])

    with pytest.raises(NotImplementedError, match="Model has no forward"):
        Model(ModelConfig())(1)
    with pytest.raises(NotImplementedError, match="generates nothing"):
        Model(ModelConfig()).generate(1)


def test_several_preprocessors_become_a_container(tiny: Model) -> None:
    single = tiny.preprocessor
    tiny.preprocessor = [single]
    assert isinstance(tiny.preprocessor, PreprocessorsContainer)
    assert tiny.preprocessor["lengths_of_words"] is single


def test_a_generative_model_is_asked_to_generate() -> None:
    class Counting(Model):
        is_generative = True

        def generate(self, start: Any, length: int = 2) -> Any:
            return [[int(s) + i for i in range(length)] for s in start]

        def post_process(self, outputs: Any) -> list[ModelOutput]:
            return [ModelOutput(text=str(row)) for row in outputs]

    assert Counting(ModelConfig()).predict({"start": torch.tensor([3, 5])}, length=3)[1].text == "[5, 6, 7]"


def test_an_output_is_a_mapping_with_attributes() -> None:
    out = ModelOutput(text="a", score=0.5)
    assert (out["text"], out.text, dict(out)) == ("a", "a", {"text": "a", "score": 0.5})
    out.score = 1.0
    assert out["score"] == 1.0
    assert repr(out) == "ModelOutput(text='a', score=1.0)"
    assert out == ModelOutput(text="a", score=1.0)
    with pytest.raises(AttributeError, match=r"no 'txt'. Did you mean 'text'"):
        out.txt  # noqa: B018


def make(name: str, config_name: str | None = None) -> type[Model]:
    @dataclass
    class Config(ModelConfig):
        width: int = 2

    Config.name = config_name or name

    @register_model(name, config_class=Config)
    class Made(Model):
        def __init__(self, config: Any, **kwargs: Any) -> None:
            super().__init__(config, **kwargs)
            self.linear = nn.Linear(self.config.width, 1)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.linear(x)}

    return Made


@pytest.mark.parametrize("name", _OWN)
def test_each_model_of_ours_is_registered_under_its_name(name: str) -> None:
    model_class = find_model(name)
    assert model_class.config_class.name == name


def test_a_model_is_built_by_name_from_nothing_a_mapping_or_a_config() -> None:
    made = make("registry_built")
    assert build_model("registry_built").config.width == 2
    assert build_model("registry_built", {"width": 3}, width=4).linear.in_features == 4
    config = made.config_class(width=5)
    model = build_model("registry_built", config, width=6)
    assert isinstance(model, made)
    assert (model.config.width, config.width) == (6, 5)
    assert model(torch.ones(1, 6))["logits"].shape == (1, 1)


def test_wrong_names_and_configs_are_refused() -> None:
    with pytest.raises(ConfigKeyError, match=r"'crnn_image2txt'.*'crnn_image2text'"):
        build_model("crnn_image2txt")

    make("registry_first")
    with pytest.raises(ConfigTypeError, match="config: got BertConfig"):
        build_model("registry_first", find_model("bert").config_class())


def test_names_belong_to_one_class() -> None:
    make("registry_again")
    second = make("registry_again")
    assert find_model("registry_again") is second

    with pytest.raises(ConfigError, match="BertTextClassification has this name"):
        register_model("bert_text_classification", find_model("bert_text_classification").config_class)(
            make("registry_other")
        )

    with pytest.raises(ConfigError, match="write `name = 'registry_x'`"):
        make("registry_x", "registry_y")
    with pytest.raises(ConfigTypeError, match="subclass of ModelConfig"):
        register_model("registry_x", config_class=dict)  # type: ignore[arg-type]


def test_predict_restores_modes_and_gradients(tiny: Model) -> None:
    tiny.train()
    tiny.norm.eval()
    before = tiny.norm.running_mean.clone()
    assert tiny.predict(["a"]) == tiny.predict(["a"])  # no dropout
    assert [m.training for m in (tiny, tiny.linear, tiny.dropout, tiny.norm)] == [True, True, True, False]
    assert torch.equal(tiny.norm.running_mean, before)
    assert not tiny.predict(["a"], post_process=False)["logits"].requires_grad
    assert torch.is_grad_enabled()

    tiny.train()
    with pytest.raises(RuntimeError):
        tiny.predict({"lengths": torch.ones(1, 7)})
    assert tiny.training
    assert tiny.dropout.training


Named = namedtuple("Named", ["loss", "logits"])


@dataclass
class Fields:
    loss: Any
    logits: Any


def test_outputs_have_names_and_scalars() -> None:
    expected = {"loss": 1, "logits": 2}
    assert named_outputs(Named(1, 2)) == named_outputs(Fields(1, 2)) == named_outputs(OrderedDict(expected)) == expected

    assert [named_outputs(other) for other in (torch.ones(2), (1, 2), [1], None, Fields)] == [None] * 5

    outputs = {"a": 1, "b": 0.5, "c": torch.ones(1, 1), "d": torch.ones(2), "e": True, "f": "x", "g": None}
    assert list(scalars_of(outputs)) == ["a", "b", "c"]
