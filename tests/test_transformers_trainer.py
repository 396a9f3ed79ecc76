"""transformers' Trainer with flash_qla: packed batches, bf16 and activation checkpointing, on the CPU.

The reference is the model's own torch code on the same sequences, padded: it takes no packed ones.
"""

import pytest
import torch
from test_transformers import BF16_RATIO, FP32_TOLERANCE, calls, example, small_model  # noqa: F401
from test_transformers_packed import LENGTHS, sequences
from transformers import DataCollatorWithFlattening

from flash_qla.integrations.transformers import use_flash_qla

pytest.importorskip("accelerate", reason="accelerate, which the Trainer needs, is not installed")

from transformers import Trainer, TrainingArguments

STEPS = 4
LOSS_TOLERANCE = 2**-9  # of losses in bf16: half an ulp
# Older releases have another name for it.
NAME = next(name for name in ("activation_checkpointing", "gradient_checkpointing") if hasattr(TrainingArguments, name))
CHECKPOINTING = {
    "reentrant": {NAME: True, f"{NAME}_kwargs": {"use_reentrant": True}},
    "not reentrant": {NAME: True, f"{NAME}_kwargs": {"use_reentrant": False}},
    "without checkpointing": {},
}
flattened = DataCollatorWithFlattening(return_tensors="pt", return_flash_attn_kwargs=True, return_seq_idx=True)


def padded(rows: list[dict]) -> dict:
    """All sequences padded on the right. As in a packed batch, no first token has a label."""
    tokens = [torch.tensor(row["input_ids"]) for row in rows]
    mask = [torch.ones_like(x) for x in tokens]
    labels = [torch.cat([torch.tensor([-100]), x[1:]]) for x in tokens]
    batch = {"input_ids": (tokens, 0), "attention_mask": (mask, 0), "labels": (labels, -100)}
    return {name: torch.nn.utils.rnn.pad_sequence(x, True, value) for name, (x, value) in batch.items()}


class Recording(Trainer):
    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        self.losses.append(loss.item())
        return loss


def train(model, collator, folder, **options) -> tuple[list[float], torch.Tensor]:
    """The losses of a few steps, and how they have changed the weights."""
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=len(LENGTHS), use_cpu=True, optim="sgd",
        learning_rate=0.01, lr_scheduler_type="constant", max_grad_norm=0, report_to="none", save_strategy="no",
        disable_tqdm=True, dataloader_pin_memory=False, **options,
    )  # fmt: skip
    rows = sequences(LENGTHS * STEPS)
    trainer = Recording(model=model, args=arguments, train_dataset=rows, data_collator=collator)
    trainer.losses = []
    trainer.train()
    return trainer.losses, torch.nn.utils.parameters_to_vector(model.parameters()).detach() - before


@pytest.fixture(scope="module")
def torch_results(tmp_path_factory):
    """Losses and change of the weights in torch, in fp32 and under bf16 autocast."""
    folder = tmp_path_factory.mktemp("own")
    return {bf16: train(small_model("qwen3_next"), padded, folder, bf16=bf16) for bf16 in (False, True)}


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("bf16", (False, True), ids=("fp32", "bf16"))
def test_trainer(bf16, checkpointing, torch_results, calls, tmp_path):  # noqa: F811
    """Losses and weights are torch's. In bf16 the weights are as near to those of fp32 as torch's."""
    model = small_model("qwen3_next")
    with use_flash_qla(model):
        losses, change = train(model, flattened, tmp_path, bf16=bf16, **CHECKPOINTING[checkpointing])
    assert len(calls) == STEPS * (2 if CHECKPOINTING[checkpointing] else 1)
    assert all(call["cu_seqlens"].numel() == len(LENGTHS) + 1 for call in calls)
    their_losses, their_change = torch_results[bf16]
    assert losses == pytest.approx(their_losses, rel=LOSS_TOLERANCE if bf16 else FP32_TOLERANCE)
    if bf16:
        _, exact = torch_results[False]
        ours, theirs = (example.relative_error(x, exact) for x in (change, their_change))
        assert ours < BF16_RATIO * theirs, f"{ours:.2e} from fp32, torch {theirs:.2e}"
    else:
        assert example.relative_error(change, their_change) < FP32_TOLERANCE
