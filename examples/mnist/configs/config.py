"""The complete configuration of the run: model, data, optimizer, training.

First ``python examples/mnist/prepare_digits.py``, then ``trainwright train examples/mnist/configs/config.py``.
"""
# ruff: noqa: C408 - a config reads as the calls that it describes

from pathlib import Path

from configs.train import train
from dataset.dataset import MnistDataSet
from modeling.model import NeuralNetwork
from omegaconf import OmegaConf

from trainwright.config import LazyCall, get_config
from trainwright.data import build_image_test_loader, build_image_train_loader

data_path = str(Path(__file__).resolve().parents[1] / "data")

model = LazyCall(NeuralNetwork)(num_classes=10)

dataloader = OmegaConf.create()
dataloader.train = LazyCall(build_image_train_loader)(
    dataset=[
        LazyCall(MnistDataSet)(
            path=data_path,
            is_train=True,
        )
    ],
    num_workers=0,  # small samples are read faster than a worker can pass them
)
dataloader.test = [
    LazyCall(build_image_test_loader)(
        dataset=LazyCall(MnistDataSet)(
            path=data_path,
            is_train=False,
        ),
        num_workers=0,
    )
]

optim = get_config("common/optim.py").optim
optim.lr = 1e-3

train.update(
    dict(
        output_dir="output/MNIST/",  # checkpoints, metrics.json, log.txt
        train_micro_batch_size=32,
        test_micro_batch_size=32,
        train_epoch=40,
        train_iter=0,
        eval_period=100,  # in iterations, as log_period
        log_period=20,
        warmup_ratio=0.01,  # of all iterations
        topk=(1,),
        checkpointer=dict(period=500, max_to_keep=3),
        dist=dict(
            data_parallel_size=1,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
        ),
        evaluation=dict(
            enabled=True,
        ),
    )
)
