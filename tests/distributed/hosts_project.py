"""What the hosts train: samples that take their time until the test lets the run finish."""

import os
import time
from pathlib import Path
from typing import Any

from tests.distributed.project import Samples


class SlowSamples(Samples):
    def __getitem__(self, index: int) -> dict[str, Any]:
        if not (Path(os.environ["SEEN_FOLDER"]) / "finish").exists():
            time.sleep(0.02)
        return super().__getitem__(index)
