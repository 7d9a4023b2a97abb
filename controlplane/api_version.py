"""Says which version of the program this is; nothing else."""

from importlib.metadata import PackageNotFoundError, version


def program_version() -> str:
    """The installed distribution's version; `0` when it runs from a plain checkout."""
    try:
        return version("modelyard")
    except PackageNotFoundError:
        return "0"
