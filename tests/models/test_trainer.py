"""Plain `transformers.Trainer`, used as with any other model."""

import pytest
import torch
import torch.nn.functional as F
from transformers import Trainer, TrainingArguments

from flash_frac.models import FracForCausalLM
from tests.tiny import tiny_config


@pytest.fixture
def make_trainer(tmp_path):
    """A function that makes a trainer of four rows of nine tokens, the last of them ignored."""

    def make(**settings):
        torch.manual_seed(0)
        model = FracForCausalLM(tiny_config(num_hidden_layers=1, initializer_range=0.2))
        ids = torch.randint(3, 259, (4, 9), generator=torch.Generator().manual_seed(0))
        labels = ids.clone()
        labels[:, -1] = -100
        rows = [{"input_ids": i, "labels": j} for i, j in zip(ids, labels, strict=True)]
        common = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none"}
        common |= {"disable_tqdm": True, "save_strategy": "no", "max_steps": 2}
        arguments = TrainingArguments(**{**common, "per_device_train_batch_size": 4, **settings})
        return Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)

    return make


def batch_of(trainer):
    rows = trainer.train_dataset
    return torch.stack([row["input_ids"] for row in rows])


def test_evaluation_during_training_and_prediction(make_trainer):
    trainer = make_trainer(eval_strategy="steps", eval_steps=1)
    trainer.train()
    seen = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
    assert len(seen) == 2 and seen[1] < seen[0]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(seen[1])
    predicted = trainer.predict(trainer.eval_dataset)
    assert predicted.predictions.shape == (4, 9, 259)
    logits = trainer.model.eval()(batch_of(trainer)).logits.detach()
    torch.testing.assert_close(torch.from_numpy(predicted.predictions), logits)


@pytest.mark.parametrize("fused", [False, True])
def test_label_smoothing(make_trainer, fused):
    """Against torch's own, of each token's next."""
    trainer = make_trainer(label_smoothing_factor=0.1, max_steps=1, logging_steps=1)
    trainer.model.config.fuse_linear_cross_entropy = fused
    ids = batch_of(trainer)
    logits = trainer.model.eval()(ids).logits.detach()[:, :-2]
    expected = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:-1].flatten(), label_smoothing=0.1)
    trainer.train()
    logged = next(log["loss"] for log in trainer.state.log_history if "loss" in log)
    assert logged == pytest.approx(expected.item(), rel=1e-5)
