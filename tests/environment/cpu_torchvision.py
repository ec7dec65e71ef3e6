"""torchvision on a torch without CUDA: its Python part registers two ops that only its compiled part declares.

There is no CPU build of torchvision among the packages, so the tests' environment declares the ops, in every process
and just before torchvision is imported. ``python cpu_torchvision.py`` installs it into the environment that runs it.
"""

import sys
from collections.abc import Sequence
from types import ModuleType


class DeclareOps:
    """An import finder that finds nothing; it acts when torchvision is looked for."""

    library = None  # torch forgets the ops when this goes

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if name != "torchvision":
            return
        sys.meta_path.remove(cls)
        import torch

        if not hasattr(torch.ops.torchvision, "nms"):
            cls.library = torch.library.Library("torchvision", "DEF")
            cls.library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            cls.library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


if __name__ == "__main__":
    import shutil
    import sysconfig
    from pathlib import Path

    import torch

    if torch.version.cuda is not None:
        sys.exit(0)  # torchvision's compiled part works there
    site_packages = Path(sysconfig.get_path("purelib"))
    shutil.copy(__file__, site_packages / "cpu_torchvision.py")
    (site_packages / "cpu_torchvision.pth").write_text("import cpu_torchvision\n")
else:
    sys.meta_path.insert(0, DeclareOps)
