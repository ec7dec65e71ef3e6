"""``python -m trainwright``: the command ``trainwright``."""

import sys

from trainwright.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
