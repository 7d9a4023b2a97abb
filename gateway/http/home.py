"""What a connection of a client needs of the server that has it. A type only; the server is gateway/http/server.py."""

from typing import Protocol, TypeVar

from gateway.http.bodies import BodyBudget
from gateway.http.due import DueBodies
from gateway.http.errands import Take
from gateway.http.limits import ServerLimits
from gateway.http.messages import Handler

Connection = TypeVar("Connection", contravariant=True)


class Home(Protocol[Connection]):
    """The server. `take` begins an errand (`ErrandWire.run`) of a request that came whole, or leaves it to the handler
    (False). `due` keeps requests whose bodies are about to come, None: nobody takes any. `date`: the Date header's value.
    """

    limits: ServerLimits
    handler: Handler
    take: Take
    due: DueBodies | None
    budget: BodyBudget
    draining: bool
    date: bytes

    def opened(self, connection: Connection) -> None:
        """A client connected."""
        ...

    def closed(self, connection: Connection) -> None:
        """Its connection is gone."""
        ...

    def begun(self) -> None:
        """A request is being answered."""
        ...

    def done(self) -> None:
        """One is answered, or nobody is there to be."""
        ...
