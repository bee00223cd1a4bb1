"""What of vLLM the connector builds on, resolved where vLLM is installed. Without it there are
classes of the same names and methods, so that everything can be imported and tested."""

from __future__ import annotations

import enum
import inspect
import logging
from typing import Any, Dict, Optional

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        KVConnectorRole,
    )
    from vllm.logger import init_logger

    logger = init_logger("vllm.kvstow")
except ImportError:
    logger = logging.getLogger("kvstow.vllm")

    class KVConnectorRole(enum.Enum):  # type: ignore[no-redef]
        SCHEDULER = 0
        WORKER = 1

    class KVConnectorMetadata:  # type: ignore[no-redef]
        pass

    class KVConnectorBase_V1:  # type: ignore[no-redef]
        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None):
            self._vllm_config = vllm_config
            self._role = role
            self._kv_cache_config = kv_cache_config
            self._connector_metadata: Any = None

        def bind_connector_metadata(self, connector_metadata: Any) -> None:
            self._connector_metadata = connector_metadata

        def clear_connector_metadata(self) -> None:
            self._connector_metadata = None

        def has_connector_metadata(self) -> bool:
            return self._connector_metadata is not None


try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:

    class CacheHitSource(enum.Enum):  # type: ignore[no-redef]
        """As minors that attribute hits have it; the others never ask."""

        HOST = "host"
        DISK = "disk"
        EXTERNAL_UNSPECIFIED = "external_unspecified"


def init_base(connector: Any, arguments: Dict[str, Any]) -> None:
    """Calls the base class's constructor with those of the arguments that it knows."""
    init = KVConnectorBase_V1.__init__
    parameters = inspect.signature(init).parameters
    init(connector, **{name: value for name, value in arguments.items() if name in parameters})


def cpu_kernel(vllm_config: Any, dtype: Any, block_size: int, head_size: int) -> Optional[str]:
    """Name of the attention kernel that vLLM's CPU backend picks for such pages, "vec" or "amx"
    or another; None where it cannot be told."""
    try:
        from vllm.v1.attention.backends import cpu_attn

        pick = cpu_attn._get_attn_isa
        known = {
            "dtype": dtype,
            "block_size": block_size,
            "head_size": head_size,
            "kv_cache_dtype": vllm_config.cache_config.cache_dtype,
        }
        names = inspect.signature(pick).parameters
        return pick(**{name: value for name, value in known.items() if name in names})
    except Exception as error:  # a private function: it may go or change
        logger.warning("kvstow: cannot tell vLLM's CPU attention kernel: %s", error)
        return None


def is_cpu_platform() -> bool:
    try:
        from vllm.platforms import current_platform

        return bool(current_platform.is_cpu())
    except ImportError:
        return False
