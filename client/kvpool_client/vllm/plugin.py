"""Plugin that registers the connector's name in vLLM's own registry, in every process of vLLM.

vLLM calls `register` through the entry point `kvpool` of the group `vllm.general_plugins`: then `kv_connector: KVPoolConnector`
is enough, without a module path. A MultiConnector needs the name: it looks its children's classes up by it when it adds their
statistics up, in whichever process logs. Where plugins are switched off (`VLLM_PLUGINS`), making the class registers it too.

Any thread; may be called any number of times.
"""

import contextlib

NAME = "KVPoolConnector"
MODULE = "kvpool_client.vllm.connector"


def register() -> None:
    """Register the class's module with vLLM; the class is made when vLLM requests it. Imports vLLM."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # the engine that asks for it

    with contextlib.suppress(ValueError):  # the name is registered
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
