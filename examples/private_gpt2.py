"""A tiny GPT-2 trained privately with Hugging Face's Trainer, on generated sentences: python examples/private_gpt2.py

Each sentence is one sample; at the end epsilon says how much any one of them can show in the weights.
"""

import argparse
import random
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from samplewise.dp.huggingface import PrivateTrainer, causal_lm_loss

SUBJECTS, VERBS, PLACES = "cat dog fox owl".split(), "sleeps runs hides waits".split(), "here there inside outside".split()
WORDS = ["<pad>", *SUBJECTS, *VERBS, *PLACES, "and", "."]
PAD = 0


def sentence(rng: random.Random) -> list[str]:
    """ "fox runs there .", or two of it joined by "and"."""
    parts = [[rng.choice(some) for some in (SUBJECTS, VERBS, PLACES)] for _ in range(rng.choice((1, 2)))]
    return [*parts[0], *(["and", *parts[1]] if len(parts) == 2 else []), "."]


def collate(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    """Sentences filled up to the longest that there is; what is filled up has no label and is not attended to."""
    ids = torch.full((len(rows), 8), PAD)
    for k, row in enumerate(rows):
        ids[k, : len(row)] = torch.tensor(row)
    mask = (ids != PAD).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sentences", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--epsilon", type=float, default=8.0)
    args = parser.parse_args()
    rng = random.Random(0)
    rows = [[WORDS.index(word) for word in sentence(rng)] for _ in range(args.sentences)]
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(WORDS),
        n_positions=8,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=PAD,
        eos_token_id=PAD,
        pad_token_id=PAD,
    )
    model = GPT2LMHeadModel(config)
    held_out = collate([[WORDS.index(word) for word in sentence(rng)] for _ in range(200)])

    def perplexity() -> float:
        model.eval()
        with torch.no_grad():
            outputs = model(input_ids=held_out["input_ids"], attention_mask=held_out["attention_mask"])
            return float(causal_lm_loss(outputs, held_out["labels"]).exp())

    before = perplexity()
    with tempfile.TemporaryDirectory() as folder:
        trainer = PrivateTrainer(
            model=model,
            args=TrainingArguments(
                folder,
                num_train_epochs=args.epochs,
                per_device_train_batch_size=args.batch_size,
                learning_rate=5e-3,
                save_strategy="no",
                report_to=[],
                remove_unused_columns=False,
                logging_strategy="no",
                disable_tqdm=True,
                use_cpu=not torch.cuda.is_available(),
            ),
            train_dataset=rows,
            data_collator=collate,
            compute_loss_func=causal_lm_loss,
            privacy={
                "target_epsilon": args.epsilon,
                "target_delta": 1e-5,
                "epochs": args.epochs,
                "max_grad_norm": 1.0,
                "clipping": "automatic",
            },
        )
        trainer.train()
    epsilon = trainer.epsilon(1e-5)
    print(f"perplexity on held-out sentences {before:.2f} → {perplexity():.2f}, epsilon {epsilon:.2f} at delta 1e-5")


if __name__ == "__main__":
    main()
