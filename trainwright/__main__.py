"""``python -m trainwright``: the command ``trainwright``."""

import sys

if __name__ == "__main__":
    try:
        if not sys.flags.safe_path:  # python -m puts the working folder first: a file there is no module of Python
            sys.path.append(sys.path.pop(0))
        from trainwright.cli.main import main

        sys.exit(main())
    except KeyboardInterrupt:  # while the first modules are loaded
        sys.exit(130)
