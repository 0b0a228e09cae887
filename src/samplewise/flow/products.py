"""Products: elements of several tensors meet, and samples must lie along dimensions that the result keeps."""

from samplewise.contraction import along, operands
from samplewise.flow.call import Call, aligned, broadcast_met, merged
from samplewise.samples import Layout, Lost, Mark


def contracted(call: Call) -> Mark:
    """matmul, einsum, linear: a dimension that tells samples apart must not be summed over."""
    found = operands(call.name, call.args, call.kwargs)
    if found is None:
        return Lost(call.name)
    letters, tensors = found
    layouts = call.layouts
    all_ids = []
    for term, tensor in zip(letters.terms, tensors, strict=True):
        layout = layouts.get(id(tensor))
        if layout is None:
            continue
        if any(term[d] not in letters.out for d in layout.dims):
            return call.mixed()
        all_ids.append(along(layout.ids, term, letters.out))
    factors = {id(t) for t in tensors}
    added = [layout for key, layout in layouts.items() if key not in factors]  # addmm's input, a bias
    return merged(call, all_ids + [aligned(layout.ids, len(letters.out)) for layout in added])


def routed_product(call: Call) -> Mark:
    """grouped_mm(x, w, offs=...): row i of the result is row i of x times the matrix of its group."""
    tensor, layout = call.subject
    return layout if tensor is call.args[0] and 1 not in layout.dims and tensor.ndim == 2 else Lost(call.name)


def paired_rows(call: Call) -> Mark:
    """bilinear(x1, x2, weight): rows of the two inputs meet one to one."""
    inputs = [
        (t, mark)
        for t, mark in call.marks
        if isinstance(mark, Layout) and any(t is call.arg(i, name) for i, name in enumerate(("input1", "input2")))
    ]
    if len(inputs) != len(call.marks) or any(t.ndim - 1 in mark.dims for t, mark in inputs):
        return Lost(call.name)
    return merged(call, [mark.ids for _, mark in inputs])


def crossed(call: Call) -> Mark:
    """cross(x, y, dim): the three elements along the dimension meet."""
    ndim = call.out.ndim
    met = broadcast_met(call, ndim)
    dim = call.arg(2, "dim", -1 if call.name == "linalg_cross" else None)
    return call.mixed() if dim is None or (isinstance(met, Layout) and dim % ndim in met.dims) else met
