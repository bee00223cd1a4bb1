"""Plan: what of an engine's KV is stored and under which name; or why it is not.

Both halves of the connector make it from the same configuration, so both name the same blocks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from typing import Any, Dict, List, Optional, Sequence, Tuple

from ..types import LayerGroup, Model, ModelSpec
from . import engine
from .config import ConnectorConfig

MIN_TOKENS_PER_BLOCK = 64
GRANULE_TOKENS = 32
MAX_TOKENS_PER_BLOCK = 1024

_DTYPES = {
    "bfloat16": "bf16",
    "float16": "f16",
    "half": "f16",
    "float32": "f32",
    "float": "f32",
}
# Formats whose pages hold all that is needed to read them. Others keep scales elsewhere.
_CACHE_DTYPES = {"auto": None, "fp8": "f8_e4m3", "fp8_e4m3": "f8_e4m3", "fp8_e5m2": "f8_e5m2"}
# Kinds of vLLM's cache specs that are not plain keys and values of every token.
_REFUSED_KINDS = {
    "MambaSpec": "recurrent state is not KV of tokens",
    "ChunkedLocalAttentionSpec": "pages outside the chunk are freed",
    "CrossAttentionSpec": "KV of an encoder does not follow from the prompt's tokens",
    "EncoderOnlyAttentionSpec": "there is no KV to keep",
    "SinkFullAttentionSpec": "KV of learned sinks is not of the prompt's tokens",
    "HiddenStateCacheSpec": "hidden states are not KV",
    "RSWASpec": "it keeps a window of its own",
    "CircularBufferSpec": "pages are overwritten in a circle",
    "HiSparseHotSpec": "pages are a cache of other pages",
    "HiSparseResidentSpec": "pages are a cache of other pages",
}


class Refusal(Exception):
    """Why this engine is not served. It then runs as if there were no connector."""


@dataclasses.dataclass(frozen=True)
class LayerShape:
    name: str  # vLLM's, "model.layers.0.self_attn.attn"
    kind: str  # of LayerGroup
    heads: int
    k_dim: int
    v_dim: int


@dataclasses.dataclass(frozen=True)
class Plan:
    layers: Tuple[LayerShape, ...]
    page_tokens: int  # vLLM's block size
    tokens_per_block: int
    page_layout: str  # a name of pages.py; "auto": told by the tensors' shapes
    ranks: Tuple[Model, ...]  # per tensor-parallel rank
    can_load: bool
    can_save: bool

    @property
    def pages_per_block(self) -> int:
        return self.tokens_per_block // self.page_tokens


def make_plan(vllm_config: Any, kv_cache_config: Any, config: ConnectorConfig) -> Plan:
    """Raises Refusal."""
    parallel = vllm_config.parallel_config
    for name, text in (
        ("pipeline_parallel_size", "pipeline parallel"),
        ("decode_context_parallel_size", "decode context parallel"),
        ("prefill_context_parallel_size", "prefill context parallel"),
    ):
        if getattr(parallel, name, 1) > 1:
            raise Refusal(f"{text} engines are not served: {name} is {getattr(parallel, name)}")
    layers, kv_dtype, torch_dtype, page_tokens = _layers_of(vllm_config, kv_cache_config)
    page_layout, kernel = _page_layout(vllm_config, config, layers, torch_dtype, page_tokens)
    if page_layout == "opaque":
        item_bytes = {"f32": 4, "bf16": 2, "f16": 2}.get(kv_dtype, 1)
        layers = [
            dataclasses.replace(s, kind="opaque", k_dim=(s.k_dim + s.v_dim) * item_bytes, v_dim=0)
            for s in layers
        ]
        kv_dtype = "opaque"
    transfer = vllm_config.kv_transfer_config
    can_load = bool(getattr(transfer, "is_kv_consumer", True))
    if can_load and getattr(transfer, "kv_load_failure_policy", "recompute") != "recompute":
        engine.logger.warning(
            "kvstow: nothing is loaded, since kv_load_failure_policy is %r and a lost sidecar "
            'would fail requests: set "kv_load_failure_policy": "recompute"',
            transfer.kv_load_failure_policy,
        )
        can_load = False
    tokens_per_block = _tokens_per_block(config.tokens_per_block, page_tokens)
    texts = _model_texts(vllm_config, config)
    num_ranks = getattr(parallel, "tensor_parallel_size", 1)
    ranks = []
    for rank in range(num_ranks):
        name = (
            f"vllm:{texts['architecture']};compute={texts['compute']};"
            f"pages={page_layout}/{kernel}/{page_tokens};tp={rank}/{num_ranks}"
        )
        spec = ModelSpec(
            name,
            texts["weights"],
            _groups_of(layers),
            kv_dtype=kv_dtype,
            rope=texts["config"],
            tokens_per_block=tokens_per_block,
        )
        try:
            ranks.append(Model(spec))
        except ValueError as error:
            raise Refusal(f"no such layout in kvstow: {error}") from error
    can_save = bool(getattr(transfer, "is_kv_producer", True))
    return Plan(
        tuple(layers), page_tokens, tokens_per_block, page_layout, tuple(ranks), can_load, can_save
    )


def _layers_of(vllm_config: Any, kv_cache_config: Any) -> Tuple[List[LayerShape], str, Any, int]:
    """Layers in order, our dtype, the engine's, tokens of a page."""
    groups = [
        group
        for group in getattr(kv_cache_config, "kv_cache_groups", None) or ()
        if getattr(group, "enable_kv_transfer", True)
    ]
    if not groups:
        raise Refusal("the engine gave no KV cache groups")
    if len(groups) > 1:
        kinds = ", ".join(sorted({type(group.kv_cache_spec).__name__ for group in groups}))
        raise Refusal(
            f"{len(groups)} KV cache groups ({kinds}): a prompt's KV is not all there when it is "
            "saved; start vLLM with --disable-hybrid-kv-cache-manager"
        )
    spec = groups[0].kv_cache_spec
    per_layer: Dict[str, Any] = dict(getattr(spec, "kv_cache_specs", None) or {})
    if not per_layer:
        per_layer = {name: spec for name in groups[0].layer_names}
    max_len = getattr(vllm_config.model_config, "max_model_len", 0)
    layers = [_shape_of(name, per_layer[name], max_len) for name in sorted(per_layer, key=_order)]
    dtypes = {str(s.dtype) for s in per_layer.values()}
    sizes = {s.block_size for s in per_layer.values()}
    if len(dtypes) != 1 or len(sizes) != 1:
        raise Refusal(f"layers differ in dtype ({dtypes}) or block size ({sizes})")
    first = next(iter(per_layer.values()))
    return layers, _kv_dtype(vllm_config, first.dtype), first.dtype, first.block_size


