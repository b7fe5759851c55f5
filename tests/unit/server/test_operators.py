"""Users who may have the role `admin`."""

import pytest

from kvpool.errors import Refused
from kvpool.server.connections.local_socket import Peer
from kvpool.server.operators import Operators

DAEMON, ENGINE, GROUP = 990, 1000, 4000


@pytest.mark.parametrize("group", [None, GROUP])
@pytest.mark.parametrize("uid", [0, DAEMON])
def test_root_and_the_daemons_user_are_operators(uid: int, group: int | None) -> None:
    Operators(DAEMON, group).check(Peer(1, uid, 5))


def test_other_users_are_refused_with_a_remedy() -> None:
    with pytest.raises(Refused) as refusal:
        Operators(DAEMON, None).check(Peer(1, ENGINE, DAEMON, (DAEMON, 0)))
    assert str(refusal.value) == (
        "role: uid 1000 is no operator of this daemon; operators are root and uid 990: use sudo -u '#990', or set "
        "server.admin_group in kvpoold's configuration and restart it"
    )


@pytest.mark.parametrize("peer", [Peer(1, ENGINE, GROUP), Peer(1, ENGINE, 5, (7, GROUP))])
def test_members_of_the_group_are_operators_by_any_of_their_groups(peer: Peer) -> None:
    Operators(DAEMON, GROUP).check(peer)
    with pytest.raises(Refused, match=r"members of group 4001 \(server\.admin_group\): add the user to that group"):
        Operators(DAEMON, GROUP + 1).check(peer)
