"""A folder with the files of an earlier run, of a version that kept no list of them."""

from pathlib import Path

from omegaconf import OmegaConf

CONFIG = OmegaConf.create({"train": {"resume": True, "seed": 1}})


WRITTEN = {  # by a run of a version that kept no list
    "config.yaml": "train: {seed: 1, consumed_train_samples: 0}\n",
    "events.out.tfevents.1.vm.2": "\x18\0\0\0\0\0\0\0....\x09....brain.Event:2",
    "last_checkpoint": "model_final",
    "log.txt": "[2025-01-01 00:00:00 trainwright.engine INFO] an earlier line\n",
    "metrics.json": '{"iteration": 9}\n',
}


def earlier_run(folder: Path) -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    (folder / "model_0000009").mkdir()
    (folder / "model_0000009" / "manifest.json").write_text("{}")
    (folder / "model_final").symlink_to("model_0000009")
    for name, content in WRITTEN.items():
        (folder / name).write_text(content)
    return contents(folder)


def contents(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()}