def _order(layer_name: str) -> Tuple[Any, ...]:
    """By the numbers in the name, so that layer 10 comes after layer 9."""
    numbers = tuple(int(part) for part in layer_name.split(".") if part.isdigit())
    return (numbers, layer_name)


def _shape_of(name: str, spec: Any, max_model_len: int) -> LayerShape:
    kinds = {cls.__name__ for cls in type(spec).__mro__}
    for refused, reason in _REFUSED_KINDS.items():
        if refused in kinds:
            raise Refusal(f"{name} is a {type(spec).__name__}: {reason}")
    window = getattr(spec, "sliding_window", None)
    if "SlidingWindowSpec" in kinds and (window is None or window < max_model_len):
        raise Refusal(
            f"{name} keeps a window of {window} tokens and max_model_len is {max_model_len}: pages "
            f"outside the window are freed; serve with --max-model-len {window} at most"
        )
    if getattr(spec, "tokens_per_state", 1) != 1:
        raise Refusal(f"{name} keeps one state for {spec.tokens_per_state} tokens")
    heads, dim = spec.num_kv_heads, spec.head_size
    if any("MLA" in kind for kind in kinds):
        return LayerShape(name, "mla", 1, dim, 0)
    v_dim = getattr(spec, "head_size_v", None) or dim
    return LayerShape(name, "full" if window is None else "sliding", heads, dim, v_dim)


def _kv_dtype(vllm_config: Any, torch_dtype: Any) -> str:
    cache_dtype = str(getattr(vllm_config.cache_config, "cache_dtype", "auto"))
    text = str(torch_dtype).replace("torch.", "")
    if cache_dtype in ("bfloat16", "float16", "float32", "half", "float"):
        cache_dtype = "auto"
    if cache_dtype not in _CACHE_DTYPES:
        raise Refusal(f"kv_cache_dtype {cache_dtype!r} keeps what it needs outside the pages")
    if cache_dtype != "auto":
        if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
            raise Refusal("calculate_kv_scales: the scales differ from one start to the next")
        return _CACHE_DTYPES[cache_dtype] or ""
    if text not in _DTYPES:
        raise Refusal(f"KV of dtype {text} is not known")
    return _DTYPES[text]


def _page_layout(
    vllm_config: Any,
    config: ConnectorConfig,
    layers: Sequence[LayerShape],
    torch_dtype: Any,
    page_tokens: int,
) -> Tuple[str, str]:
    """Name of the layout, name of the kernel that reads it."""
    if config.page_layout != "auto":
        from .pages import LAYOUTS

        if config.page_layout not in LAYOUTS:
            raise Refusal(f"page_layout {config.page_layout!r}: known are {', '.join(LAYOUTS)}")
        return config.page_layout, "given"
    if not engine.is_cpu_platform():
        return "auto", "rows"
    kernels = {
        engine.cpu_kernel(vllm_config, torch_dtype, page_tokens, dim)
        for dim in {shape.k_dim for shape in layers}
    }
    if kernels == {"vec"} and all(shape.v_dim == shape.k_dim for shape in layers):
        return "cpu_vec", "vec"
    kernel = "+".join(sorted(str(kernel) for kernel in kernels))
    if config.codec not in ("lossless", "raw"):
        raise Refusal(
            f"how the CPU attention kernel {kernel} packs its pages is not known, so they can be "
            f"kept byte for byte but not with the codec {config.codec!r}: set codec to 'lossless'"
        )
    return "opaque", kernel


