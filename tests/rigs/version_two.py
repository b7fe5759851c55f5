"""A made-up version 2 of the local protocol: one field more in the hello, in a request and in an answer, and one more request.

`apply` makes this process speak it, before the modules that answer requests are imported. Run as a module it is a kvpoold that
does.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, make_dataclass
from typing import Any, ClassVar, get_type_hints

from kvpool.protocol import versions
from kvpool.protocol.records import messages as m


def _with_field(record: type[Any]) -> type[Any]:
    """The record with one more field, whose value is 7."""
    hints = get_type_hints(record)
    known = [(field.name, hints[field.name], field) for field in fields(record)]
    more = ("more", int, 7)
    return make_dataclass(record.__name__, [*known, more], namespace={"KIND": record.KIND}, frozen=True, slots=True)


Hello, Acquire, Leased = (_with_field(record) for record in (m.Hello, m.Acquire, m.Leased))


@dataclass(frozen=True, slots=True)
class AskRack:
    """Where the daemon is. Answered by Report."""

    KIND: ClassVar[int] = 200


def apply(set_attribute: Callable[[object, str, object], None] = setattr) -> None:
    """Speak version 2 from now on. `set_attribute`: as `setattr`, for a test that takes it back."""
    counts = {record: ((1, len(fields(record)) - 1),) for record in (Hello, Acquire, Leased)}
    set_attribute(versions, "FIELDS_UP_TO", counts)
    set_attribute(versions, "SINCE", {AskRack: 2})
    set_attribute(versions, "NEWEST", 2)
    set_attribute(m, "PROTOCOL_VERSION", 2)
    for record in (Hello, Acquire, Leased):
        set_attribute(m, record.__name__, record)


if __name__ == "__main__":
    apply()
    from kvpool.cli.kvpoold import main

    main()
