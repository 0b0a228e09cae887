"""Hugging Face's `Trainer` with private steps."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer  # type: ignore[import-not-found]

from samplewise.dp.loader import PoissonLoader
from samplewise.dp.optimizer import PrivateOptimizer
from samplewise.dp.private import make_private
from samplewise.errors import SamplewiseError


class PrivateTrainer(Trainer):
    """A `Trainer` whose training is private; `privacy` has the arguments of `make_private`, the rest is the Trainer's.

    **Guarantee.** That of `make_private`, for what the parameters become. What the Trainer logs (losses, metrics) is not private,
    nor is a choice of the best checkpoint by it on training data.

    | | |
    |-|-|
    | loss | the model's own mean; over unequal numbers of tokens it is refused: `compute_loss_func=causal_lm_loss` |
    | num_items_in_batch | not used: a sample's loss would depend on the lengths of the others |
    | gradient_accumulation_steps, fp16, several devices | refused |
    | max_grad_norm of the arguments | has no effect: there are no gradients before the step |
    | resume_from_checkpoint | goes on in the epoch, with the account |
    """

    def __init__(self, *args: Any, privacy: dict[str, Any], **kwargs: Any):
        super().__init__(*args, **kwargs)
        for what, wrong in (
            ("gradient_accumulation_steps", self.args.gradient_accumulation_steps != 1),
            ("fp16", self.args.fp16),
            ("several devices", self.args.n_gpu > 1 or self.args.world_size > 1),
        ):
            if wrong:
                raise SamplewiseError(
                    f"private training does not go with {what} of the Trainer. Use one device, bf16 or float32, and a larger "
                    "per_device_train_batch_size."
                )
        self.args.ignore_data_skip = True  # the loader knows where it stands
        self.model_accepts_loss_kwargs = False
        self._privacy, self._loader = privacy, None

    def get_train_dataloader(self) -> Any:
        if self._loader is None:
            collate = self._get_collator_with_removed_columns(self.data_collator, description="training")
            rows = DataLoader(
                self.train_dataset,  # type: ignore[arg-type]
                batch_size=self._train_batch_size,
                collate_fn=collate,
                num_workers=self.args.dataloader_num_workers,
            )
            drawing = ("sample_ids", "views", "seed", "batch_dim")
            self._loader = PoissonLoader.of(rows, **{k: self._privacy[k] for k in drawing if k in self._privacy})
        return self._loader

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        optimizer = super().create_optimizer(model)
        inner = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wrapper in a second call of train()
        if not isinstance(inner, PrivateOptimizer):
            options = {k: v for k, v in self._privacy.items() if k not in ("sample_ids", "views")}
            assert self.model is not None
            make_private(self.model, inner, self.get_train_dataloader(), **options)
        return optimizer

    def epsilon(self, delta: float, *, accountant: str = "pld") -> float:
        """ε of the training so far."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        assert isinstance(optimizer, PrivateOptimizer)
        return optimizer.epsilon(delta, accountant=accountant)


def causal_lm_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """The mean over samples of each sample's mean over its tokens, for a `Trainer`'s `compute_loss_func`.

    loss = (1/B) sum_b (1/T_b) sum_t ce(logits[b, t], labels[b, t+1]), over the T_b labels that are not -100

    **Guarantee.** A sample's term does not depend on the others, whatever their lengths; `num_items_in_batch` does, and is ignored.

    | sample | term |
    |-|-|
    | no label that counts | 0 |
    """
    logits, labels = outputs.logits[:, :-1].float(), labels[:, 1:]
    each = F.cross_entropy(logits.mT, labels, ignore_index=-100, reduction="none")
    num = (labels != -100).sum(1).clamp(min=1)
    return (each.sum(1) / num).mean()
