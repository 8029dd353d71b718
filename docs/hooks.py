"""What mkdocs does beside its plugins: pages from outside `docs`, maths as MathML, no network.

Browsers draw MathML themselves, so that the site needs no script for formulas.
"""

import html
import re
import sys
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
FROM_THE_ROOT = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
COMMANDS = "reference/cli.md"
FORMULA = re.compile(
    r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL | re.MULTILINE
)
# A file that a page loads, as opposed to a link that a reader may follow.
LOADED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?(?:https?:)?//[^\"' >]+"
    r"|<link\b[^>]*rel=[\"']?(?:stylesheet|preload|preconnect)[^>]*href=[\"']?(?:https?:)?//[^>]+"
    r"|(?:@import|url\()\s*[\"']?(?:https?:)?//[^\"')]+"
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the experiments, the documents of the root, and the page of the commands."""
    found = [ROOT / name for name in FROM_THE_ROOT]
    for pattern in ("README.md", "*.svg"):
        found += sorted((ROOT / "experiments").rglob(pattern))
    for path in found:
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    files.append(File.generated(config, COMMANDS, content=command_page()))
    return files


def command_page() -> str:
    """`--help` of every command, as it is printed on 100 columns."""
    sys.path.insert(0, str(ROOT))
    from typer.main import get_command

    from flash_frac.cli import app

    lines = ["# Commands", "", "The help text of every command of `frac`."]
    for name, command in commands_of(get_command(app), ("frac",)):
        # Without the frames that typer draws for a terminal.
        command.rich_markup_mode = None
        context = command.context_class(command, info_name=" ".join(name), terminal_width=100)
        lines += ["", f"## {' '.join(name)}", "", "```text", command.get_help(context), "```"]
    return "\n".join(lines)


def commands_of(command, name):
    """(words, command) of a command and all below it."""
    yield name, command
    for word, inner in getattr(command, "commands", {}).items():
        yield from commands_of(inner, (*name, word))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links that hold in the repository, where `docs` is a folder, become those of the site."""
    if page.file.src_uri.startswith("experiments/"):
        return re.sub(r"\]\(((?:\.\./)+)docs/", r"](\1", markdown)
    if page.file.src_uri in FROM_THE_ROOT:
        return markdown.replace("](docs/", "](")
    return markdown.replace("](../", "](") if "/" not in page.file.src_uri else markdown


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Formulas, between dollars in the source, as MathML."""

    def formula(match: re.Match[str]) -> str:
        display = "inline" if match[1] == "span" else "block"
        drawn = convert(html.unescape(match[2]).strip(), display=display)
        # Dots and tildes stand close to their letter.
        return drawn.replace("<mover>", '<mover accent="true">')

    return FORMULA.sub(formula, content)


def on_post_build(config: MkDocsConfig) -> None:
    """Refuse a page that would load anything from another host."""
    for path in sorted(Path(config.site_dir).rglob("*")):
        if path.suffix in (".html", ".css"):
            found = LOADED.search(path.read_text())
            if found:
                raise PluginError(f"{path} loads {found[0]!r}; the site must work offline")
