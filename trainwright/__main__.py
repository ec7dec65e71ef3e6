"""``python -m trainwright``: the command ``trainwright``."""

import sys

if __name__ == "__main__":
    # python -m adds the working folder, which may be data of a command; a command adds the folders of its code.
    if not sys.flags.safe_path:
        del sys.path[0]
    try:
        from trainwright.cli.main import main
    except KeyboardInterrupt:
        sys.excepthook = lambda *_: None  # no traceback
        raise
    sys.exit(main())
