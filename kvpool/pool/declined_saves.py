"""Declined saves: users none of whose chunks are taken any more, because of a bound that an operator sets.

One save that finds no room says little; a user all of whose saves were declined for SHOWN_AFTER_S computes everything again,
while the daemon and everybody else is well. Control thread only, but for `problems`.
"""

from dataclasses import dataclass

from kvpool.clock import NS_PER_S, Clock
from kvpool.states import SaveState
from kvpool.units import format_duration

SHOWN_AFTER_S = 30.0
# A user that has saved nothing for so long is not shown.
FORGOTTEN_AFTER_S = 120.0
USERS_MAX = 64
_BOUNDS = {
    SaveState.FULL: "dram.capacity is held whole",
    SaveState.QUOTA: "dram.connection_quota and server.user_quota bound it",
}
_TAKEN = (SaveState.RESERVED, SaveState.PRESENT)


@dataclass(slots=True)
class _Declined:
    first_ns: int
    last_ns: int
    chunks: int
    state: SaveState


class DeclinedSaves:
    """See the module."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._users: dict[int, _Declined] = {}

    def __repr__(self) -> str:
        return f"<DeclinedSaves of {len(self._users)} users>"

    def note_answer(self, user: int | None, states: bytes) -> None:
        """A reservation's answer, a state for each chunk. `user` None: nobody's share counts it."""
        if user is None or not states:
            return
        if any(state in states for state in _TAKEN):
            self._users.pop(user, None)
            return
        state = next((state for state in _BOUNDS if state in states), None)
        if state is None:
            return
        now_ns = self._clock.now_ns()
        known = self._users.get(user)
        if known is None or now_ns - known.last_ns > FORGOTTEN_AFTER_S * NS_PER_S:
            known = self._users[user] = _Declined(now_ns, now_ns, 0, state)
            if len(self._users) > USERS_MAX:
                del self._users[next(iter(self._users))]
        known.last_ns, known.state = now_ns, state
        known.chunks += len(states)

    def problems(self) -> list[str]:
        """A line for each such user. Any thread."""
        now_ns = self._clock.now_ns()
        found = []
        for user, declined in tuple(self._users.items()):
            lasted_s = (declined.last_ns - declined.first_ns) / NS_PER_S
            if lasted_s >= SHOWN_AFTER_S and now_ns - declined.last_ns <= FORGOTTEN_AFTER_S * NS_PER_S:
                why = f"{declined.state.reason}: {_BOUNDS[declined.state]}"
                lasted = format_duration(float(int(lasted_s)))
                found.append(
                    f"saves: all of user {user} are declined for {lasted}, {declined.chunks} chunks ({why}): "
                    "`kvpoolctl stats held` names who holds DRAM"
                )
        return found
