"""The benchmarks are scripts beside each other, so their folder must be where Python looks."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
