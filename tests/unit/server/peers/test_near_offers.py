"""Near offers: the places of an offer are for who has it, on this host, while it lasts."""

from kvpool.peers.control import records as r
from kvpool.server.peers.near_offers import NearOffers

HOST, EPOCH = b"h" * 16, b"e" * 16
COLUMNS = (bytes(8), b"s" * 8, b"g" * 8)
ASK = r.AskNear(7, HOST)


def offers() -> NearOffers:
    made = NearOffers(HOST, "/run/kvpool.sock", EPOCH)
    made.add_offer(1, COLUMNS)
    return made


def code_of(answer: r.Near | r.Refused) -> str:
    assert isinstance(answer, r.Refused)
    return answer.code


def test_the_places_of_an_offer_are_given_and_counted() -> None:
    one = offers()
    assert one.answer(1, ASK) == r.Near(7, "/run/kvpool.sock", EPOCH, *COLUMNS)
    assert one.given == 1


def test_another_host_is_refused_so_that_it_does_not_ask_again() -> None:
    one = offers()
    assert code_of(one.answer(1, r.AskNear(7, bytes(16)))) == r.RefusalCode.TRANSPORT
    assert one.given == 0


def test_an_offer_that_is_none_or_has_ended_is_refused() -> None:
    one = offers()
    assert code_of(one.answer(None, ASK)) == r.RefusalCode.FAILED
    one.drop(1)
    assert code_of(one.answer(1, ASK)) == r.RefusalCode.FAILED
