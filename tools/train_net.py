"""Train what a configuration file describes: the same program as ``trainwright train``.

python tools/train_net.py --config-file examples/mnist/configs/config.py [--resume] [key=value …]
torchrun --nproc-per-node 2 tools/train_net.py --config-file examples/mnist/configs/config.py
"""

import sys

from trainwright.cli.train import main

if __name__ == "__main__":
    sys.exit(main(prog="train_net.py"))
