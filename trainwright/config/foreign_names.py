"""Names of other libraries, and what is called so here: for the messages about unknown settings, keys and attributes.

The libraries are Lightning, transformers, Accelerate, timm, MMEngine, Composer, fastai and Keras. Names that mean the
same as a setting are aliases of it instead, in the table of settings.
"""

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

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
    **dict.fromkeys(
        ("logger", "report_to"),
        "trackers='wandb'; files for TensorBoard are written by default, and tensorboard=None turns them off",
    ),
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
    "dataloader_persistent_workers": "Leave it out: workers stay alive over epochs",
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
    "use_distributed_sampler": "Leave it out: each process reads its share",
    "dataloader_in_order": "Leave it out: batches are in the order of the samples",
    "ignore_data_skip": "Leave it out: a resume continues with the next sample",
    "device_placement": "Leave it out: the model and batches are moved to the device",
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
    "ddp_backend": "Leave it out: it is nccl for GPUs and gloo for CPUs",
    "average_tokens_across_devices": "Leave it out: a mean loss is over the tokens of all processes (loss_ignores)",
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
    "save_best_only": "Leave it out: the best checkpoint is kept, by metric_for_best_model",
    "prediction_loss_only": "metrics=None",
    "include_for_metrics": "Trainer(..., metrics_handler=...)",
    **dict.fromkeys(
        ("batch_eval_metrics", "eval_accumulation_steps", "eval_do_concat_batches", "eval_use_gather_object"),
        "Leave it out: metrics count batch by batch",
    ),
    "inference_mode": "Leave it out: evaluations compute no gradients",
    # Folders, logs and checkpoints.
    **dict.fromkeys(("work_dir", "save_dir", "project_dir", "project_config"), "output_dir"),
    "path": "the folder of a run is output_dir",
    "model_dir": "checkpoints_dir",
    "verbose": "progress_bar",
    **dict.fromkeys(("logging_strategy", "log_processor"), "log_steps"),
    **dict.fromkeys(("log_level", "log_level_replica"), "logging.getLogger('trainwright').setLevel(...)"),
    "log_on_each_node": "Leave it out: the main process writes the log",
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
    "enable_autolog_hparams": "Leave it out: TensorBoard and trackers get the settings",
    "save_only_model": "Leave it out: a checkpoint has the complete state; trainer.export(folder) writes the model",
    "enable_jit_checkpoint": "Leave it out: SIGTERM saves and stops a run",
    "restore_callback_states_from_checkpoint": "Leave it out: a resume restores state_dict() of each callback",
    "rng_types": "Leave it out: a checkpoint has all random generators",
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
    **dict.fromkeys(("bs", "batch"), "train.train_micro_batch_size"),
    **dict.fromkeys(("param_scheduler", "lr_config"), "train.scheduler"),
    "warmup_steps": "train.warmup_ratio",
    **dict.fromkeys(("clip_grad", "max_norm", "grad_clip", "clip_norm"), "optim.params.clip_grad_max_norm"),
    **dict.fromkeys(("writers", "writer"), "train.trackers"),
    "grad_checkpointing": "train.activation_checkpoint.enabled",
    **dict.fromkeys(("work_dir", "output"), "train.output_dir"),
    **dict.fromkeys(
        ("load_from", "pretrained", "checkpoint", "ckpt", "init_checkpoint", "init_weights", "weights"),
        "train.load_weight",
    ),
    "hydra": "train.output_dir",
    **dict.fromkeys(("resume_from", "resume_from_checkpoint", "ckpt_path"), "--resume"),
    **dict.fromkeys(("eval", "evaluate", "test_only"), "--eval-only"),
    **dict.fromkeys(("num_workers", "workers"), "dataloader.train.num_workers"),
    "save_interval": "train.checkpointer.period",
    "max_keep_ckpts": "train.checkpointer.max_to_keep",
    "val_interval": "train.evaluation.eval_after_n_epoch",
    "val_check_interval": "train.evaluation.eval_period",
    "log_interval": "train.log_period",
    **dict.fromkeys(("dataset", "train_dataset", "data"), "dataloader.train.dataset"),
    "config": "--config-file",
    **dict.fromkeys(("callback", "callbacks", "cbs"), "train.callbacks"),
    **dict.fromkeys(("hook", "hooks", "default_hooks", "custom_hooks", "build_hooks"), "train.hooks"),
}

