"""TensorRT-LLM's second cache manager and attention data parallelism, driven by a scripted executor (`standin`)."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.rigs.daemon import Daemon, wait_until

torch = pytest.importorskip("torch", reason="the torch extra is not installed")

from kvpool.errors import LayoutMismatch  # noqa: E402
from kvpool_client.trtllm.pages import pages_of_layout, pages_of_tensor  # noqa: E402
from tests.engines.trtllm.pages_rig import Buffer, Group, PageLayout, Region  # noqa: E402
from tests.engines.trtllm.standin import Executor  # noqa: E402

pytestmark = pytest.mark.torch

PROMPT = np.random.default_rng(5).integers(0, 900, 30).tolist()
Start = Callable[..., Executor]


def test_the_two_managers_never_share_bytes(shared_daemon: Daemon, start_trtllm: Start) -> None:
    start_trtllm(shared_daemon).answer(PROMPT)
    for manager in ("v2", "v2-apart"):
        assert start_trtllm(shared_daemon, manager=manager).answer(PROMPT)[0] == 0, manager


def test_a_generation_only_request_is_not_served(shared_daemon: Daemon, start_trtllm: Start) -> None:
    for manager in ("v1", "v2"):
        engine = start_trtllm(shared_daemon, manager=manager)
        engine.answer(PROMPT)
        assert engine.answer(PROMPT, is_generation_only=True)[0] == 0
        assert engine.answer(PROMPT)[0] == 28


def test_an_owner_that_ends_leaves_the_others_served(shared_daemon: Daemon, start_trtllm: Start) -> None:
    owners = [start_trtllm(shared_daemon, manager="v2", owner=rank, tensor_parallel_size=2) for rank in range(2)]
    cold = owners[0].answer(PROMPT, 6)[1]
    owners[0].close()
    assert owners[1].answer(PROMPT, 6) == (28, cold)


@pytest.mark.parametrize(
    ("start", "end", "left"), [(0, 8, 5), (0, 10, 5), (0, 28, 0), (13, 28, 4), (8, 20, 7), (28, 40, 7)]
)
def test_blocks_that_the_runtime_found_itself_leave_the_claim_and_the_rest_stays(
    shared_daemon: Daemon, start_trtllm: Start, start: int, end: int, left: int
) -> None:
    engine = start_trtllm(shared_daemon, manager="v2")
    cold = engine.answer(PROMPT, 6)[1]
    request = engine.ask(PROMPT, 6)
    assert request.claimed == 28
    engine.hold(request, start, min(end, 28))
    engine.scheduler.cancel_load(request, start, end)
    request.computed, request.claimed = 28, 28 - (min(end, 28) - start if start < 28 else 0)
    request.py_num_connector_matched_tokens = request.claimed  # type: ignore[attr-defined]
    engine.run()
    assert request.tokens[len(PROMPT) :] == cold
    assert engine.workers[0].half.stats()["loaded_blocks"] == left
    assert engine.answer(PROMPT, 6) == (28, cold)


def test_a_replayed_request_never_saves_from_blocks_that_others_have_taken(
    shared_daemon: Daemon, start_trtllm: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime takes a request's pages away and looks it up again, without a notification."""
    import kvpool_client as kv

    engine = start_trtllm(shared_daemon, manager="v2", step_tokens=8)
    engine.layer_number = lambda layer: layer + 1  # so that nothing is copied before the commit
    engine.answer([1, 2, 3])
    request = engine.ask(PROMPT, 3)
    with monkeypatch.context() as patch:
        patch.setattr(kv.Save, "commit", lambda self, wait=True: None)
        engine.step()
    engine.replay(request)
    engine.run()
    wait_until(lambda: shared_daemon.stats()["reservations"] == 0, "no save is left")
    assert engine.answer(PROMPT, 3)[0] == 28
    assert shared_daemon.problems() == []


def _region(size: int, buffers: tuple[Buffer, ...]) -> Region:
    return Region(torch.zeros(3, size, dtype=torch.uint8), buffers)


def _layout(*regions: Region) -> PageLayout:
    return PageLayout(4, (Group(0, (1, 0), None, regions),))


def test_pages_with_layers_in_order_are_recognised() -> None:
    both = [Buffer(layer, role) for layer in range(2) for role in ("key", "value")]
    (pages,) = pages_of_layout(_layout(_region(64, tuple(both))), 4, "w")
    assert (pages.is_by_layer, pages.geometry.layers, pages.geometry.planes, len(pages.layers)) == (True, 2, 2, 2)
    (pages,) = pages_of_layout(_layout(_region(64, tuple(reversed(both)))), 4, "w")
    assert (pages.is_by_layer, pages.geometry.layers, len(pages.layers)) == (False, 1, 1)
    (latent,) = pages_of_layout(_layout(_region(32, (Buffer(0, "key"), Buffer(1, "key")))), 4, "w")
    assert (latent.is_by_layer, latent.geometry.is_replicated) == (True, True)
    assert not pages.geometry.is_replicated
    assert pages.geometry.format != pages_of_layout(_layout(_region(64, tuple(both))), 4, "w")[0].geometry.format


@pytest.mark.parametrize(
    ("layout", "word"),
    [
        (PageLayout(4, ()), "0 layer groups"),
        (PageLayout(4, (Group(1, (0,), None, (_region(64, (Buffer(0, "key"),)),)),)), "numbers from 0 on"),
        (PageLayout(4, (Group(0, (0,), 0, (_region(64, (Buffer(0, "key"),)),)),)), "window of 0 tokens"),
        (_layout(_region(64, (Buffer(0, "ssm_state"), Buffer(1, "conv_state")))), "recurrent states"),
        (PageLayout(8, _layout(_region(64, (Buffer(0, "key"),))).groups), "tokens_per_block"),
        (_layout(_region(64, (Buffer(0, "key", 2),))), "page size"),
        (_layout(_region(64, (Buffer(0, "key"),)), _region(8, (Buffer(0, "key_scale"),))), "kv_cache_config.dtype"),
        (_layout(_region(66, (Buffer(0, "key"),))), "tokens_per_block"),
        (_layout(), "page size"),
    ],
)
def test_pages_that_cannot_be_served_are_refused_with_a_remedy(layout: Any, word: str) -> None:
    with pytest.raises(LayoutMismatch, match=word):
        pages_of_layout(layout, 4, "w")


def test_a_pool_tensor_of_another_shape_is_refused_with_a_remedy() -> None:
    for tensor in (torch.zeros(3, 2, 5, 32), torch.zeros(3, 2, 2, 32, dtype=torch.int8)):
        with pytest.raises(LayoutMismatch, match=r"without the connector|kv_cache_config\.dtype"):
            pages_of_tensor(tensor, 4, "w")
