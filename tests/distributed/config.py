"""Read by the tests as a configuration file."""

from project import Model, Samples

from trainwright.config import LazyCall, get_config
from trainwright.data import build_image_test_loader, build_image_train_loader

model = LazyCall(Model)()
dataloader = {
    "train": LazyCall(build_image_train_loader)(dataset=LazyCall(Samples)(length=50), num_workers=0),
    "test": [LazyCall(build_image_test_loader)(dataset=LazyCall(Samples)(length=23, seed=1), num_workers=0)],
}
optim = get_config("common/optim.py").optim
optim.lr = 0.05
train = get_config("common/train.py").train
train.update(
    {
        "train_iter": 12,
        "log_period": 1,
        "train_micro_batch_size": 4,
        "global_batch_size": 8,
        "test_micro_batch_size": 4,
        "checkpointer": {"period": 6},
        "evaluation": {"eval_period": 5},
        "topk": [1],
    }
)
