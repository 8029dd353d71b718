"""Escape user-supplied text for Markdown: names of models, files and tasks."""

from __future__ import annotations

import html
import re

# Underscores inside a word need no escape.
_SPECIAL = re.compile(r"[\\`*~\[\]|]|(?<![^\W_])_|_(?![^\W_])")


def plain(text: object) -> str:
    """Escape a text so that Markdown shows it literally, on one line and in tables too.

    HTML becomes entities, because not every Markdown renderer accepts a backslash before it.

    Example: `plain("a|b <script>") == "a\\\\|b &lt;script&gt;"`
    """
    line = " ".join(str(text).split())
    return _SPECIAL.sub(r"\\\g<0>", html.escape(line, quote=False))
