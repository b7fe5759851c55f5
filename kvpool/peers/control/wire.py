"""Wire form of the control records: one ZMQ message with one part, the body of a frame (`protocol/frames.py`).

    body := msgpack [kind, sequence, field, …]

The size is checked before a byte is decoded; then the kind, the number and type of the fields, and each value against its
bounds. Whatever is wrong is a `WireFault` with the code of the refusal. Its text names what was wrong, and shows no bytes of
keys. Pure functions; any thread.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kvpool.config.addresses import parse_zmq
from kvpool.errors import InvalidArgument, LayoutMismatch, ProtocolError
from kvpool.ids import CHECKSUM_BYTES, EPOCH_BYTES, MODEL_BYTES_MAX, TICKET_BYTES
from kvpool.key_column import KeyColumn, packed_bytes
from kvpool.keys import is_scope
from kvpool.layout import Layout
from kvpool.peers.control import records as r
from kvpool.protocol import frames
from kvpool.protocol.columns import keys_of
from kvpool.protocol.records.codec import decode_as, encode

MESSAGE_BYTES_MAX = frames.FRAME_BYTES_MAX
# Of a Hello, and of all that a peer may send before it.
HELLO_BYTES_MAX = 1024
SEQUENCE_MAX = (1 << 63) - 1
_PART_MAX = (1 << 32) - 1
Buffer = bytes | memoryview


class WireFault(ProtocolError):
    """A message that is refused. `sequence`: that of the message, 0 where it cannot be known."""

    def __init__(self, code: str, text: str, sequence: int = 0) -> None:
        super().__init__(text)
        self.code = code
        self.sequence = sequence


class Message(NamedTuple):
    """A record, and the number that its answer repeats."""

    sequence: int
    record: Any


def encode_message(record: r.Request | r.Answer, sequence: int) -> bytes:
    """The message that carries `record`."""
    return encode(record, sequence)[frames.LENGTH.size :]


def decode_request(parts: Sequence[Buffer], *, bytes_max: int = MESSAGE_BYTES_MAX) -> Message:
    """The request in a message from a puller. Raises WireFault."""
    return _decode(parts, _REQUESTS, bytes_max)


def decode_answer(parts: Sequence[Buffer]) -> Message:
    """The answer in a message from an owner. Raises WireFault."""
    return _decode(parts, _ANSWERS, MESSAGE_BYTES_MAX)


def choose_version(hello: r.Hello) -> int:
    """The version for a puller. Raises WireFault where both speak none."""
    if min(hello.version, r.NEWEST_VERSION) < max(hello.oldest, r.OLDEST_VERSION):
        older = "the puller" if hello.version < r.OLDEST_VERSION else "this node"
        spoken = f"peer speaks versions {hello.oldest} to {hello.version}, this node {r.OLDEST_VERSION} to {r.NEWEST_VERSION}"
        raise WireFault(r.RefusalCode.VERSION, f"{spoken}: update {older}")
    return min(hello.version, r.NEWEST_VERSION)


def check_offer(pull: r.Pull, offer: r.Offer) -> None:
    """Raises WireFault unless the offer is one to this pull."""
    extents, asked = Layout.from_wire(pull.layout).extents, len(KeyColumn(pull.keys)) - pull.first
    if not pull.are_alone and offer.present:
        _refuse(
            f"Offer names {len(offer.present)} chunks as present, expected none: those of pull {pull.pull} are not alone"
        )
    held, named = offer.present.count(r.HELD), len(offer.present)
    if pull.are_alone and (named > asked or held != offer.chunks):
        _refuse(
            f"Offer has {offer.chunks} chunks, and names {held} of {named} as present, expected as many, of {asked} at most"
        )
    if offer.pull != pull.pull or offer.chunks > asked:
        _refuse(f"Offer has {offer.chunks} chunks for pull {offer.pull}, expected at most {asked} for {pull.pull}")
    if len(offer.checks) not in (0, CHECKSUM_BYTES * extents * offer.chunks):
        _refuse(f"Offer has checks of {len(offer.checks)} bytes for {offer.chunks} chunks of {extents} extents")


def check_staged(stage: r.AnyStage, staged: r.Staged) -> None:
    """Raises WireFault unless the rows are the first of those asked for."""
    if (staged.pull, staged.part) != (stage.pull, stage.part) or len(staged.gone) > stage.rows:
        _refuse(
            f"Staged has {len(staged.gone)} rows for part {staged.part} of pull {staged.pull}, expected at most "
            f"{stage.rows} for part {stage.part} of {stage.pull}"
        )


def check_near(ask: r.AskNear, near: r.Near) -> None:
    """Raises WireFault unless the places are those of this pull."""
    if near.pull != ask.pull:
        _refuse(f"Near is of pull {near.pull}, expected {ask.pull}")


def check_follow(ask: r.AskFollow, answer: object) -> None:
    """Raises WireFault unless the answer is one to this request: ids and cursors never go back."""
    if isinstance(ask, r.AskChanges) and isinstance(answer, r.Changes):
        if not answer.is_gap and answer.last < ask.last:
            _refuse(f"Changes reach event {answer.last}, expected {ask.last} or a later one")
        if not answer.is_gap and answer.saves < ask.saves:
            _refuse(f"Changes reach note {answer.saves} of saves, expected {ask.saves} or a later one")
    elif isinstance(ask, r.AskKeys) and isinstance(answer, r.Keys):
        if answer.cursor != r.NO_MORE_KEYS and answer.cursor < ask.cursor + bool(answer.keys):
            _refuse(f"Keys have cursor {answer.cursor}, expected one beyond {ask.cursor}")
    else:
        _refuse(f"{type(answer).__name__} answers {type(ask).__name__}")


def _decode(
    parts: Sequence[Buffer], kinds: "Mapping[int, tuple[type[Any], Callable[[Any], None]]]", most: int
) -> Message:
    if len(parts) != 1:
        raise WireFault(r.RefusalCode.PROTOCOL, f"message has {len(parts)} parts, expected 1")
    if not 2 <= len(parts[0]) <= most:
        raise WireFault(r.RefusalCode.PROTOCOL, f"message has {len(parts[0])} bytes, expected 2..{most}")
    try:
        kind, sequence, values = frames.decode(parts[0])
    except ProtocolError as error:
        raise WireFault(r.RefusalCode.PROTOCOL, _short(str(error))) from error
    found = kinds.get(kind)
    if found is None:
        raise WireFault(r.RefusalCode.KIND, _short(f"kind {kind} is not known here"), sequence)
    try:
        record = decode_as(found[0], values)
        found[1](record)
    except WireFault as fault:
        raise WireFault(fault.code, str(fault), sequence) from fault
    except (ProtocolError, LayoutMismatch, InvalidArgument) as error:
        raise WireFault(r.RefusalCode.PROTOCOL, _short(str(error)), sequence) from error
    return Message(sequence, record)


def _check_hello(hello: r.Hello) -> None:
    if hello.magic != r.MAGIC:
        _refuse("Hello has another magic: this is the port for other nodes of kvpool")
    _check_range("Hello version", hello.version, 1, 1 << 31)
    _check_range("Hello oldest", hello.oldest, 1, hello.version)
    _check_text("Hello node", hello.node, r.NAME_BYTES_MAX)
    if not hello.node:
        _refuse("Hello node is empty")
    _check_bytes("Hello incarnation", hello.incarnation, (r.INCARNATION_BYTES,))
    _check_bytes("Hello domain", hello.domain, (r.DOMAIN_TAG_BYTES,))
    _check_address("Hello stream", hello.stream)


def _check_pull(pull: r.Pull) -> None:
    _check_range("Pull pull", pull.pull, 1, SEQUENCE_MAX)
    _check_model("Pull model", pull.model)
    layout = Layout.from_wire(pull.layout)
    if layout.rank is None:
        _refuse("Pull layout stands for all ranks, expected that of one")
    if not is_scope(pull.scope):
        _refuse(f"Pull scope of {len(pull.scope)} bytes is none")
    keys = keys_of(pull.keys, keys_max=r.keys_max(layout, are_alone=pull.are_alone))
    is_chain = layout.is_chained and not pull.are_alone
    _check_range("Pull first", pull.first, 0, len(keys) - 1 if is_chain else 0)
    if not is_chain and len(set(keys)) < len(keys):
        _refuse("Pull names a chunk without a parent twice")
    _check_range("Pull deadline_ms", pull.deadline_ms, 1, r.DEADLINE_MS_MAX)


def _check_offer_alone(offer: r.Offer) -> None:
    _check_range("Offer pull", offer.pull, 1, SEQUENCE_MAX)
    _check_range("Offer chunks", offer.chunks, 0, r.PULL_KEYS_MAX)
    _check_bytes("Offer ticket", offer.ticket, (TICKET_BYTES,) if offer.chunks else (0,))
    _check_range("Offer connections", offer.connections, 1 if offer.chunks else 0, r.CONNECTIONS_MAX)
    _check_address("Offer address", offer.address)
    if offer.chunks and not offer.address:
        _refuse("Offer address is empty")
    if len(offer.present) > r.SET_KEYS_MAX or offer.present.strip(bytes([r.ABSENT, r.HELD, r.LATER])):
        _refuse(f"Offer present has {len(offer.present)} bytes, expected at most {r.SET_KEYS_MAX}, of 0, 1 or 2")
    if len(offer.checks) > r.CHECKS_BYTES_MAX:
        _refuse(f"Offer has checks of {len(offer.checks)} bytes, expected at most {r.CHECKS_BYTES_MAX}")


def _check_stage(stage: r.AnyStage) -> None:
    _check_range("Stage pull", stage.pull, 1, SEQUENCE_MAX)
    _check_range("Stage part", stage.part, 0, _PART_MAX)
    _check_bytes("Stage ended", stage.ended, tuple(range(0, 4 * r.STAGE_PARTS_MAX + 1, 4)))
    _check_range("Stage first", stage.first, 0, SEQUENCE_MAX)
    _check_range("Stage rows", stage.rows, 0, r.STAGE_ROWS_MAX)
    _check_text("Stage protocol", stage.protocol, r.PROTOCOL_BYTES_MAX)
    _check_range("Stage wait_ms", stage.wait_ms, 0, r.STAGE_WAIT_MS_MAX)


def _check_stage_into(stage: r.StageInto) -> None:
    _check_stage(stage)
    _check_range("StageInto agent's bytes", len(stage.agent), 1, r.AGENT_BYTES_MAX)
    _check_range("StageInto address", stage.address, 1, SEQUENCE_MAX)
    _check_bytes("StageInto mark", stage.mark, (r.MARK_BYTES,))


def _check_staged_alone(staged: r.Staged) -> None:
    _check_range("Staged pull", staged.pull, 1, SEQUENCE_MAX)
    _check_range("Staged part", staged.part, 0, _PART_MAX)
    if not staged.server:
        _refuse("Staged server is empty")
    _check_address("Staged server", f"tcp://{staged.server}")
    _check_bytes("Staged life", staged.life, (r.LIFE_BYTES,))
    _check_range("Staged address", staged.address, 0, SEQUENCE_MAX)
    _check_range("Staged rows", len(staged.gone), 0, r.STAGE_ROWS_MAX)
    _check_bytes("Staged checks", staged.checks, (CHECKSUM_BYTES * len(staged.gone),))


def _check_ask_near(ask: r.AskNear) -> None:
    _check_range("AskNear pull", ask.pull, 1, SEQUENCE_MAX)
    _check_bytes("AskNear host", ask.host, (r.HOST_BYTES,))


def _check_near_alone(near: r.Near) -> None:
    _check_range("Near pull", near.pull, 1, SEQUENCE_MAX)
    _check_text("Near socket", near.socket, r.SOCKET_BYTES_MAX)
    if not near.socket.startswith("/"):
        _refuse("Near socket is no absolute path")
    _check_bytes("Near epoch", near.epoch, (EPOCH_BYTES,))
    chunks = len(near.offsets) // r.PLACE_BYTES
    _check_range("Near chunks", chunks, 1, r.PULL_KEYS_MAX)
    for name in ("offsets", "slots", "generations"):
        _check_bytes(f"Near {name}", getattr(near, name), (r.PLACE_BYTES * chunks,))


def _check_release(release: r.Release) -> None:
    _check_range("Release pull", release.pull, 1, SEQUENCE_MAX)


def _check_wrong(wrong: r.Wrong) -> None:
    _check_model("Wrong model", wrong.model)
    layout = Layout.from_wire(wrong.layout)
    if layout.rank is None:
        _refuse("Wrong layout stands for all ranks, expected that of one")
    _check_bytes("Wrong parent", wrong.parent, (0, packed_bytes(1)) if layout.is_chained else (0,))
    _check_bytes("Wrong key", wrong.key, (packed_bytes(1),))


def _check_refused(refused: r.Refused) -> None:
    _check_text("Refused code", refused.code, 32)
    _check_text("Refused text", refused.text, r.TEXT_BYTES_MAX)


def _check_pong(pong: r.Pong) -> None:
    _check_bytes("Pong incarnation", pong.incarnation, (r.INCARNATION_BYTES,))


def _check_ask_changes(ask: r.AskChanges) -> None:
    _check_range("AskChanges last", ask.last, -1, SEQUENCE_MAX)
    _check_range("AskChanges wait_ms", ask.wait_ms, 0, r.WAIT_MS_MAX)
    _check_range("AskChanges saves", ask.saves, 0, SEQUENCE_MAX)


def _check_changes(changes: r.Changes) -> None:
    _check_range("Changes newest", changes.newest, -1, SEQUENCE_MAX)
    _check_range("Changes last", changes.last, -1, changes.newest)
    _check_range("Changes saves", changes.saves, 0, SEQUENCE_MAX)
    _check_keys("Changes", changes.stored, changes.removed)
    if changes.is_gap and (changes.stored or changes.removed):
        _refuse("Changes have a gap and keys")


def _check_ask_keys(ask: r.AskKeys) -> None:
    _check_range("AskKeys cursor", ask.cursor, 0, SEQUENCE_MAX)


def _check_page(page: r.Keys) -> None:
    _check_range("Keys as_of", page.as_of, -1, SEQUENCE_MAX)
    _check_range("Keys cursor", page.cursor, r.NO_MORE_KEYS, SEQUENCE_MAX)
    _check_keys("Keys", page.keys)


def _check_keys(what: str, *columns: bytes) -> None:
    """Columns of whole keys, which together are not too many."""
    most = packed_bytes(r.FOLLOW_KEYS_MAX)
    if any(len(column) % packed_bytes(1) for column in columns) or sum(map(len, columns)) > most:
        sizes = " and ".join(str(len(column)) for column in columns)
        _refuse(
            f"{what} have columns of {sizes} bytes, expected multiples of {packed_bytes(1)}, at most {most} together"
        )


def _check_nothing(record: object) -> None:
    """A record without fields."""


def _check_range(what: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        _refuse(f"{what} is {value}, expected {least}..{most}")


def _check_text(what: str, value: str, bytes_max: int) -> None:
    if len(value.encode("utf-8", "surrogatepass")) > bytes_max or not (value.isprintable() or not value):
        _refuse(f"{what} is no printable text of at most {bytes_max} bytes")


def _check_model(what: str, value: str) -> None:
    _check_range(f"{what} bytes", len(value.encode("utf-8", "surrogatepass")), 0, MODEL_BYTES_MAX)


def _check_bytes(what: str, value: bytes, lengths: tuple[int, ...]) -> None:
    if len(value) not in lengths:
        _refuse(f"{what} has {len(value)} bytes, expected {' or '.join(map(str, lengths))}")


def _check_address(what: str, value: str) -> None:
    _check_text(what, value, r.ADDRESS_BYTES_MAX)
    if not value:
        return
    try:
        scheme, _, place = value.partition("://")
        is_stream = scheme in ("tcp", "tls") and parse_zmq(f"tcp://{place}") is not None
    except ValueError:
        is_stream = False
    if not is_stream:
        _refuse(f"{what} is {value!r}, expected tcp://IP:PORT or tls://IP:PORT")


def _refuse(text: str) -> None:
    raise WireFault(r.RefusalCode.PROTOCOL, _short(text))


def _short(text: str) -> str:
    """A text that fits a Refused: printable, and cut."""
    plain = "".join(character if character.isprintable() else "?" for character in text[: r.TEXT_BYTES_MAX])
    return plain.encode("utf-8", "replace")[: r.TEXT_BYTES_MAX].decode("utf-8", "ignore")


_REQUESTS: dict[int, tuple[type[Any], Callable[[Any], None]]] = {
    r.Hello.KIND: (r.Hello, _check_hello),
    r.Pull.KIND: (r.Pull, _check_pull),
    r.Stage.KIND: (r.Stage, _check_stage),
    r.StageInto.KIND: (r.StageInto, _check_stage_into),
    r.AskNear.KIND: (r.AskNear, _check_ask_near),
    r.Release.KIND: (r.Release, _check_release),
    r.Wrong.KIND: (r.Wrong, _check_wrong),
    r.Ping.KIND: (r.Ping, _check_nothing),
    r.AskChanges.KIND: (r.AskChanges, _check_ask_changes),
    r.AskKeys.KIND: (r.AskKeys, _check_ask_keys),
}
_ANSWERS: dict[int, tuple[type[Any], Callable[[Any], None]]] = {
    r.Hello.KIND: (r.Hello, _check_hello),
    r.Offer.KIND: (r.Offer, _check_offer_alone),
    r.Staged.KIND: (r.Staged, _check_staged_alone),
    r.Near.KIND: (r.Near, _check_near_alone),
    r.Refused.KIND: (r.Refused, _check_refused),
    r.Pong.KIND: (r.Pong, _check_pong),
    r.Changes.KIND: (r.Changes, _check_changes),
    r.Keys.KIND: (r.Keys, _check_page),
}
