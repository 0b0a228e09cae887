"""The batch of a capture: which rows of which tensors belong to which sample, from the model's arguments on."""

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from samplewise.errors import UnattributedError
from samplewise.marks import Marks
from samplewise.rowwise import know
from samplewise.samples import Layout, Mark
from samplewise.weights import Weights


class MarkedBatch:
    """The samples, and the marks of tensors that hold them."""

    weights: Weights

    def __init__(self, batch_size: int | None, batch_dim: int, sample_ids: Tensor | None):
        if batch_dim < 0:
            raise ValueError(f"batch_dim counts dimensions from the first, 0: got {batch_dim}")
        if sample_ids is not None:
            sample_ids = checked_ids(sample_ids)
            batch_size = max(batch_size or 0, int(sample_ids.max()) + 1 if len(sample_ids) else 0)
        self.batch_size, self.batch_dim, self.sample_ids = batch_size, batch_dim, sample_ids
        self.marks: Marks[Mark] = Marks(by_memory=True)
        self.constants: Marks[bool] = Marks()

    def mark(self, tensor: Tensor, *, batch_dim: int | None = None) -> Tensor:
        """`tensor`, known from now on to hold the samples of the batch along `batch_dim`.

        For data that reaches the parameters in another way than as an argument of the model.
        """
        dim = self.batch_dim if batch_dim is None else batch_dim
        size = tensor.shape[dim]
        if self.batch_size is None:
            self.batch_size = size
        if size != self.num_rows:
            raise UnattributedError(
                f"a tensor {tuple(tensor.shape)} was marked along dimension {dim}, but the batch has {self.num_rows} rows."
            )
        layout = self.rows_of(tensor, dim)
        self.marks.set(tensor, layout)
        know(tensor, layout)
        return tensor

    def rows_of(self, tensor: Tensor, dim: int) -> Layout:
        """The layout of a tensor that has the rows of the batch along `dim`."""
        assert self.batch_size is not None
        if self.sample_ids is None:
            return Layout.along(dim, ndim=tensor.ndim, num_samples=self.batch_size)
        shape = [1] * tensor.ndim
        shape[dim] = len(self.sample_ids)
        return Layout(self.sample_ids.reshape(shape), self.batch_size)

    @property
    def num_rows(self) -> int | None:
        """How many rows the batch has: one a sample, unless sample ids say otherwise."""
        return self.batch_size if self.sample_ids is None else len(self.sample_ids)

    def mark_inputs(self, args: tuple, kwargs: dict) -> None:
        """Marks the tensors among these arguments of the model that have as many rows as the batch."""
        leaves = []
        for leaf in tree_leaves((args, kwargs), is_leaf=lambda a: isinstance(a, PackedSequence)):
            if isinstance(leaf, PackedSequence):
                self._mark_packed(leaf)
            elif isinstance(leaf, Tensor):
                leaves.append(leaf)
        if any(t.is_nested for t in leaves):
            raise UnattributedError(
                "the model was given a nested tensor, in which samples are not followed. Give it padded, or the rows of all "
                "sequences in one tensor with the number of each row's sample: capture(model, sample_ids=...)."
            )
        inputs = [t for t in leaves if self.marks.get(t) is None and self.weights.get(t) is None]
        dim = self.batch_dim
        if self.batch_size is None and not torch.is_grad_enabled():
            return  # nothing is captured here, so this need not be the batch
        self._refuse_strange(inputs)
        in_order = [t.shape[dim] for t in inputs if t.ndim > dim]
        sizes = set(in_order)
        if self.batch_size is None:
            if in_order[:1] != [1]:
                sizes = sizes - {1} or sizes  # a lone 1 behind others is broadcast over the batch
            if len(sizes) > 1:
                raise UnattributedError(
                    f"the model's inputs have sizes {sorted(sizes)} along dimension {dim}, so the batch size is not clear. "
                    "Give it: capture(model, batch_size=...); inputs of another size are then shared by all samples."
                )
            if not sizes:
                raise UnattributedError(
                    "the model was called without a tensor from which the batch size could be read. "
                    "Give it, capture(model, batch_size=...), and mark the data: grads.mark(tensor)."
                )
            (self.batch_size,) = sizes
        elif inputs and self.num_rows not in sizes and len(inputs) == len(leaves) and torch.is_grad_enabled():
            raise UnattributedError(
                f"the batch has {self.num_rows} rows, but no input of this call has that size along dimension {dim} "
                f"(found {sorted(sizes)}). One capture holds one batch."
            )
        for t in inputs:
            if t.ndim > dim and t.shape[dim] == self.num_rows:
                self.mark(t)

    def _mark_packed(self, sequences: PackedSequence) -> None:
        """Each row of packed sequences belongs to the sequence that it came from, counted in the caller's order."""
        sizes = sequences.batch_sizes.tolist()
        order = torch.arange(sizes[0], device="cpu") if sequences.sorted_indices is None else sequences.sorted_indices.cpu()
        if self.batch_size is None:
            self.batch_size = sizes[0]
        if self.batch_size != sizes[0]:
            raise UnattributedError(f"the batch has {self.batch_size} samples, but {sizes[0]} sequences were packed.")
        ids = torch.cat([order[:size] for size in sizes])
        shape = [-1] + [1] * (sequences.data.ndim - 1)
        self.marks.set(sequences.data, Layout(ids.reshape(shape), self.batch_size))
        for numbers in (sequences.batch_sizes, sequences.sorted_indices, sequences.unsorted_indices):
            if numbers is not None:
                self.constants.set(numbers, True)  # states of zeros, as many and in whatever order, are zeros

    def _refuse_strange(self, inputs: list[Tensor]) -> None:
        """Raises if these arguments of the model cannot be the batch, or more of it."""


def checked_ids(sample_ids: Tensor) -> Tensor:
    """Sample ids as a vector on the CPU."""
    sample_ids = torch.as_tensor(sample_ids)
    if sample_ids.is_floating_point() or sample_ids.ndim != 1 or bool((sample_ids < 0).any()):
        raise ValueError(
            f"sample_ids is a vector with the number of its sample, from 0 on, for each row; got {tuple(sample_ids.shape)} of "
            f"{sample_ids.dtype}"
        )
    return sample_ids.detach().cpu().long()
