"""The base classes of torch's normalization layers with running statistics.

They also find layers of other packages that derive from these classes.
"""

from torch import nn

_NAMES = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm")
_PUBLIC_BATCH_NORMS = tuple(getattr(nn, name) for name in _NAMES)
_PUBLIC_NORMS = (*_PUBLIC_BATCH_NORMS, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def _base(name: str, public: tuple[type[nn.Module], ...]) -> tuple[type[nn.Module], ...]:
    """The class of this name that all of ``public`` derive from; ``public`` if torch has none."""
    for base in public[0].__mro__:
        if base.__name__ == name and all(issubclass(kind, base) for kind in public):
            return (base,)
    return public


BATCH_NORMS = _base("_BatchNorm", _PUBLIC_BATCH_NORMS)  # with synchronized and lazy ones
RUNNING_NORMS = _base("_NormBase", _PUBLIC_NORMS)  # with instance norms
