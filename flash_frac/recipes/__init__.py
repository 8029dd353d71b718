"""The training recipes and model sizes that are installed with the package.

NAME.yaml                  a training run: `frac train NAME`
models/NAME/config.json    a model size: `config_name: NAME` in a recipe, `frac bench NAME`
"""

from __future__ import annotations

import os
from pathlib import Path

HERE = Path(__file__).parent
MODELS = HERE / "models"


def installed_recipes() -> list[str]:
    """The names of the recipes in this package."""
    return sorted(path.stem for path in HERE.glob("*.yaml"))


def installed_sizes() -> list[str]:
    """The names of the model sizes in this package."""
    return sorted(path.parent.name for path in MODELS.glob("*/config.json"))


def find_recipe(recipe: str | Path) -> Path:
    """The YAML file of a recipe.

    Args:
        recipe: the name of an installed recipe, or the path of a file. Text without a path
            separator and without the suffix .yaml or .yml is a name; a `Path` is always a path.

    Example: `find_recipe("small")`, `find_recipe("./my.yaml")`
    """
    path, known = Path(recipe), installed_recipes()
    hint = ""
    if recipe == path.name and path.suffix not in (".yaml", ".yml"):
        if recipe in known:
            return HERE / f"{recipe}.yaml"
        if path.exists():
            hint = f" (for the file of that name write ./{recipe})"
    elif path.exists() and not path.is_dir():
        return path
    elif path.stem in known:
        hint = f" (for the installed recipe write {path.stem}: frac train {path.stem})"
    raise ValueError(
        f"there is no recipe {recipe}{hint}; give the path of a YAML file, or the name of an "
        f"installed recipe: {', '.join(known)}"
    )


def find_config(
    name: str | Path, folder: str | Path = "", *, argument: str = "config_name"
) -> Path:
    """A config.json, or the folder that holds it.

    Args:
        name: the name of an installed size, or a path. A folder that has the name of an installed
            size is reached as ./NAME.
        folder: what a relative path starts from; the working directory by default.
        argument: what the caller calls it, for the error.

    Example: `FracConfig.from_pretrained(find_config("frac-130m"))`
    """
    known = installed_sizes()
    if name in known:
        return MODELS / name
    path = Path(os.path.abspath(Path(folder) / name))
    if path.is_file() or (path / "config.json").is_file():
        return path
    raise ValueError(
        f"{argument} {name} was not found: {path} is neither a file nor a folder with a "
        f"config.json, and the installed sizes are {', '.join(known)}"
    )