# Lazy calls beside the sections of a config file, and the section or key that a run reads in their place.
CALLS = {
    "optimizer": "optim",
    **dict.fromkeys(("scheduler", "lr_scheduler", "lr_multiplier", "param_scheduler"), "train.scheduler"),
    **dict.fromkeys(("evaluator", "val_evaluator", "test_evaluator"), "train.evaluation.evaluator"),
}

# Loaders of evaluations in the section dataloader, which here are its list test.
EVALUATED = ("val", "valid", "validation", "eval", "evaluation", "dev")

# What else a user may look for, by the key that a hint names.
BESIDE = {"train.hooks": " A subclass of DefaultTrainer may override build_hooks, the list of all hooks."}

# Functions of searches that draw values, as overrides have them.
DRAWN = {
    **dict.fromkeys(("loguniform", "log_uniform", "suggest_loguniform", "qloguniform", "log_uniform_values"), "log"),
    **dict.fromkeys(("suggest_float", "suggest_uniform", "quniform"), "uniform"),
    **dict.fromkeys(("randint", "suggest_int", "int_uniform"), "int"),
    **dict.fromkeys(("categorical", "suggest_categorical", "grid_search"), "choice"),
}
_DRAWS = {"uniform": "uniform(0,1)", "log": "log(1e-4,1e-1)", "int": "int(1,8)", "choice": "choice(1,2)"}


def drawn_hint(function: str, arguments: str) -> str | None:
    """The draw of an override for that of another library's search; None if ``function`` is not known.

    Its arguments stay if they mean the same here: two numbers, or the values of a choice.
    """
    ours = DRAWN.get(function.lower())
    if ours is None:
        return None
    if ours == "choice":
        values = re.fullmatch(r"\[([^][{}()]+)\]|([^][{}()'\"]+)", arguments.strip())
        texts = [] if values is None else [text.strip() for text in (values[1] or values[2]).split(",")]
        is_other = any(text in ("", "None") or "=" in text or text.count("'") % 2 for text in texts)
        return f"choice({','.join(texts)})" if len(texts) > 1 and not is_other else _DRAWS[ours]
    try:
        low, high = map(float, arguments.split(","))
    except ValueError:
        return _DRAWS[ours]
    is_meant = -math.inf < low < high < math.inf and (ours != "log" or low > 0)
    is_meant = is_meant and (ours != "int" or (low.is_integer() and high.is_integer()))
    return f"{ours}({arguments.replace(' ', '')})" if is_meant else _DRAWS[ours]


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
    "best_metric": "best_checkpoint (the values are in history)",
    **dict.fromkeys(("should_stop", "stop_training"), "trainercontrol.should_training_stop"),
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
    "resume": "TrainingConfig(resume_from_checkpoint=True), or train.resume=True of a config file",
    "_data_loader_iter": "train_step(model, inputs), which gets the batch",
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

# Arguments of evaluate() and predict().
EVALUATION_ARGUMENTS = {
    **dict.fromkeys(("batch_size", "eval_batch_size"), "TrainingConfig(eval_batch_size=...)"),
    **dict.fromkeys(
        ("eval_dataset", "test_dataset", "dataloaders", "dataloader", "x", "datamodule"), "the first argument"
    ),
    **dict.fromkeys(("num_workers", "dataloader_num_workers"), "TrainingConfig(dataloader_num_workers=...)"),
    **dict.fromkeys(("metrics", "compute_metrics"), "TrainingConfig(metrics=...), or Trainer(metrics_handler=...)"),
    **dict.fromkeys(("y", "labels", "targets"), "in the first argument, TensorDataset(inputs, labels)"),
    "ckpt_path": "load(path) before",
}

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

