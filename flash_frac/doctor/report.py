"""What an examination finds, and how it is shown."""

from __future__ import annotations

import shutil
import textwrap
from dataclasses import dataclass
from typing import Literal, NamedTuple

# How every remedy ends for what should not be: there is nothing that a user can mend.
REPORT_IT = "report it with all of this output"
_STATUS, _NAME = 9, 28


class Finding(NamedTuple):
    """One thing looked at: how it is, what was found, and what to do about it, if anything."""

    name: str
    status: Literal["ok", "warning", "wrong"]
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        """Status, name and text in columns, for the width of the terminal."""
        indent = " " * (_STATUS + _NAME)
        width = max(min(shutil.get_terminal_size().columns, 120) - len(indent), 30)
        lines = textwrap.wrap(self.found, width)
        lines += textwrap.wrap(f"-> {self.remedy}", width) if self.remedy else []
        return f"{self.status:{_STATUS}}{self.name:{_NAME}}" + f"\n{indent}".join(lines)


@dataclass(frozen=True)
class Report:
    """All findings; `str()` of it is what `frac doctor` prints."""

    findings: tuple[Finding, ...]

    @property
    def wrong(self) -> tuple[str, ...]:
        """Names of what is wrong; warnings are not."""
        return tuple(finding.name for finding in self.findings if finding.status == "wrong")

    def __str__(self) -> str:
        last = f"wrong: {', '.join(self.wrong)}" if self.wrong else "nothing is wrong"
        return "\n".join([*map(str, self.findings), "", last])
