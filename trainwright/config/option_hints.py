"""What an unknown option of a command is called: in the command, as an override, or in another command."""

import re
from collections.abc import Collection, Sequence

from trainwright.base.errors import did_you_mean

_SPLIT = "The data are dataloader.test of the config: dataloader.test.0.dataset.NAME=VALUE changes an argument of it."
_CHECKPOINT = "Write --checkpoint NAME, or pass the folder of the checkpoint in place of the run."
_LAUNCH = "It is an option of launch, which comes first: trainwright launch -n 2 {command} ..."
_PROCESSES = ("gpus", "n", "nproc", "nproc_per_node", "num_processes", "num_gpus", "devices", "world_size")
_WEIGHTS = ("weights", "weight", "ckpt", "ckpt_path", "load_weight", "model", "pretrained", "init_checkpoint", "load")
_FILES = ("output", "o", "out", "out_file", "save", "save_dir", "output_dir", "output_file", "save_path", "dest")
_WRITTEN = (".png", ".pdf", ".svg", ".csv", ".json", ".jsonl", ".html")
_BATCH = ("batch_size", "bs", "batch", "eval_batch_size", "per_device_eval_batch_size", "test_batch_size")

# By the command; "" is for each that takes overrides.
_OF_COMMANDS: dict[str, dict[str, str]] = {
    "": {
        **dict.fromkeys(
            ("config_name", "cn", "config_path", "cp", "config_dir", "cd", "c", "cfg", "cfg_file", "f"),
            "The file is an argument without an option: trainwright {command} config.py",
        ),
        **dict.fromkeys(
            ("cfg_options", "opts", "options", "set", "overrides", "override", "o", "hparams"),
            "Overrides have no option: trainwright {command} config.py optim.lr=1e-3",
        ),
        **dict.fromkeys(("n", "nnodes", "nproc", "rdzv_endpoint", "max_restarts"), _LAUNCH),
        **dict.fromkeys(("debug", "dry_run", "sanity_check"), "Did you mean '--fast-dev-run' of trainwright train?"),
    },
    "eval": {
        **dict.fromkeys(
            _FILES, "Write --predictions FILE.csv for the predictions, --metrics FILE.json for the metrics."
        ),
        **dict.fromkeys(_WEIGHTS, _CHECKPOINT),
        **dict.fromkeys(("split", "dataset", "data", "subset"), _SPLIT),
        **dict.fromkeys(_BATCH, "Write train.test_micro_batch_size=N."),
        "resume": "It reads the best checkpoint, else the last one; --checkpoint NAME is another.",
    },
    "predict": {
        **dict.fromkeys((*_FILES, "predictions"), "Did you mean '--output'?"),
        **dict.fromkeys(_WEIGHTS, "Did you mean '--checkpoint'?"),
    },
    "export": {
        **dict.fromkeys(_FILES, "Did you mean '--output'?"),
        **dict.fromkeys(
            ("format", "onnx", "to", "type", "pt2", "torchscript"),
            "It writes a folder with model.safetensors; in Python, trainer.export('model.onnx') writes ONNX.",
        ),
        "checkpoint": "Pass the folder of the checkpoint in place of the run.",
    },
    "report": {
        **dict.fromkeys(("format", "image", "pdf", "picture"), "Did you mean '--png'?"),
        **dict.fromkeys(_FILES, "Did you mean '--output'?"),
    },
    "runs": dict.fromkeys(("filter", "select", "query"), "Did you mean '--where'?")
    | dict.fromkeys(("columns", "fields", "keys"), "Did you mean '--show'?"),
    "find": {
        **dict.fromkeys(("min", "min_lr", "start_lr", "start"), "Did you mean '--lowest'?"),
        **dict.fromkeys(("max", "max_lr", "end_lr", "end"), "Did you mean '--highest'?"),
        **dict.fromkeys(("num_training", "steps", "num_iter", "iterations", "n"), "Did you mean '--updates'?"),
    },
    "estimate": {
        **dict.fromkeys(_PROCESSES, "Did you mean '--world'?"),
        **dict.fromkeys(("gpu_memory", "vram", "hbm"), "Did you mean '--memory'?"),
    },
    "check": dict.fromkeys(("quick", "fast", "timeout", "time"), "Did you mean '--max-seconds'?")
    | dict.fromkeys(("skip", "checks", "select"), "Did you mean '--only'?"),
    "replay": dict.fromkeys(("iteration", "iter", "update", "global_step"), "Did you mean '--step'?"),
    "show": dict.fromkeys(
        ("key", "get", "only", "filter"), "It shows all settings: trainwright config show CONFIG | grep KEY"
    ),
    "doctor": dict.fromkeys(("gpu", "nproc", "n"), "On several processes: trainwright launch -n 2 doctor"),
}


def option_hint(option: str, value: str | None, command: str, flags: Collection[str], *, has_overrides: bool) -> str:
    """What an unknown option is called, as a sentence.

    Args:
        value: what follows it, which may be its value.
        command: the name of the command.
        flags: the options that there are.
    """
    name = option.lstrip("-").replace("-", "_")
    if name in _FILES and name not in _OF_COMMANDS.get(command, {}) and str(value).endswith(_WRITTEN):
        return "Did you mean '--plot'?" if "--plot" in flags else did_you_mean("", flags)
    for known in (_OF_COMMANDS.get(command, {}), _OF_COMMANDS[""] if has_overrides else {}):
        if name in known:
            return known[name].replace("{command}", command)
    if not has_overrides:
        return did_you_mean(option, flags)
    from trainwright.config.key_hints import key_hint  # here: loads pydantic

    hint = key_hint(option)
    key = re.match(r"Did you mean '([a-z_]+\.[\w.]+)'\?", hint)
    if key is None:
        return hint or did_you_mean(option, flags)
    value = "True" if value is None and key[1].endswith(".enabled") else value
    return hint if value is None else f"{hint} Write {key[1]}={value}"


def value_after(option: str, arguments: Sequence[str]) -> str | None:
    """The text that may be the value of an option: behind its "=", or the next argument."""
    if "=" in option:
        return option.partition("=")[2]
    place = next((n for n, text in enumerate(arguments) if text == option), len(arguments))
    following = arguments[place + 1 : place + 2]
    is_value = following and not following[0].startswith("--") and "=" not in following[0]
    return following[0] if is_value and not following[0].endswith((".py", ".yaml", ".yml")) else None
