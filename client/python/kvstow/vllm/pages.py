"""Page layouts: where the keys and values of a token are in vLLM's pages. Exact copies.

A layout takes pages out (`pick`, on the engine's thread, a copy), turns them into rows
[tokens, kv heads, dim] (`rows`, on our thread), and puts rows back into pages (`store`).

    nominal      [pages, heads, tokens, 2 * dim]: per token the key, then the value
    cpu_vec      the same shape, but each (page, head) is K^T [dim, tokens], then V [tokens, dim]:
                 what the "vec" attention kernels of vLLM's CPU backend read
    kv_first     [2, pages, tokens, heads, dim]
    kv_second    [pages, 2, tokens, heads, dim]
    latent       [pages, tokens, dim] or [pages, 1, tokens, dim]: MLA
    opaque       any of them, byte for byte and whole pages only: for layouts that nobody described
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

Rows = Tuple[Any, Optional[Any]]  # (k, v), each [tokens, heads, dim]; v is None for latent, opaque


class PageLayout:
    """heads, k_dim, v_dim: of a layer. Page tensors may be views with any strides."""

    name = ""
    page_axis = 0

    def __init__(self, heads: int, k_dim: int, v_dim: int):
        self.heads, self.k_dim, self.v_dim = heads, k_dim, v_dim

    def tokens_per_page(self, cache: Any) -> int:
        """Raises ValueError where the tensor is not of this layout."""
        raise NotImplementedError

    def pick(self, cache: Any, page_ids: Any) -> Any:
        """A copy of these pages, in host memory."""
        return cache.index_select(self.page_axis, page_ids.to(cache.device)).cpu()

    def rows(self, picked: Any) -> Rows:
        raise NotImplementedError

    def empty_rows(self, cache: Any, num_tokens: int) -> Rows:
        import torch

        def rows(dim: int) -> Any:
            return torch.empty((num_tokens, self.heads, dim), dtype=cache.dtype)

        return rows(self.k_dim), rows(self.v_dim) if self.v_dim else None

    def store(self, cache: Any, page_ids: Any, rows: Rows) -> None:
        pages = self._pages(rows, self.tokens_per_page(cache), cache).to(cache.device)
        cache.index_copy_(self.page_axis, page_ids.to(cache.device), pages)

    def _pages(self, rows: Rows, tokens_per_page: int, cache: Any) -> Any:
        raise NotImplementedError

    def _refuse(self, cache: Any, want: str) -> None:
        raise ValueError(
            f"pages of shape {list(cache.shape)} are not of the layout {self.name!r}: want {want}"
        )


def _by_page(rows: Any, tokens_per_page: int) -> Any:
    """[tokens, heads, dim] -> [pages, tokens of a page, heads, dim]"""
    return rows.view(-1, tokens_per_page, *rows.shape[1:])


class NominalPages(PageLayout):
    name = "nominal"

    def tokens_per_page(self, cache: Any) -> int:
        if cache.dim() != 4 or (cache.shape[1], cache.shape[3]) != (
            self.heads,
            self.k_dim + self.v_dim,
        ):
            self._refuse(cache, f"[pages, {self.heads}, tokens, {self.k_dim + self.v_dim}]")
        return cache.shape[2]

    def rows(self, picked: Any) -> Rows:
        by_token = picked.permute(0, 2, 1, 3)
        k = by_token[..., : self.k_dim].reshape(-1, self.heads, self.k_dim)
        return k, by_token[..., self.k_dim :].reshape(-1, self.heads, self.v_dim)

    def _pages(self, rows: Rows, tokens_per_page: int, cache: Any) -> Any:
        import torch

        k, v = (_by_page(part, tokens_per_page) for part in rows)
        return torch.cat((k, v), dim=3).permute(0, 2, 1, 3)


class CpuVecPages(NominalPages):
    name = "cpu_vec"

    def tokens_per_page(self, cache: Any) -> int:
        if self.k_dim != self.v_dim:
            raise ValueError(f"cpu_vec pages want k_dim {self.k_dim} and v_dim {self.v_dim} equal")
        return super().tokens_per_page(cache)

    def rows(self, picked: Any) -> Rows:
        num_pages, heads, tokens, _ = picked.shape
        k_values = tokens * self.k_dim
        flat = picked.contiguous().view(num_pages, heads, -1)
        k = flat[..., :k_values].view(num_pages, heads, self.k_dim, tokens)
        v = flat[..., k_values:].view(num_pages, heads, tokens, self.v_dim)
        return (
            k.permute(0, 3, 1, 2).reshape(-1, heads, self.k_dim),
            v.permute(0, 2, 1, 3).reshape(-1, heads, self.v_dim),
        )

    def _pages(self, rows: Rows, tokens_per_page: int, cache: Any) -> Any:
        import torch

        k, v = (_by_page(part, tokens_per_page) for part in rows)
        num_pages = k.shape[0]
        k = k.permute(0, 2, 3, 1).reshape(num_pages, self.heads, -1)
        v = v.permute(0, 2, 1, 3).reshape(num_pages, self.heads, -1)
        return torch.cat((k, v), dim=2).view(num_pages, self.heads, tokens_per_page, -1)


class KvFirstPages(PageLayout):
    name = "kv_first"
    page_axis = 1
    _kv_axis = 0

    def tokens_per_page(self, cache: Any) -> int:
        if (
            cache.dim() != 5
            or cache.shape[self._kv_axis] != 2
            or tuple(cache.shape[3:]) != (self.heads, self.k_dim)
            or self.k_dim != self.v_dim
        ):
            self._refuse(cache, f"2, pages, tokens, {self.heads}, {self.k_dim}")
        return cache.shape[2]

    def rows(self, picked: Any) -> Rows:
        k, v = picked.unbind(self._kv_axis)
        return k.reshape(-1, self.heads, self.k_dim), v.reshape(-1, self.heads, self.v_dim)

    def _pages(self, rows: Rows, tokens_per_page: int, cache: Any) -> Any:
        import torch

        return torch.stack([_by_page(part, tokens_per_page) for part in rows], dim=self._kv_axis)


class KvSecondPages(KvFirstPages):
    name = "kv_second"
    page_axis = 0
    _kv_axis = 1


class LatentPages(PageLayout):
    name = "latent"

    def tokens_per_page(self, cache: Any) -> int:
        is_plain = cache.dim() == 3 or (cache.dim() == 4 and cache.shape[1] == 1)
        if not is_plain or cache.shape[-1] != self.k_dim:
            self._refuse(cache, f"[pages, tokens, {self.k_dim}]")
        return cache.shape[-2]

    def rows(self, picked: Any) -> Rows:
        return picked.reshape(-1, 1, self.k_dim), None

    def _pages(self, rows: Rows, tokens_per_page: int, cache: Any) -> Any:
        return rows[0].reshape(-1, *cache.shape[1:])


class OpaquePages(PageLayout):
    """k_dim: bytes of a page per token and head. Whatever is in a page, it comes back as it was;
    what a row is called has no meaning."""

    name = "opaque"

    def tokens_per_page(self, cache: Any) -> int:
        want = self.heads * self.k_dim
        page_bytes = cache[0].numel() * cache.element_size()
        if cache.dim() < 2 or page_bytes % want != 0:
            self._refuse(cache, f"pages of a multiple of {want} bytes")
        return page_bytes // want

    def rows(self, picked: Any) -> Rows:
        import torch

        return picked.contiguous().view(torch.uint8).view(-1, self.heads, self.k_dim), None

    def empty_rows(self, cache: Any, num_tokens: int) -> Rows:
        import torch

        return torch.empty((num_tokens, self.heads, self.k_dim), dtype=torch.uint8), None

    def _pages(self, rows: Rows, tokens_per_page: int, cache: Any) -> Any:
        num_pages = rows[0].shape[0] // tokens_per_page
        pages = rows[0].reshape(num_pages, *cache.shape[1:-1], -1)
        return pages.view(cache.dtype)


LAYOUTS = {
    layout.name: layout
    for layout in (NominalPages, CpuVecPages, KvFirstPages, KvSecondPages, LatentPages, OpaquePages)
}


def layout_of_shape(shape: Tuple[int, ...], num_kv_dims: int = 5) -> Optional[str]:
    """Which of the layouts with two halves a five-dimensional tensor has; None where both fit."""
    if len(shape) != num_kv_dims:
        return None
    fits = [name for name, axis in (("kv_first", 0), ("kv_second", 1)) if shape[axis] == 2]
    return fits[0] if len(fits) == 1 else None
