"""Export a model for other programs: ONNX, torch.export, safetensors; each compared with the model itself."""

import inspect
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from trainwright.base.batch import arguments as arguments_of
from trainwright.base.batch import fields, parameter_names
from trainwright.base.dist import is_main_process, synchronize
from trainwright.base.errors import ConfigError, UserError
from trainwright.base.files import clean_sibling, commit_folder, make_folders, sync_file, sync_folder
from trainwright.base.signatures import read_signature
from trainwright.models.eval_mode import evaluation_mode
from trainwright.parallel.faults import meet
from trainwright.parallel.mesh import current_mesh

logger = logging.getLogger("trainwright.models")

FORMATS = {".onnx": "ONNX", ".pt2": "a program of torch.export"}
_LABELS = ("label", "target")
Inputs = dict[str, Any]
Run = Callable[[Inputs], list[Tensor]]


class ExportError(UserError):
    """The model cannot be exported, or the exported one computes something else."""


def export_of_run(model: nn.Module, path: str | os.PathLike[str], batch: Any, *, tolerance: float) -> Path:
    """:func:`export_model` by the main process, with one log line."""
    if current_mesh() is not None:
        raise ConfigError(
            "export: each process holds a part of the model. Use `trainwright checkpoint export RUN` on a checkpoint,"
            " and export the model that it gives in one process."
        )
    meet("export")
    if is_main_process():
        written, difference = export_model(model, path, batch, tolerance=tolerance)
        logger.info("Exported to %s; largest difference to the model: %.1e of the largest output.", written, difference)
    synchronize()
    return Path(path)


def export_model(
    model: nn.Module, path: str | os.PathLike[str], batch: Any, *, tolerance: float = 1e-4
) -> tuple[Path, float]:
    """Write a model in evaluation mode to ``path``, and compare it with the model on two batch sizes.

    Args:
        path: ``….onnx`` (ONNX), ``….pt2`` (torch.export), or a folder for ``model.safetensors`` and, where the model
            has them, its config and preprocessor.
        batch: an example: a dict of the arguments of forward by name, a tensor, or a pair of inputs and labels.
            Labels are left out where forward does not need them. The number of samples stays free.
        tolerance: the largest difference of an output, relative to the largest value of that output.

    Returns the path and the largest difference found.
    """
    path = Path(path)
    if path.suffix and path.suffix not in FORMATS:
        known = " or ".join(FORMATS)
        raise ConfigError(f"export: got {path.name!r}; the name must end in {known}, or be that of a folder.")
    _check_target(path)
    arguments = _inputs(model, batch)
    by_name = fields(batch) is not None  # else by position
    temporary = clean_sibling(path)
    new = temporary / path.name
    temporary.mkdir()
    try:
        with evaluation_mode(model), torch.no_grad():
            write = {".onnx": _to_onnx, ".pt2": _to_program, "": _to_folder}[path.suffix]
            run = write(model, new, arguments, by_name)
            examples = arguments, {n: v[:1] if _has_samples(v) else v for n, v in arguments.items()}
            difference = _largest([_compare(model, run, example, by_name) for example in examples])
        if not difference <= tolerance:  # NaN is a difference
            raise ExportError(
                f"export: the exported model differs from the model by {difference:.2g} of the largest output; at most"
                f" {tolerance:g} is allowed. Export it in float32, or pass a larger tolerance."
            )
        if path.suffix:
            sync_file(new)
            os.replace(new, path)
            sync_folder(path.parent)
        else:
            commit_folder(new, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return path, difference


def _check_target(path: Path) -> None:
    """Create the parent; refuse a target that the export would fail to replace at its end."""
    if not path.name:
        raise ConfigError(f"export: got {str(path)!r}; pass the name of a file or of a new folder.")
    if path.suffix and path.is_dir():
        raise ConfigError(f"export: {path} is a folder; pass the name of a file.")
    if not path.suffix and (path.is_file() or (path.is_dir() and any(path.iterdir()))):
        raise ConfigError(f"export: {path} exists; pass the name of a new or empty folder.")
    try:
        make_folders(path.parent)
    except OSError as error:
        raise ConfigError(f"export: the folder {path.parent} cannot be created: {error.strerror}.") from error
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"export: nothing can be written into {path.parent}: permission denied.")


def _inputs(model: nn.Module, batch: Any) -> Inputs:
    """The arguments of forward by name, with at least two samples and without labels that it does not need."""
    parameters = read_signature(model.forward).parameters
    positional, found = arguments_of(batch, parameter_names(model.forward))
    found = {name: value for name, value in found.items() if not _is_needless(name, parameters.get(name))}
    if positional:
        first = next(iter(parameters), None)
        if first is None:
            raise ExportError(f"export: the forward of {type(model).__name__} takes no input.")
        found = {first: positional[0]}
    if not any(isinstance(value, Tensor) for value in found.values()):
        kinds = ", ".join(f"{name} is of type {type(value).__name__}" for name, value in found.items())
        raise ExportError(
            f"export: the example has no tensor for the forward of {type(model).__name__}{kinds and f' ({kinds})'}."
            " Where inputs are nested, export a module around the model whose forward takes tensors."
        )
    # torch.export takes a batch of one sample for a model of one sample.
    return {n: torch.cat([v, v]) if _has_samples(v) and len(v) == 1 else v for n, v in found.items()}


