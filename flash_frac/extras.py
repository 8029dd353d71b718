"""Optional dependencies: imported where used; if one is missing, the error names its extra."""

from __future__ import annotations

import importlib
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
