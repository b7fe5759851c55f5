"""Guard that allows one kvpool connector for each engine: a second one, as another child of a MultiConnector, runs without a
pool.

Two would answer a request under the same name, which vLLM takes for an error of its own, and each scheduler's half could end
the saves of the other's worker. vLLM gives all children its engine's id. Any thread: the interpreter's lock makes a claim
atomic.
"""

import weakref

from kvpool_client.vllm.support import Unserved

CODE = "second_child"
_Place = tuple[str, str, int]
_TAKEN: "weakref.WeakValueDictionary[_Place, object]" = weakref.WeakValueDictionary()


def claim(owner: object, engine_id: object, role: str, rank: int) -> None:
    """Claim this role of the engine until `release`, or the owner's end. Raises Unserved where another has it."""
    if engine_id is not None and _TAKEN.setdefault((str(engine_id), role, rank), owner) is not owner:
        raise Unserved(CODE, "this engine has a connector of kvpool's already")


def release(owner: object) -> None:
    """Release what the owner has claimed, if anything."""
    for place in [place for place, taken in _TAKEN.items() if taken is owner]:
        del _TAKEN[place]
