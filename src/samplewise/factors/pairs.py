"""Inner products of every sample of one factor with every sample of another."""

import torch
from torch import Tensor

from samplewise.factors.base import Factor, fitting, flat, in_blocks
from samplewise.tracing import doubt, is_tracing


def gram(G: Factor, H: Factor) -> Tensor:
    """K with K[b, c] = Re sum conj(G[b]) * H[c], shape [B, C], in float32 or better.

    Without a gradient built where the two structures allow it and it is cheaper; otherwise both are built a few rows of
    the weight, or a few samples, at a time.

    >>> from samplewise.factors.dense import Dense
    >>> gram(Dense(torch.eye(2)), Dense(torch.tensor([[3.0, 4.0]]))).tolist()
    [[3.0], [4.0]]
    """
    K = G.pairs(H)
    if K is None and H is not G:
        turned = H.pairs(G)
        K = None if turned is None else turned.mT.contiguous()
    if K is None:
        return built(G, H)
    for factor, dim in ((G, 0),) if H is G and is_tracing() else ((G, 0), (H, 1)):
        is_doubtful = factor.sq_norms() < 1e-3 * factor.terms()  # as in `mended`
        if is_tracing():
            doubt(is_doubtful.any())
            continue
        doubtful = is_doubtful.nonzero().squeeze(1)
        if len(doubtful):
            exact = built(*(f.select(doubtful) if d == dim else f for d, f in enumerate((G, H))))
            K = K.index_copy(dim, doubtful, exact.to(K.dtype))
    return K


def built(G: Factor, H: Factor) -> Tensor:
    """`gram` from gradients that are built: by rows of the weight where both factors know how, else by samples."""
    device = G.tensors()[0].device
    none = torch.arange(0, device=device)
    if not G.shape or G.band(none) is None or H.band(none) is None:
        return _by_samples(G, H)
    width, rows = (G.num_samples + H.num_samples) * torch.Size(G.shape[1:]).numel(), _common_rows(G, H)
    blocks = in_blocks(rows, G.shape[0], width, device)
    K = None
    for block in blocks:
        whole = rows is None and len(blocks) == 1
        left = G.materialize_wide() if whole else _of_rows(G, block)
        right = left if H is G else H.materialize_wide() if whole else _of_rows(H, block)
        term = _products(left, right)
        K = term if K is None else K + term
    return G.sq_norms().new_zeros(G.num_samples, H.num_samples) if K is None else K


def _of_rows(G: Factor, rows: Tensor) -> Tensor:
    """G[:, rows]."""
    band = G.band(rows)
    assert band is not None
    return band.materialize_wide()


def _common_rows(G: Factor, H: Factor) -> Tensor | None:
    """The rows of the weight in which both may be other than zero; None where that may be all."""
    one, other = G.occupied(), H.occupied()
    if one is not None and other is not None:
        return min(one, other, key=len) if is_tracing() else one[torch.isin(one, other)]
    return other if one is None else one


def _by_samples(G: Factor, H: Factor) -> Tensor:
    size = 2 * max(G.elements_per_sample(), H.elements_per_sample())
    step = fitting(size)
    lines = []
    for b in range(0, max(1, G.num_samples), step):
        left = G.select(slice(b, b + step)).materialize_wide()
        starts = range(0, max(1, H.num_samples), step)
        tiles = (left if H is G and c == b else H.select(slice(c, c + step)).materialize_wide() for c in starts)
        lines.append(torch.cat([_products(left, right) for right in tiles], 1))
    return torch.cat(lines)


def _products(G: Tensor, H: Tensor) -> Tensor:
    dtype = torch.promote_types(G.dtype, H.dtype)
    K = flat(G.to(dtype)).conj() @ flat(H.to(dtype)).mT
    return K.real if K.is_complex() else K
