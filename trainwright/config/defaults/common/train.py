"""Every setting of training and evaluation. Read by get_config("common/train.py").train."""
# ruff: noqa: C408 - settings read better as keyword arguments

from trainwright.config import LazyCall

train = dict(
    # Where checkpoints, logs, metrics.json and config.yaml go.
    output_dir="./output",
    # global_batch_size = train_micro_batch_size * num_accumulation_steps * number of data-parallel ranks.
    # Give any of the first two; what is None follows from the others. An iteration is one update by one global batch.
    train_micro_batch_size=32,
    global_batch_size=None,
    num_accumulation_steps=None,
    # How long the run is. train_epoch goes before the default of train_iter; where both are set, the longer counts.
    train_iter=10000,
    train_epoch=0,
    # Save and stop after this time: "HH:MM:SS", "DD:HH:MM:SS" or seconds. A resume continues the run.
    max_time=None,
    # Train on this number of batches of each process in each epoch, or on a share of them such as 0.1; the same for
    # each evaluation. overfit_batches: train on the same first batches in each epoch, and evaluate on them.
    limit_train_batches=None,
    limit_eval_batches=None,
    overfit_batches=None,
    # True or a number of iterations: try everything once, in the folder fast_dev_run inside output_dir.
    fast_dev_run=False,
    # Use only deterministic algorithms of torch in training; "warn": warn of operations that have none.
    deterministic=False,
    # Counted by the run itself.
    consumed_train_samples=0,
    consumed_valid_samples=0,
    train_samples=None,
    # Share of the iterations, in [0, 1), in which the learning rate rises.
    warmup_ratio=0,
    # First iteration. Resuming sets it.
    start_iter=0,
    # Mixed precision in training.
    amp=dict(enabled=False),
    # Multiply matrices of float32 in "high" (TF32) or "medium" (bfloat16) precision; None: as torch is set.
    float32_matmul_precision=None,
    # Compute activations again in the backward pass rather than keep them: less memory, more time.
    activation_checkpoint=dict(enabled=False),
    # Settings of another backend, accepted so that its configurations run. They have no effect with torch.
    nccl_fusion_threshold_mb=16,
    nccl_fusion_max_ops=24,
    rdma_enabled=True,
    zero_optimization=dict(enabled=False, stage=1),
    # Save each `period` iterations, or each `save_model_after_n_epoch` epochs; keep the newest `max_to_keep`, and the
    # `save_top_k` best ones by eval_metric. `save_trainable_only` leaves out frozen parameters. Saves are
    # `asynchronous`: a background thread writes them, from a copy of model and optimizer in memory.
    checkpointer=dict(
        period=5000,
        max_to_keep=100,
        save_top_k=None,
        save_model_after_n_epoch=None,
        asynchronous=True,
        save_trainable_only=False,
    ),
    # Samples per rank in one batch of evaluation.
    test_micro_batch_size=32,
    evaluation=dict(
        enabled=True,
        evaluator=LazyCall("trainwright.evaluation.ClsEvaluator")(topk=(1, 5)),
        # Evaluate each `eval_period` iterations, or each `eval_after_n_epoch` epochs, on at most `eval_iter` batches.
        eval_period=5000,
        eval_after_n_epoch=None,
        eval_iter=1e9,
        # The metric that decides which checkpoint is the best, and whether it should be large ("max") or small ("min").
        eval_metric="Acc@1",
        eval_mode="max",
        # Write this number of samples with the largest losses of each evaluation to hardest_samples.csv.
        hardest_samples=None,
    ),
    # Evaluate before the first iteration, too.
    eval_on_start=False,
    # A checkpoint to begin from: its weights only.
    load_weight="",
    # Write metrics each `log_period` iterations. This and the other periods may be shares of all iterations: 0.25.
    log_period=20,
    # Show a bar on a terminal and a table in a notebook. False: only the lines of the log.
    progress_bar=True,
    # Where a loss or the gradients become NaN or infinite: "stop" the training, "skip" that update, or "warn".
    non_finite="stop",
    # Evaluate and save an average of the weights: dict(decay=0.999), or dict(average="equal", start=0.75).
    ema=None,
    # Layers that are frozen at first: [dict(epoch=1, layers=["encoder"]), ...] trains them after the first epoch.
    unfreeze=None,
    # Record a few iterations with torch.profiler, into the output folder: True, or arguments of a ProfileHook such as
    # dict(wait=10, active=3).
    profile=None,
    # Experiment trackers: "wandb", "mlflow" or "trackio", a list of these, or dict(wandb=dict(project="digits")).
    trackers=None,
    # max_iter and warmup_iter are set from train_iter, train_epoch and warmup_ratio.
    scheduler=LazyCall("trainwright.optim.WarmupCosineLR")(warmup_factor=0.001, alpha=0.01, warmup_method="linear"),
    # None: the accelerator if there is one, else the CPU.
    input_placement_device=None,
    dist=dict(
        data_parallel_size=1,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        # Copies of the model among the data-parallel processes, with zero_optimization; None: one.
        replicate_size=None,
        # Tensor-parallel processes also share the activations between their layers.
        sequence_parallel=False,
        pipeline_schedule="1F1B",
        # A resume on another number of processes keeps the samples per update.
        elastic=False,
        pipeline_num_layers=None,
        custom_pipeline_stage_id=None,
        device_type=None,
        # For models of which some parameters take no part in some steps: else the processes wait for their gradients.
        find_unused_parameters=False,
        # Seconds after which a process that stays at one place ends the job; all print the stacks of their threads.
        hang_timeout_s=1800,
    ),
    # Must be positive.
    seed=1234,
)
