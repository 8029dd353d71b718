"""TRL's SFTTrainer: packed documents stay separate, and its checkpoints load on their own."""

from functools import partial

import pytest
import torch
from datasets import Dataset

from flash_frac.data import byte_tokenizer
from tests.hf.test_checkpoints import assert_loads_in_new_processes
from tests.models.conftest import make_model
from tests.models.hybrids import make_kind
from tests.models.test_boundaries import loss_one_by_one

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.hf


@pytest.fixture
def documents():
    ids = torch.randint(3, 250, (60,), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": part.tolist()} for part in ids.split([20, 9, 31])]


def trainer_of(model, documents, folder, **options):
    arguments = trl.SFTConfig(
        output_dir=str(folder),
        per_device_train_batch_size=3,
        max_length=64 if options.get("packing") else None,
        max_steps=2,
        report_to=[],
        use_cpu=True,
        bf16=False,
        **options,
    )
    data = Dataset.from_list(documents)
    return trl.SFTTrainer(model, arguments, train_dataset=data, processing_class=byte_tokenizer())


@pytest.mark.parametrize("make", [make_model, partial(make_kind, "all")], ids=["frac", "all"])
@pytest.mark.parametrize("options", [{}, {"padding_free": True}, {"packing": True}])
def test_sft(make, documents, options, tmp_path):
    model = make(dtype=torch.float32, vocab_size=259)
    expected = loss_one_by_one(model, documents)
    trainer = trainer_of(model, documents, tmp_path, **options)
    batch = next(iter(trainer.get_train_dataloader()))
    if options:
        assert batch["input_ids"].shape == (1, 60) and "position_ids" in batch
    loss = trainer.compute_loss(model.train(), batch)
    torch.testing.assert_close(loss.detach(), expected.detach())
    trainer.train()
    assert len(trainer.state.log_history) > 0


def test_what_it_saves_loads_in_new_processes(documents, tmp_path):
    model = make_model(torch.float32, vocab_size=259)
    trainer = trainer_of(model, documents, tmp_path / "run")
    trainer.save_model(str(tmp_path / "saved"))
    assert_loads_in_new_processes(model, tmp_path / "saved")