# The same of a DefaultTrainer, with the methods of Trainer.
_LOADERS = {
    "train": "build_train_loader(cls, cfg, tokenizer=None)",
    "eval": "build_test_loader(cls, cfg, tokenizer=None)",
}
METHODS_OF_CONFIGS = METHODS | {
    "training_step": "train_step(self, model, inputs), which calls self.backward(loss), self.step() and returns what"
    " is logged",
    **dict.fromkeys(
        ("configure_optimizers", "create_optimizer", "create_optimizer_and_scheduler", "create_scheduler"),
        "build_optimizer(cls, cfg, model), with build_lr_scheduler(cls, cfg, optimizer)",
    ),
    **dict.fromkeys(("get_train_dataloader", "train_dataloader", "create_train_dataloader"), _LOADERS["train"]),
    **dict.fromkeys(
        ("get_eval_dataloader", "get_test_dataloader", "val_dataloader", "test_dataloader", "create_eval_dataloader"),
        f"{_LOADERS['eval']}, which returns a list",
    ),
    **dict.fromkeys(
        (
            "validation_step",
            "test_step",
            "prediction_step",
            "eval_step",
            "val_step",
            "evaluation_step",
            "evaluate_step",
        ),
        "process(inputs, outputs) of an evaluator, train.evaluation.evaluator",
    ),
    **dict.fromkeys(("compute_metrics", "calculate_metrics", "compute_metric"), "train.evaluation.evaluator"),
    **dict.fromkeys(
        ("compute_loss", "forward"), "forward of the model, which returns the loss, or train_step(model, inputs)"
    ),
    **dict.fromkeys(
        ("optimizer_step", "_optimizer_step", "optimization_step"), "train_step(model, inputs), which calls self.step()"
    ),
    "prepare_input_batch": "get_batch(cls, data, input_placement_device=None, mixup_func=None)",
}

# What callbacks of other libraries set to end a training, on their trainer or model.
FLAGS = ("stop_training", "_stop_training", "should_stop")

# Methods of callbacks, by those that other libraries have at the same moment.
CALLBACK_METHODS = {
    **dict.fromkeys(
        ("on_fit_start", "on_train_start", "before_run", "before_fit", "before_train", "on_fit_begin"),
        "on_train_begin(logs)",
    ),
    **dict.fromkeys(
        ("on_fit_end", "after_run", "after_fit", "after_train", "on_exception", "on_run_end"),
        "on_train_end(logs)",
    ),
    **dict.fromkeys(
        ("on_train_epoch_start", "on_epoch_start", "before_train_epoch", "before_epoch", "on_train_epoch_begin"),
        "on_epoch_begin(epochs, logs)",
    ),
    **dict.fromkeys(("on_train_epoch_end", "after_train_epoch", "after_epoch"), "on_epoch_end(epochs, logs)"),
    **dict.fromkeys(
        ("on_train_batch_start", "on_step_begin", "before_train_iter", "before_batch", "on_batch_start"),
        "on_train_batch_begin(batch, logs)",
    ),
    **dict.fromkeys(
        ("on_step_end", "on_substep_end", "after_train_iter", "after_batch", "after_step"),
        "on_train_batch_end(batch, logs)",
    ),
    **dict.fromkeys(
        (
            "on_optimizer_step",
            "on_before_optimizer_step",
            "on_pre_optimizer_step",
            "on_before_zero_grad",
            "on_before_backward",
            "on_after_backward",
            "on_backward_end",
            "after_backward",
        ),
        "optimization_step of a subclass of Trainer, or on_train_batch_end(batch, logs)",
    ),
    **dict.fromkeys(
        (
            "on_evaluate",
            "on_validation_end",
            "on_validation_epoch_end",
            "on_test_end",
            "on_test_epoch_end",
            "after_val_epoch",
            "after_val",
            "after_test_epoch",
            "after_validate",
            "on_predict_end",
            "on_eval_epoch_end",
        ),
        "on_eval_end(logs)",
    ),
    **dict.fromkeys(
        (
            "on_validation_start",
            "on_validation_epoch_start",
            "on_test_start",
            "on_test_epoch_start",
            "on_test_begin",
            "on_sanity_check_start",
            "before_val_epoch",
            "before_val",
            "before_validate",
            "on_validation_begin",
            "on_predict_begin",
            "on_predict_start",
        ),
        "on_eval_begin(logs)",
    ),
    **dict.fromkeys(
        ("on_validation_batch_start", "on_test_batch_start", "on_test_batch_begin", "before_val_iter"),
        "on_eval_batch_begin(batch, logs)",
    ),
    **dict.fromkeys(
        ("on_validation_batch_end", "on_test_batch_end", "on_prediction_step", "after_val_iter"),
        "on_eval_batch_end(batch, logs)",
    ),
    **dict.fromkeys(("on_save", "on_save_checkpoint", "before_save_checkpoint"), "state_dict(), which is saved"),
    **dict.fromkeys(("on_load_checkpoint", "after_load_checkpoint"), "load_state_dict(state)"),
    **dict.fromkeys(("on_log", "on_logs"), "on_train_batch_end(batch, logs), whose logs has the values"),
    "on_init_end": "on_train_begin(logs)",
}
_OF_HOOKS = {
    "on_train_begin": "before_train()",
    "on_train_end": "after_train()",
    "on_train_batch_begin": "before_step()",
    "on_train_batch_end": "after_step()",
    "state_dict": "state_dict()",
    "load_state_dict": "load_state_dict(state)",
}


