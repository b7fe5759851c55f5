"""Arguments of callers: text that has no bytes in UTF-8 is refused as every other wrong value, by its name."""

import pytest

import kvpool_client as kv
from tests.rigs.daemon import SMALL
from tests.rigs.fake_pool import AWAY

HALF_A_PAIR = "\ud800"


@pytest.mark.parametrize("given", [{"model": HALF_A_PAIR}, {"model": "m", "revision": HALF_A_PAIR}])
def test_a_model_without_bytes_in_utf_8_is_refused(given: dict[str, str]) -> None:
    with pytest.raises(kv.InvalidArgument, match=r"is '\\ud800', expected"):
        kv.connect(AWAY, layout=SMALL, **given)  # type: ignore[arg-type]  # texts alone


def test_an_adapter_without_bytes_in_utf_8_is_refused() -> None:
    pool = kv.connect(AWAY, model="m", revision="5f0b02c", layout=SMALL)
    with pool, pytest.raises(kv.InvalidArgument, match=r"adapter is '\\ud800', expected text"):
        pool.keys(list(range(64)), adapter=HALF_A_PAIR)
