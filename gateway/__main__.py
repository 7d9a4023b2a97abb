"""`python -m gateway`: runs a gateway as a service."""

import sys

from events.service import run_service
from gateway.app import main as service_main


def main() -> int:
    """Runs until SIGTERM or SIGINT; returns the exit code."""
    return run_service("gateway", service_main, numbers=("workers",))


if __name__ == "__main__":
    sys.exit(main())
