"""A training with a mirror, whose steps take a moment. Usage: ``mirror_program.py API FOLDER URL``."""

import os
import sys
import time
from pathlib import Path

from tests.engine.test_mirror import BOTH
from trainwright.hooks import CallbackHook

STEP_S = 0.4 if os.environ.get("TORTURE") else 0.05

if __name__ == "__main__":
    api, folder, url = sys.argv[1:]
    trainer = BOTH[api](Path(folder), url, resumes=True)
    trainer.register_hooks([CallbackHook(after_step=lambda _: time.sleep(STEP_S))])
    trainer.train()
