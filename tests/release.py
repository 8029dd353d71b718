"""Build the release files and test them as a user would: python tests/release.py PYTHON...

Builds sdist and wheel from the last commit. For each Python, both are installed in an otherwise
empty environment, and `tests/smoke.py` runs there, outside the clone. Needs the package `build`,
and a package index.
"""

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUT = ROOT / "build" / "release"
# What the archive of the source holds, beside the package.
TEXTS = ("CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "SECURITY.md", "pyproject.toml")


def run(*words, cwd=OUT):
    subprocess.run([str(word) for word in words], check=True, cwd=cwd)


def build() -> tuple[Path, Path]:
    """sdist and wheel of the last commit, whatever lies about in the clone."""
    shutil.rmtree(OUT, ignore_errors=True)
    (OUT / "source").mkdir(parents=True)
    run("git", "archive", "--output", OUT / "source.tar", "HEAD", cwd=ROOT)
    run("tar", "-xf", OUT / "source.tar", "-C", OUT / "source")
    run(sys.executable, "-m", "build", "--outdir", OUT / "dist", OUT / "source")
    (sdist,), (wheel,) = (list((OUT / "dist").glob(name)) for name in ("*.tar.gz", "*.whl"))
    return sdist, wheel


def check_contents(sdist: Path, wheel: Path) -> None:
    """The wheel has the files of the package and no others; the sdist has the texts, too."""
    package = OUT / "source" / "flash_frac"
    wanted = {
        path.relative_to(package.parent).as_posix() for path in package.rglob("*") if path.is_file()
    }
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    if found != wanted:
        sys.exit(f"{wheel.name} differs from flash_frac/: {sorted(found ^ wanted)}")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    missing = (wanted | set(TEXTS)) - names
    if missing:
        sys.exit(f"{sdist.name} lacks {sorted(missing)}")
    if any(name.startswith("tests") for name in names):
        sys.exit(f"{sdist.name} holds some of the tests, which need a clone")


def try_with(python: str, sdist: Path, wheel: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run(python, "-m", "venv", folder)
        installed = Path(folder) / "bin" / "python"
        pip = (installed, "-m", "pip", "install", "--quiet")
        for archive, options in ((wheel, ()), (sdist, ("--no-deps", "--force-reinstall"))):
            print(f"{python}, {archive.name}:", flush=True)
            run(*pip, *options, "-c", ROOT / "constraints-cpu.txt", archive, cwd=folder)
            # Isolated: neither PYTHONPATH nor the folder of the script is looked into.
            run(installed, "-I", ROOT / "tests" / "smoke.py", cwd=folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pythons", nargs="+", help="Commands of the Pythons to try.")
    pythons = parser.parse_args().pythons
    sdist, wheel = build()
    check_contents(sdist, wheel)
    for python in pythons:
        try_with(python, sdist, wheel)
    print(f"{sdist.name} and {wheel.name} in {OUT / 'dist'} work with {', '.join(pythons)}.")


if __name__ == "__main__":
    main()
