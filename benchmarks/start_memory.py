"""Peak memory of a process while a model of 400 MB starts, in parts: measured, and as ``estimate`` says.

    python benchmarks/start_memory.py [PROCESSES ...]      # by default 1 2 4 8

A GPT of 8 blocks of 50 MB is built on the meta device and initialised, loaded from a folder as transformers writes it
(several files and an index), and resumed with the state of its optimizer. The growth of a process is the peak of its
resident memory in ``Trainer(...)`` minus that before, after the same start of a small model.
"""

import argparse
import ctypes
import gc
import json
import logging
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from trainwright import Trainer, TrainingConfig
from trainwright.config import LazyCall
from trainwright.models import GPTTextGeneration, GPTTextGenerationConfig

MB = 1e6
LAYOUTS = {
    "ZeRO 3": {"zero_stage": 3},
    "tensor": {"tensor_parallel_size": "all"},
    "pipeline": {"pipeline_parallel_size": "all"},
}
STARTS = ("meta_init", "not on the meta device", "init_weights_from", "resume")


def model(size: int) -> GPTTextGeneration:
    return GPTTextGeneration(
        GPTTextGenerationConfig(
            vocab_size=512, hidden_size=size, num_hidden_layers=8, num_attention_heads=8, max_position_embeddings=16
        )
    )


def trainer_of(size: int, folder: Path, layout: dict[str, Any], **settings: Any) -> Trainer:
    config = TrainingConfig(
        output_dir=str(folder), batch_size=1, optimizer="AdamW", save_enabled=False, eval_strategy="no", max_steps=1,
        device_str="cpu", tensorboard=None, num_dataloader_workers=0, metrics=None, **layout, **settings,
    )  # fmt: skip
    tokens = torch.zeros(64, 4, dtype=torch.int64)
    return Trainer(LazyCall(model)(size=size), config, train_dataset=TensorDataset(tokens, tokens))


def memory(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0]) * 1024


def growth(start: Any) -> tuple[int, Any]:
    """The peak of this process's memory while ``start()`` runs, minus that before."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    started = start()
    return memory("VmHWM") - before, started


def measure(folder: Path, layout: dict[str, Any]) -> None:
    from trainwright.base.dist import all_gather_object, get_rank, get_world_size, synchronize

    logging.disable(logging.WARNING)
    world = int(os.environ.get("WORLD_SIZE", 1))
    layout = {name: world if size == "all" else size for name, size in layout.items()} if world > 1 else {}
    weights, found = str(folder / "weights"), {}
    small = trainer_of(64, folder / "small", layout, meta_init=True)  # loads the code that a start and a step need
    small.train()
    small.save(folder / "small" / "saved")
    trainer_of(64, folder / "loaded", layout, meta_init=True, init_weights_from=str(folder / "small" / "saved"))
    for name in STARTS:
        settings: dict[str, Any] = {"meta_init": name != "not on the meta device"}
        if name == "init_weights_from":
            settings["init_weights_from"] = weights
        elif name == "resume":
            settings["resume_from_checkpoint"] = str(folder / "trained")
        grown, trainer = growth(partial(trainer_of, 1024, folder / "run", layout, **settings))
        found[name] = all_gather_object(grown)
        parts = [t.to_local() if hasattr(t, "to_local") else t for t in trainer.model.parameters()]
        found["share"] = all_gather_object(sum(part.nbytes for part in parts))
        if name == "meta_init":
            trainer.train()
            trainer.save(folder / "trained" / "checkpoints" / "1")
        del trainer, parts
        synchronize()
    if get_rank() == 0:
        print(json.dumps({"processes": get_world_size(), **found}))


def estimated(processes: int, layout: dict[str, Any], folder: Path, rank: int) -> int:
    """The peak of the start of one process."""
    from trainwright.engine import estimate

    sizes = {name: processes if size == "all" else size for name, size in layout.items()} if processes > 1 else {}
    config = TrainingConfig(output_dir=str(folder), batch_size=1, meta_init=True, metrics=None, **sizes)
    tokens = torch.zeros(64, 4, dtype=torch.int64)
    data = TensorDataset(tokens, tokens)

    def build(config: TrainingConfig) -> Trainer:
        return Trainer(LazyCall(model)(size=1024), config, train_dataset=data)

    return estimate(build, config, world_size=processes, rank=rank).costs[rank].start


def write_weights(folder: Path) -> None:
    """In four files with an index, as transformers does."""
    from safetensors.torch import save_file

    folder.mkdir()
    state = {name: tensor.contiguous() for name, tensor in model(1024).state_dict().items() if name != "head.weight"}
    files = {name: f"model-{number % 4 + 1:05d}-of-00004.safetensors" for number, name in enumerate(state)}
    for file in {*files.values()}:
        save_file({name: tensor for name, tensor in state.items() if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("processes", nargs="*", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--layout", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        return measure(Path(arguments.measure), LAYOUTS[arguments.layout])
    print("MB of a process: its share, the estimate, and the measured growth (" + ", ".join(STARTS) + ")")
    with tempfile.TemporaryDirectory() as base:
        write_weights(Path(base, "weights"))
        for processes in arguments.processes:
            for layout in LAYOUTS if processes > 1 else ["ZeRO 3"]:
                folder = Path(base, f"{processes} {layout}")
                folder.mkdir()
                (folder / "weights").symlink_to(Path(base, "weights"))
                command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
                command = command if processes > 1 else [sys.executable]
                command += [__file__, "--measure", str(folder), "--layout", layout]
                output = subprocess.run(
                    command, check=True, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
                ).stdout
                found = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
                columns = [found["share"], *(found[name] for name in STARTS)]
                share, *grown = (max(column) / MB for column in columns)
                largest = found["share"].index(max(found["share"]))  # stages differ
                said = estimated(processes, LAYOUTS[layout], folder, largest) / MB
                print(
                    f"{processes} {layout}: {share:.0f}  {said:.0f}  {' '.join(f'{size:.0f}' for size in grown)}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
