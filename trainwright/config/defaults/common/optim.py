"""AdamW over the model's parameters. Read by get_config("common/optim.py").optim."""

from trainwright.config import LazyCall

optim = LazyCall("torch.optim.AdamW")(
    # The model is added when the optimizer is built.
    params=LazyCall("trainwright.optim.get_default_optimizer_params")(
        clip_grad_max_norm=1.0,
        clip_grad_norm_type=2.0,
        weight_decay_norm=0.0,
        weight_decay_bias=0.0,
    ),
    lr=1e-4,
    weight_decay=0.01,
    betas=(0.9, 0.999),
    eps=1e-8,
)
