"""Check that a change does not alter results, bit for bit.

``python -m benchmarks.fingerprint --json before.json`` before the change, ``… --compare before.json`` after it.

Trains small models through both APIs, each run in a process of its own, and records every logged loss and a hash of the
final weights. If a change does not alter results, two records of the same machine are equal, bit for bit. Float results
differ between machines and releases of torch, so compare only records of the same machine.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

ROOT = Path(__file__).parents[1]


class Points(Dataset[dict[str, Any]]):
    """Noisy points and their classes; the noise differs for each sample and epoch."""

    def __init__(self, length: int = 150, seed: int = 0) -> None:
        self.points = torch.randn(length, 8, generator=torch.Generator().manual_seed(seed))

    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = random.gauss(0, 0.1) + torch.randn(8) * 0.1
        return {"inputs": self.points[index] + noise, "labels": int(self.points[index].sum() > 0)}

    def __len__(self) -> int:
        return len(self.points)


class Network(nn.Module):
    """Dropout and batch normalization, so that randomness and buffers count."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 16), nn.Linear(16, 2)
        )

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        scores = self.body(inputs)
        loss = {} if labels is None else {"loss": F.cross_entropy(scores, labels)}
        return {**loss, "prediction_scores": scores, "logits": scores}


def objects(folder: Path, *, model: Any = None, data: Any = None, trainer: Any = None, **settings: Any) -> nn.Module:
    """A run through the Python API."""
    from trainwright import Trainer, TrainingConfig

    torch.manual_seed(1)
    model = model or Network()
    callbacks = settings.pop("callbacks", ())
    defaults: dict[str, Any] = {"num_epochs": 3, "batch_size": 16, "learning_rate": 0.01, "log_steps": 1}
    config = TrainingConfig(**{"output_dir": folder, "early_stopping": None, **defaults, **settings})
    data = data or (Points(), Points(40, seed=1))
    (trainer or Trainer)(model, config, *data, callbacks=callbacks).train()
    return model


def config_file(folder: Path, *, trainer: Any = None, **settings: Any) -> nn.Module:
    """A run through the config-file API; ``settings`` are overrides, with ``__`` for dots."""
    from trainwright import DefaultTrainer, LazyCall, LazyConfig, get_config
    from trainwright.data import build_image_test_loader, build_image_train_loader

    cfg = get_config("common/defaults.py")
    cfg.model = LazyCall(Network)()
    cfg.dataloader = {
        "train": LazyCall(build_image_train_loader)(dataset=LazyCall(Points)(), num_workers=0),
        "test": [LazyCall(build_image_test_loader)(dataset=LazyCall(Points)(length=40, seed=1), num_workers=0)],
    }
    cfg.optim.lr = 0.01
    cfg.train.update({"output_dir": str(folder), "train_iter": 28, "train_micro_batch_size": 16, "log_period": 1})
    cfg.train.update({"evaluation": {"eval_period": 10}, "topk": [1], "checkpointer": {"period": 5}})
    cfg = LazyConfig.apply_overrides(
        cfg, [f"{name.replace('__', '.')}={json.dumps(value)}" for name, value in settings.items()]
    )
    run = (trainer or DefaultTrainer)(cfg)
    run.train()
    model: nn.Module = run.model
    return model


def interrupted(api: Callable[..., nn.Module], folder: Path, **settings: Any) -> nn.Module:
    """Ctrl-C in the middle of the second epoch, and a resume."""
    code = f"import benchmarks.fingerprint as f; f.CASES[{settings.pop('case')!r}](f.Path({str(folder)!r}), stop=True)"
    if settings.pop("stop", False):
        from trainwright.hooks import CallbackHook

        def stop(trainer: Any) -> None:
            if trainer.iter == 12:
                raise KeyboardInterrupt

        original = _base(api)
        hook = CallbackHook(after_step=stop)

        class Stopped(original):  # type: ignore[misc, valid-type]
            def build_hooks(self) -> Any:
                return [*super().build_hooks(), hook]

        with contextlib.suppress(KeyboardInterrupt):
            api(folder, trainer=Stopped, **settings)
        sys.exit(7)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (7, 130), done.stderr
    resume: dict[str, Any] = {"resume_from_checkpoint": True, "allow_other_trainer": True}
    if api is not objects:
        resume = {"train__resume": True, "train__allow_other_trainer": True}
    return api(folder, **{**settings, **resume})


def _base(api: Any) -> Any:
    from trainwright import DefaultTrainer, Trainer

    return Trainer if api is objects else DefaultTrainer


def own_train_step(folder: Path) -> nn.Module:
    from trainwright import Trainer

    class Own(Trainer):
        def train_step(self, model: Any, inputs: Any) -> dict[str, Any]:
            loss = model(**inputs)["loss"] + 1e-3 * sum(p.square().sum() for p in model.parameters())
            loss.backward()
            assert self.optimizer is not None
            self.optimizer.step()
            self.optimizer.zero_grad()
            return {"step_loss": loss.detach()}

    return objects(folder, trainer=Own)


