"""A BERT of transformers as a pipeline, with attention masks and batches of changing length (needs transformers).

python examples/hugging_face.py
"""

from __future__ import annotations

import copy
import logging
import sys

import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification

import fxpipe


# model
def make() -> BertForSequenceClassification:
    """A small one with weights that are drawn here; `from_pretrained(...)` gives a model of the same class."""
    torch.manual_seed(0)
    config = BertConfig(
        num_hidden_layers=4, num_attention_heads=4, hidden_size=64, intermediate_size=128, vocab_size=100,
        max_position_embeddings=64, num_labels=2,
        problem_type="single_label_classification",  # else the first call sets it, and the second one is captured anew
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,  # so that the plain model has the same losses
    )  # fmt: skip
    return BertForSequenceClassification(config)


# data
def batch(number: int) -> dict[str, Tensor]:
    """Sentences of different lengths, padded to the longest; the label says whether word 7 is in it."""
    random = torch.Generator().manual_seed(number)
    longest = int(torch.randint(8, 33, (), generator=random))
    lengths = torch.randint(4, longest + 1, (32,), generator=random)
    mask = (torch.arange(longest) < lengths[:, None]).long()
    ids = torch.randint(8, 100, (32, longest), generator=random)
    labels = torch.randint(2, (32,), generator=random)
    ids[:, 1] = torch.where(labels == 1, 7, ids[:, 1])
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


# train
def train(steps: int = 12) -> None:
    model = make()
    plain = copy.deepcopy(model)
    pipe = fxpipe.compile(model, devices=2, chunks=4, schedule="1f1b")
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
    other = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    for step in range(steps):
        inputs = batch(step)
        loss = pipe.step(**inputs)  # the model returns its loss
        alone = plain(**inputs).loss
        alone.backward()
        for one in (optimizer, other):
            one.step()
            one.zero_grad()
        length = inputs["input_ids"].shape[1]
        print(f"step {step:2}  length {length:2}  pipe {loss.item():.4f}  plain {alone.item():.4f}")
    pipe.close()


# end
if __name__ == "__main__":
    logging.getLogger("fxpipe").addHandler(logging.StreamHandler(sys.stdout))
    logging.getLogger("fxpipe").setLevel(logging.INFO)
    torch.set_num_threads(1)
    train()
