"""What an unknown key of a config file, or flag of the command line, is called here."""

import difflib
import functools

from trainwright.config.settings import KEYS, TrainingConfig

# Keys of config files, and flags of the command line, by names that are not those of a setting.
_KEYS = {
    "base_lr": "optim.lr",
    "wd": "optim.weight_decay",
    "opt": "optim",
    **dict.fromkeys(("max_iters", "num_iters", "iterations", "steps"), "train.train_iter"),
    "bs": "train.train_micro_batch_size",
    **dict.fromkeys(("scheduler", "sched", "param_scheduler"), "train.scheduler"),
    **dict.fromkeys(("warmup_steps", "warmup_epochs"), "train.warmup_ratio"),
    **dict.fromkeys(("precision", "bf16", "fp16"), "train.amp.enabled"),
    "clip_grad": "optim.params.clip_grad_max_norm",
    "grad_checkpointing": "train.activation_checkpoint.enabled",
    **dict.fromkeys(("work_dir", "output", "default_root_dir"), "train.output_dir"),
    **dict.fromkeys(("load_from", "pretrained", "checkpoint"), "train.load_weight"),
    **dict.fromkeys(("resume_from", "resume_from_checkpoint", "ckpt_path"), "--resume"),
    **dict.fromkeys(("eval", "evaluate", "test_only"), "--eval-only"),
    **dict.fromkeys(("num_workers", "workers"), "dataloader.train.num_workers"),
    "save_interval": "train.checkpointer.period",
    "max_keep_ckpts": "train.checkpointer.max_to_keep",
    **dict.fromkeys(("val_interval", "val_check_interval"), "train.evaluation.eval_period"),
    "log_interval": "train.log_period",
    **dict.fromkeys(("enable_progress_bar", "disable_tqdm"), "train.progress_bar"),
    "save_best": "train.evaluation.eval_metric",
    **dict.fromkeys(("ema_decay", "model_ema", "model_ema_decay"), "train.ema"),
    **dict.fromkeys(("compile", "torch_compile"), "graph.enabled"),
    **dict.fromkeys(("dataset", "train_dataset", "data"), "dataloader.train.dataset"),
    "config": "--config-file",
    **dict.fromkeys(("fsdp", "deepspeed", "strategy"), "train.zero_optimization.stage"),
}


@functools.cache
def keys_by_name() -> dict[str, str]:
    """Keys of config files, and flags of the command line, by the names of the Python API and of other libraries."""
    rows = TrainingConfig.rows
    fields = {name: name for name in rows} | {name: alias.field for name, alias in TrainingConfig.aliases.items()}
    return {name: rows[field].place for name, field in fields.items() if rows[field].place and name != "graph"} | _KEYS


def key_hint(name: str) -> str:
    """What an unknown key or flag is called in config files, as a sentence; "" if it is not known."""
    parts, keys = name.lstrip("-").replace("-", "_").split("."), keys_by_name()
    for number, part in enumerate(parts):
        if part in keys:
            rest = parts[number + 1 :] if keys[part] == "optim" else []
            return f"Did you mean {'.'.join([keys[part], *rest])!r}?"
    is_of_train = any(key.split(".")[:2] == ["train", parts[0]] for key in KEYS)
    return f"Did you mean {'.'.join(['train', *parts])!r}?" if is_of_train else ""


def python_hint(name: str) -> str:
    """That a name without a key is a setting of the Python API, as a sentence; "" if it is none.

    >>> python_hint("early_stopping")
    'It is a setting of the Python API, TrainingConfig(early_stopping=...), and no key of train.'
    """
    if name not in TrainingConfig.rows:
        return ""
    return f"It is a setting of the Python API, TrainingConfig({name}=...), and no key of train."


def misspelt_key_hint(name: str) -> str:
    """As :func:`key_hint`, for a name that is spelled almost as one of another library.

    >>> misspelt_key_hint("precison")
    "Did you mean 'train.amp.enabled'?"
    """
    nearest = difflib.get_close_matches(name, keys_by_name(), n=1, cutoff=0.8)
    return key_hint(nearest[0]) if nearest else ""
