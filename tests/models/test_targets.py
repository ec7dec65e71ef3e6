"""The loss of an update is the mean over the targets that count, of all micro-batches and all processes.

Each run has one update of 8 samples, whose targets are very uneven, and is compared with a plain loop over one batch of
all of them. B batch, L tokens, C classes. Everything is float64, so that 1e-6 is far above rounding.
"""

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.ranks import on_ranks
from tests.toys import OwnStep, quiet
from trainwright import Trainer, TrainingConfig
from trainwright.base.dist import get_rank, get_world_size
from trainwright.base.errors import ConfigError
from trainwright.data import ColumnDataset
from trainwright.engine import EagerTrainer
from trainwright.models.targets import Targets, declared_targets, label_fields, targets_of_criterion

CLASSES = 5
IGNORED = -100


class Tokens(Dataset[Any]):
    """8 samples of 7 tokens; each sample has another number of labels that count."""

    def __init__(
        self, ignored: int = IGNORED, *, is_pair: bool = False, per_sample: bool = False, name: str = "labels"
    ) -> None:
        generator = torch.Generator().manual_seed(5)
        self.inputs = torch.randint(CLASSES, (8, 7), generator=generator)
        self.labels = torch.randint(1, CLASSES, (8, 7), generator=generator)
        for index in range(8):
            self.labels[index, [1, 7, 2, 6, 1, 1, 5, 3][index] :] = ignored
            self.labels[index, : index % 2] = ignored
        self.labels[0, 0] = 2
        if per_sample:
            self.labels = torch.tensor([0, 0, 0, ignored, 1, 2, ignored, ignored])
        self.is_pair, self.names = is_pair, ("inputs", name)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        pair = self.inputs[index], self.labels[index]
        return pair if self.is_pair else dict(zip(self.names, pair, strict=True))

    def batch(self, *indices: int) -> Any:
        rows = list(indices) or list(range(8))
        pair = self.inputs[rows], self.labels[rows]
        return pair if self.is_pair else dict(zip(self.names, pair, strict=True))


class Scores(nn.Module):
    def __init__(self, *, per_sample: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(CLASSES, 4), nn.Linear(4, CLASSES)).double()
        self.per_sample = per_sample

    def forward(self, inputs: Tensor) -> Any:  # (B, C, L), as torch's losses take it, or (B, C)
        logits_BLC = self.body(inputs)
        return logits_BLC.mean(1) if self.per_sample else logits_BLC.transpose(1, 2)


