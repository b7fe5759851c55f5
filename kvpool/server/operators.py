"""Operators: the peers that may have the role `admin`. Decided by the kernel's credentials of the peer, not by its own word.

Root, the daemon's own user, and members of `server.admin_group`, by the primary or a supplementary group that the process had
when it connected. An engine's user is none of these, so that an engine's requests are limited to its own model: no flush and no
events of other models. Pure; any thread.
"""

from kvpool.errors import Refused
from kvpool.ownership import ROOT_UID
from kvpool.server.connections.local_socket import Peer

ROOT = 0


class Operators:
    """The operators of one daemon, which runs as `daemon_uid`; `group` None: no group is allowed."""

    def __init__(self, daemon_uid: int, group: int | None) -> None:
        self._uids = frozenset((ROOT, daemon_uid))
        self._daemon_uid = daemon_uid
        self._group = group

    def include(self, peer: Peer) -> bool:
        """Whether the peer is one of them."""
        return peer.uid in self._uids or (self._group is not None and self._group in (peer.gid, *peer.groups))

    def check(self, peer: Peer) -> None:
        """Raises Refused for anybody else, with what to do."""
        if self.include(peer):
            return
        users = ["root"] if self._daemon_uid == ROOT_UID else ["root", f"uid {self._daemon_uid}"]
        users += [] if self._group is None else [f"members of group {self._group} (server.admin_group)"]
        *firsts, last = users
        named = f"{', '.join(firsts)} and {last}" if firsts else last
        do = (
            f"add the user to that group and log in again, or use sudo -u '#{self._daemon_uid}'"
            if self._group is not None
            else f"use sudo -u '#{self._daemon_uid}', or set server.admin_group in kvpoold's configuration and restart it"
        )
        raise Refused(
            "role",
            f"uid {peer.uid} is no operator of this daemon; operators are {named}: {do}",
        )
