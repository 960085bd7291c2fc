"""`python -m funzero`: the same as the command `funzero`."""

import sys

from funzero.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
