"""Shares of a user in namespaces and size classes: at most a share of what the others leave."""

import contextlib
from collections.abc import Iterable
from dataclasses import replace

import pytest

from kvpool.errors import Refused
from kvpool.index.namespaces import NAMESPACES_MAX, SIZE_CLASSES_MAX, Namespace, Namespaces
from kvpool.layout import Layout
from tests.unit.index.test_namespaces import LAYOUT, Tiers, layout_of

SHARE = 0.75
GREEDY, OTHER = 7, 8
SIZES = [replace(layout_of(1 + number // 8), layers=1 + number % 8) for number in range(SIZE_CLASSES_MAX + 8)]
WIDE = replace(LAYOUT, rank=None, world=256)


def namespaces() -> Namespaces:
    tiers = Tiers()
    tiers.directory.mark_segment_ready(0)
    return Namespaces(tiers.directory, SHARE)


def open_for(names: Namespaces, user: int | None, model: str, layout: Layout) -> list[Namespace]:
    """A connection of this user that is accepted."""
    opened = list(names.open_ranks(model, layout, user).values())
    names.join(opened, user)
    assert names.verify() == []
    return opened


def fill(names: Namespaces, user: int | None, wanted: Iterable[tuple[str, Layout]]) -> list[list[Namespace]]:
    """The connections that a user gets until one is refused."""
    opened: list[list[Namespace]] = []
    with contextlib.suppress(Refused):
        for model, layout in wanted:
            opened.append(open_for(names, user, model, layout))
    return opened


def test_a_user_keeps_its_share_of_the_sizes_open_and_another_opens_its_own() -> None:
    names = namespaces()
    assert len(fill(names, GREEDY, (("m", layout) for layout in SIZES))) == 48
    with pytest.raises(
        Refused, match=r"uid 7 keeps chunk sizes by .* 48 of 64, .* 48 now .*user_quota is 0.75.*disconnect ID"
    ) as refused:
        open_for(names, GREEDY, "m", SIZES[-1])
    assert refused.value.code == "full"  # a client that gets this code connects by itself once there is room
    assert len(fill(names, OTHER, (("m", layout) for layout in SIZES[48:]))) == 12  # three quarters of 16
    assert names.verify() == []


def test_a_user_keeps_its_share_of_the_namespaces_open_and_another_opens_its_own() -> None:
    names = namespaces()
    greedy = fill(names, GREEDY, ((f"m{number}", WIDE) for number in range(NAMESPACES_MAX)))
    assert len(greedy) == int(SHARE * NAMESPACES_MAX) // WIDE.world
    with pytest.raises(Refused, match=r"uid 7 keeps models, layouts and ranks by .* 3072 of 4096"):
        open_for(names, GREEDY, "one more", LAYOUT)
    assert len(open_for(names, OTHER, "another", WIDE)) == WIDE.world


def test_connections_of_one_user_to_one_namespace_count_once() -> None:
    names = namespaces()
    first = [open_for(names, GREEDY, "m", SIZES[0]) for _ in range(10)]
    assert len(fill(names, GREEDY, (("m", layout) for layout in SIZES[1:]))) == 47
    for opened in first[1:]:
        names.leave(opened, GREEDY)
    with pytest.raises(Refused):
        open_for(names, GREEDY, "m", SIZES[-1])  # the first connection is still there
    names.leave(first[0], GREEDY)
    open_for(names, GREEDY, "m", SIZES[-1])


def test_a_user_may_open_its_own_sizes_again_whatever_others_take_meanwhile() -> None:
    names = namespaces()
    fill(names, GREEDY, (("m", layout) for layout in SIZES[:40]))
    fill(
        names, None, (("m", layout) for layout in SIZES[40:64])
    )  # of three quarters of 40 it has more than it would get
    for layout in SIZES[:40]:
        open_for(names, GREEDY, "m", layout)
    with pytest.raises(Refused, match=r"40 of 64, and may keep 30 now"):
        open_for(names, GREEDY, "m", SIZES[-1])


def test_connections_of_no_user_have_no_share() -> None:
    names = namespaces()
    assert len(fill(names, None, (("m", layout) for layout in SIZES))) == SIZE_CLASSES_MAX


def test_every_user_may_keep_one_open() -> None:
    tiers = Tiers()
    names = Namespaces(tiers.directory, 0.0)
    for user in range(5):
        assert len(fill(names, user, (("m", layout) for layout in SIZES[8 * user :]))) == 1


def test_unused_namespaces_are_released_before_a_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 512
    monkeypatch.setattr("kvpool.index.namespaces.NAMESPACES_MAX", most)
    names = namespaces()
    for layout in SIZES[:SIZE_CLASSES_MAX]:
        names.open("left behind", layout)
    assert len(fill(names, GREEDY, (("m", layout) for layout in SIZES))) == 48
    for number in range(most // 2):
        names.open(f"left behind {number}", SIZES[0])
    for number in range(int(SHARE * most) - 60):
        names.join(names.open_ranks(f"m{number}", SIZES[0], GREEDY).values(), GREEDY)
    assert names.verify() == []
