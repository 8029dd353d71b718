"""Optional dependencies: imported where they are used, and named with their extra when missing."""

from __future__ import annotations

import importlib
from types import ModuleType


def require(module: str, extra: str, needed_by: str) -> ModuleType:
    """Import `module`, or say which extra of flash-frac brings it.

    Example: `linprog = require("scipy.optimize", "theory", "minimax_fit").linprog`
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{needed_by} needs {module.split('.')[0]}: pip install 'flash-frac[{extra}]'"
        ) from error
