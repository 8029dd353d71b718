"""Put the folder of the benchmark scripts on Python's path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
