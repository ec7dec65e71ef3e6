"""``python -m trainwright``: the command ``trainwright``."""

import sys

if __name__ == "__main__":
    try:
        # python -m adds the working folder, which may be data of a command; a command adds the folders of its code.
        if not sys.flags.safe_path:
            del sys.path[0]
        from trainwright.cli.main import main

        sys.exit(main())
    except KeyboardInterrupt:  # while the first modules are loaded
        sys.exit(130)
