"""Names of other libraries, and what is called so here: for the messages about unknown settings, keys and attributes.

The libraries are Lightning, transformers, Accelerate, timm, MMEngine, Composer and Keras. Names that mean the same as a
setting are aliases of it instead, in the table of settings.
"""

from collections.abc import Iterable, Mapping

from trainwright.base.errors import did_you_mean

_NONE = "there is no equivalent"
_PROCESSES = "torchrun --nproc-per-node N SCRIPT"
_SMOOTHING = "loss={'name_': 'CrossEntropyLoss', 'label_smoothing': 0.1}"

# Settings of a TrainingConfig.
SETTINGS = {
    "default_root_dir": "output_dir",
    **dict.fromkeys(("max_iter", "max_iters", "train_iter", "num_iters"), "max_steps"),
    **{name: f"mixed_precision={name!r}" for name in ("bf16", "fp16")},
    "precision": "mixed_precision='bf16' or 'fp16'",
    "logging_dir": "logs_dir, or tensorboard={'log_dir': ...}",
    **dict.fromkeys(("logger", "report_to"), "trackers='wandb', or tensorboard={'log_dir': ...}"),
    "save_strategy": "model_checkpoint={'every_n_epoch': 1}, or save_steps",
    "enable_checkpointing": "save_enabled",
    "enable_progress_bar": "progress_bar",
    "disable_tqdm": "progress_bar=False",
    **dict.fromkeys(("optim", "opt"), "optimizer"),
    **dict.fromkeys(("sched", "scheduler"), "lr_scheduler_type, or lr_scheduler"),
    "warmup_epochs": "warmup_ratio, or warmup_steps",
    "gradient_clip_algorithm": "max_grad_norm for 'norm', clip_grad_value for 'value'",
    "val_check_interval": "eval_strategy='step' with eval_steps, a number of steps or a share of all steps",
    "num_sanity_val_steps": "eval_on_start",
    **dict.fromkeys(
        ("validation_split", "val_split", "valid_pct", "eval_split"),
        "torch.utils.data.random_split(data, [0.8, 0.2]), whose second part is the Trainer's eval_dataset",
    ),
    "full_determinism": "deterministic",
    "benchmark": "torch.backends.cudnn.benchmark = True, in your program",
    "limit_test_batches": "limit_eval_batches",
    "limit_predict_batches": "trainer.predict(data) with fewer samples",
    "auto_lr_find": "trainer.find_lr(apply=True)",
    **dict.fromkeys(("auto_scale_batch_size", "auto_find_batch_size"), "trainer.find_batch_size()"),
    "dataloader_persistent_workers": "nothing, workers stay alive over epochs",
    "logging_first_step": "log_steps=1",
    **dict.fromkeys(("ema_decay", "model_ema", "model_ema_decay"), "ema={'decay': 0.999}"),
    "swa": "ema={'average': 'equal', 'start': 0.75}",
    "devices": f"{_PROCESSES}, or device",
    "num_nodes": "torchrun --nnodes N SCRIPT",
    "accelerator": "device, or Trainer(..., accelerator=Accelerator())",
    "strategy": f"zero_stage=1, 2 or 3 for fsdp and deepspeed; {_PROCESSES}",
    **dict.fromkeys(("torch_compile", "compile"), "graph=True"),
    "profiler": "profile",
    "callbacks": "Trainer(..., callbacks=[...])",
    "compute_metrics": "metrics=[...], or Trainer(..., metrics_handler=...)",
    **dict.fromkeys(
        ("early_stopping_patience", "patience"), "early_stopping={'monitor': 'eval_loss', 'patience': 3, 'mode': 'min'}"
    ),
    "push_to_hub": "trainer.push_to_hub(repo_id)",
    "do_train": "trainer.train()",
    "do_predict": "trainer.predict(data)",
    "checkpoint_hist": "max_to_keep",
    **dict.fromkeys(("label_smoothing", "label_smoothing_factor", "smoothing"), _SMOOTHING),
    "sync_batchnorm": "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), before Trainer(...)",
    **dict.fromkeys(("mixup", "cutmix"), "build_image_train_loader(..., mixup_func=timm.data.Mixup(...))"),
    "dataloader_prefetch_factor": "train_dataloader=build_image_train_loader(..., prefetch_factor=...)[0]",
    "wandb": "trackers='wandb'",
    "enable_model_summary": "trainer.print_info()",
    **dict.fromkeys(("deepspeed", "fsdp", "fsdp_config"), "zero_stage=1, 2 or 3, with torchrun"),
    **dict.fromkeys(("num_gpus", "gpus", "n_gpu", "num_processes", "nproc_per_node"), _PROCESSES),
    **dict.fromkeys(("min_epochs", "min_steps", "remove_unused_columns", "neftune_noise_alpha"), _NONE),
}