class NextToken(Scores):
    """A causal language model: the score at a token is compared with the label of the next one."""

    loss_type = "ForCausalLM"

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Any:  # type: ignore[override]
        logits_BLC = self.body(inputs)
        assert labels is not None
        loss = F.cross_entropy(logits_BLC[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits_BLC}


class OwnMethod(Scores):
    """The same in two methods."""

    loss_type = "ForCausalLM"

    def forward(self, inputs: Tensor) -> Any:
        return {"logits": self.body(inputs)}

    def compute_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Alone(Scores):
    """Returns its loss without the scores."""

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Any:  # type: ignore[override]
        assert labels is not None
        return {"loss": F.cross_entropy(self.body(inputs).flatten(0, 1), labels.flatten())}


class Tagger(Alone):
    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Any:
        return {**super().forward(inputs, labels), "logits": self.body(inputs)}


class OtherName(Tagger):
    def forward(self, inputs: Tensor, token_labels: Tensor) -> Any:  # type: ignore[override]
        return super().forward(inputs, token_labels)


class NamedBySetting(Tagger):
    def forward(self, inputs: Tensor, tags: Tensor) -> Any:  # type: ignore[override]
        return super().forward(inputs, tags)


class Shifted(Tagger):
    """Its labels are those of the next tokens already."""

    def forward(self, inputs: Tensor, shift_labels: Tensor) -> Any:  # type: ignore[override]
        return super().forward(inputs, shift_labels)


class Padded(Scores):
    """Ignores its padding token, 0, as only ``loss_ignores`` can say."""

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Any:  # type: ignore[override]
        assert labels is not None
        logits_BLC = self.body(inputs)
        loss = F.cross_entropy(logits_BLC.flatten(0, 1), labels.flatten(), ignore_index=0)
        return {"loss": loss, "logits": logits_BLC}


class TwoIgnored(Scores):
    """A mean over the labels that are neither 0 nor -100."""

    def forward(self, inputs: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
        scores, labels = self.body(inputs).flatten(0, 1), labels.flatten()
        counts = (labels != 0) & (labels != IGNORED)
        return {"loss": F.cross_entropy(scores[counts], labels[counts])}


class PerSampleMean(Scores):
    """A mean over samples of the mean over each one's labels."""

    def forward(self, inputs: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
        each = F.cross_entropy(self.body(inputs).transpose(1, 2), labels, reduction="none").sum(1)
        return {"loss": (each / (labels != IGNORED).sum(1).clamp(min=1)).mean()}


class ByItems(Scores):
    """Returns the loss alone; its mean is over the number that it is given, as models of transformers do."""

    loss_type = "ForCausalLM"

    def forward(self, inputs: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> Any:  # type: ignore[override]
        logits_BLC = self.body(inputs)[:, :-1]
        total = F.cross_entropy(logits_BLC.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        return {
            "loss": total / ((labels[:, 1:] != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch)
        }


class Says(Scores):
    """Returns its loss with the number of tokens, in the form that ``shape`` makes of it."""

    def __init__(self, shape: Callable[[Tensor], Any] = lambda count: count.float()[None]) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, inputs: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
        loss = F.cross_entropy(self.body(inputs).flatten(0, 1), labels.flatten())
        return {"loss": loss, "num_tokens": self.shape((labels != IGNORED).sum())}


class Classifies(Scores):
    """One label for each sample; ``starts`` has another size than the batch."""

    def forward(self, inputs: Tensor, labels: Tensor, starts: Any = None) -> Any:  # type: ignore[override]
        logits_BC = self.body(inputs).mean(1)
        return {"loss": F.cross_entropy(logits_BC, labels), "logits": logits_BC}


def samples() -> Tokens:
    return Tokens(4, per_sample=True)  # a class as others


def with_starts(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {**{name: torch.stack([row[name] for row in rows]) for name in rows[0]}, "starts": torch.zeros(7)}


class OwnLoss(Trainer):
    def compute_loss(self, model: Any, inputs: Any) -> Any:
        return model(**inputs)["loss"]


WEIGHTS = torch.tensor([0.1, 1.0, 5.0, 2.0, 0.5], dtype=torch.float64)

# Kind of run: the model, its data, and further arguments of the trainer.
KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tokens], dict[str, Any]]] = {
    "next tokens": (NextToken, Tokens, {}),
    "loss of a method": (OwnMethod, Tokens, {}),
    "tags": (Tagger, Tokens, {}),
    "labels of another name": (OtherName, lambda: Tokens(name="token_labels"), {}),
    "labels of a name that is set": (NamedBySetting, lambda: Tokens(name="tags"), {"label_names": ["tags"]}),
    "labels that are shifted": (Shifted, lambda: Tokens(name="shift_labels"), {}),
    "padding is ignored": (Padded, lambda: Tokens(0), {"loss_ignores": 0}),
    "two classes are ignored": (TwoIgnored, lambda: Tokens(0), {"loss_ignores": [0, IGNORED]}),
    "samples are declared": (PerSampleMean, Tokens, {"loss_ignores": None}),
    "number of items": (ByItems, Tokens, {}),
    "ignored pixels": (Scores, lambda: Tokens(3, is_pair=True), {"loss": nn.CrossEntropyLoss(ignore_index=3)}),
    "class weights": (Scores, lambda: Tokens(is_pair=True), {"loss": nn.CrossEntropyLoss(weight=WEIGHTS)}),
    "weights of a partial": (
        Scores,
        lambda: Tokens(is_pair=True),
        {"loss": functools.partial(F.cross_entropy, weight=WEIGHTS)},
    ),
    "one label a sample": (
        lambda: Scores(per_sample=True),
        lambda: Tokens(is_pair=True, per_sample=True),
        {"loss": nn.CrossEntropyLoss(weight=WEIGHTS)},
    ),
    "number that the model returns": (Says, Tokens, {}),
    "whole number that the model returns": (lambda: Says(int), Tokens, {}),
    "samples": (Classifies, samples, {}),
    "sizes that a batch does not show": (Classifies, samples, {"data_collator": with_starts}),
    "own step": (NextToken, Tokens, {"kind": OwnStep}),
    "own loss": (Tagger, Tokens, {"kind": OwnLoss}),
}


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return KINDS[kind][0]()


def by_hand(kind: str) -> tuple[list[list[float]], float]:
    model, (_, make_data, options) = model_of(kind), KINDS[kind]
    batch = make_data().batch()
    if isinstance(model, OwnMethod):
        loss = model.compute_loss(**model(batch["inputs"]), labels=batch["labels"])
    else:
        loss = model(**batch)["loss"] if isinstance(batch, dict) else options["loss"](model(batch[0]), batch[1])
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    return weights_of(model), loss.item()


def weights_of(model: nn.Module) -> list[list[float]]:
    return [parameter.detach().flatten().tolist() for parameter in model.parameters()]


def trained(kind: str, batch_size: int, accumulation: int, folder: str) -> tuple[list[list[float]], float]:
    """The weights after one update, and its logged loss."""
    model, (_, make_data, options) = model_of(kind), dict(KINDS)[kind]
    options = copy.copy(options)
    make, names = options.pop("kind", Trainer), options.pop("label_names", None)
    ignores = options.pop("loss_ignores", "declared")
    config = quiet(
        Path(folder), num_epochs=1, batch_size=batch_size, gradient_accumulation_steps=accumulation, optimizer="SGD",
        learning_rate=0.5, dataloader_shuffle=False, dataloader_drop_last=False, metrics=[], eval_strategy="no",
        save_enabled=False, label_names=names, loss_ignores=ignores,
    )  # fmt: skip
    trainer = make(model, config, make_data(), **options)
    trainer.train()
    return weights_of(model), trainer.storage.history("total_loss").latest()


def assert_equal(found: tuple[list[list[float]], float], kind: str) -> None:
    weights, loss = by_hand(kind)
    for left, right in zip(found[0], weights, strict=True):
        assert left == pytest.approx(right, rel=1e-6, abs=1e-9)
    assert found[1] == pytest.approx(loss, rel=1e-6)


@pytest.mark.exhaustive(every=5)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("batch_size", "accumulation"), [(8, 1), (1, 8), (3, 3)])
def test_any_micro_batches_give_the_update_of_one_batch(
    kind: str, batch_size: int, accumulation: int, tmp_path: Path
) -> None:
    assert_equal(trained(kind, batch_size, accumulation, str(tmp_path)), kind)


def all_kinds(folder: str) -> dict[str, Any]:
    each = 8 // get_world_size()
    return {
        f"{kind}, {accumulation}": trained(kind, each // accumulation, accumulation, folder)
        for kind in KINDS
        for accumulation in (1, 2)
    }


@pytest.mark.exhaustive(every=2)
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_give_the_update_of_one_batch(world_size: int, tmp_path: Path) -> None:
    for found in on_ranks(all_kinds, str(tmp_path), world_size=world_size, timeout=180):
        for name, result in found.items():
            assert_equal(result, name.partition(",")[0])


def eager(kind: str, parts: list[list[int]]) -> tuple[list[list[float]], float]:
    model, data = model_of(kind), KINDS[kind][1]()
    trainer = EagerTrainer(
        model,
        [data.batch(*part) for part in parts],
        torch.optim.SGD(model.parameters(), lr=0.5),
        len(parts),
        loss_ignores=KINDS[kind][2].get("loss_ignores", "declared"),
    )
    trainer.train(0, 1)
    return weights_of(model), trainer.storage.history("total_loss").latest()


NAMED = ["next tokens", "tags", "labels of another name", "padding is ignored", "number of items", "samples"]
NAMED += ["two classes are ignored", "samples are declared"]
NAMED += ["number that the model returns", "whole number that the model returns"]


@pytest.mark.parametrize("kind", NAMED)
def test_so_do_those_of_config_files(kind: str) -> None:
    assert_equal(eager(kind, [[0, 1, 2], [3], [4, 5, 6, 7]]), kind)


def eager_kinds() -> dict[str, Any]:
    share = [[number] for number in range(8) if number % get_world_size() == get_rank()]
    return {kind: eager(kind, share) for kind in NAMED}


def test_so_do_processes_of_config_files() -> None:
    for found in on_ranks(eager_kinds):
        for kind, result in found.items():
            assert_equal(result, kind)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def test_a_count_that_is_no_number_is_explained() -> None:
    model = Says(lambda count: count.expand(3))
    with pytest.raises(ConfigError, match=r"'num_tokens' has shape \(3,\).*one number"):
        EagerTrainer(model, [Tokens().batch()], sgd(model), 2).train(0, 1)


@pytest.mark.parametrize("given", [(False, True), (True, False)])
def test_a_count_for_some_micro_batches_only_is_refused(given: tuple[bool, bool]) -> None:
    left = iter(given)

    class Sometimes(Says):
        def forward(self, inputs: Tensor, labels: Tensor) -> Any:
            outputs = super().forward(inputs, labels)
            return outputs if next(left) else {"loss": outputs["loss"]}

    model = Sometimes()
    with pytest.raises(ConfigError, match=r"'num_tokens' for some batches only"):
        EagerTrainer(model, [Tokens().batch(), Tokens().batch()], sgd(model), 2).train(0, 1)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_an_update_without_any_target_changes_nothing(accumulation: int) -> None:
    model, none = model_of("number that the model returns"), Tokens().batch(5)
    before = weights_of(model)
    trainer = EagerTrainer(model, [none] * accumulation, sgd(model), accumulation)
    trainer.train(0, 1)
    assert weights_of(model) == before
    assert trainer.storage.history("total_loss").latest() == 0


@pytest.mark.parametrize("name", ["labels", "classes_of_samples"])
def test_batches_of_tensors_of_several_sizes_count_by_the_first_of_them(name: str) -> None:
    class Packed(Scores):
        def forward(self, inputs: Tensor, starts: Tensor, **labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            return {"loss": F.cross_entropy(self.body(inputs).mean(1), labels[name])}

    parts = [samples().batch(0, 1, 2, 3), samples().batch(4)]
    batches = [{"inputs": one["inputs"], name: one["labels"], "starts": torch.zeros(2)} for one in parts]
    torch.manual_seed(0)
    ours, theirs = Packed(), Packed()
    theirs.load_state_dict(ours.state_dict())
    EagerTrainer(ours, batches, sgd(ours), 2).train(0, 1)
    for batch, share in zip(batches, (0.8, 0.2), strict=True):
        (theirs(**batch)["loss"] * share).backward()
    sgd(theirs).step()
    assert weights_of(ours)[0] == pytest.approx(weights_of(theirs)[0], rel=1e-6)


def test_an_own_training_step_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that divides by the length of the window."""

    class Own(Trainer):
        def training_step(self, batch: Any) -> Tensor:
            loss = self.compute_loss(self.model, batch)
            (loss / 2).backward()
            return loss.detach()

    monkeypatch.setitem(KINDS, "own training step", (Tagger, Tokens, {"kind": Own}))
    found, _ = trained("own training step", 4, 2, str(tmp_path))
    theirs = model_of("tags")
    for rows in (range(4), range(4, 8)):
        (theirs(**Tokens().batch(*rows))["loss"] / 2).backward()
    sgd(theirs).step()
    assert found[0] == pytest.approx(weights_of(theirs)[0], rel=1e-6)


def test_gradients_are_clipped_after_the_targets_have_divided_them() -> None:
    data, ours, theirs = Tokens(), model_of("tags"), model_of("tags")
    theirs(**data.batch())["loss"].backward()
    norm = nn.utils.clip_grad_norm_(theirs.parameters(), 0.01)
    sgd(theirs).step()
    groups = [{"params": list(ours.parameters()), "clip_grad_max_norm": 0.01, "clip_grad_norm_type": 2.0}]
    batches = [data.batch(0, 1, 2), data.batch(3, 4, 5, 6, 7)]
    trainer = EagerTrainer(ours, batches, torch.optim.SGD(groups, lr=0.5), 2)
    trainer.train(0, 1)
    assert weights_of(ours)[0] == pytest.approx(weights_of(theirs)[0], rel=1e-6)
    assert trainer.storage.history("grad_norm").latest() == pytest.approx(norm.item())


def test_batches_without_a_target_have_no_part_in_a_loss_that_returns_no_scores(tmp_path: Path) -> None:
    rows = [
        {**row, "labels": torch.full_like(row["labels"], -100)} if n % 8 < 4 else row
        for n, row in enumerate([*Tokens(), *Tokens()])
    ]
    settings: dict[str, Any] = {"gradient_accumulation_steps": 2, "batch_size": 4, "metrics": [], "num_epochs": 1}
    settings |= {"dataloader_shuffle": False, "optimizer": "SGD", "lr": 0.5, "lr_scheduler_type": None}
    losses = []
    for kind in (Alone, Tagger):
        torch.manual_seed(0)
        trainer = Trainer(kind(), TrainingConfig(output_dir=tmp_path / kind.__name__, **settings), rows)
        trainer.train()
        losses.append([value for value, _ in trainer.storage.history("total_loss").values()])
    assert losses[0] == pytest.approx(losses[1])


class WithStatistics(ByItems):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.frozen = nn.BatchNorm1d(7).double(), nn.Sequential(nn.BatchNorm1d(7).double())
        self.frozen.requires_grad_(False).eval()

    def forward(self, inputs: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> Any:  # type: ignore[override]
        self.frozen(self.norm(inputs.double()))
        return super().forward(inputs, labels, num_items_in_batch)


def test_counting_the_targets_changes_no_statistics_and_no_mode(tmp_path: Path) -> None:
    model = WithStatistics()
    Trainer(model, quiet(tmp_path, batch_size=2, num_epochs=1, gradient_accumulation_steps=2), Tokens()).train()
    assert (model.norm.num_batches_tracked, model.frozen[0].num_batches_tracked) == (4, 0)
    assert not model.frozen[0].training


class Smoothed(Scores):
    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits = self.body(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
        return {"loss": loss, "logits": logits}


def test_a_resumed_run_weights_micro_batches_as_before(tmp_path: Path) -> None:
    tokens = torch.randint(5, (64, 6), generator=torch.Generator().manual_seed(0))
    labels = tokens.clone()
    for row, length in enumerate(torch.randint(1, 7, (64,), generator=torch.Generator().manual_seed(1)).tolist()):
        labels[row, length:] = -100

    def trained(folder: str, epochs: int, **settings: Any) -> list[Tensor]:
        """The declaration is read at each start: a resumed run reads it in another update than the whole one."""
        torch.manual_seed(0)
        settings |= {"num_epochs": epochs, "batch_size": 4, "gradient_accumulation_steps": 4, "metrics": None}
        config = quiet(tmp_path / folder, optimizer={"name_": "SGD", "lr": 2.0}, eval_strategy="no", **settings)
        model = Smoothed()
        Trainer(model, config, ColumnDataset(inputs=tokens, labels=labels)).train()
        return [parameter.detach() for parameter in model.parameters()]

    whole = trained("whole", 10)
    trained("parts", 7)
    resumed = trained("parts", 10, resume_from_checkpoint=True)
    assert all(torch.equal(one, other) for one, other in zip(whole, resumed, strict=True))
    # The weights of micro-batches matter, before the stop and behind it.
    for start in ("new", "parts"):
        by_samples = trained(start, 11, loss_ignores=None, resume_from_checkpoint=start == "parts")
        by_targets = trained(f"{start} by targets", 11)
        assert not torch.equal(by_samples[0], by_targets[0])


class Bytes(Scores):
    """Takes labels of uint8, in which -100 and class 156 are the same bits."""

    def __init__(self) -> None:
        super().__init__()
        self.body[1] = nn.Linear(4, 157).double()

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"loss": F.cross_entropy(self.body(inputs).flatten(0, 1), labels.long().flatten())}


class ByteTokens(Tokens):
    def __init__(self) -> None:
        super().__init__()
        self.labels = self.labels.clamp(min=0)
        self.labels[:3] = 156
        self.labels = self.labels.byte()


def test_no_class_of_labels_in_bytes_is_taken_for_the_ignored_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, "bytes", (Bytes, ByteTokens, {}))
    assert_equal(trained("bytes", 3, 3, str(tmp_path)), "bytes")


def compiled(module: Any) -> Any:
    return torch.compile(module, backend="eager")


@pytest.mark.parametrize("wrapper", [nn.DataParallel, compiled])
@pytest.mark.parametrize("kind", ["next tokens", "labels of another name"])
def test_a_wrapper_hides_no_declaration(
    kind: str, wrapper: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, *others = KINDS[kind]
    monkeypatch.setitem(KINDS, "wrapped", (lambda: wrapper(make()), *others))
    assert_equal(trained("wrapped", 3, 3, str(tmp_path)), kind)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of torch.compile
def test_neither_does_one_around_the_criterion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, data, options = KINDS["ignored pixels"]
    monkeypatch.setitem(KINDS, "wrapped", (make, data, {"loss": compiled(options["loss"])}))
    assert_equal(trained("wrapped", 3, 3, str(tmp_path)), "ignored pixels")


def test_adapters_hide_no_labels() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = peft.get_peft_model(OtherName(), peft.LoraConfig(target_modules=["1"]))
    assert label_fields(model, Tokens(name="token_labels").batch(), None) == ["token_labels"]


class PerSample(nn.CrossEntropyLoss):
    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(scores, labels, reduction="sum", ignore_index=IGNORED) / len(scores)


def test_losses_with_another_formula_declare_nothing() -> None:
    assert targets_of_criterion(nn.CrossEntropyLoss(ignore_index=3)) == Targets((3,))
    assert targets_of_criterion(functools.partial(F.nll_loss, ignore_index=3)) == Targets((3,))
    assert targets_of_criterion(PerSample(ignore_index=3)) == Targets()  # the rule where nothing is declared
    assert targets_of_criterion(lambda scores, labels: scores.mean()) == Targets()
    assert targets_of_criterion(functools.partial(F.cross_entropy, reduction="sum")) is None
    assert targets_of_criterion(nn.MSELoss()) is None
    assert targets_of_criterion(F.ctc_loss) is None


_SIZES = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
SMALL: dict[str, dict[str, Any]] = {  # settings of small models of transformers, by the name of their config
    "Bert": _SIZES,
    "Llama": _SIZES,
    "GPT2": {"vocab_size": 11, "n_embd": 8, "n_layer": 1, "n_head": 2},
    "T5": {"vocab_size": 11, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    | {"decoder_start_token_id": 0},
    "Segformer": {"hidden_sizes": [4] * 4, "depths": [1] * 4, "num_attention_heads": [1] * 4, "decoder_hidden_size": 4},
    "Wav2Vec2": {**_SIZES, "conv_dim": [4], "conv_kernel": [4], "conv_stride": [2], "feat_extract_norm": "layer"}
    | {"num_conv_pos_embedding_groups": 2, "ctc_loss_reduction": "mean"},
}


def tiny(kind: str, **settings: Any) -> Any:
    import transformers

    name = next(name for name in SMALL if kind.startswith(name))
    settings |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    made = getattr(transformers, f"{name}Config")(**SMALL[name], **settings)
    torch.manual_seed(0)
    return getattr(transformers, kind)(made).double().eval()


def texts(labels: Tensor) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(11, (8, 7), generator=torch.Generator().manual_seed(1)), "labels": labels}


def batch_for(kind: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    if kind.startswith("Segformer"):
        classes = torch.randint(2, (8, 32, 32), generator=generator)
        classes[:6, :30] = 255
        return {"pixel_values": torch.rand(8, 3, 32, 32, generator=generator).double(), "labels": classes}
    if kind.startswith("Wav2Vec2"):
        labels = Tokens().labels[:, :4].clone()
        labels[:, 0] = 3
        return {"input_values": torch.rand(8, 64, generator=generator).double(), "labels": labels}
    if kind.endswith("ForQuestionAnswering"):
        ends = torch.randint(7, (2, 8), generator=generator)
        return {"input_ids": texts(ends)["input_ids"], "start_positions": ends[0], "end_positions": ends[1]}
    labels = Tokens().labels if "Classification" not in kind or "Token" in kind else torch.randint(2, (8,))
    return texts(labels.clamp(max=1) if "Token" in kind else labels)


@pytest.mark.parametrize(
    "kind",
    [
        "GPT2LMHeadModel", "LlamaForCausalLM", "BertLMHeadModel", "BertForMaskedLM", "BertForTokenClassification",
        "BertForSequenceClassification", "BertForQuestionAnswering", "T5ForConditionalGeneration",
        "SegformerForSemanticSegmentation", "Wav2Vec2ForCTC",
    ],
)  # fmt: skip
def test_what_the_losses_of_transformers_average_is_known(kind: str) -> None:
    """The loss of a batch is the mean of those of its parts, weighted by what is declared."""
    model, batch = tiny(kind, **({"is_decoder": True} if kind == "BertLMHeadModel" else {})), batch_for(kind)
    targets = declared_targets(model)
    parts = [{name: value[rows] for name, value in batch.items()} for rows in (slice(0, 3), slice(3, 8))]
    weights = (
        [len(part["labels"]) if targets is None else targets.count_in(part, ["labels"]) for part in parts]
        if ("labels" in batch)
        else [3, 5]
    )
    with torch.no_grad():
        whole, *losses = (model(**one).loss.item() for one in (batch, *parts))
    assert weights[0] / sum(weights) != pytest.approx(3 / 8) or targets is None or kind.endswith("Answering")
    assert whole == pytest.approx(
        sum(map(float.__mul__, losses, map(float, weights))) / sum(weights), rel=1e-6
    )  # some compute it in float32


def resumed_cases(folder: str) -> dict[str, tuple[list[list[float]], list[list[float]]]]:
    """The weights of a run, and of one that was stopped and resumed, on the processes that call this."""
    data = [{"inputs": one["inputs"], "labels": one["labels"]} for one in [*Tokens(), *Tokens()] * 5]

    def trained(name: str, model: type[nn.Module], **settings: Any) -> list[list[float]]:
        torch.manual_seed(0)
        config = quiet(
            Path(folder) / name, num_epochs=2, batch_size=6, optimizer={"name_": "SGD", "momentum": 0.9},
            learning_rate=0.05, metrics=[], eval_strategy="no", save_steps=3, save_enabled=True,
            resume_from_checkpoint=True, **settings,
        )  # fmt: skip
        made = model().float()
        Trainer(made, config, data).train()
        return weights_of(made)

    found = {}
    for name, model in {"labels": Alone, "tokens": Says, "next tokens": NextToken}.items():
        whole = trained(f"{name}-whole", model)
        trained(f"{name}-stopped", model, max_steps=3)
        found[name] = (whole, trained(f"{name}-stopped", model))
    return found


def test_a_run_of_two_processes_that_is_resumed_is_the_whole_one_bit_for_bit(tmp_path: Path) -> None:
    for found in on_ranks(resumed_cases, str(tmp_path), timeout=180):
        for name, (whole, resumed) in found.items():
            assert whole == resumed, name
