"""Screenshots for the documentation, from the model of a quickstart: `make screenshots`.

    python docs/screenshots.py [FOLDER]      # of frac quickstart; ./quickstart by default

Needs chromium (apt-get install chromium). Writes docs/figures/inspect_*.png and quickstart.png.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from PIL import Image

from flash_frac.inspect import inspect_checkpoint
from flash_frac.models import FracConfig, FracForCausalLM
from flash_frac.quickstart import corpus

FIGURES = Path(__file__).parent / "figures"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# A picture of a page should not slow the page down that shows it.
MOST_BYTES = 150_000
COLOURS = 256


def main(quickstart: Path) -> None:
    """Compare the model with what it was before training, and take pictures of the page."""
    final = quickstart / "final"
    if not (final / "config.json").exists():
        raise SystemExit(f"{final} holds no model; run frac quickstart --output-dir {quickstart}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        page = folder / "law" / "index.html"
        inspect_checkpoint(
            final,
            page.parent,
            before=untrained(final, folder / "quickstart" / "untrained"),
            text=corpus.load()[-1].text,
            text_name="State of the Union address",
        )
        shoot(page, "inspect_light.png", (1160, 930))
        shoot(page, "inspect_dark.png", (1160, 930), dark=True)
        shoot(page, "inspect_phone.png", (360, 1230), dark=True)
        shoot(side_by_side(quickstart, folder / "quickstart.html"), "quickstart.png", (1160, 250))


def untrained(final: Path, folder: Path) -> Path:
    """A checkpoint of the same model as training found it."""
    torch.manual_seed(0)
    FracForCausalLM(FracConfig.from_pretrained(final)).save_pretrained(folder)
    return folder


def side_by_side(quickstart: Path, page: Path) -> Path:
    """A page with the figures of a quickstart."""
    images = [
        f'<img src="{(quickstart / name).resolve().as_uri()}" width="370">'
        for name in ("loss.svg", "context.svg", "memory.svg")
    ]
    page.write_text(f'<body style="background: white">{"".join(images)}', encoding="utf-8")
    return page


def shoot(page: Path, name: str, size: tuple[int, int], *, dark: bool = False) -> None:
    """A picture of the upper end of a page, with a palette."""
    browser = next((found for each in BROWSERS if (found := shutil.which(each))), None)
    if browser is None:
        raise SystemExit("screenshots need a browser: apt-get install chromium")
    path = FIGURES / name
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    options += [f"--window-size={size[0]},{size[1]}", f"--screenshot={path}"]
    options += [f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
    subprocess.run([browser, *options, page.as_uri()], check=True, capture_output=True)
    image = Image.open(path).convert("RGB").quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE)
    image.save(path, optimize=True)
    if path.stat().st_size > MOST_BYTES:
        raise SystemExit(f"{path} has {path.stat().st_size} bytes, more than {MOST_BYTES}")
    print(f"{path}: {path.stat().st_size / 1000:.0f} KB")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "quickstart"))
