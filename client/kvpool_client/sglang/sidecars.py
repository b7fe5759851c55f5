"""Sidecars: the host pools that a model has beside its KV, each with a page store of its own.

Sliding windows, states of Mamba, keys of indexers, compressed KV, draft models. SGLang registers them by name, some of them
late, and says with each request which pages of which pool it needs. Which ranks have the same bytes follows SGLang's own
storage backends: where the KV is replicated, so are the other pools, but states of Mamba and draft models with heads.

Threads: registered on SGLang's scheduler thread, used from its prefetch and backup threads.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kvpool_client.sglang.hit_policy import ALL_PAGES, BLOCK_GROUPS, prefixes_of
from kvpool_client.sglang.host_pages import Shard
from kvpool_client.sglang.page_store import PageStore

MAMBA = "mamba"
_DRAFT = "draft"
_REPLICATED_DRAFTS = {"MLATokenToKVPoolHost", "DeepSeekV4PagedHostPool"}
_UNREGISTERED = (
    "sidecars: SGLang names pages of host pool {name!r}, which it has not registered: run without "
    "--hicache-storage-backend"
)
_DRAFT_OF_ONE_RANK = (
    "draft: SGLang backs up the draft model's KV on the first rank alone, though each rank has its own heads: run with "
    "--tp-size 1, or without --hicache-storage-backend, or without the draft model"
)

# Makes the store of a host pool: its name, its shard, whether it has KV of a draft model, and a reason to refuse it.
StoreOf = Callable[[str, Shard, bool, str], PageStore]


class Sidecars:
    """See the module."""

    def __init__(self, shard: Shard, store_of: StoreOf) -> None:
        self._shard = shard
        self._store_of = store_of
        self._stores: dict[str, PageStore] = {}

    def __len__(self) -> int:
        return len(self._stores)

    def __repr__(self) -> str:
        return f"<Sidecars {', '.join(self._stores) or 'none'}>"

    @property
    def refusal(self) -> str:
        """Why nothing of the model is stored or found: one of its pools cannot be. Empty where all can."""
        return next((store.refusal for store in self._stores.values() if store.refusal), "")

    def register(self, host_pool: Any, name: str) -> None:
        """Take a host pool. One of a name that was there before takes its place."""
        shard = shard_of(host_pool, name, self._shard)
        is_of_one_rank = name.startswith(_DRAFT) and self._shard.is_replicated and not shard.is_replicated
        refusal = _DRAFT_OF_ONE_RANK if is_of_one_rank and shard.tp_size > 1 else ""
        store = self._store_of(name, shard, has_draft(host_pool, name), refusal)
        before = self._stores.get(name)
        store.register(host_pool)
        self._stores[name] = store
        if before is not None:
            before.close()

    def find_store(self, name: str) -> PageStore:
        """The pages of a host pool. Raises LookupError for one that is not registered."""
        if name not in self._stores:
            raise LookupError(_UNREGISTERED.format(name=name))
        return self._stores[name]

    def prefixes(self, transfers: Sequence[Any], keys: Sequence[str]) -> tuple[list[int], dict[Any, int]]:
        """The prefixes of pages with these keys that all pools can serve, ascending, and the longest of each pool.

        A pool is looked at only while there is a prefix left. Raises LookupError for a pool that is not registered.
        """
        lengths = list(range(1, len(keys) + 1))
        longest: dict[Any, int] = {}
        for transfer in transfers:
            policy = str(getattr(transfer.hit_policy, "value", transfer.hit_policy))
            if not lengths or policy == BLOCK_GROUPS:
                continue
            own = self._own_prefixes(self.find_store(str(transfer.name)), policy, transfer, keys)
            if own:
                longest[transfer.name] = own[-1]
            lengths = sorted(set(lengths).intersection(own))
        return lengths, longest

    @property
    def stores(self) -> tuple[PageStore, ...]:
        """The pages of each host pool."""
        return tuple(self._stores.values())

    def stats(self) -> dict[str, int | float | str]:
        """Each pool's counters, behind its name."""
        return {
            f"{name}.{counter}": value
            for name, store in self._stores.items()
            for counter, value in store.stats().items()
        }

    def close(self) -> None:
        """End the connections. Idempotent."""
        for store in self._stores.values():
            store.close()

    def _own_prefixes(self, store: PageStore, policy: str, transfer: Any, keys: Sequence[str]) -> list[int]:
        if policy == ALL_PAGES:
            return list(range(1, store.count_present(keys) + 1))
        return prefixes_of(policy, store.present(keys), len(transfer.keys or ()))


def shard_of(host_pool: Any, name: str, shard: Shard) -> Shard:
    """The part of a host pool's bytes that this rank has."""
    is_replicated = shard.is_replicated and name != MAMBA
    if is_replicated and name.startswith(_DRAFT):
        is_replicated = any(kind.__name__ in _REPLICATED_DRAFTS for kind in type(host_pool).__mro__)
    return replace(shard, is_replicated=is_replicated)


def has_draft(host_pool: Any, name: str) -> bool:
    """Whether a host pool has KV of a draft model, alone or packed behind its target's layers."""
    layers = getattr(host_pool, "layer_num", 0)
    packed = layers != getattr(host_pool, "target_layer_num", layers) or getattr(host_pool, "_draft_layer_num", 0)
    return name.startswith(_DRAFT) or bool(packed or getattr(host_pool, "mtp_draft_buffer_infos", ()))
