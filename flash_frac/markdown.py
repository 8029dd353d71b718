"""Text of others in Markdown: names of models, files and tasks mean nothing but themselves."""

from __future__ import annotations

import html
import re

# Underscores inside of a word are only letters.
_SPECIAL = re.compile(r"[\\`*~\[\]|]|(?<![^\W_])_|_(?![^\W_])")


def plain(text: object) -> str:
    """A text in one line of Markdown, of a table too, that is shown as it is.

    HTML is written as entities, since not every reader of Markdown knows a backslash before it.

    Example: `plain("a|b <script>") == "a\\\\|b &lt;script&gt;"`
    """
    line = " ".join(str(text).split())
    return _SPECIAL.sub(r"\\\g<0>", html.escape(line, quote=False))
