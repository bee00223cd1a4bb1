"""kvstow for vLLM: KvstowConnector, loaded by --kv-transfer-config and configured there alone.

    vllm serve MODEL --kv-transfer-config '{
      "kv_connector": "KvstowConnector", "kv_connector_module_path": "kvstow.vllm",
      "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
      "kv_connector_extra_config": {"target": "unix:/run/kvstow.sock", "codec": "safe"}}'

Importable without vLLM and without torch.
"""

from .connector import KvstowConnector

__all__ = ["KvstowConnector"]