def _of_hook(here: str) -> str:
    return _OF_HOOKS.get(here.partition("(")[0], f"{here} of a Callback in callbacks=[...]")


# Methods of hooks: those of the same moments, also by the names that callbacks have here.
HOOK_METHODS = {name: _of_hook(here) for name, here in CALLBACK_METHODS.items()}
HOOK_METHODS |= {name: here for name, here in _OF_HOOKS.items() if name.startswith("on_")}
_OF_CALLBACKS = ("on_epoch_begin", "on_epoch_end", "on_batch_begin", "on_batch_end", "on_eval_begin", "on_eval_end")
HOOK_METHODS |= {name: f"{name} of a Callback in callbacks=[...]" for name in _OF_CALLBACKS}


def argument_hint(name: str, table: Mapping[str, str], settings: Iterable[str]) -> str:
    """What an unknown argument is called here, or that it is a setting; "" if it is not known."""
    if name in table:
        return f" Here: {table[name]}."
    return f" It is a setting: TrainingConfig({name}=...)." if name in {*settings} else ""


def key_hint_of_argument(name: str) -> str:
    """The key of a config file for an argument of a trainer, as a sentence; "" if it is not known."""
    key = {"model": "model", **CALLS, **KEYS}.get(name, "--")
    return "" if key.startswith("--") else f"It is in the configuration: {key}."


