"""`python -m holdfast` is `holdfast`."""

import sys

from holdfast.faces.cli import main

if __name__ == "__main__":
    sys.exit(main())
