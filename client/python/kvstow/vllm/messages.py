"""What the scheduler half tells the worker half, once a step. Plain values: they are pickled."""

from __future__ import annotations

import dataclasses
from typing import List

from ..types import KeyContext
from .engine import KVConnectorMetadata


@dataclasses.dataclass
class LoadOrder:
    """Fill pages with blocks [first_block, last_block) of a prompt. Tokens before `first_token` are
    there already, in pages that others may be reading."""

    request_id: str
    context: KeyContext
    tokens: List[int]  # of blocks 0 to last_block
    first_block: int
    first_token: int
    pages: List[int]  # of `tokens`, vLLM's block ids


@dataclasses.dataclass
class SaveOrder:
    """Store blocks [first_block, n) of a prompt, which the coming forward pass completes."""

    request_id: str
    context: KeyContext
    tokens: List[int]  # of blocks 0 to n
    first_block: int
    pages: List[int]  # of `tokens`
    computed_from: int  # tokens whose KV was there before the pass


@dataclasses.dataclass
class StepOrders(KVConnectorMetadata):
    loads: List[LoadOrder] = dataclasses.field(default_factory=list)
    saves: List[SaveOrder] = dataclasses.field(default_factory=list)
    finished: List[str] = dataclasses.field(default_factory=list)
