import subprocess
import sys

import flash_frac.data


def test_public_names_exist():
    assert all(getattr(flash_frac.data, name) is not None for name in flash_frac.data.__all__)


def test_import_does_not_load_what_only_some_need():
    code = (
        "import sys, flash_frac.data\n"
        "print(*{'datasets', 'pyarrow', 'zstandard', 'accelerate'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
