"""`python -m controlplane.ctl` is `yardctl`."""

import sys

from controlplane.ctl.main import main

if __name__ == "__main__":
    sys.exit(main())
