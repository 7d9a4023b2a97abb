"""Starts an agent: `python -m nodeagent --config --data --nats --id`.

Exit codes: 0 left as told; 3 another agent runs this node; 4 another agent works in this data folder
(starting it again helps in neither case); 1 failed; 64 usage.
"""

import sys
from functools import partial

from events.service import run_service
from nodeagent.app import Ending, run


def main() -> int:
    """Runs until SIGTERM (engines go on) or SIGINT (engines stop); returns the exit code."""
    ending = Ending()
    code = run_service("nodeagent", partial(run, ending=ending))
    return ending.status or code


if __name__ == "__main__":
    sys.exit(main())