def own_run_step(folder: Path) -> nn.Module:
    from trainwright import DefaultTrainer
    from trainwright.engine import EagerTrainer

    class Stepper(EagerTrainer):
        def run_step(self, get_batch: Any = None, input_placement_device: Any = None) -> None:
            losses = self.model(**get_batch(next(self._data_loader_iter), input_placement_device))
            (2 * losses["loss"]).backward()
            self.write_metrics({"loss": losses["loss"]}, 0.0)
            self.update()

    class Own(DefaultTrainer):
        def __init__(self, cfg: Any) -> None:
            super().__init__(cfg)
            self._trainer = Stepper(self.model, self.train_loader, self.optimizer)

    return config_file(folder, trainer=Own)


def transformers_model(folder: Path, **settings: Any) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(2)
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = BertForSequenceClassification(BertConfig(**sizes, intermediate_size=32, num_labels=3))
    rows = torch.randint(0, 50, (90, 12), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": int(row[0]) % 3} for row in rows]
    return objects(folder, model=model, data=(data, data[:20]), **settings)


def tensors(folder: Path, **settings: Any) -> nn.Module:
    """Data in tensors, a criterion, a plain module: the shortest path."""
    inputs = torch.randn(150, 8, generator=torch.Generator().manual_seed(3))
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    return objects(folder, model=model, data=(data, data), **settings)


def with_callbacks(folder: Path) -> nn.Module:
    from trainwright.hooks import Callback

    class Decay(Callback):
        def on_epoch_end(self, epochs: int, logs: Any) -> None:
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.5

    stopping = {"monitor": "eval_epoch_loss", "patience": 1, "mode": "min"}
    return objects(folder, callbacks=[Decay()], early_stopping=stopping, lr_scheduler_type=None, num_epochs=6)


CASES: dict[str, Callable[..., nn.Module]] = {
    "python": lambda folder: objects(folder),
    "python accumulation": lambda folder: objects(folder, gradient_accumulation_steps=3),
    "python bf16": lambda folder: objects(folder, mixed_precision="bf16"),
    "python clipping": lambda folder: objects(folder, max_grad_norm=0.1, warmup_ratio=0.3),
    "python skip": lambda folder: objects(folder, non_finite="skip", max_grad_norm=0.5),
    "python graph": lambda folder: tensors(folder, graph=True),
    "python tensors": tensors,
    "python resume": lambda folder, **k: interrupted(objects, folder, case="python resume", save_steps=5, **k),
    "python own train_step": own_train_step,
    "python callbacks": with_callbacks,
    "python transformers": transformers_model,
    "python torch schedule": lambda folder: objects(folder, lr_scheduler={"name_": "ExponentialLR", "gamma": 0.5}),
    "python ranks": lambda folder: objects(folder),
    "config": lambda folder: config_file(folder),
    "config accumulation": lambda folder: config_file(folder, train__num_accumulation_steps=2),
    "config bf16": lambda folder: config_file(folder, train__amp__enabled=True),
    "config recompute": lambda folder: config_file(folder, train__activation_checkpoint__enabled=True),
    "config graph": lambda folder: config_file(folder, graph__enabled=True),
    "config resume": lambda folder, **k: interrupted(config_file, folder, case="config resume", **k),
    "config own run_step": own_run_step,
    "config skip": lambda folder: config_file(folder, train__non_finite="skip"),
    "config ranks": lambda folder: config_file(folder),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append", help="by default all; may be given more than once")
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--compare", type=Path, help="an earlier record; exit code 1 where results differ")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        case, folder = args.one.split("@")
        digest = _digest(CASES[case](Path(folder)))
        if os.environ.get("RANK", "0") == "0":  # the lines of two processes may be written as one
            print("FINGERPRINT", digest)
        return
    before = json.loads(args.compare.read_text()) if args.compare else {}
    record, differing = {}, []
    for case in args.case or CASES:
        record[case] = _run(case)
        verdict = ""
        if case in before:
            verdict = _difference(before[case], record[case]) or "equal"
            differing += [] if verdict == "equal" else [case]
        losses = record[case]["losses"]
        print(f"{case:24} {len(losses):3} losses, last {losses[-1]}, weights {record[case]['weights'][:12]} {verdict}")
    if args.json:
        args.json.write_text(json.dumps(record, indent=1))
    sys.exit(f"Differing: {', '.join(differing)}" if differing else 0)


def _run(case: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.fingerprint", "--one", f"{case}@{folder}/run"]
        if case.endswith("ranks"):
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
            command = [*launcher, *command[1:]]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        found = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("FINGERPRINT")]
        if done.returncode or not found:
            sys.exit(f"{case} failed:\n{done.stdout}\n{done.stderr}")
        rows = [json.loads(line) for line in (Path(folder) / "run" / "metrics.json").read_text().splitlines()]
        losses = [row["total_loss"] for row in rows if "total_loss" in row]
        return {"losses": losses, "weights": found[0]}


def _digest(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _difference(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    pairs = zip(before["losses"], now["losses"], strict=False)  # a different length is reported below
    first = next((number for number, (was, new) in enumerate(pairs) if was != new), None)
    if first is not None:
        return f"DIFFERS from loss {first} on: {before['losses'][first]} was, {now['losses'][first]} is"
    if len(before["losses"]) != len(now["losses"]):
        return f"DIFFERS in the number of losses: {len(before['losses'])} were"
    return None if before["weights"] == now["weights"] else "DIFFERS in the final weights"


if __name__ == "__main__":
    main()
