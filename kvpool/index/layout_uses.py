"""Uses of each model and layout: when engines last used its chunks, and how much of what they looked up was there.

Of all ranks together, and of each group of a layout with groups. Control thread only; `now_ns` is an argument.

Invariant: at most USES_MAX are known, those that were used last.
"""

from collections import OrderedDict
from dataclasses import dataclass

from kvpool.index.namespaces import NAMESPACES_MAX
from kvpool.index.sessions import EngineSession
from kvpool.layout import Layout

USES_MAX = NAMESPACES_MAX
Identity = tuple[str, bytes]


@dataclass(slots=True)
class LayoutUse:
    """The last use, and the tokens looked up and found since the daemon's start, as often as engines looked them up."""

    used_ns: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0


class LayoutUses:
    """See the module."""

    def __init__(self) -> None:
        self._uses: OrderedDict[Identity, LayoutUse] = OrderedDict()

    def note_use(self, session: EngineSession, now_ns: int, *, lookup_tokens: int = 0, hit_tokens: int = 0) -> None:
        """An engine has used chunks, and looked so many tokens up meanwhile."""
        for part in session.groups or (session,):
            use = self._uses.get(part.identity)
            if use is None:
                use = self._uses[part.identity] = LayoutUse()
            use.used_ns = now_ns
            use.lookup_tokens += lookup_tokens
            use.hit_tokens += hit_tokens
            self._uses.move_to_end(part.identity)
        while len(self._uses) > USES_MAX:
            self._uses.popitem(last=False)

    def of(self, model: str, layout: Layout) -> LayoutUse | None:
        """The use of a model in the layout of one of its ranks and groups; None where there was none."""
        return self._uses.get((model, layout.for_rank(0).fingerprint()))
