"""``python -m flatlens`` is the command ``flatlens``."""

import sys
from pathlib import Path

# ``python -m`` puts the current folder on the path, where any plotly.py would be imported instead
# of the real one. The command line adds the folder itself when it imports a user's model.
if not sys.flags.safe_path and sys.path and Path(sys.path[0] or ".").resolve() == Path.cwd():
    del sys.path[0]

from flatlens.cli import main

if __name__ == "__main__":
    sys.exit(main())