def _is_needless(name: str, parameter: inspect.Parameter | None) -> bool:
    is_label = any(word in name.lower() for word in _LABELS)
    return is_label and (parameter is None or parameter.default is not inspect.Parameter.empty)


def _has_samples(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0


def _call(arguments: Inputs, by_name: bool) -> dict[str, Any]:
    """The arguments of torch's functions: an example, with free sizes where it is possible."""
    auto = torch.export.Dim.AUTO
    shapes = {n: dict.fromkeys(range(v.ndim), auto) if isinstance(v, Tensor) else None for n, v in arguments.items()}
    if by_name:
        return {"args": (), "kwargs": arguments, "dynamic_shapes": shapes}
    return {"args": tuple(arguments.values()), "kwargs": {}, "dynamic_shapes": tuple(shapes.values())}


def _called(model: Callable[..., Any], arguments: Inputs, by_name: bool) -> list[Tensor]:
    outputs = model(**arguments) if by_name else model(*arguments.values())
    return [value for value in pytree.tree_leaves(outputs) if isinstance(value, Tensor)]


def _to_program(model: nn.Module, path: Path, arguments: Inputs, by_name: bool) -> Run:
    try:
        program = torch.export.export(model, **_call(arguments, by_name), strict=False)
    except Exception as error:  # torch raises many types for code that it cannot trace
        raise _failure(model, "torch.export", error) from error
    torch.export.save(program, path)
    loaded = torch.export.load(path).module()
    return lambda inputs: _called(loaded, inputs, by_name)


def _to_onnx(model: nn.Module, path: Path, arguments: Inputs, by_name: bool) -> Run:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"export: ONNX needs packages: pip install onnx onnxscript onnxruntime ({error}).") from error
    names = [name for name, value in arguments.items() if isinstance(value, Tensor)]
    try:
        torch.onnx.export(
            model, f=str(path), **_call(arguments, by_name), input_names=names, dynamo=True, external_data=False,
            verbose=False,
        )  # fmt: skip
    except Exception as error:  # as above
        raise _failure(model, "ONNX", error) from error
    try:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as error:  # the runtime has a type for each cause
        raise ExportError(
            f"export: ONNX Runtime cannot load {type(model).__name__}: {error} (It has few operations for bfloat16:"
            " export the model in float32.)"
        ) from error
    taken = {item.name for item in session.get_inputs()}

    def run(inputs: Inputs) -> list[Tensor]:
        given = {name: inputs[name].cpu().numpy() for name in names if name in taken}
        return [torch.as_tensor(value) for value in session.run(None, given)]

    return run


def _to_folder(model: nn.Module, path: Path, arguments: Inputs, by_name: bool) -> Run:
    from copy import deepcopy

    import safetensors.torch

    save: Any = getattr(model, "save", None) or getattr(model, "save_pretrained", None)
    if save is not None:
        save(path)
    else:
        path.mkdir()
        safetensors.torch.save_model(model, str(path / "model.safetensors"))
    other = deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()  # what is compared is what was read
    safetensors.torch.load_model(other, str(path / "model.safetensors"), strict=False)
    return lambda inputs: _called(other, inputs, by_name)


def _failure(model: nn.Module, kind: str, error: Exception) -> ExportError:
    error = error.__cause__ if isinstance(error.__cause__, Exception) else error  # torch.onnx adds colored advice
    reason = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
    return ExportError(
        f"export: {kind} cannot trace {type(model).__name__}: {reason} (Code that depends on the values of tensors,"
        " such as `if x.sum() > 0`, cannot be exported.)"
    )


def _compare(model: nn.Module, run: Run, arguments: Inputs, by_name: bool) -> float:
    """The largest difference of an output, relative to its largest value."""
    expected = _called(model, arguments, by_name)
    try:
        found = run(arguments)
    except Exception as error:
        size = next(len(value) for value in arguments.values() if _has_samples(value))
        raise ExportError(f"export: the exported model does not run on a batch of {size}: {error}") from error
    shapes, right = ([tuple(value.shape) for value in values] for values in (found, expected))
    if shapes != right:
        raise ExportError(f"export: the exported model returns {shapes}, the model {right}.")
    differences = [
        float((ours.double() - theirs.to(ours.device).double()).abs().max() / ours.double().abs().max().clamp(min=1e-6))
        for ours, theirs in zip(expected, found, strict=True)
        if ours.numel()
    ]
    return _largest(differences)


def _largest(differences: list[float]) -> float:
    """NaN if one is NaN."""
    return float(torch.tensor(differences).max()) if differences else 0.0
