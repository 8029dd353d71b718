"""For mkdocstrings: `Example:` of our docstrings, with lines after `>>>`, is a block of code."""

from typing import Any

from griffe import Extension, Object


class Examples(Extension):
    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            # The name that Google's style has for such a section.
            obj.docstring.value = obj.docstring.value.replace("Example:\n", "Examples:\n")
