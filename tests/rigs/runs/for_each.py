"""One test of a rule about many files: it looks at all of them and names each that breaks the rule.

A test for each file costs more than the look at it, thousands of times.
"""

from collections.abc import Callable, Sequence
from pathlib import Path


def for_each(
    paths: Sequence[Path], name_of: Callable[[Path], str]
) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """A decorator that makes one test of a rule's check of one path. REQUIRES: there are paths."""
    assert paths

    def made(check: Callable[[Path], None]) -> Callable[[], None]:
        def run() -> None:
            broken = [fault for path in paths if (fault := _fault_of(check, path, name_of))]
            assert not broken, "\n".join([check.__doc__ or check.__name__, *broken])

        run.__name__, run.__doc__, run.__module__ = check.__name__, check.__doc__, check.__module__
        return run

    return made


def _fault_of(check: Callable[[Path], None], path: Path, name_of: Callable[[Path], str]) -> str:
    """The first line of what is wrong with a path; empty where nothing is."""
    try:
        check(path)
    except AssertionError as error:
        return f"{name_of(path)}: {(str(error).splitlines() or ['breaks the rule'])[0]}"
    return ""
