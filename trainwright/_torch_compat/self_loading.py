"""Modules that load a state themselves, such as observers of quantization, or a bank that gets its shape in training.

They override ``_load_from_state_dict``, as torch's own modules do, or have a hook of
``register_load_state_dict_pre_hook``. torch has no public way to ask for either. Where its names are others, no module
loads itself.
"""

from torch import nn

_BY_SHAPE = ("torch.nn.", "torch.distributed.", "torch._")  # whose own methods need the usual names and shapes


def self_loading_modules(model: nn.Module) -> set[str]:
    """The names of the modules that load their own parameters and buffers, perhaps of other shapes than they have."""
    found = {name for name, module in model.named_modules() if any(map(_is_own, _loaders(module)))}
    return found | ({""} if _is_own(type(model).load_state_dict) else set())


def _loaders(module: nn.Module) -> list[object]:
    hooks = getattr(module, "_load_state_dict_pre_hooks", {}).values()
    return [getattr(type(module), "_load_from_state_dict", None), *(getattr(hook, "hook", hook) for hook in hooks)]


def _is_own(loader: object) -> bool:
    return loader is not None and not str(getattr(loader, "__module__", "")).startswith(_BY_SHAPE)
