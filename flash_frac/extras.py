"""Optional dependencies: imported where used; if one is missing, the error names its extra."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


def require(module: str, extra: str, needed_by: str) -> ModuleType:
    """Import `module`, or raise an ImportError that names the extra of flash-frac to install.

    Example: `linprog = require("scipy.optimize", "theory", "minimax_fit").linprog`
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{needed_by} needs {module.split('.')[0]}: pip install 'flash-frac[{extra}]'"
        ) from error


@contextmanager
def quiet_torchao() -> Iterator[None]:
    """Silence what torchao and torch log while transformers imports torchao.

    transformers does so whenever torchao is installed. Then they warn about extensions for other
    GPUs, and about a call that will be deprecated: nothing that a user could act on.
    """
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