def _tokens_per_block(wanted: int, page_tokens: int) -> int:
    step = math.lcm(GRANULE_TOKENS, page_tokens)
    chosen = wanted or step * max(1, math.ceil(MIN_TOKENS_PER_BLOCK / step))
    if chosen % step != 0 or chosen > MAX_TOKENS_PER_BLOCK:
        raise Refusal(
            f"tokens_per_block {chosen}: want a multiple of {step} (32 and vLLM's block size of "
            f"{page_tokens}), at most {MAX_TOKENS_PER_BLOCK}"
        )
    return chosen


def _groups_of(layers: Sequence[LayerShape]) -> Tuple[LayerGroup, ...]:
    groups: List[LayerGroup] = []
    for i, layer in enumerate(layers):
        shape = (layer.kind, layer.heads, layer.k_dim, layer.v_dim)
        if groups:
            last = groups[-1]
            if (last.kind, last.num_kv_heads, last.k_dim, last.v_dim) == shape:
                groups[-1] = dataclasses.replace(last, num_layers=last.num_layers + 1)
                continue
        groups.append(LayerGroup(i, 1, *shape))
    return tuple(groups)


# --- the model's identity ---


def _model_texts(vllm_config: Any, config: ConnectorConfig) -> Dict[str, str]:
    model = vllm_config.model_config
    hf_config = getattr(model, "hf_config", None)
    architectures = getattr(hf_config, "architectures", None) or ["unknown"]
    compute = f"{str(getattr(model, 'dtype', '')).replace('torch.', '')}"
    if getattr(model, "quantization", None):
        compute += f"+{model.quantization}"
    return {
        "architecture": str(architectures[0]),
        "compute": compute,
        "config": _config_digest(getattr(model, "hf_text_config", None) or hf_config),
        "weights": config.weights or weights_identity(model),
    }


def _config_digest(hf_config: Any) -> str:
    """Everything that the model's configuration says: RoPE, its scaling, windows, ..."""
    to_dict = getattr(hf_config, "to_dict", None)
    values = dict(to_dict()) if to_dict else {}
    for name in ("_name_or_path", "transformers_version", "torch_dtype", "dtype"):
        values.pop(name, None)
    text = json.dumps(values, sort_keys=True, default=str)
    return "config-sha256:" + hashlib.sha256(text.encode()).hexdigest()


_DIGESTS: Dict[Tuple[Any, ...], str] = {}
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")


def weights_identity(model_config: Any) -> str:
    """The hub's commit, or the digest of the weight files of a folder. Raises Refusal where neither
    is known: a name alone does not tell one fine-tune from the next."""
    path = str(model_config.model)
    if os.path.isdir(path):
        return folder_digest(path)
    if os.path.isfile(path):
        return _files_digest([path])
    commit = getattr(getattr(model_config, "hf_config", None), "_commit_hash", None)
    revision = commit or getattr(model_config, "revision", None)
    if not revision:
        raise Refusal(
            f"the revision of {path!r} is not known: pass --revision, or weights in "
            "kv_connector_extra_config"
        )
    return f"hub:{path}@{revision}"


def folder_digest(folder: str) -> str:
    """SHA-256 over the weight files of a folder, whole. Read once for a folder as it is."""
    files = sorted(
        os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(_WEIGHT_SUFFIXES)
    )
    if not files:
        raise Refusal(f"{folder}: no weight files to take the digest of; set weights")
    return _files_digest(files)


def _files_digest(files: Sequence[str]) -> str:
    stats = [os.stat(path) for path in files]
    known = tuple((path, s.st_size, s.st_mtime_ns, s.st_ino) for path, s in zip(files, stats))
    if known not in _DIGESTS:
        digest = hashlib.sha256()
        for path, stat in zip(files, stats):
            digest.update(f"{os.path.basename(path)}:{stat.st_size}:".encode())
            with open(path, "rb") as file:
                while chunk := file.read(1 << 22):
                    digest.update(chunk)
        _DIGESTS[known] = "files-sha256:" + digest.hexdigest()
    return _DIGESTS[known]


def adapter_digest(lora_request: Optional[Any]) -> bytes:
    """Digest of a LoRA adapter's files, b"" for none. Raises Refusal where they cannot be read."""
    if lora_request is None:
        return b""
    folder = getattr(lora_request, "lora_path", None) or getattr(
        lora_request, "lora_local_path", None
    )
    try:
        files = sorted(
            os.path.join(str(folder), name)
            for name in os.listdir(folder)
            if name.endswith(_WEIGHT_SUFFIXES) or name == "adapter_config.json"
        )
    except (OSError, TypeError) as error:
        raise Refusal(f"LoRA adapter {folder!r}: its files cannot be read: {error}") from error
    if not files:
        raise Refusal(f"LoRA adapter {folder!r}: no files to take the digest of")
    return bytes.fromhex(_files_digest(files).partition(":")[2])
