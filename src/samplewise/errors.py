"""What samplewise raises instead of returning a number that would be wrong."""


class SamplewiseError(RuntimeError):
    """A per-sample gradient was asked for that samplewise cannot give; the text names the way out."""


class SamplesMixError(SamplewiseError):
    """Samples of the batch influence each other, so a gradient of one sample alone does not exist."""


class UnattributedError(SamplewiseError):
    """It is not known which rows belong to which sample, or a gradient reached a parameter unseen."""
