"""`python -m remat` is `remat`."""

import sys

from remat.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