# Values of settings, by the setting and the text of the value in lower case: what to write.
_PRECISIONS = {
    "fp16": ("16", "16-mixed", "fp16", "fp16-mixed", "float16", "half", "mixed_float16", "torch.float16", "amp", "o1",
             "o2", "amp_fp16", "native", "apex"),
    "bf16": ("bf16", "bf16-mixed", "bfloat16", "mixed_bfloat16", "torch.bfloat16", "amp_bf16"),
    "no": ("32", "32-true", "fp32", "float32", "single", "torch.float32", "float", "fp32-true", "none", "o0"),
}  # fmt: skip
_OTHER_PRECISIONS = {
    "16-true": "a model in this type, model.to(torch.float16), and no mixed precision",
    "bf16-true": "a model in this type, model.to(torch.bfloat16), and no mixed precision",
    **dict.fromkeys(("64", "64-true", "float64", "double", "torch.float64"), "model.double(), and no mixed precision"),
    **dict.fromkeys(("fp8", "transformer-engine", "transformer-engine-float16", "nf4", "int8", "amp_fp8"), _NONE),
}
_MATMUL = {"high": ("tf32", "true"), "highest": ("fp32", "float32", "ieee", "false"), "medium": ("bf16", "bfloat16")}
_STAGES = {
    1: ("zero1", "zero-1", "zero_1", "stage1", "stage_1", "deepspeed_stage_1", "os", "zero"),
    2: ("zero2", "zero-2", "zero_2", "stage2", "stage_2", "deepspeed", "deepspeed_stage_2", "shard_grad_op"),
    3: ("zero3", "zero-3", "zero_3", "stage3", "stage_3", "deepspeed_stage_3", "full_shard", "fsdp", "fsdp2"),
}
_TASKS = {
    "text_classification": (
        "sentiment-analysis",
        "sentiment_analysis",
        "sequence-classification",
        "text-classification",
    ),
    "sequence_labeling": ("ner", "token-classification", "token_classification", "pos", "tagging"),
    "text_generation": ("summarization", "translation", "text2text-generation", "seq2seq", "seq2seq-lm"),
    "language_modeling": ("causal-lm", "causal_lm", "clm", "lm", "pretraining"),
    "mask_filling": ("fill-mask", "fill_mask", "masked-lm", "masked_lm", "mlm"),
    "speech_recognition": ("asr", "automatic-speech-recognition", "speech-to-text", "ctc"),
    "image2text": ("image-to-text", "image_to_text", "ocr"),
    "audio_classification": ("audio-classification",),
}
_NO_TASKS = (
    "classification", "binary", "multiclass", "multilabel", "regression", "tabular_classification",
    "tabular_regression", "image_classification", "image-classification", "object_detection", "object-detection",
    "detection", "segmentation", "image_segmentation", "image-segmentation", "semantic_segmentation",
)  # fmt: skip
_WITHOUT_TASK = (
    "Leave out task= (a TrainerConfig needs one: use a TrainingConfig): the model has its loss, or loss= names it, and"
    " metrics= names metrics"
)
_DIRECTIONS = {
    "min": ("minimize", "minimise", "lower", "less", "smaller", "minimum", "decrease", "descending", "np.less"),
    "max": ("maximize", "maximise", "higher", "greater", "larger", "maximum", "increase", "ascending", "np.greater"),
}
_SCHEDULES = {
    "lr_scheduler_type='cosine'": ("warmup_cosine", "cosineannealing", "cosine_decay", "cosine_with_warmup"),
    "lr_scheduler_type='cosine', which ends at 0": ("cosine_with_min_lr", "cosine_warmup_with_min_lr"),
    "lr_scheduler_type='linear'": ("linear_with_warmup", "warmup_linear", "linear_decay"),
    "lr_scheduler_type='polynomial'": ("poly", "polynomial_decay"),
    "lr_scheduler={'name_': 'ReduceLROnPlateau'}": ("reduce_lr_on_plateau", "plateau", "reduceonplateau"),
    "lr_scheduler={'name_': 'OneCycleLR', 'max_lr': 0.01, 'total_steps': 1000}": ("onecycle", "one_cycle", "1cycle"),
    "lr_scheduler={'name_': 'StepLR', 'step_size': 10}": ("step", "multistep"),
    "lr_scheduler={'name_': 'ExponentialLR', 'gamma': 0.9}": ("exponential", "exp", "exponential_decay"),
    "Trainer(..., lr_scheduler=...) with a schedule of your own, as torch.optim.lr_scheduler.LambdaLR": (
        "inverse_sqrt", "rsqrt", "noam", "warmup_stable_decay", "wsd", "lambda",
    ),
}  # fmt: skip
_OPTIMIZERS = {
    "Trainer(..., optimizer=bitsandbytes.optim.AdamW8bit(model.parameters(), lr=...))": (
        "adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "adam8bit", "adamw8bit",
    ),
    "Trainer(..., optimizer=...) with an object of its class": (
        "lion", "lamb", "lars", "sophia", "shampoo", "soap", "prodigy", "schedule_free_adamw", "scheduler_free_adamw",
        "galore_adamw", "adan", "adabelief", "lion_8bit", "adahessian", "lookahead", "novograd",
    ),
    "optimizer='AdamW'": ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "fusedadam"),
    "optimizer={'name_': 'SGD', 'momentum': 0.9}": ("momentum", "sgd_momentum", "nesterov"),
}  # fmt: skip
_LOSSES = {
    "L1Loss": ("mae", "l1", "mean_absolute_error"),
    "MSELoss": ("l2", "mse", "mean_squared_error"),
    "CrossEntropyLoss": ("ce", "xent", "cross_entropy", "crossentropy", "categorical_crossentropy",
                         "sparse_categorical_crossentropy", "softmax_cross_entropy"),
    "BCEWithLogitsLoss": ("bce", "binary_crossentropy", "binary_cross_entropy", "bce_with_logits", "sigmoid_ce"),
    "NLLLoss": ("nll",),
    "SmoothL1Loss": ("smooth_l1",),
    "HuberLoss": ("huber",),
    "KLDivLoss": ("kl", "kld", "kl_divergence"),
}  # fmt: skip