# Keys of config files, and flags of the command line, that do not follow from ``SETTINGS``: see ``key_hints``.
KEYS = {
    "base_lr": "optim.lr",
    "wd": "optim.weight_decay",
    **dict.fromkeys(("max_iter", "max_iters", "num_iters", "iterations", "steps"), "train.train_iter"),
    "bs": "train.train_micro_batch_size",
    "param_scheduler": "train.scheduler",
    "warmup_steps": "train.warmup_ratio",
    "clip_grad": "optim.params.clip_grad_max_norm",
    "grad_checkpointing": "train.activation_checkpoint.enabled",
    **dict.fromkeys(("work_dir", "output"), "train.output_dir"),
    **dict.fromkeys(("load_from", "pretrained", "checkpoint"), "train.load_weight"),
    **dict.fromkeys(("resume_from", "resume_from_checkpoint", "ckpt_path"), "--resume"),
    **dict.fromkeys(("eval", "evaluate", "test_only"), "--eval-only"),
    **dict.fromkeys(("num_workers", "workers"), "dataloader.train.num_workers"),
    "save_interval": "train.checkpointer.period",
    "max_keep_ckpts": "train.checkpointer.max_to_keep",
    **dict.fromkeys(("val_interval", "val_check_interval"), "train.evaluation.eval_period"),
    "log_interval": "train.log_period",
    "save_best": "train.evaluation.eval_metric",
    **dict.fromkeys(("dataset", "train_dataset", "data"), "dataloader.train.dataset"),
    "config": "--config-file",
    **dict.fromkeys(("callback", "callbacks"), "train.callbacks"),
    **dict.fromkeys(("hook", "hooks", "custom_hooks", "build_hooks"), "train.hooks"),
}

# What else a user may look for, by the key that a hint names.
BESIDE = {"train.hooks": " A subclass of DefaultTrainer may override build_hooks, the list of all hooks."}

# Attributes of a trainer.
ATTRIBUTES = {
    **dict.fromkeys(("fit", "run", "train_loop"), "train()"),
    **dict.fromkeys(("validate", "val", "test", "eval"), "evaluate(), or evaluate(dataset)"),
    "evaluate": "test(cfg, loaders, model)",
    **dict.fromkeys(("save_model", "save_checkpoint", "save_state", "save_weights"), "save(path)"),
    **dict.fromkeys(("load_model", "load_checkpoint", "load_state", "load_weights"), "load(path)"),
    **dict.fromkeys(("log", "log_dict", "log_metrics"), "trainwright.get_event_storage().put_scalar(name, value)"),
    "args": "config",
    **dict.fromkeys(("current_epoch", "epochs"), "epoch"),
    "global_step": "state.global_step",
    "should_stop": "trainercontrol.should_training_stop",
    **dict.fromkeys(("callback_metrics", "logged_metrics"), "last_eval_results"),
    **dict.fromkeys(("tokenizer", "processing_class"), "preprocessor"),
    "get_train_dataloader": "create_train_dataloader(dataset)",
    "get_eval_dataloader": "create_eval_dataloader(dataset)",
    **dict.fromkeys(("create_optimizer", "create_optimizer_and_scheduler"), "set_optimizer(optimizer)"),
    "prediction_step": "predict_step(batch)",
    "manual_backward": "backward(loss)",
    "optimizers": "optimizer",
    "summary": "print_info()",
    "compile": "TrainingConfig(optimizer=..., loss=..., metrics=...)",
}

# Arguments of Trainer(...).
ARGUMENTS = {
    "args": "config",
    "compute_metrics": "metrics_handler",
    **dict.fromkeys(("compute_loss_func", "loss_fn", "criterion"), "loss"),
    **dict.fromkeys(("processing_class", "tokenizer", "feature_extractor", "image_processor"), "preprocessor"),
    **dict.fromkeys(("val_dataset", "valid_dataset", "test_dataset"), "eval_dataset"),
    **dict.fromkeys(("train_loader", "train_dataloaders"), "train_dataloader"),
    **dict.fromkeys(("val_loader", "val_dataloaders", "val_dataloader", "test_dataloader"), "eval_dataloader"),
    "datamodule": "train_dataset and eval_dataset",
    "collate_fn": "data_collator",
    "scheduler": "lr_scheduler",
    "model_init": "model",
    **dict.fromkeys(("devices", "strategy", "num_gpus", "gpus"), _PROCESSES),
}

# Arguments of train().
TRAIN_ARGUMENTS = {
    **dict.fromkeys(
        ("resume_from_checkpoint", "ckpt_path"),
        "TrainingConfig(resume_from_checkpoint=True), or train(resume_checkpoint_path=path)",
    ),
    **dict.fromkeys(("model", "train_dataloaders", "val_dataloaders", "datamodule"), "arguments of Trainer(...)"),
}


def argument_hint(name: str, table: Mapping[str, str], settings: Iterable[str]) -> str:
    """What an unknown argument is called here, or that it is a setting; "" if it is not known."""
    if name in table:
        return f" Here: {table[name]}."
    return f" It is a setting: TrainingConfig({name}=...)." if name in {*settings} else ""


def setting_hint(name: str, allowed: Iterable[str]) -> str:
    """What an unknown setting is called in a TrainingConfig, or the nearest name."""
    if name not in SETTINGS:
        return did_you_mean(name, allowed)
    return f"Here: {SETTINGS[name]}." if SETTINGS[name] != _NONE else f"It is of another library; {_NONE}."


def attribute_hint(name: str, owner: object) -> str | None:
    """What the attribute of another library's trainer is called; None if it is not known, or is not on ``owner``."""
    here = ATTRIBUTES.get(name)
    if here is None:
        return None
    attribute = here.partition("(")[0].partition(".")[0]
    return here if "." in here.partition("(")[0] or here[0].isupper() or hasattr(owner, attribute) else None
