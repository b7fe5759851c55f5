"""Adapter for vLLM: a KV connector (V1) that vLLM loads by configuration, with nothing patched.

    --kv-transfer-config '{"kv_connector": "KVPoolConnector", "kv_connector_module_path": "kvpool_client.vllm.connector",
                           "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'

Importing this package imports neither vLLM nor torch; the class itself is made when it is first asked for (`connector`).
"""
