"""Access by key to ZMQ sockets: the ZAP handler (RFC 27) of a context.

A connection is admitted if its CURVE key is in the allow-list, and for no other reason: addresses and names that a peer
reports are not looked at. The user id of its messages is then the key in hexadecimal, which no peer can choose. The number of
handshakes of one key from one address in a minute is bounded, so that nobody opens connections without end; a key that a whole
fleet shares comes from as many addresses as there are nodes.

One thread, which also calls `answer`; `allowed` is replaced as a whole, by any thread.
"""

from collections import OrderedDict

from kvpool.clock import Clock
from kvpool.peers.token_bucket import TokenBucket

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"kvpool"
ZAP_FRAMES = 7
_KNOWN_MAX = 4096
_MINUTE_S = 60.0


class ZapHandler:
    """The allow-list of a context's servers. `refused`: handshakes until now."""

    def __init__(self, allowed: frozenset[bytes], clock: Clock, *, handshakes_per_minute: int = 0) -> None:
        """`handshakes_per_minute`: of one key from one address; 0: any number."""
        self.allowed = allowed
        self.refused = 0
        self._clock = clock
        self._most = handshakes_per_minute
        self._buckets: OrderedDict[tuple[bytes, bytes], TokenBucket] = OrderedDict()

    def __repr__(self) -> str:
        return f"<ZapHandler {len(self.allowed)} keys, {self.refused} refused>"

    def answer(self, request: list[bytes]) -> list[bytes]:
        """The answer to a request: 200 for a key that is admitted, 400 for anything else."""
        sequence = request[1] if len(request) > 1 else b""
        is_known = len(request) == ZAP_FRAMES and request[5] == b"CURVE" and request[6] in self.allowed
        if is_known and self._is_within_rate(request[6], request[3]):
            return [b"1.0", sequence, b"200", b"OK", request[6].hex().encode(), b""]
        self.refused += 1
        return [b"1.0", sequence, b"400", b"too many handshakes" if is_known else b"no such key", b"", b""]

    def _is_within_rate(self, key: bytes, address: bytes) -> bool:
        if not self._most:
            return True
        source = key, address
        bucket = self._buckets.pop(source, None) or TokenBucket(self._most / _MINUTE_S, self._most, self._clock)
        self._buckets[source] = bucket
        if len(self._buckets) > _KNOWN_MAX:
            self._buckets.popitem(last=False)
        return bucket.take_tokens()
