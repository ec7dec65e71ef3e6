"""``python -m trainwright``: the command ``trainwright``."""

import sys

if __name__ == "__main__":
    try:
        from trainwright.cli.main import main

        sys.exit(main())
    except KeyboardInterrupt:  # while the first modules are loaded
        sys.exit(130)
