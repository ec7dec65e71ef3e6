"""``trainwright train`` for hosts that may be cut off: waits seconds for a lost host, not half an hour."""

import sys

from trainwright.cli.train import main
from trainwright.parallel import setup_dist_util

setup_dist_util({"device_type": "cpu"}, timeout_s=4)
sys.exit(main(sys.argv[1:], prog="hosts_script.py"))
