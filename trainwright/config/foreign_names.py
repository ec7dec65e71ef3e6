"""Names of other libraries, and what is called so here: for the messages about unknown settings, keys and attributes.

The libraries are Lightning, transformers, Accelerate, timm, MMEngine, Composer, fastai and Keras. Names that mean the
same as a setting are aliases of it instead, in the table of settings.
"""

import difflib
from collections.abc import Iterable, Mapping

from trainwright.base.errors import nearest_name

_NONE = "there is no equivalent"
_PROCESSES = "torchrun --nproc-per-node N SCRIPT"
_HOOKS = "trainer.register_hooks([...]) before train(), or build_hooks() of a subclass"
_SMOOTHING = "loss={'name_': 'CrossEntropyLoss', 'label_smoothing': 0.1}"

# Settings of a TrainingConfig.
SETTINGS = {
    "default_root_dir": "output_dir",
    **dict.fromkeys(("max_iter", "max_iters", "train_iter", "num_iters"), "max_steps"),
    **{name: f"mixed_precision={name!r}, or None, the default" for name in ("bf16", "fp16")},
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
    "ema_tau": "ema={'decay': 0.9999, 'warmup': 2000}",
    **dict.fromkeys(
        ("model_ema_warmup", "use_ema_warmup", "ema_inv_gamma", "ema_power"), "ema={'decay': 0.9999, 'warmup': 'timm'}"
    ),
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
    "dataloader_prefetch_factor": "Trainer(..., train_dataloader=DataLoader(..., prefetch_factor=...))",
    "wandb": "trackers='wandb'",
    "enable_model_summary": "trainer.print_info()",
    **dict.fromkeys(("deepspeed", "fsdp", "fsdp_config"), "zero_stage=1, 2 or 3, with torchrun"),
    **dict.fromkeys(("num_gpus", "gpus", "n_gpu", "num_processes", "nproc_per_node"), _PROCESSES),
    **dict.fromkeys(("min_epochs", "min_steps", "remove_unused_columns", "neftune_noise_alpha"), _NONE),
    # Data.
    "shuffle": "dataloader_shuffle",
    **dict.fromkeys(("num_workers", "workers"), "dataloader_num_workers"),
    "packing": "Trainer(..., train_dataset=PackedDataset(texts, length))",
    "mirror": "checkpoint_mirror",
    "bs": "batch_size",
    **dict.fromkeys(("validation_batch_size", "val_bs"), "eval_batch_size"),
    "split_batches": "batch_size, the samples of each process",
    "steps_per_epoch": "limit_train_batches",
    "validation_steps": "limit_eval_batches",
    **dict.fromkeys(("x", "y"), "Trainer(model, config, TensorDataset(x, y))"),
    "validation_data": "Trainer(..., eval_dataset=...)",
    "train_dataloader": "Trainer(..., train_dataloader=...)",
    **dict.fromkeys(("val_dataloader", "test_dataloader"), "Trainer(..., eval_dataloader=...)"),
    "dataloader_config": "dataloader_num_workers, dataloader_drop_last or dataloader_shuffle",
    "dataloader_multiprocessing_context": "Trainer(..., train_dataloader=DataLoader(..., multiprocessing_context=...))",
    "train_sampling_strategy": "dataloader_shuffle, bucket_by_length, or Trainer(..., train_dataloader=...)",
    "length_column_name": "bucket_by_length='length', or the name of another field",
    "item_tfms": "a transform of the data set",
    "batch_tfms": "prepare_input_batch(batch) of a subclass of Trainer",
    "reload_dataloaders_every_n_epochs": "create_train_dataloader(dataset) of a subclass, called for each epoch",
    "use_distributed_sampler": "nothing, each process reads its share",
    "dataloader_in_order": "nothing, batches are in the order of the samples",
    "ignore_data_skip": "nothing, a resume continues with the next sample",
    "device_placement": "nothing, the model and batches are moved to the device",
    "sample_weight": "a field of the samples, which a loss of your own uses",
    # Optimizer, schedule and loss.
    **dict.fromkeys(("betas", "adam_beta1", "adam_beta2"), "optimizer={'name_': 'AdamW', 'betas': [0.9, 0.999]}"),
    "adam_epsilon": "optimizer={'name_': 'AdamW', 'eps': 1e-8}",
    "optim_args": "optimizer={'name_': 'AdamW', 'eps': 1e-8}, the name with the arguments",
    "momentum": "optimizer={'name_': 'SGD', 'momentum': 0.9}",
    "nesterov": "optimizer={'name_': 'SGD', 'momentum': 0.9, 'nesterov': True}",
    "opt_func": "optimizer, or Trainer(..., optimizer=...)",
    "optim_wrapper": "optimizer, max_grad_norm and gradient_accumulation_steps",
    "lr_max": "learning_rate",
    "wd": "weight_decay",
    **dict.fromkeys(("no_decay", "wd_bn_bias"), "decay_norm_and_bias, False for no weight decay of norms and biases"),
    **dict.fromkeys(("div", "div_final", "moms"), "lr_scheduler={'name_': 'OneCycleLR', ...}, with its arguments"),
    "pct_start": "warmup_ratio",
    "param_scheduler": "lr_scheduler, or lr_scheduler_type",
    "step_scheduler_with_optimizer": "lr_scheduling_steps",
    "clip_grad": "max_grad_norm",
    **dict.fromkeys(("accumulative_counts", "gradient_accumulation_plugin"), "gradient_accumulation_steps"),
    "splitter": "Trainer(..., optimizer=...) with groups of your own, or layer_decay",
    "train_bn": "freeze_bn=True for norms that are not trained",
    "reset_opt": "a new Trainer, which has a new optimizer",
    "loss_func": "loss",
    "class_weight": "loss={'name_': 'CrossEntropyLoss', 'weight': [1.0, 2.0]}",
    "loss_weights": "the weighted sum of the losses, in compute_loss of the model or of a subclass of Trainer",
    **dict.fromkeys(
        ("use_liger_kernel", "liger_kernel_config"),
        "apply_liger_kernel_to_llama() of liger_kernel, or its function for another model, before it is built",
    ),
    # Precision, devices and processes.
    **dict.fromkeys(("torch_dtype", "dtype"), "mixed_precision, or a model in this type"),
    **dict.fromkeys(("bf16_full_eval", "fp16_full_eval"), "mixed_precision, which is used in evaluations, too"),
    "auto_scale_loss": "mixed_precision='fp16', which scales the loss",
    "tf32": "float32_matmul_precision='high'",
    "cpu": "use_cpu=True",
    "activation_checkpointing": "gradient_checkpointing",
    **dict.fromkeys(
        ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"),
        "gradient_checkpointing=True, 'selective' or 'offload'",
    ),
    **dict.fromkeys(("jit_compile", "dynamo_plugin"), "graph=True"),
    **dict.fromkeys(("torch_compile_backend", "dynamo_backend"), "graph_backend"),
    "run_eagerly": "graph=False, the default",
    "ddp_find_unused_parameters": "find_unused_parameters",
    "ddp_timeout": "hang_timeout_s",
    "ddp_backend": "nothing, it is nccl for GPUs and gloo for CPUs",
    "average_tokens_across_devices": "nothing, a mean loss is over the tokens of all processes (loss_ignores)",
    **dict.fromkeys(("fsdp_plugin", "deepspeed_plugin", "deepspeed_plugins"), "zero_stage=1, 2 or 3, with torchrun"),
    "torch_tp_plugin": "tensor_parallel_size",
    "megatron_lm_plugin": "tensor_parallel_size and pipeline_parallel_size",
    "parallelism_config": "tensor_parallel_size, context_parallel_size, zero_stage and replicate_size",
    "accelerator_config": "Trainer(..., accelerator=Accelerator(...))",
    **dict.fromkeys(("launcher", "local_rank"), _PROCESSES),
    # Evaluation.
    **dict.fromkeys(
        ("eval_every", "eval_interval", "val_interval", "validation_freq", "val_cfg", "test_cfg"),
        "eval_every_n_epoch, or eval_strategy='step' with eval_steps",
    ),
    "do_eval": "eval_strategy, or trainer.evaluate()",
    "monitor": "metric_for_best_model, or early_stopping={'monitor': ...}",
    "save_best_only": "nothing, the best checkpoint is kept, by metric_for_best_model",
    "prediction_loss_only": "metrics=None",
    "include_for_metrics": "Trainer(..., metrics_handler=...)",
    **dict.fromkeys(
        ("batch_eval_metrics", "eval_accumulation_steps", "eval_do_concat_batches", "eval_use_gather_object"),
        "nothing, metrics count batch by batch",
    ),
    "inference_mode": "nothing, evaluations compute no gradients",
    # Folders, logs and checkpoints.
    **dict.fromkeys(("work_dir", "save_dir", "project_dir", "project_config"), "output_dir"),
    "path": "the folder of a run is output_dir",
    "model_dir": "checkpoints_dir",
    "verbose": "progress_bar",
    **dict.fromkeys(("logging_strategy", "log_processor"), "log_steps"),
    **dict.fromkeys(("log_level", "log_level_replica"), "logging.getLogger('trainwright').setLevel(...)"),
    "log_on_each_node": "nothing, the main process writes the log",
    **dict.fromkeys(("logging_nan_inf_filter", "debug"), "the setting non_finite says what NaN and infinity do"),
    "detect_anomaly": "torch.autograd.set_detect_anomaly(True), in your program",
    "include_num_input_tokens_seen": "log_throughput",
    "log_with": "trackers='wandb'",
    "visualizer": "trackers, or tensorboard",
    **dict.fromkeys(
        ("run_name", "experiment_name", "name"), "a run's folder is output_dir; trackers={'wandb': {'name': ...}}"
    ),
    "project": "the arguments of a tracker, trackers={'wandb': {'project': 'digits'}}",
    **dict.fromkeys(
        ("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"), "trackers={'trackio': {...}}"
    ),
    "enable_autolog_hparams": "nothing, TensorBoard and trackers get the settings",
    "save_only_model": "nothing, a checkpoint has the complete state; trainer.export(folder) writes the model",
    "enable_jit_checkpoint": "nothing, SIGTERM saves and stops a run",
    "restore_callback_states_from_checkpoint": "nothing, a resume restores what state_dict() of a callback returns",
    "rng_types": "nothing, a checkpoint has all random generators",
    "load_from": "init_weights_from",
    "resume": "resume_from_checkpoint=True",
    **dict.fromkeys(
        ("initial_epoch", "start_epoch"), "resume_from_checkpoint=True, which continues where a run has stopped"
    ),
    "hub_token": "the environment variable HF_TOKEN",
    "hub_private_repo": "trainer.push_to_hub(repo_id, private=True)",
    **dict.fromkeys(
        ("hub_model_id", "hub_strategy", "hub_always_push", "hub_revision"), "trainer.push_to_hub(repo_id)"
    ),
    # Others.
    "barebones": "progress_bar=False, save_enabled=False and eval_strategy='no'",
    "n_epoch": "num_epochs",
    "train_cfg": "num_epochs, or max_steps",
    "data_seed": "seed",
    "randomness": "seed and deterministic",
    "cbs": "Trainer(..., callbacks=[...])",
    **dict.fromkeys(("hooks", "default_hooks", "custom_hooks"), _HOOKS),
    "use_cache": "a setting of the model: model.config.use_cache = False",
    **dict.fromkeys(
        (
            "model_registry",
            "plugins",
            "ddp_broadcast_buffers",
            "ddp_bucket_cap_mb",
            "ddp_static_graph",
            "eval_delay",
            "optim_target_modules",
            "save_on_each_node",
            "skip_memory_metrics",
            "torch_compile_mode",
            "val_begin",
            "torch_empty_cache_steps",
            "kwargs_handlers",
            "weighted_metrics",
            "steps_per_execution",
            "auto_scale_lr",
            "env_cfg",
            "default_scope",
        ),
        _NONE,
    ),
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
    **dict.fromkeys(("dataset", "train_dataset", "data"), "dataloader.train.dataset"),
    "config": "--config-file",
    **dict.fromkeys(("callback", "callbacks", "cbs"), "train.callbacks"),
    **dict.fromkeys(("hook", "hooks", "default_hooks", "custom_hooks", "build_hooks"), "train.hooks"),
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
    **dict.fromkeys(("log_dict", "log_metrics"), "log({name: value})"),
    "args": "config",
    **dict.fromkeys(("current_epoch", "epochs"), "epoch"),
    "global_step": "state.global_step",
    "should_stop": "trainercontrol.should_training_stop",
    **dict.fromkeys(("callback_metrics", "logged_metrics"), "last_eval_results"),
    **dict.fromkeys(("tokenizer", "processing_class"), "preprocessor"),
    **dict.fromkeys(("best_model_path", "best_model_checkpoint", "best_checkpoint_path"), "best_checkpoint"),
    **dict.fromkeys(("log_history", "metrics_history"), "history"),
    **dict.fromkeys(("register_hook", "add_hook", "add_hooks"), "register_hooks([hook])"),
    **dict.fromkeys(("add_callbacks", "register_callback"), "add_callback(callback)"),
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
    **dict.fromkeys(("hooks", "custom_hooks"), _HOOKS),
    "cbs": "callbacks",
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


# Methods that the trainers and modules of other libraries have for a user to override.
METHODS = {
    **dict.fromkeys(("validation_step", "test_step", "prediction_step", "eval_step", "val_step"), "evaluation_step"),
    **dict.fromkeys(
        ("configure_optimizers", "create_optimizer", "create_optimizer_and_scheduler", "create_scheduler"),
        "Trainer(model, config, data, optimizer=..., lr_scheduler=...), or build_optimizer of a DefaultTrainer",
    ),
    **dict.fromkeys(("get_train_dataloader", "train_dataloader"), "create_train_dataloader, or train_dataloader=..."),
    **dict.fromkeys(
        ("get_eval_dataloader", "get_test_dataloader", "val_dataloader", "test_dataloader"),
        "create_eval_dataloader, or eval_dataloader=...",
    ),
    **dict.fromkeys(
        ("on_train_epoch_end", "training_epoch_end", "on_validation_epoch_end", "validation_epoch_end", "after_epoch"),
        "on_epoch_end and on_eval_end of a Callback in callbacks=[...]",
    ),
    **dict.fromkeys(("compute_metrics", "calculate_metrics"), "metrics=[...] of the config, or compute_metric"),
    **dict.fromkeys(("optimizer_step", "_optimizer_step"), "optimization_step"),
    "training_step_end": "training_step",
    "forward": "that of the model; compute_loss(model, inputs) of the trainer computes the loss",
}


def setting_hint(name: str, allowed: Iterable[str], places: Mapping[str, str] | None = None) -> str:
    """What an unknown setting is called in a TrainingConfig, or the nearest name.

    ``places``: the settings by their keys in config files.
    """
    if "." in name:
        return _without_dots(name, set(allowed), places or {})
    if name not in SETTINGS:
        names = sorted(allowed)
        near = nearest_name(name, names).lstrip()
        few = sorted(names, key=lambda one: -difflib.SequenceMatcher(None, name, one).ratio())[:5]
        return near or f"The nearest names are {', '.join(few)}; get_config_help() describes all."
    return f"Here: {SETTINGS[name]}." if SETTINGS[name] != _NONE else f"It is of another library; {_NONE}."


def _without_dots(name: str, allowed: set[str], settings: Mapping[str, str]) -> str:
    """What to write in place of the path of a config file, or of an entry of a setting that is a dict."""
    first, _, rest = name.partition(".")
    last = name.rpartition(".")[2]
    found = settings.get(name) or settings.get(f"train.{name}") or (last if last in allowed else None)
    if first in allowed and found is None:
        return f"Write {first}={{{rest!r}: ...}}."
    if found is None:
        return f"The settings have no sections. {setting_hint(last, allowed)}"
    return f"The settings have no sections: write {found}=..."


def attribute_hint(name: str, owner: object) -> str | None:
    """What the attribute of another library's trainer is called; None if it is not known, or is not on ``owner``."""
    here = ATTRIBUTES.get(name)
    if here is None:
        return None
    attribute = here.partition("(")[0].partition(".")[0]
    return here if "." in here.partition("(")[0] or here[0].isupper() or hasattr(owner, attribute) else None
