"""Endings of forgotten objects: the warning about each."""

import pytest

from kvpool_client.connection.endings import Endings


def test_what_is_forgotten_is_named_as_it_was_when_it_was_found() -> None:
    """The thread that ends it may be quicker than the finalizer."""
    states = ["live"]
    endings = Endings(lambda: endings.close())

    class Owner:
        def __repr__(self) -> str:
            return f"<Owner {states[-1]}>"

    with pytest.warns(ResourceWarning, match="^<Owner live>: never released$"):
        endings.add_forgotten("never released", Owner(), lambda: states.append("released"))
    assert states == ["live", "released"]
