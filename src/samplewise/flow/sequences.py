"""Sequences, one or more a sample: padded, packed, and run through step by step."""

import torch

from samplewise.flow.call import Call, Several, merged
from samplewise.samples import Layout, Lost, Mark


def recurrent(call: Call) -> Several | Mark:
    """rnn, lstm and gru: (outputs in the layout of the input, last states with the samples second)."""
    tensor, layout = call.subject
    if tensor is not call.args[0] or tensor.ndim - 1 in layout.dims:
        return Lost(call.name)
    of_states = [mark for _, mark in call.marks[1:] if isinstance(mark, Layout)]
    if tensor.ndim == 2:  # packed: the first rows are those of step 0, one a sample
        states = layout.ids[: call.results[1].shape[1]].reshape(1, -1, 1)
    else:
        (axis,) = layout.dims or (0,)
        batch_first = call.args[-1] if isinstance(call.args[-1], bool) else False
        if axis != (0 if batch_first else 1):
            return call.mixed()
        states = layout.ids.reshape(1, -1, 1)
    if any(not torch.equal(mark.ids, states) for mark in of_states):
        return call.mixed()  # a state of another sample
    return Several([layout, *[call.layout(states)] * (len(call.results) - 1)])


def cell(call: Call) -> Mark:
    """One step of an rnn: rows of the input and of the states meet one to one."""
    inputs = [(t, mark) for t, mark in call.marks if isinstance(mark, Layout)]
    if any(t.ndim - 1 in mark.dims for t, mark in inputs):
        return call.mixed()
    return merged(call, [mark.ids for _, mark in inputs])


def packed(call: Call) -> Several | Mark:
    """_pack_padded_sequence(x, lengths, batch_first): the ids packed in the same way."""
    tensor, layout = call.subject
    if tensor is not call.args[0]:
        return Lost(call.name)
    shape = tensor.shape[:2]
    ids = layout.ids.expand([*shape, *layout.ids.shape[2:]])
    data, _ = call.func(ids, *call.args[1:])
    return Several([call.layout(data), None])


def unpacked(call: Call) -> Several | Mark:
    """_pad_packed_sequence(data, batch_sizes, batch_first, ...): a row is of one sample, its padding too."""
    tensor, layout = call.subject
    ids = layout.ids.expand([len(tensor), *layout.ids.shape[1:]])
    padded, _ = call.func(ids, call.args[1], call.args[2], 0, call.args[4])
    time = 1 if call.args[2] else 0
    return Several([call.layout(padded.narrow(time, 0, 1)), None])


def sequences(call: Call) -> Mark:
    """pad_sequence([...]): each of one sample, its padding too."""
    tensors, batch_first = call.arg(0, "sequences"), call.arg(1, "batch_first", False)
    layouts = call.layouts
    if any(id(t) not in layouts or layouts[id(t)].ids.numel() != 1 for t in tensors):
        return Lost(call.name)
    shape = [1] * call.out.ndim
    shape[0 if batch_first else 1] = len(tensors)
    return call.layout(torch.cat([layouts[id(t)].ids.flatten() for t in tensors]).reshape(shape))
