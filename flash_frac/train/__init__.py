"""Training on Hugging Face's Trainer: a recipe in, a checkpoint out."""

from flash_frac.extras import quiet_torchao

with quiet_torchao():
    from flash_frac.train.arguments import FracTrainingArguments, ModelArguments
    from flash_frac.train.recipe import Recipe, load_recipe
    from flash_frac.train.run import TrainResult, train
    from flash_frac.train.trainer import FracTrainer, decayed_parameters

__all__ = [
    "FracTrainer",
    "FracTrainingArguments",
    "ModelArguments",
    "Recipe",
    "TrainResult",
    "decayed_parameters",
    "load_recipe",
    "train",
]