def _by_value(lines: Mapping[str, Iterable[str]]) -> dict[str, str]:
    return {word: line for line, words in lines.items() for word in words}


def _by_word(setting: str, words_of: Mapping[Any, Iterable[str]]) -> dict[str, str]:
    """``setting=value`` for each word of another library for the value."""
    none = _none(setting)
    return _by_value(
        {f"{setting}={none if value is None else repr(value)}": words for value, words in words_of.items()}
    )


def _none(setting: str) -> str:
    """None in a line for ``setting``: a key of config files is given as an override, where ``None`` is a text."""
    return "null" if setting.startswith("train.") else "None"


_AMP = {True: (*_PRECISIONS["fp16"], *_PRECISIONS["bf16"]), False: _PRECISIONS["no"]}
_UNLIMITED_EPOCHS = "Set a large num_epochs, and max_time or early_stopping to end the run"
_UNLIMITED = ("-1", "0", "all", "inf", "none", "-1.0", "0.0", "false")
VALUES: dict[str, dict[str, str]] = {
    "mixed_precision": _by_word("mixed_precision", _PRECISIONS) | _OTHER_PRECISIONS,
    "train.amp.enabled": _by_word("train.amp.enabled", _AMP) | _OTHER_PRECISIONS,
    "train.amp": _by_word("train.amp.enabled", _AMP) | _OTHER_PRECISIONS,
    **{name: _by_word(name, _MATMUL) for name in ("float32_matmul_precision", "train.float32_matmul_precision")},
    "zero_stage": _by_word("zero_stage", _STAGES),
    **{
        name: _by_word("train.zero_optimization.enabled=True, train.zero_optimization.stage", _STAGES)
        for name in ("train.zero_optimization.stage", "train.zero_optimization")
    },
    **{
        name: _by_word(name, {True: ("full", "block", "all", "reentrant")})
        for name in ("gradient_checkpointing", "train.activation_checkpoint.enabled")
    },
    **{
        name: _by_word(name, {"stop": ("raise", "error", "exception", "terminate"), "warn": ("ignore", "log")})
        for name in ("non_finite", "train.non_finite")
    },
    **{
        name: _by_value({f"{better!r}": words for better, words in _DIRECTIONS.items()})
        for name in ("early_stopping.mode", "train.early_stopping.mode", "train.evaluation.eval_mode")
    },
    "greater_is_better": _by_word(
        "greater_is_better", {True: ("max", *_DIRECTIONS["max"]), False: ("min", *_DIRECTIONS["min"])}
    ),
    "eval_strategy": _by_word("eval_strategy", {"epoch": ("true", "epochs")}),
    "train.train_iter": {"none": "train.train_iter=0, with train.train_epoch"},
    "train.evaluation.evaluator": dict.fromkeys(
        ("accuracy", "acc", "f1", "f1_score", "auroc", "mse", "precision", "recall"),
        "LazyCall(TorchMetricsHandler)(metrics=['accuracy']), with TorchMetricsHandler of trainwright.evaluation",
    ),
    "train.evaluation.eval_period": {"epoch": "train.evaluation.eval_after_n_epoch=1"},
    "train.checkpointer.period": {"epoch": "train.checkpointer.save_model_after_n_epoch=1"},
    "lr_scheduler_type": _by_value(_SCHEDULES),
    "optimizer": _by_value(_OPTIMIZERS),
    "task": _by_word("task", _TASKS) | dict.fromkeys(_NO_TASKS, _WITHOUT_TASK),
    "loss": _by_word("loss", _LOSSES),
    "num_epochs": dict.fromkeys(("-1", "-1.0", "inf"), _UNLIMITED_EPOCHS),
    **{
        name: _by_word(name, {None: _UNLIMITED})
        for name in (
            "max_to_keep", "train.checkpointer.max_to_keep", "max_grad_norm", "clip_grad_max_norm", "clip_grad_value",
            "hardest_samples", "log_steps", "print_steps", "max_time", "train.max_time", "limit_train_batches",
            "limit_eval_batches", "train.limit_train_batches", "train.limit_eval_batches",
        )
    },
    **{
        f"{above}save_top_k": {
            "-1": f"{above}save_top_k={none}, and {above}max_to_keep={none}, which keeps all checkpoints",
            "0": f"{above}save_top_k={none}",
        }
        for above, none in (("", "None"), ("train.checkpointer.", "null"))
    },
    "batch_size": {"auto": "trainer.find_batch_size(), which searches the largest"},
    "dataloader_num_workers": {"auto": "dataloader_num_workers=-1"},
    "learning_rate": {"auto": "trainer.find_lr(apply=True)"},
    "device_str": {
        "auto": "device_str=None, the default",
        **{str(number): f"device_str='cuda:{number}'" for number in range(8)},
        **dict.fromkeys(("-1", "all"), "device_str='cuda', all GPUs"),
    },
    **{
        name: dict.fromkeys(("simple", "advanced", "pytorch", "torch"), f"{name}=True")
        for name in ("profile", "train.profile")
    },
    **{
        name: {"true": "Leave it out: the best checkpoint is kept; the name of another metric keeps one more"}
        for name in ("save_best", "train.checkpointer.save_best")
    },
    "tensorboard": dict.fromkeys(("true", "yes", "on"), "Leave it out: TensorBoard is on by default"),
}  # fmt: skip

