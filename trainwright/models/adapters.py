"""Adapters of the peft library (LoRA and others): recognized without importing it, and written in its own format."""

import copy
import tempfile
from pathlib import Path
from typing import Any

from torch import nn

from trainwright.base.dist import gather_over_pipeline
from trainwright.parallel.wrappers import model_state

WEIGHTS_NAME = "adapter_model.safetensors"


def is_peft_model(model: nn.Module) -> bool:
    """Whether ``model`` is a ``peft.PeftModel``."""
    return any(kind.__name__ == "PeftModel" and kind.__module__.startswith("peft.") for kind in type(model).__mro__)


class TrainableNames(set[str]):
    """The names in the state dict except for frozen parameters: all that a training with a frozen base changes.

    A parameter that is unfrozen later is found by the next ``in``, and stays.
    """

    def __init__(self, model: nn.Module) -> None:
        values = model_state(model, keep_vars=True)
        self._frozen = {n: v for n, v in values.items() if isinstance(v, nn.Parameter) and not v.requires_grad}
        super().__init__(values.keys() - self._frozen.keys())

    def __contains__(self, name: object) -> bool:
        frozen = self._frozen.get(str(name))
        if frozen is not None and frozen.requires_grad:
            self.add(str(name))
        return super().__contains__(name)


def adapter_files(model: nn.Module) -> dict[str, bytes]:
    """The files that ``PeftModel.from_pretrained(base, folder)`` reads, by their relative names; none for other models.

    The first adapter's are in the folder itself if it is called "default", others in a folder of their name. Of a
    model that is spread over processes every process must call this.
    """
    if not is_peft_model(model):
        return {}
    from peft import get_peft_model_state_dict
    from safetensors.torch import save

    files: dict[str, bytes] = {}
    peft_model: Any = model
    for name, config in peft_model.peft_config.items():
        weights = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
        prefix = "" if name == "default" else f"{name}/"
        own = {
            key: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().cpu().clone()
            for key, value in weights.items()
        }
        stages = gather_over_pipeline(own)  # each has the adapters of its layers
        files[prefix + WEIGHTS_NAME] = save({key: value for stage in stages for key, value in stage.items()})
        written = copy.copy(config)
        written.inference_mode = True
        if written.base_model_name_or_path is None:
            written.base_model_name_or_path = getattr(peft_model.get_base_model(), "name_or_path", None)
        with tempfile.TemporaryDirectory() as folder:
            written.save_pretrained(folder)
            files |= {prefix + path.name: path.read_bytes() for path in Path(folder).iterdir()}
    return files
