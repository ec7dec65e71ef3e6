import contextlib
import json
import math
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright.base.errors import ConfigError, ConfigTypeError, UserError
from trainwright.events import EventStorage, get_event_storage, has_event_storage
from trainwright.events.storage import EvaluationStorage, NoEventStorageError, StorageView


class Operations(TorchDispatchMode):
    """Counts what reaches the device; ``_local_scalar_dense`` is what ``.item()`` becomes."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


# -- the current storage ------------------------------------------------------------------------------------------


def test_outside_a_run_there_is_no_storage_and_the_error_says_what_to_do():
    assert not has_event_storage()
    with pytest.raises(RuntimeError, match="with EventStorage"):
        get_event_storage()
    with pytest.raises(UserError):
        get_event_storage()


def test_the_innermost_storage_is_current_and_exceptions_restore_the_outer_one():
    with EventStorage() as outer:
        with contextlib.suppress(ZeroDivisionError), EventStorage(5) as inner:
            assert get_event_storage() is inner
            raise ZeroDivisionError
        assert get_event_storage() is outer
        EventStorage().__enter__()  # is never left, and goes with the outer one
    assert not has_event_storage()


# -- putting and reading ------------------------------------------------------------------------------------------


def test_values_belong_to_the_iteration_at_which_they_were_put():
    storage = EventStorage(start_iter=7)
    storage.put_scalar("loss", 1.0)
    storage.step()
    storage.put_scalar("loss", 2)
    storage.iter = 20
    storage.put_scalars(loss=torch.tensor(3.0), lr=np.float32(0.5))
    assert storage.history("loss").values() == [(1.0, 7), (2.0, 8), (3.0, 20)]
    assert storage.latest() == {"loss": (3.0, 20), "lr": (0.5, 20)}
    assert storage.start_iter == 7
    assert list(storage.histories()) == ["loss", "lr"]


@pytest.mark.parametrize(
    "value",
    [
        3,
        3.0,
        True,
        np.int64(3),
        np.float16(3),
        np.array(3.0),
        torch.tensor(3),
        torch.tensor([[3.0]]),
        torch.tensor(True),
    ],
    ids=repr,
)
def test_every_kind_of_number_is_read_as_a_float(value):
    storage = EventStorage()
    storage.put_scalar("x", value)
    number, _ = storage.latest()["x"]
    assert type(number) is float
    assert number == float(value)


def test_a_mix_of_dtypes_and_floats_keeps_values_order_and_iterations():
    storage = EventStorage()
    generator = torch.Generator().manual_seed(0)
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.int32, None]
    expected = {"a": [], "b": [], "c": []}
    for place in range(300):
        number = torch.rand((), generator=generator) * 100
        dtype = dtypes[int(number) % 5]
        name = "abc"[place % 3]
        value = number.item() if dtype is None else number.to(dtype)
        storage.put_scalar(name, value)
        expected[name].append((float(value), place))
        storage.step()
    assert {name: history.values() for name, history in storage.histories().items()} == expected
    with torch.inference_mode():
        storage.put_scalars(tokens=torch.tensor(2**53 - 1), loss=torch.tensor(0.5, dtype=torch.float16))
    assert (storage.latest()["tokens"][0], storage.latest()["loss"][0]) == (2**53 - 1, 0.5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        storage.put_scalars(rate=torch.tensor(1.1, dtype=torch.float64), loss=torch.tensor(0.5, dtype=torch.float16))
        assert (storage.latest()["rate"][0], storage.latest()["loss"][0]) == (1.1, 0.5)


def test_a_tensor_changed_after_it_was_put_does_not_change_the_metric():
    storage = EventStorage()
    running = torch.zeros(())
    for _ in range(3):
        running += 1
        storage.put_scalar("running", running)
    assert [value for value, _ in storage.history("running").values()] == [1, 2, 3]


def test_a_put_loss_does_not_keep_its_graph_alive():
    class Saved:
        def __init__(self, tensor):
            self.tensor = tensor

    graph = weakref.WeakSet()

    def pack(tensor):
        saved = Saved(tensor)
        graph.add(saved)
        return saved

    storage = EventStorage()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
        loss = torch.ones(3, requires_grad=True).square().sum()
    assert len(graph) == 1
    storage.put_scalar("loss", loss)
    del loss
    assert len(graph) == 0
    assert storage.latest()["loss"][0] == 3


# -- no wait on the step ------------------------------------------------------------------------------------------


def test_the_number_of_reads_does_not_grow_with_names_or_dtypes():
    storage = EventStorage()
    for place in range(100):
        storage.put_scalars(a=torch.tensor(1.0), b=torch.tensor(place), c=torch.tensor(1.0, dtype=torch.bfloat16))
    with Operations() as reading:
        storage.histories()
    assert reading.counts.get("cat") == 1  # all dtypes joined on the device, so that one copy takes them all
    assert reading.counts["stack"] == 3
    assert "_local_scalar_dense" not in reading.counts


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_no_put_waits_and_one_copy_brings_all():
    storage = EventStorage()
    values = [torch.tensor(float(place), device="cuda") for place in range(500)]
    values = torch.arange(500, device="cuda")
    with warnings.catch_warnings(action="ignore"):  # it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        for place, value in enumerate(values):
            storage.put_scalars(loss=value, count=values[place])
        storage.put_histogram("weights", values.float())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        assert storage.history("count").values()[-1][0] == 499.0
    copies = [event for event in profile.events() if "Memcpy DtoH" in event.name]
    assert len(copies) == 1
    assert [value for value, _ in storage.history("loss").values()] == [float(place) for place in range(500)]


def test_a_distributed_tensor_is_put_as_its_full_value():
    from torch.distributed import HashStore, destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, distribute_tensor

    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        sharded = distribute_tensor(torch.arange(4.0), mesh)
        storage = EventStorage()
        storage.put_scalars(total=sharded.sum(), plain=torch.tensor(2.0))
        assert Partial() in sharded.sum().placements or sharded.sum().full_tensor() == 6
        assert storage.latest() == {"total": (6.0, 0), "plain": (2.0, 0)}
    finally:
        destroy_process_group()


# torch's compiler itself looks at .grad of every tensor that crosses a graph break.
@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_model_may_put_metrics():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(3, 1)

        def forward(self, x):
            out = self.linear(x)
            storage = get_event_storage()
            storage.put_scalar("mean", out.mean())
            with storage.name_scope("inner"):
                storage.put_scalars(size=3.0, total=out.sum(), smoothing_hint=False)
            return out.relu()

    model = Model()
    compiled = torch.compile(model, backend="eager")
    batches = torch.randn(20, 4, 3)
    with EventStorage() as storage:
        for batch in batches:
            compiled(batch).sum().backward()
            storage.step()
    expected = [(model.linear(batch).mean().item(), place) for place, batch in enumerate(batches)]
    assert storage.history("mean").values() == expected
    assert [at for _, at in storage.history("inner/total").values()] == list(range(20))
    assert storage.latest()["inner/size"] == (3.0, 19)
    assert torch._dynamo.utils.counters["frames"]["total"] < 30  # compiled once, not at each of the 20 steps
    torch._dynamo.reset()


# -- mistakes -----------------------------------------------------------------------------------------------------


def test_a_tensor_of_several_elements_is_refused_with_its_name_shape_and_cure():
    with pytest.raises(UserError, match=r"'losses/mask'.*\(2, 3\)(.|\n)*mean\(\)"):
        EventStorage().put_scalar("losses/mask", torch.zeros(2, 3))
    with pytest.raises(UserError, match=r"\(0,\)"):
        EventStorage().put_scalar("empty", torch.zeros(0))


@pytest.mark.parametrize("value", ["3.0", None, [1.0], {}, 1j, np.zeros(2), b"1", 10**400, torch.tensor(1j)], ids=repr)
def test_what_is_no_number_is_a_type_error_that_names_the_metric(value):
    with pytest.raises(TypeError, match=r"put_scalar.*'acc'") as caught:
        EventStorage().put_scalar("acc", value)
    assert isinstance(caught.value, UserError)
    with pytest.raises(ConfigTypeError, match=r"put_text\('x'\): got "):
        EventStorage().put_text("x", 3)


@pytest.mark.parametrize("name", ["", "iteration", 3, None])
def test_what_cannot_name_a_metric_is_refused(name):
    with pytest.raises(UserError, match="cannot name a metric"):
        EventStorage().put_scalar(name, 1.0)


def test_an_unknown_metric_is_a_key_error_with_the_nearest_name():
    storage = EventStorage()
    with pytest.raises(KeyError, match="Nothing has been put yet"):
        storage.history("loss")
    storage.put_scalar("total_loss", 1.0)
    with pytest.raises(KeyError, match=r"total_los'(.|\n)*Did you mean 'total_loss'"):
        storage.history("total_los")


# -- scopes and smoothing -----------------------------------------------------------------------------------------


def test_scopes_nest_and_exceptions_restore_them():
    storage = EventStorage()
    with storage.name_scope("eval"):
        with contextlib.suppress(ZeroDivisionError), storage.name_scope("inner/"):
            storage.put_scalar("a", 1.0)
            raise ZeroDivisionError
        storage.put_scalar("b", 1.0)
    storage.put_scalar("c", 1.0)
    assert list(storage.latest()) == ["eval/inner/a", "eval/b", "c"]


def test_smoothing_takes_the_median_over_iterations_not_over_values():
    storage = EventStorage()
    for iteration in range(30):
        for micro in range(4):
            storage.put_scalar("loss", float(10 * iteration + micro))
        storage.put_scalar("lr", float(iteration), smoothing_hint=False)
        storage.step()
    last = [10.0 * iteration + micro for iteration in range(10, 30) for micro in range(4)]
    assert storage.latest_with_smoothing_hint(20)["loss"] == (float(np.median(last)), 29)
    assert storage.latest_with_smoothing_hint(1)["loss"] == (291.5, 29)
    assert storage.latest_with_smoothing_hint(20)["lr"] == (29.0, 29)
    assert storage.latest()["loss"] == (293.0, 29)


@pytest.mark.parametrize("newest", [math.nan, math.inf])
def test_a_newest_value_that_is_not_finite_is_shown_and_an_older_one_is_left_out(newest):
    storage = EventStorage()
    for value in (1.0, newest, 2.0, 3.0):
        storage.put_scalar("loss", value)
        storage.step()
    assert storage.latest_with_smoothing_hint(20)["loss"] == (2.0, 3)
    storage.put_scalar("loss", newest)
    assert not math.isfinite(storage.latest_with_smoothing_hint(20)["loss"][0])


# -- resume -------------------------------------------------------------------------------------------------------


def test_a_resumed_storage_smooths_as_the_uninterrupted_one():
    def put(storage, iterations):
        for iteration in iterations:
            storage.iter = iteration
            generator = torch.Generator().manual_seed(iteration)
            storage.put_scalar("loss", torch.rand((), generator=generator))
            storage.put_scalar("lr", 1.0 / (iteration + 1), smoothing_hint=False)
        storage.samples = 8 * iterations.stop

    uninterrupted = EventStorage()
    put(uninterrupted, range(60))
    first = EventStorage()
    put(first, range(37))
    second = EventStorage(start_iter=37)
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    assert second.samples == 8 * 37
    assert (second.iter, second.start_iter) == (37, 37)
    put(second, range(37, 60))
    assert second.latest_with_smoothing_hint() == uninterrupted.latest_with_smoothing_hint()
    assert second.history("loss").global_avg() == uninterrupted.history("loss").global_avg()
    assert second.state_dict() == uninterrupted.state_dict()
    put(second, range(60, 3000))
    assert len(second.state_dict()["scalars"]["loss"]["values"]) == 1000  # however long the run


def test_a_resume_knows_which_weights_were_evaluated():
    first, second = EventStorage(), EventStorage(1)
    first.evaluated_weights = "EMA weights"
    second.load_state_dict(first.state_dict())
    assert second.evaluated_weights == "EMA weights"
    second.load_state_dict(EventStorage().state_dict())
    assert not second.evaluated_weights


def test_code_changed_between_two_runs_may_give_another_hint():
    first = EventStorage()
    first.put_scalar("acc", 1.0)
    second = EventStorage(1)
    second.load_state_dict(first.state_dict())
    assert second.smoothing_hints() == {"acc": True}
    second.put_scalar("acc", 1.0, smoothing_hint=False)
    assert second.smoothing_hints() == {"acc": False}
    with pytest.raises(UserError, match="smoothing_hint"):
        second.put_scalar("acc", 1.0)


# -- during an evaluation -------------------------------------------------------------------------------------------


def test_scalars_of_an_evaluation_are_dropped_and_media_are_kept():
    with EventStorage(5) as training:
        training.put_scalar("loss", 1.0)
        with EvaluationStorage():
            inner = get_event_storage()
            inner.put_scalar("loss", 2.0)
            inner.put_text("sentence", "A text.")
            assert (inner.iter, inner.latest()["loss"]) == (5, (1.0, 5))
        assert get_event_storage() is training
    with EvaluationStorage():  # without a training it has a storage too
        get_event_storage().put_scalars(a=1.0, b=torch.tensor(2.0))
    with pytest.raises(NoEventStorageError):
        get_event_storage()
    assert training.history("loss").values() == [(1.0, 5)]
    assert [(item.name, item.iteration, item.content) for item in training.media()] == [("sentence", 5, "A text.")]


def test_nothing_can_be_put_into_a_view() -> None:
    view = StorageView(EventStorage())
    for put in (
        lambda: view.put_scalar("loss", 1.0),
        lambda: view.put_text("answer", "yes"),
        lambda: view.put_image("image", torch.zeros(1, 4, 4)),
        lambda: view.put_histogram("weights", torch.zeros(4)),
    ):
        with pytest.raises(ConfigError, match="a writer runs in a background thread"):
            put()
