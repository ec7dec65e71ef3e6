"""Read as a configuration file by the runs that are killed: 60 updates in a second, and something saved every few."""

from project import Digits, Net, adamw

from trainwright.config import LazyCall, get_config
from trainwright.data import build_image_test_loader, build_image_train_loader

model = LazyCall(Net)(is_plain=False)
dataloader = {
    # An update takes 16 samples, so every epoch ends within one, and often within a micro-batch.
    "train": LazyCall(build_image_train_loader)(
        dataset=LazyCall(Digits)(start=0, stop=150, is_train=True), num_workers=0
    ),
    "test": [
        LazyCall(build_image_test_loader)(dataset=LazyCall(Digits)(start=150, stop=250, is_train=False), num_workers=0)
    ],
}
optim = LazyCall(adamw)(
    params=LazyCall("trainwright.optim.get_default_optimizer_params")(
        clip_grad_max_norm=1.0, clip_grad_norm_type=2.0, weight_decay_norm=0.0, weight_decay_bias=0.0
    ),
    lr=0.01,
    weight_decay=0.05,
)
train = get_config("common/train.py").train
train.update(
    {
        "train_iter": 60,
        "log_period": 5,
        "train_micro_batch_size": 8,
        "num_accumulation_steps": 2,
        "test_micro_batch_size": 50,
        "warmup_ratio": 0.2,
        "checkpointer": {"period": 7, "max_to_keep": 2},
        # With these the best is found again and again, once at iteration 55: one checkpoint under two names.
        "evaluation": {"eval_period": 8},
        "topk": [1],
        "seed": 15,
    }
)
