"""`python -m gateway`: runs a gateway as a service."""

import sys

from events.service import run_service
from gateway.app import main as service_main


def main() -> int:
    """Runs until SIGTERM or SIGINT; returns the exit code."""
    workers = "processes that serve on the one port; the setting gateway.workers"
    return run_service("gateway", service_main, numbers={"workers": workers})


if __name__ == "__main__":
    sys.exit(main())
