"""A plain PyTorch loop with our data, metrics, checkpoints and precision, on one process or several.

    python examples/recipes/own_loop.py
    torchrun --nproc-per-node 2 examples/recipes/own_loop.py

Stop it at any time, and start it again: it continues exactly.
"""

import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from trainwright.data import ColumnDataset, build_image_train_loader
from trainwright.engine import TrainingLoop
from trainwright.parallel import apply_autocast, get_rank, get_world_size, setup_dist_util, wrap_data_parallel


def main(folder: str = "output/recipes/own_loop", max_iter: int = 200) -> TrainingLoop:
    device = setup_dist_util()  # joins the processes of torchrun, if there are any
    torch.manual_seed(0)

    digits = load_digits()
    data = ColumnDataset(inputs=digits.data.astype("float32") / 16, labels=digits.target)
    loader, _, _ = build_image_train_loader(data, train_batch_size=32 // get_world_size(), num_workers=0)

    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10)).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max_iter)
    apply_autocast(net, device)  # bfloat16

    settings = {"max_iter": max_iter, "output_dir": folder, "save_period": 50}
    loop = TrainingLoop(net, optimizer, loader, lr_scheduler=lr_scheduler, **settings)
    model = wrap_data_parallel(net, device)  # averages gradients over the processes
    torch.manual_seed(get_rank())  # each process draws other random numbers; a resume restores them
    for batch in loop:
        loss = F.cross_entropy(model(batch["inputs"]).float(), batch["labels"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        lr_scheduler.step()
        loop.storage.put_scalar("total_loss", loss)
    return loop


if __name__ == "__main__":
    main(*sys.argv[1:2])
