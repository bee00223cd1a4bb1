"""LanguageModel: what the measures ask of a causal model of transformers."""

from __future__ import annotations

import pathlib
from typing import Any, List

from ..errors import FailedPreconditionError, InvalidArgumentError
from ..hf import cache_layers
from .past import Past

# Of one forward pass: the logits of more would be large, [tokens, vocabulary] in fp32.
PREFILL_TOKENS = 256


class LanguageModel:
    """network: a transformers model; tokenizer: anything that turns text into `input_ids`."""

    def __init__(self, network: Any, tokenizer: Any):
        self.network = network.eval()
        self.tokenizer = tokenizer

    @staticmethod
    def load(name: str, dtype: str = "float32", num_threads: int = 0) -> LanguageModel:
        """`name`: a model of the hub, a folder, or a GGUF file."""
        try:
            import torch
            import transformers
        except ImportError as error:
            raise FailedPreconditionError(f"{error}: pip install 'kvstow[eval]'") from error

        if num_threads:
            torch.set_num_threads(num_threads)
        place = {"pretrained_model_name_or_path": name}
        if name.endswith(".gguf"):
            path = pathlib.Path(name)
            place = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        network = transformers.AutoModelForCausalLM.from_pretrained(
            **place, dtype=getattr(torch, dtype)
        )
        return LanguageModel(network, transformers.AutoTokenizer.from_pretrained(**place))

    def tokens(self, text: str, *, is_whole: bool = True) -> List[int]:
        """`is_whole`: with the tokens that the tokenizer puts around a text."""
        return list(self.tokenizer(text, add_special_tokens=is_whole)["input_ids"])

    def prefill(self, ids: List[int]) -> Past:
        """The exact past of `ids`."""
        import torch

        from transformers import DynamicCache

        cache = DynamicCache()
        with torch.inference_mode():
            for start in range(0, len(ids), PREFILL_TOKENS):
                # Without the head: nobody asks for these words.
                self.network.base_model(
                    input_ids=torch.tensor([ids[start : start + PREFILL_TOKENS]]),
                    past_key_values=cache,
                    use_cache=True,
                )
        layers = cache_layers(cache)
        for i, (k, _) in enumerate(layers):
            if k is None or k.dim() != 4 or k.shape[-2] != len(ids):
                raise InvalidArgumentError(f"layer {i} does not keep K and V of every token")
        return Past(list(layers))

    def log_probs(self, past: Past, ids: List[int]) -> Any:
        """log p(next token) after each of `ids`, read against `past`: fp32 [tokens, words]."""
        import torch

        with torch.inference_mode():
            logits = self._forward(ids, past.cache()).float()
            return torch.log_softmax(logits, dim=-1)

    def best_tokens(self, past: Past, ids: List[int]) -> List[int]:
        """The most likely token after each of `ids`."""
        import torch

        best: List[int] = []
        cache = past.cache()
        with torch.inference_mode():
            for start in range(0, len(ids), PREFILL_TOKENS):
                logits = self._forward(ids[start : start + PREFILL_TOKENS], cache)
                best += logits.argmax(-1).tolist()
        return best

    def continue_greedily(self, past: Past, token: int, num_tokens: int) -> List[int]:
        """`token` and the `num_tokens` most likely ones that follow, each read by the next."""
        import torch

        ids, cache = [token], past.cache()
        with torch.inference_mode():
            for _ in range(num_tokens):
                ids.append(int(self._forward(ids[-1:], cache)[-1].argmax()))
        return ids

    def _forward(self, ids: List[int], cache: Any) -> Any:
        import torch

        return self.network(
            input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True
        ).logits[0]