# Keys inside of settings that are dicts.
_TRACKER = "a callback or a writer of your own; the trackers are wandb, mlflow and trackio"
INNER_KEYS = {
    "early_stopping": {
        **dict.fromkeys(("metric", "metric_name", "monitor_metric", "eval_metric", "key"), "monitor"),
        **dict.fromkeys(("early_stopping_patience", "max_patience", "wait"), "patience"),
        **dict.fromkeys(("early_stopping_threshold", "threshold", "delta", "tolerance"), "min_delta"),
        **dict.fromkeys(("rule", "direction", "greater_is_better"), "mode"),
        **dict.fromkeys(("start_from_epoch", "start_epoch", "warmup", "min_epochs"), "start"),
        **dict.fromkeys(
            ("restore_best_weights", "load_best"), "the setting load_best_model_at_end, outside of early_stopping"
        ),
        "stopping_threshold": "baseline, which the first evaluations have to pass",
        **dict.fromkeys(("verbose", "strict", "check_finite", "check_on_train_epoch_end"), "Leave it out"),
    },
    "ema": {
        **dict.fromkeys(("beta", "alpha", "momentum", "ema_decay", "rate", "max_decay"), "decay"),
        **dict.fromkeys(("warmup_steps", "use_warmup", "tau", "use_ema_warmup"), "warmup"),
        "inv_gamma": "gamma",
        **dict.fromkeys(("update_every", "update_every_n_steps", "interval"), "every"),
        **dict.fromkeys(("start_step", "update_after_step", "begin", "swa_start"), "start"),
        **dict.fromkeys(("use_buffers", "update_buffers", "ema_buffers"), "buffers"),
        "type": "average",
    },
    "model_checkpoint": {
        **dict.fromkeys(("every_n_epochs", "interval", "period", "save_freq", "epochs"), "every_n_epoch"),
        **dict.fromkeys(("every_n_train_steps", "every_n_steps", "steps", "save_steps"), "every_n_iteration"),
        **dict.fromkeys(("save_top_k", "save_best", "max_to_keep"), "a setting beside model_checkpoint"),
        **dict.fromkeys(("monitor", "mode", "save_best_only"), "metric_for_best_model and greater_is_better, settings"),
        **dict.fromkeys(("dirpath", "filename", "filepath"), "checkpoints_dir, a setting"),
        "save_last": "Leave it out: the newest checkpoint is kept",
        "max_keep_ckpts": "max_to_keep, a setting",
        "save_weights_only": "Leave it out: a checkpoint has the complete state",
    },
    "trackers": {
        "tensorboard": "nothing to set, files for TensorBoard are written by default",
        **dict.fromkeys(("comet", "comet_ml", "neptune", "clearml", "aim", "dvclive", "swanlab", "csv"), _TRACKER),
        **dict.fromkeys(("all", "none"), "trackers=['wandb', 'mlflow'], or None"),
    },
    "tensorboard": dict.fromkeys(("save_dir", "dir", "path"), "log_dir"),
    "profile": {"skip_first": "wait", "schedule": "wait, warmup, active and repeat", "dirpath": "output_dir"},
    "amp": dict.fromkeys(
        ("dtype", "precision", "opt_level"), "enabled=True, which is bfloat16, or float16 on GPUs without bfloat16"
    ),
}  # fmt: skip


