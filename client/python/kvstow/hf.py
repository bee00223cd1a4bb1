"""transformers: keeps a DynamicCache in kvstow, and restores it.

    store = kvstow.hf.CacheStore(kvstow.Client("unix:/run/kvstow.sock"), model)
    cache, num_cached = store.load(input_ids)
    out = model.generate(input_ids, past_key_values=cache, return_dict_in_generate=True)
    store.save(out.sequences, out.past_key_values)

torch and transformers are imported when they are needed.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Dict, Iterator, List, Optional, Tuple

from .client import Client
from .errors import DeadlineExceededError, InvalidArgumentError, UnavailableError
from .types import LayerGroup, Model, ModelSpec, PutResult

_DTYPES = {"torch.bfloat16": "bf16", "torch.float16": "f16", "torch.float32": "f32"}


def cache_layers(cache: Any) -> List[Tuple[Any, Any]]:
    """(keys, values) per layer of a DynamicCache, each [batch, kv heads, tokens, dim]."""
    layers = getattr(cache, "layers", None)
    if layers is not None:
        for i, layer in enumerate(layers):
            if getattr(layer, "is_sliding", False):
                raise InvalidArgumentError(
                    f"cache.layers[{i}]: a {type(layer).__name__} drops tokens outside its window, "
                    "want layers that keep all"
                )
        return [(layer.keys, layer.values) for layer in layers]
    if hasattr(cache, "key_cache"):  # transformers before 4.54
        return list(zip(cache.key_cache, cache.value_cache))
    raise InvalidArgumentError(f"cache: {type(cache).__name__}, want a DynamicCache")


def weights_digest(model: Any) -> str:
    """SHA-256 over all parameters: names, shapes, bytes. Takes about a second per two gigabytes."""
    import torch

    digest = hashlib.sha256()
    for name, parameter in sorted(model.state_dict().items()):
        digest.update(f"{name}:{tuple(parameter.shape)}:{parameter.dtype}:".encode())
        flat = parameter.detach().cpu().contiguous().reshape(-1)
        digest.update(memoryview(flat.view(torch.uint8).numpy()))
    return "sha256:" + digest.hexdigest()


class CacheStore:
    """The KV of one model's prompts.

    model: the transformers model; or give `config` (its configuration) and `weights` (digest or
        revision), and `dtype` ("bf16", "f16", "f32") of the cache.
    codec, tenant, lora_digest: as of Client.put.

    A prompt is one sequence: batch size 1. Losing the service is no error: nothing is loaded, and
    save returns None.
    """

    def __init__(
        self,
        client: Client,
        model: Any = None,
        *,
        config: Any = None,
        weights: str = "",
        dtype: str = "",
        codec: str = "safe",
        tokens_per_block: int = 64,
        tenant: str = "",
        lora_digest: bytes = b"",
    ):
        if model is not None:
            config = model.config
            weights = weights or weights_digest(model)
            dtype = dtype or _DTYPES.get(str(model.dtype), str(model.dtype))
        if config is None or not weights or not dtype:
            raise InvalidArgumentError("give a model, or config, weights and dtype")
        self._client = client
        self._codec = codec
        self._context: Dict[str, Any] = {"tenant": tenant, "lora_digest": lora_digest}
        self._model = Model(_spec_of(config, weights, dtype, tokens_per_block))
        self._is_registered = False

    @property
    def model(self) -> Model:
        return self._model

    def save(self, input_ids: Any, cache: Any) -> Optional[PutResult]:
        """Stores the full blocks of what `cache` holds; `input_ids` are its tokens, at least."""
        layers = cache_layers(cache)
        if not layers or layers[0][0] is None:
            return None
        num_tokens = min(layers[0][0].shape[-2], _tokens(input_ids).shape[0])
        if num_tokens < self._model.tokens_per_block:
            return None
        rows = [(_rows(k)[:num_tokens], _rows(v)[:num_tokens]) for k, v in layers]
        try:
            if not self._is_registered:
                self._client.register_model(self._model.spec)
                self._is_registered = True
            return self._client.put(
                self._model,
                _tokens(input_ids)[:num_tokens],
                rows,
                codec=self._codec,
                **self._context,
            )
        except (UnavailableError, DeadlineExceededError):
            self._is_registered = False
            return None

    def load(self, input_ids: Any, cache: Any = None, *, device: Any = None) -> Tuple[Any, int]:
        """A DynamicCache with the longest stored prefix of the prompt, and how many tokens that is.
        The last token is left to the model. `cache`, if given, is empty and is filled."""
        import torch

        if cache is None:
            from transformers import DynamicCache

            cache = DynamicCache()
        size = self._model.tokens_per_block
        tokens = _tokens(input_ids)
        usable = (tokens.shape[0] - 1) // size * size
        if usable <= 0:
            return cache, 0
        dtype = {v: k for k, v in _DTYPES.items()}[self._model.spec.kv_dtype]
        torch_dtype = getattr(torch, dtype.replace("torch.", ""))
        try:
            found = self._client.lookup(self._model, tokens[:usable], **self._context)
            if found.num_leading == 0:
                return cache, 0
            rows = [
                tuple(
                    torch.empty((heads, found.num_leading * size, dim), dtype=torch_dtype)
                    for dim in (k_dim, v_dim)
                )
                for heads, k_dim, v_dim in self._model.layer_shapes
            ]
            views = [tuple(part.transpose(0, 1) for part in pair) for pair in rows]
            got = self._client.get(self._model, found.leading_keys, views)
        except (UnavailableError, DeadlineExceededError):
            return cache, 0
        num_tokens = got.num_leading * size
        if num_tokens == 0:
            return cache, 0
        for i, pair in enumerate(rows):
            k, v = (part[None, :, :num_tokens].to(device or part.device) for part in pair)
            cache.update(k, v, i)
        return cache, num_tokens


def _tokens(input_ids: Any) -> Any:
    """[tokens], on the host, of [tokens] or [1, tokens]."""
    if input_ids.dim() == 2:
        if input_ids.shape[0] != 1:
            raise InvalidArgumentError(f"input_ids: batch of {input_ids.shape[0]}, want 1")
        input_ids = input_ids[0]
    return input_ids.detach().cpu()


def _rows(part: Any) -> Any:
    """[1, heads, tokens, dim] as rows [tokens, heads, dim], on the host."""
    if part.dim() != 4 or part.shape[0] != 1:
        raise InvalidArgumentError(
            f"cache: layers of shape {list(part.shape)}, want [1, heads, tokens, dim]"
        )
    return part.detach()[0].cpu().transpose(0, 1)


def _spec_of(config: Any, weights: str, dtype: str, tokens_per_block: int) -> ModelSpec:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kinds = list(_layer_kinds(text))
    groups: List[LayerGroup] = []
    for i, kind in enumerate(kinds):
        if groups and groups[-1].kind == kind:
            last = groups.pop()
            groups.append(LayerGroup(last.first_layer, last.num_layers + 1, kind, heads, dim, dim))
        else:
            groups.append(LayerGroup(i, 1, kind, heads, dim, dim))
    values = dict(text.to_dict())
    for name in ("_name_or_path", "transformers_version", "torch_dtype", "dtype"):
        values.pop(name, None)
    canonical = json.dumps(values, sort_keys=True, default=str)
    architecture = (getattr(config, "architectures", None) or [type(config).__name__])[0]
    return ModelSpec(
        f"transformers:{architecture}",
        weights,
        tuple(groups),
        kv_dtype=dtype,
        rope="config-sha256:" + hashlib.sha256(canonical.encode()).hexdigest(),
        tokens_per_block=tokens_per_block,
    )


def _layer_kinds(text: Any) -> Iterator[str]:
    types = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    for i, name in enumerate(types):
        if name not in ("full_attention", "sliding_attention"):
            raise InvalidArgumentError(f"layer {i} is {name!r}: want attention layers only")
        yield "sliding" if name == "sliding_attention" else "full"
