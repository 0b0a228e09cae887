"""Rules, one file a family of ops; importing this package registers them all."""

from samplewise.ops import conv, embedding, linear, norm, pointwise, recurrent

__all__ = ["conv", "embedding", "linear", "norm", "pointwise", "recurrent"]
