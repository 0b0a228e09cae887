"""Batches made of rows, be they none."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


class Collate:
    """Collates rows, be they none; goes to worker processes, so it holds nothing else."""

    def __init__(self, collate: Callable[[list], Any], dataset: Any, batch_dim: int):
        self._collate, self._dataset, self._batch_dim = collate, dataset, batch_dim
        self._empty: Any = None

    def __call__(self, rows: list) -> Any:
        if rows:
            return self._collate(rows)
        if self._empty is None:
            self._empty = without_rows(self._collate([self._dataset[0]]), self._batch_dim)
        return self._empty


def without_rows(batch: Any, batch_dim: int = 0) -> Any:
    """A batch of one row with that row taken out: tensors keep dtype and other sizes, lists of anything else are empty.

    >>> without_rows({"x": Tensor([[1, 2, 3]]), "name": ["a"]})
    {'x': tensor([], size=(0, 3)), 'name': []}
    """

    def empty(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.narrow(batch_dim, 0, 0) if leaf.ndim > batch_dim else leaf
        return type(leaf)() if isinstance(leaf, list | tuple) else leaf

    def is_row_list(node: Any) -> bool:
        plain = isinstance(node, list | tuple) and len(node) == 1 and not hasattr(node, "_fields")
        return plain and not any(isinstance(leaf, Tensor) for leaf in tree_leaves(node))

    return tree_map(empty, batch, is_leaf=is_row_list)
