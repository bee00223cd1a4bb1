"""Page layouts: rows out and in again, bit for bit, each by a definition of its own."""

import pytest

numpy = pytest.importorskip("numpy", reason="numpy is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")

from kvstow.vllm.pages import LAYOUTS, layout_of_shape  # noqa: E402

HEADS, DIM, TOKENS, PAGES = 3, 16, 32, 6


def value(layer_role, page, token, head, i):
    return layer_role * 1e6 + page * 1e4 + token * 100 + head * 30 + i / 8


def rows_of(role, pages):
    return torch.tensor(
        [
            [[value(role, p, t, h, i) for i in range(DIM)] for h in range(HEADS)]
            for p in pages
            for t in range(TOKENS)
        ]
    )


def build(layout):
    """Pages, filled one value at a time from the layout's description."""
    shapes = {
        "nominal": (PAGES, HEADS, TOKENS, 2 * DIM),
        "cpu_vec": (PAGES, HEADS, 2 * DIM * TOKENS),
        "kv_first": (2, PAGES, TOKENS, HEADS, DIM),
        "kv_second": (PAGES, 2, TOKENS, HEADS, DIM),
    }
    cache = numpy.zeros(shapes[layout], "f4")
    place = {
        "nominal": lambda r, p, t, h, i: (p, h, t, r * DIM + i),
        # K^T [dim, tokens], then V [tokens, dim]
        "cpu_vec": lambda r, p, t, h, i: (
            p,
            h,
            i * TOKENS + t if r == 0 else (TOKENS + t) * DIM + i,
        ),
        "kv_first": lambda r, p, t, h, i: (r, p, t, h, i),
        "kv_second": lambda r, p, t, h, i: (p, r, t, h, i),
    }[layout]
    for r in (0, 1):
        for p in range(PAGES):
            for t in range(TOKENS):
                for h in range(HEADS):
                    for i in range(DIM):
                        cache[place(r, p, t, h, i)] = value(r, p, t, h, i)
    cache = torch.from_numpy(cache)
    return cache.view(PAGES, HEADS, TOKENS, 2 * DIM) if layout == "cpu_vec" else cache


@pytest.mark.parametrize("layout", ["nominal", "cpu_vec", "kv_first", "kv_second"])
def test_rows_are_where_the_layout_says(layout):
    pages = LAYOUTS[layout](HEADS, DIM, DIM)
    cache = build(layout)
    assert pages.tokens_per_page(cache) == TOKENS
    order = [4, 1, 3]
    k, v = pages.rows(pages.pick(cache, torch.tensor(order)))
    assert torch.equal(k, rows_of(0, order)) and torch.equal(v, rows_of(1, order))
    # A view with gaps, as the layers of one storage are.
    target = torch.zeros(*cache.shape, 2)[..., 0]
    pages.store(target, torch.tensor(order), (k, v))
    untouched = [p for p in range(PAGES) if p not in order]
    assert torch.equal(
        target.index_select(pages.page_axis, torch.tensor(order)),
        cache.index_select(pages.page_axis, torch.tensor(order)),
    )
    assert not target.index_select(pages.page_axis, torch.tensor(untouched)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
def test_opaque_pages_come_back_whatever_they_hold(dtype):
    item = torch.zeros((), dtype=dtype).element_size()
    cache = torch.randint(0, 255, (PAGES, HEADS, TOKENS, 2 * DIM * item), dtype=torch.uint8)
    cache = cache.view(dtype)
    pages = LAYOUTS["opaque"](HEADS, 2 * DIM * item, 0)
    assert pages.tokens_per_page(cache) == TOKENS
    ids = torch.tensor([5, 2])
    rows = pages.rows(pages.pick(cache, ids))
    assert rows[0].shape == (2 * TOKENS, HEADS, 2 * DIM * item) and rows[1] is None
    target = torch.zeros_like(cache)
    pages.store(target, ids, rows)
    assert torch.equal(target[ids].view(torch.uint8), cache[ids].view(torch.uint8))


def test_latent_pages():
    pages = LAYOUTS["latent"](1, 40, 0)
    for shape in ((PAGES, TOKENS, 40), (PAGES, 1, TOKENS, 40)):
        cache = torch.rand(shape)
        rows = pages.rows(pages.pick(cache, torch.tensor([3, 0])))
        assert rows[0].shape == (2 * TOKENS, 1, 40)
        target = torch.zeros(shape)
        pages.store(target, torch.tensor([3, 0]), rows)
        assert torch.equal(target[[3, 0]], cache[[3, 0]]) and not target[1].any()


def test_other_shapes_are_refused_by_name():
    for layout, shape in [
        ("nominal", (4, HEADS, 32, DIM)),
        ("nominal", (4, HEADS + 1, 32, 2 * DIM)),
        ("cpu_vec", (4, 32, HEADS, 2 * DIM)),
        ("kv_first", (4, 2, 32, HEADS, DIM)),
        ("kv_second", (2, 4, 32, HEADS, DIM)),
        ("latent", (4, 2, 32, DIM)),
    ]:
        with pytest.raises(ValueError, match=layout):
            LAYOUTS[layout](1 if layout == "latent" else HEADS, DIM, DIM).tokens_per_page(
                torch.zeros(shape)
            )
    assert layout_of_shape((2, 9, 16, 4, 64)) == "kv_first"
    assert layout_of_shape((9, 2, 16, 4, 64)) == "kv_second"
    assert layout_of_shape((2, 2, 16, 4, 64)) is None and layout_of_shape((9, 4, 16, 64)) is None
