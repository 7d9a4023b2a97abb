"""How the fake vLLM says no, in each dialect, and what of its adapters' work can be told to go wrong.

Standard library only; it decides nothing: who is refused and why is vllm_lora.py's and vllm_folder.py's affair.
"""

import fnmatch
import threading

VERSIONS = {"python": "0.32.0", "old": "0.10.2", "rust": "0.33.0"}

FAULTS = """
lora-hangs         a load gets no answer
lora-dies          it exits with 1 in the middle of a load
lora-500           a load is answered 500 in the engine's usual words
lora-early         the name is listed before the load is done
lora-lost          a load is answered 200 and nothing is loaded
lora-as-base       a load is answered 200 and requests are answered by the base model
lora-wrong-root    the list tells another path than the one that was asked for
lora-route-off     load and unload are not there, whatever the environment says
lora-answer        a load is answered with `status` and `body`, see `Faults`
unload-hangs       an unload gets no answer
unload-500         an unload is answered 500
unload-keeps       an unload is answered 200 and the name stays
unload-answer      as lora-answer
list-hangs         GET /v1/models gets no answer
list-500           it is answered 500
list-garbage       it is answered 200 with half a JSON document
"""


class Faults:
    """What goes wrong: from FAKE_VLLM_FAULTS at the start, and by POST /fake/fault later.

    One is {"fault": name, "adapter": pattern of lora_name, "times": how often (null: always), "status", "body"}.
    """

    def __init__(self, names, known) -> None:
        self.known = known
        self.change = threading.Lock()
        self.told: list[dict] = []
        for name in names:
            self.add({"fault": name})

    def add(self, told: dict) -> None:
        assert told["fault"] in self.known, told
        with self.change:
            self.told.append({"adapter": "*", "times": None, **told})

    def clear(self) -> None:
        with self.change:
            self.told.clear()

    def hit(self, name: str, adapter: str = "") -> dict | None:
        """The fault if it strikes now; one strike of it is used up."""
        with self.change:
            for told in self.told:
                fits = told["fault"] == name and fnmatch.fnmatch(adapter, told["adapter"])
                if fits and told["times"] != 0:
                    if told["times"] is not None:
                        told["times"] -= 1
                    return told
        return None

    def __contains__(self, name: str) -> bool:
        return any(told["fault"] == name and told["times"] != 0 for told in self.told)


class Refused(Exception):
    """The request's answer is an error."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.message, self.param = status, kind, message, param


def envelope(dialect: str, refused: Refused) -> dict:
    told = {
        "message": refused.message,
        "type": refused.kind,
        "param": refused.param,
        "code": refused.status,
    }
    return {"object": "error", **told} if dialect == "old" else {"error": told}


def unknown_model(dialect: str, name: str, aliases) -> Refused:
    text = f"The model `{name}` does not exist."
    if dialect == "python":
        text += f" Valid aliases: {', '.join(aliases)}."
    return Refused(404, "NotFoundError", text, "model" if dialect == "python" else None)
