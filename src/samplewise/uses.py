"""What backward brings to a capture: the factors of each parameter's uses, built, kept or reduced to norms as planned."""

from collections import Counter

from torch import Tensor

from samplewise.errors import SamplewiseError
from samplewise.factors.base import Factor
from samplewise.factors.norms import Norms
from samplewise.factors.total import join
from samplewise.ops.registry import Note
from samplewise.planner import Planner
from samplewise.tap import Targets


class Uses:
    """The uses of each captured parameter, and what they are multiplied with."""

    def __init__(self, planner: Planner, keep: str):
        self._planner, self.keep = planner, keep
        self._factors: dict[str, list[Factor]] = {}
        self.notes: dict[str, list[Note]] = {}
        """How the uses of each parameter were understood."""
        self._versions: dict[str, list[tuple[Tensor, int]]] = {}
        """Tensors that the factors read, and their versions when they came."""
        self._num_taken: Counter[str] = Counter()
        """How many uses of each parameter backward has brought."""
        self._scale: float | None = None

    def _set_scale(self, scale: float) -> None:
        if self._scale not in (None, scale):
            raise SamplewiseError(
                'loss.backward() with loss_reduction="mean" and grads.backward(losses) met in one capture.'
            )
        self._scale = scale

    def _keep_use(self, targets: Targets, factor: Factor, *, default_scale: float) -> None:
        """Takes the factor of one use to the parameters behind it."""
        if self._scale is None:
            self._set_scale(default_scale)
        for name, pull in targets:
            self._num_taken[name] += 1
            part, uses = pull(factor), self._factors.get(name)
            if uses is None:
                uses = self._factors[name] = []
                self._versions[name] = []
            elif uses and isinstance(uses[0], Norms):
                raise SamplewiseError(
                    f"another gradient of {name!r} came after its norms had been taken (a second backward, or a reentrant "
                    f'checkpoint?), and norms do not add up. Leave out keep="{self.keep}".'
                )
            if self.keep == "gradients":
                part = self._planner.settled(name, part)
            uses.append(part)
            if self.keep != "gradients" and len(uses) == len(self.notes[name]):  # every use that forward saw
                whole = join(uses)
                part = Norms(self._planner.sq_norms(name, whole), shape=whole.shape)
                uses[:], self._versions[name] = [part], []
            self._versions[name] += [(t, t._version) for t in part.tensors()]

    def note(self, targets: Targets, use: Note) -> None:
        for name, _ in targets:
            self.notes.setdefault(name, []).append(use)
