import copy
import pickle

import pytest
import torch

from trainwright.base.errors import ConfigTypeError
from trainwright.data import DataError, DistTensorData, Instance


def test_fields_are_read_set_and_removed_by_name_and_as_attributes():
    sample = Instance(inputs=1, labels=2)
    sample.weights = 3
    sample.set("labels", 4)
    assert (sample.inputs, sample.get("labels"), sample.weights) == (1, 4, 3)
    assert list(sample.get_fields()) == ["inputs", "labels", "weights"]
    assert len(sample) == 3
    sample.remove("inputs")
    assert not sample.has("inputs")
    assert repr(sample) == "Instance(labels=4, weights=3)"

    with pytest.raises(NotImplementedError, match="get_fields"):
        iter(Instance(inputs=1))
    assert Instance()


@pytest.mark.parametrize("access", [lambda s: s.label, lambda s: s.get("label"), lambda s: s.remove("label")])
def test_an_absent_field_is_named_beside_those_that_are_there(access):
    with pytest.raises(AttributeError, match=r"'label' .*inputs, labels"):
        access(Instance(inputs=1, labels=2))


def test_an_instance_can_be_copied_and_sent_to_another_process():
    sample = Instance(inputs=DistTensorData(torch.arange(3), placement_idx=-1))
    for twin in (copy.deepcopy(sample), pickle.loads(pickle.dumps(sample))):
        assert torch.equal(twin.inputs.tensor, sample.inputs.tensor)
        assert twin.inputs.placement_idx == -1


def test_stacking_gives_each_kind_of_field_its_batch():
    class Box:
        def __init__(self, values):
            self.values = values

        @staticmethod
        def stack(boxes):
            return Box([box.values for box in boxes])

    samples = [
        Instance(
            image=DistTensorData(torch.full((2, 2), i), ["broadcast", "broadcast"], -1),
            plain=torch.tensor([i, i]),
            tokens=[i, i + 1],
            name=f"n{i}",
            box=Box(i),
            number=i,
            nested={"mask": torch.tensor(i)},
        )
        for i in range(3)
    ]
    batch = Instance.stack(samples)
    assert batch.image.tensor.shape == (3, 2, 2)
    assert (batch.image.sbp_list, batch.image.placement_idx) == (["broadcast", "broadcast"], -1)
    assert batch.plain.tolist() == [[0, 0], [1, 1], [2, 2]]
    assert batch.tokens == [[0, 1], [1, 2], [2, 3]]
    assert batch.name == ["n0", "n1", "n2"]
    assert batch.box.values == [0, 1, 2]
    assert batch.number.tolist() == [0, 1, 2]
    assert batch.nested["mask"].tolist() == [0, 1, 2]


def test_a_batch_and_its_samples_share_nothing():
    sample = Instance(inputs=DistTensorData(torch.zeros(2)))
    batch = Instance.stack([sample])
    batch.inputs.tensor.add_(1)
    assert batch.inputs.tensor.shape == (1, 2)
    assert sample.inputs.tensor.tolist() == [0, 0]

    first, second = DistTensorData(torch.zeros(1)), DistTensorData(torch.zeros(1))
    first.sbp_list.append("x")
    assert second.sbp_list == ["split_0", "broadcast"]
    assert second.placement_idx == 0


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_ragged_sample_is_said_with_field_place_shapes_and_cure(wrapped):
    tensors = [torch.zeros(1, 28, 28), torch.zeros(1, 28, 28), torch.zeros(28, 28)]
    samples = [Instance(inputs=DistTensorData(tensor) if wrapped else tensor) for tensor in tensors]
    with pytest.raises(DataError) as raised:
        Instance.stack(samples)
    message = str(raised.value)
    for fact in ("field 'inputs'", "sample 2 of the batch", "(28, 28)", "(1, 28, 28)", "image.unsqueeze(0)"):
        assert fact in message


def test_samples_that_cannot_be_batched_are_named():
    samples = [Instance(labels=torch.tensor(1)), Instance(labels=torch.tensor(2.0))]
    with pytest.raises(DataError, match=r"'labels': sample 1 .*torch.float32; sample 0 .*torch.int64"):
        Instance.stack(samples)

    samples = [Instance(extra={"mask": torch.zeros(3)}), Instance(extra={"mask": torch.zeros(4)})]
    with pytest.raises(DataError, match=r"sample 1 .*'extra.mask' .*\(4,\); sample 0 .*\(3,\)"):
        Instance.stack(samples)

    with pytest.raises(DataError, match="field 'thing' cannot be batched"):
        Instance.stack([Instance(thing=object()), Instance(thing=object())])

    with pytest.raises(DataError, match=r"sample 1 .*\['b'\]; sample 0 .*\['a'\]"):
        Instance.stack([Instance(a=1), Instance(b=1)])
    with pytest.raises(DataError, match="sample 1 of the batch has placement_idx=-1"):
        DistTensorData.stack([DistTensorData(torch.zeros(1)), DistTensorData(torch.zeros(1), placement_idx=-1)])
    with pytest.raises(DataError, match=r"'a': sample 1 .*Tensor; sample 0 .*DistTensorData"):
        Instance.stack([Instance(a=DistTensorData(torch.zeros(1))), Instance(a=torch.zeros(1))])

    with pytest.raises(ConfigTypeError, match=r"got int; .*torch.Tensor.*torch.tensor"):
        DistTensorData(3)


def test_pinning_reaches_every_tensor_and_keeps_all_else():
    class Recorded:
        def __init__(self):
            self.pinned = False

        def pin_memory(self):
            twin = Recorded()
            twin.pinned = True
            return twin

    batch = Instance(a=Recorded(), b={"c": [Recorded()]}, name="x").pin_memory()
    assert batch.a.pinned
    assert batch.b["c"][0].pinned
    assert batch.name == "x"
