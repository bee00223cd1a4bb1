"""kvstow: the KV-cache store of language models, from Python.

    spec = kvstow.ModelSpec.uniform(
        "my-model", "sha256:...", num_layers=30, num_kv_heads=3, head_dim=64)
    with kvstow.Client("unix:/run/kvstow.sock") as client:
        model = client.register_model(spec)
        client.put(model, tokens, [(k, v) for k, v in layers], codec="safe")
        got = client.get(model, client.lookup(model, tokens).leading_keys, empty_layers)

Arrays are NumPy arrays, torch CPU tensors, or anything else with the buffer protocol or DLPack.
`kvstow.aio` is the same for asyncio, `kvstow.hf` and `kvstow.vllm` are for those engines.
"""

from .client import Client, Lease, PutSession, tune_malloc
from .errors import (
    AbortedError,
    AlreadyExistsError,
    CancelledError,
    DataLossError,
    DeadlineExceededError,
    Error,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    OutOfRangeError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
    UnknownError,
)
from .types import (
    DRAM,
    HBM,
    NVME,
    BlockInfo,
    GetResult,
    KeyContext,
    LayerGroup,
    LookupResult,
    Model,
    ModelSpec,
    PutResult,
    Stat,
    TierStat,
    VerifyResult,
    block_keys,
)

__version__ = "0.1.0"

__all__ = [
    "DRAM",
    "HBM",
    "NVME",
    "AbortedError",
    "AlreadyExistsError",
    "BlockInfo",
    "CancelledError",
    "Client",
    "DataLossError",
    "DeadlineExceededError",
    "Error",
    "FailedPreconditionError",
    "GetResult",
    "InternalError",
    "InvalidArgumentError",
    "KeyContext",
    "LayerGroup",
    "Lease",
    "LookupResult",
    "Model",
    "ModelSpec",
    "NotFoundError",
    "OutOfRangeError",
    "PermissionDeniedError",
    "PutResult",
    "PutSession",
    "ResourceExhaustedError",
    "Stat",
    "TierStat",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
    "UnknownError",
    "VerifyResult",
    "block_keys",
    "tune_malloc",
]
