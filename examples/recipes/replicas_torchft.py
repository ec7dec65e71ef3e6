"""Data-parallel copies that go on without a lost one, by torchft (pip install torchft): no restart, no step back.

    torchft_lighthouse --min_replicas 1 --bind "[::]:29510"                      # once, on a host that stays
    python examples/recipes/replicas_torchft.py 0 http://HOST:29510              # a copy, on a host of its own
    python examples/recipes/replicas_torchft.py 1 http://HOST:29510              # another; more may come later

Kill a copy: the others take its share of each update after seconds. Start it again: it gets the weights from a copy
that is alive, and joins. Kill all: they continue from their checkpoints.
An update has 16 samples of each copy that is alive. With RUST_LOG=warn torchft prints no lines of each step.
"""

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchft
from sklearn.datasets import load_digits
from torch import nn

from trainwright.data import ColumnDataset, build_image_train_loader
from trainwright.engine import TrainingLoop


def main(copy: int, lighthouse: str, folder: str = "output/recipes/replicas", max_iter: int = 200) -> nn.Module:
    torch.manual_seed(0)
    digits = load_digits()
    data = ColumnDataset(inputs=digits.data.astype("float32") / 16, labels=digits.target)
    loader, _, _ = build_image_train_loader(data, 16, num_workers=0, seed=copy)  # each copy has an order of its own
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)

    def weights() -> dict[str, Any]:
        return {"net": net.state_dict(), "optimizer": optimizer.state_dict()}

    def load(states: dict[str, Any]) -> None:
        net.load_state_dict(states["net"])
        optimizer.load_state_dict(states["optimizer"])

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # of this copy's processes: one
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=10)),
        min_replica_size=1,
        state_dict=weights,
        load_state_dict=load,
        replica_id=f"copy_{copy}",
        lighthouse_addr=lighthouse,
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
    )
    settings = {"max_iter": max_iter, "output_dir": f"{folder}/{copy}", "save_period": 50, "max_to_keep": 2}
    loop = TrainingLoop(net, optimizer, loader, copies=manager, **settings)
    update = torchft.Optimizer(manager, optimizer)  # steps where all of them have their gradients
    for batch in loop:
        update.zero_grad()
        loss = F.cross_entropy(net(batch["inputs"]), batch["labels"])
        loss.backward()
        for exchange in [manager.allreduce(parameter.grad) for parameter in net.parameters()]:
            exchange.wait()  # the mean of the copies that are alive; if one has died meanwhile, no copy steps
        update.step()
        loop.storage.put_scalar("total_loss", loss.detach())
        loop.storage.put_scalar("copies", manager.num_participants())
        if manager.current_step() >= max_iter:  # a copy that joined late has fewer iterations of its own
            break
    manager.shutdown()
    return net


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:4], *map(int, sys.argv[4:]))