def value_hint(where: str, value: object) -> str:
    """What to write instead of another library's value of the setting at ``where``, as a sentence; "" if not known."""
    here = VALUES.get(where, {}).get(str(value).strip().lower())
    if here is None:
        return ""
    return f"Write {here}." if re.match(r"[\w.]+=|'", here) else _sentence(here)


def inner_key_hint(section: str, key: str) -> str:
    """What a key of a setting that is a dict is called here, as a sentence; "" if not known."""
    here = INNER_KEYS.get(section, {}).get(key)
    return "" if here is None else _sentence(here)


def _sentence(here: str) -> str:
    if here == _NONE:
        return f"It is of another library; {_NONE}."
    return f"{here}." if here.startswith(("Leave ", "Set ")) else f"Here: {here}."


def setting_hint(
    name: str, allowed: Iterable[str], places: Mapping[str, str] | None = None, *, sign: Literal["=", ": "] = "="
) -> str:
    """What an unknown setting is called in a TrainingConfig, or the nearest name.

    ``places``: the settings by their keys in config files. ``sign``: of an assignment, in Python or in YAML.
    """
    if "." in name:
        return _without_dots(name, set(allowed), places or {}, sign)
    if name not in SETTINGS:
        names = sorted(allowed)
        near = nearest_name(name, names).lstrip()
        few = sorted(names, key=lambda one: -difflib.SequenceMatcher(None, name, one).ratio())[:5]
        return near or f"The nearest names are {', '.join(few)}; get_config_help() describes all."
    return _sentence(SETTINGS[name])


_NAMED = ("optimizer", "lr_scheduler", "loss")  # dicts of a name and its arguments, some of which are settings, too
_CLASS_NAMES = ("name", "type", "class_name", "_target_")  # their name in other libraries


def _without_dots(name: str, allowed: set[str], settings: Mapping[str, str], sign: str) -> str:
    """What to write in place of the path of a config file, or of an entry of a setting that is a dict."""
    first, _, rest = name.removeprefix("train.").partition(".")
    last = name.rpartition(".")[2]
    found = settings.get(name) or settings.get(f"train.{name}")
    if found is None and first in _NAMED and last in allowed:
        found = last
    if found is None and first in allowed and rest:
        key = "name_" if first in _NAMED and rest in _CLASS_NAMES else INNER_KEYS.get(first, {}).get(rest, rest)
        keys = ["name_", key] if first in _NAMED and key != "name_" else [key]
        items = ", ".join(f"{one if sign == ': ' else repr(one)}: ..." for one in keys)
        return f"Write {first}{sign}{{{items}}}."
    found = found or (last if last in allowed else None)
    if found is None:
        return f"The settings have no sections. {setting_hint(last, allowed)}"
    return f"The settings have no sections: write {found}{sign}..."


def attribute_hint(name: str, owner: object) -> str | None:
    """What the attribute of another library's trainer is called; None if it is not known, or is not on ``owner``."""
    here = ATTRIBUTES.get(name)
    if here is None:
        return None
    attribute = here.partition("(")[0].partition(".")[0].strip()
    return here if "." in here.partition("(")[0] or here[0].isupper() or hasattr(owner, attribute) else None
