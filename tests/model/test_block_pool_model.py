"""Block pool against a slow model that remembers every computed prefix, by random operations.

The bytes of each token derive from its prefix, so any wrong sharing is a wrong byte (`prefix_engine`).
"""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

pytest.importorskip("torch", reason="needs the torch extra: pip install kvpool[torch]")

from tests.rigs.blocks.prefix_engine import PrefixEngine

pytestmark = pytest.mark.torch

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=18)
SOME = st.integers(0, 30)


class BlockPoolMachine(RuleBasedStateMachine):
    """Requests of few tokens over an alphabet of two: most prompts share heads."""

    blocks = 9

    def __init__(self) -> None:
        super().__init__()
        self.engine = PrefixEngine(self.blocks, size=4)
        self.known: list[list[int]] = []  # every sequence that was computed, as far as it was
        self.names = 0

    def _new(self) -> int:
        self.names += 1
        return self.names

    def _chosen(self, number: int) -> int:
        living: list[int] = sorted(self.engine.tokens)
        return living[number % len(living)]

    def _remember(self, request: int) -> None:
        self.known.append(self.engine.tokens[request][: self.engine.computed[request]])

    def _longest(self, tokens: list[int], known: list[list[int]], *, has_logits: bool) -> int:
        """Tokens, but the last one where its logits are needed, that one of the known sequences begins with."""
        limit = len(tokens) - (not has_logits)

        def common(other: list[int]) -> int:
            pairs = zip(tokens[:limit], other, strict=False)
            shared = min(limit, len(other))
            return next((at for at, (one, two) in enumerate(pairs) if one != two), shared)

        lengths: list[int] = [common(other) for other in known]
        return max(lengths, default=0)

    @rule(tokens=TOKENS, part=SOME, has_logits=st.booleans())
    def allocate(self, tokens: list[int], part: int, has_logits: bool) -> None:
        request, free = self._new(), self.engine.blocks.num_free_blocks
        allocation = self.engine.start(request, tokens, has_logits=has_logits)
        if allocation is None:
            assert free < -(-len(tokens) // 4)
            return
        assert allocation.reused_tokens <= self._longest(tokens, self.known, has_logits=has_logits)
        if part % 3:
            self.engine.compute(request)
        else:
            self.engine.compute(request, max(allocation.reused_tokens, part % len(tokens)))
        self._remember(request)

    @precondition(lambda self: self.engine.tokens)
    @rule(number=SOME, tokens=TOKENS)
    def append(self, number: int, tokens: list[int]) -> None:
        request, free = self._chosen(number), self.engine.blocks.num_free_blocks
        before = self.engine.tokens[request] + []
        if self.engine.append(request, tokens[:5]):
            self._remember(request)
        else:
            assert self.engine.tokens[request] == before
            assert free < 3

    @precondition(lambda self: self.engine.tokens)
    @rule(number=SOME)
    def compute(self, number: int) -> None:
        request = self._chosen(number)
        self.engine.compute(request)
        self._remember(request)

    @precondition(lambda self: self.engine.tokens)
    @rule(number=SOME)
    def fork(self, number: int) -> None:
        request, free = self._chosen(number), self.engine.blocks.num_free_blocks
        if not self.engine.fork(request, self._new()):
            assert free < len(self.engine.blocks.block_ids(request))

    @precondition(lambda self: self.engine.tokens)
    @rule(number=SOME, count=SOME)
    def rewind(self, number: int, count: int) -> None:
        request = self._chosen(number)
        self.engine.rewind(request, count % (len(self.engine.tokens[request]) + 1))

    @precondition(lambda self: self.engine.tokens)
    @rule(number=SOME, count=st.integers(0, 6))
    def reserve(self, number: int, count: int) -> None:
        self.engine.blocks.reserve(self._chosen(number), count)

    @precondition(lambda self: self.engine.tokens)
    @rule(number=SOME, count=st.integers(0, 6), kept=st.integers(0, 6))
    def keep_room(self, number: int, count: int, kept: int) -> None:
        request = self._chosen(number)
        if self.engine.blocks.reserve(request, count):
            before = self.engine.blocks.block_ids(request)
            self.engine.blocks.keep_room(request, min(count, kept))
            slots = self.engine.blocks.length(request) + min(count, kept)
            assert self.engine.blocks.block_ids(request) == before[: -(-slots // 4)]

    @precondition(lambda self: self.engine.tokens)
    @rule(number=SOME)
    def free(self, number: int) -> None:
        self.engine.free(self._chosen(number))

    @invariant()
    def all_is_well(self) -> None:
        self.engine.verify()

    def teardown(self) -> None:
        for request in list(self.engine.tokens):
            self.engine.free(request)
        assert self.engine.blocks.num_free_blocks == self.blocks
        assert self.engine.blocks.verify() == []


class RoomyMachine(BlockPoolMachine):
    """So much room that nothing is evicted: then all full blocks that were computed are reused, and heads of part blocks."""

    blocks = 600

    @rule(tokens=TOKENS, part=SOME, has_logits=st.booleans())
    def allocate(self, tokens: list[int], part: int, has_logits: bool) -> None:
        request = self._new()
        allocation = self.engine.start(request, tokens, has_logits=has_logits)
        assert allocation is not None
        full = [known[: len(known) // 4 * 4] for known in self.known]
        most = self._longest(tokens, self.known, has_logits=has_logits)
        assert self._longest(tokens, full, has_logits=has_logits) <= allocation.reused_tokens <= most
        self.engine.compute(request)
        self._remember(request)


@pytest.mark.parametrize(
    ("machine", "examples"),
    [
        (BlockPoolMachine, 12),
        (RoomyMachine, 6),
        pytest.param(BlockPoolMachine, 60, marks=pytest.mark.slow),
        pytest.param(RoomyMachine, 30, marks=pytest.mark.slow),
    ],
)
def test_random_requests_share_what_was_computed_alone(machine: type[BlockPoolMachine], examples: int) -> None:
    checked = settings(
        max_examples=examples,
        stateful_step_count=40,
        deadline=None,
        print_blob=True,
        suppress_health_check=[*HealthCheck],
    )
    run_state_machine_as_test(machine, settings=checked)
