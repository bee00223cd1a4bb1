"""kv_connector_extra_config: names, defaults, checks. Unknown names are errors."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any, Mapping, Optional

from .. import _kvstow


@dataclasses.dataclass(frozen=True)
class ConnectorConfig:
    """target: of the sidecar, "unix:PATH" or "HOST:PORT".
    codec: "safe", "lossless", ...; only what is saved depends on it.
    namespace: keeps the blocks of one group of engines from another's.
    tokens_per_block: a multiple of 32 and of vLLM's block size; 0: the smallest such from 64 on.
    weights: digest or revision of the weights; "": from the model folder or the hub's revision.
    page_layout: of vLLM's pages, "auto" or a name of pages.py.
    lookup_timeout, load_timeout, save_timeout: seconds that a request may wait for one of them.
    max_pending_bytes: copies of pages that wait to be sent; beyond it saves are dropped.
    load_batch_bytes: staging memory of loads.
    shutdown_timeout: seconds that an engine going down waits for its last saves.
    """

    target: str = "unix:/tmp/kvstow.sock"
    codec: str = "safe"
    namespace: str = ""
    tokens_per_block: int = 0
    weights: str = ""
    page_layout: str = "auto"
    durable: bool = False
    lookup_timeout: float = 0.5
    load_timeout: float = 5.0
    save_timeout: float = 10.0
    max_pending_bytes: int = 1 << 30
    load_batch_bytes: int = 256 << 20
    shutdown_timeout: float = 10.0

    @staticmethod
    def of(extra: Optional[Mapping[str, Any]]) -> "ConnectorConfig":
        """Raises ValueError: this runs when the engine starts, where an error is read."""
        known = {field.name: field for field in dataclasses.fields(ConnectorConfig)}
        for name in extra or {}:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                raise ValueError(
                    f"kv_connector_extra_config: {name!r} is not known"
                    + (f", did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}")
                )
        config = ConnectorConfig(**(extra or {}))
        for name, field in known.items():
            value: Any = getattr(config, name)
            want = type(field.default)
            if isinstance(value, int) and not isinstance(value, bool) and want is float:
                value = float(value)
                object.__setattr__(config, name, value)
            if type(value) is not want:
                raise ValueError(
                    f"kv_connector_extra_config: {name} is {value!r}, want {want.__name__}"
                )
            if want in (int, float) and not getattr(config, name) >= 0:
                raise ValueError(f"kv_connector_extra_config: {name} is {value}, want 0 or more")
        for name in ("lookup_timeout", "load_timeout", "save_timeout"):
            if not 0 < getattr(config, name) < 3600:
                raise ValueError(f"kv_connector_extra_config: {name} wants 0 to 3600 seconds")
        _kvstow.check_codec(config.codec)
        return config
