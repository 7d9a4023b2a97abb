"""Starts a control plane: `python -m controlplane --config --data --nats --listen --id`."""

import sys

from controlplane.app import run
from events.service import run_service


def main() -> int:
    return run_service("controlplane", run)


if __name__ == "__main__":
    sys.exit(main())
