"""Rules, one file a family of ops; importing this package registers them all."""

from samplewise.ops import attention, conv, embedding, linear, norm, pointwise, recurrent

__all__ = ["attention", "conv", "embedding", "linear", "norm", "pointwise", "recurrent"]
