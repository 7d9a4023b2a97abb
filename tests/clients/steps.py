"""Says what a step of a Python client is, and takes it: a call of the client as a user writes it, and what must come."""

import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Generic, Protocol, TypeVar

from msgspec import Struct

from tests.clients.calls import Key
from tests.clients.judging import steady

LONGEST: Final = 300


class Closes(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=Closes)


class Clients(Generic[C]):
    """A client of a package for each key, as `api.all`; made when it is first used, all closed with the block."""

    def __init__(self, keys: Mapping[Key, str], make: Callable[[str], C]) -> None:
        self._keys = keys
        self._make = make
        self._made: dict[str, C] = {}

    def __getattr__(self, name: str) -> C:
        if name not in self._made:
            key = self._keys[name]  # pyright: ignore[reportArgumentType]
            self._made[name] = self._make(key or "none")
        return self._made[name]

    def __enter__(self) -> "Clients[C]":
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._made.values():
            client.close()


class Step(Struct, frozen=True, kw_only=True):
    """`take` makes the call and returns what a user would look at.

    `gives` must be in the text of what it returns; with `raises` (the name of the client's class), `status` and `code` it
    must raise that instead. `status` None: the error came inside a stream.
    """

    title: str
    take: Callable[..., Any]
    model: str | None = None
    gives: str = ""
    raises: str = ""
    status: int | None = None
    code: str = ""

    @property
    def source(self) -> str:
        """The body of the function, as it is written."""
        lines = inspect.getsource(self.take).splitlines()
        first = next(n for n, line in enumerate(lines) if line.rstrip().endswith(":"))
        text = textwrap.dedent("\n".join(lines[first + 1 :]))
        return text.replace("return ", "").replace("model=model", f'model="{self.model}"')


class Taken(Struct, frozen=True, kw_only=True):
    """A step, what came as a line to read, and what is wrong with it; empty: nothing."""

    step: Step
    came: str
    wrong: str


def take_all(steps: Iterable[Step], api: Any, package: Any) -> list[Taken]:
    """Takes the steps in order with the clients `api`, whose errors are those of `package`."""
    return [_taken(step, api, package) for step in steps]


def _taken(step: Step, api: Any, package: Any) -> Taken:
    try:
        came = str(step.take(api) if step.model is None else step.take(api, step.model))
    except package.APIError as error:
        return Taken(step=step, came=_said(error), wrong=_wrong_error(step, error))
    except Exception as error:  # noqa: BLE001 - whatever a client stumbles over is what was to be found
        return Taken(step=step, came=repr(error), wrong=repr(error))
    short = steady(came) if len(came) <= LONGEST else f"{steady(came)[:LONGEST]} …"
    if step.raises:
        return Taken(step=step, came=short, wrong=f"no {step.raises} but {short}")
    return Taken(
        step=step, came=short, wrong="" if step.gives in came else f"{step.gives!r} not in {came}"
    )


def _code(error: Any) -> str:
    """The gateway's code: openai keeps it, in an anthropic error it stands in the body."""
    code = getattr(error, "code", None)
    body = getattr(error, "body", None)
    if code is None and isinstance(body, dict):
        inner = body.get("error")
        code = (inner if isinstance(inner, dict) else body).get("code")
    return str(code or "")


def _said(error: Any) -> str:
    status = getattr(error, "status_code", None)
    return steady(f"{type(error).__name__}, status {status}, code {_code(error)}: {error}")[:400]


def _wrong_error(step: Step, error: Any) -> str:
    expected = (step.raises, step.status, step.code)
    found = (type(error).__name__, getattr(error, "status_code", None), _code(error))
    return "" if found == expected else f"{found}, not {expected}: {error}"


def complaints(taken: list[Taken]) -> list[str]:
    return [f"{t.step.title} ({t.step.model}): {t.wrong}" for t in taken if t.wrong]
