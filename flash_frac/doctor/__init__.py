"""`frac doctor`: describe this machine, and check that flash_frac computes correctly on it.

Given a checkpoint, it checks that instead: its files, weights and tokenizer, and a forward pass.
"""

from __future__ import annotations

import secrets
import shutil
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

__all__ = ["Finding", "Report", "doctor", "examine"]

# The remedy for errors that a user cannot fix.
REPORT_IT = "report it with all of this output"
_STATUS, _NAME = 9, 28


class Finding(NamedTuple):
    """The result of one check, and a remedy if one is needed."""

    name: str
    status: Literal["ok", "warning", "wrong"]
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        """Status, name and text in columns that fit the terminal."""
        indent = " " * (_STATUS + _NAME)
        width = max(min(shutil.get_terminal_size().columns, 120) - len(indent), 30)
        lines = textwrap.wrap(self.found, width)
        lines += textwrap.wrap(f"-> {self.remedy}", width) if self.remedy else []
        return f"{self.status:{_STATUS}}{self.name:{_NAME}}" + f"\n{indent}".join(lines)


@dataclass(frozen=True)
class Report:
    """All findings; `str()` gives the output of `frac doctor`."""

    findings: tuple[Finding, ...]

    @property
    def wrong(self) -> tuple[str, ...]:
        """Names of the findings that are wrong, without warnings."""
        return tuple(finding.name for finding in self.findings if finding.status == "wrong")

    def __str__(self) -> str:
        last = f"Wrong: {', '.join(self.wrong)}." if self.wrong else "No problems found."
        return "\n".join([*map(str, self.findings), "", last])


def examine(*, quick: bool = False, seed: int | None = None) -> Report:
    """Check this machine and the operators on it. It never raises: an error becomes a finding.

    Args:
        quick: skip the longer inputs and the speed.
        seed: random seed of the inputs; a fresh one if None.

    Example:
        >>> examine(quick=True).wrong
        ()
    """
    return Report(tuple(_findings(quick, seed)))


def doctor(checkpoint: str | None = None, *, quick: bool = False) -> int:
    """Print each finding as it comes; return 1 if something is wrong, else 0.

    Args:
        checkpoint: a folder or hub id to check instead of the machine.
        quick: skip the longer inputs and the speed.
    """
    import typer

    if checkpoint is None:
        coming = _findings(quick, None)
    else:
        from flash_frac.doctor.checkpoint import examine_checkpoint

        coming = examine_checkpoint(checkpoint)
    findings = []
    for finding in coming:
        findings.append(finding)
        color = {"ok": "green", "warning": "yellow", "wrong": "red"}[finding.status]
        status, rest = str(finding).split(" ", 1)
        # typer drops colours if the output is not a terminal.
        typer.echo(f"{typer.style(status, fg=color)} {rest}")
    report = Report(tuple(findings))
    typer.echo("\n" + str(report).splitlines()[-1])
    return 1 if report.wrong else 0


def _findings(quick: bool, seed: int | None) -> Iterator[Finding]:
    # Imported here because they import Finding from this file.
    from flash_frac.doctor import machine, model, operators

    device = "cuda" if torch.cuda.is_available() else "cpu"
    seed = secrets.randbits(31) if seed is None else seed
    looks: list[tuple[str, Callable[[], list[Finding]]]] = [
        ("versions", machine.versions),
        ("requirements", machine.requirements),
        ("device", machine.device),
        ("known problems", lambda: machine.known_problems(machine.facts())),
        ("backend", lambda: machine.backend(device)),
    ]
    for name, look in looks:
        yield from _safely(name, look)
    looks = [("model", lambda: model.check(device, seed))]

    def list_operators() -> list[Finding]:
        looks[:0] = operators.checks(device, seed, quick=quick)
        return []

    # A backend that cannot be queried, such as a broken Triton, is a finding too.
    yield from _safely("operators", list_operators)
    for name, look in looks:
        # Inputs are small, and on a busy machine threads only wait for each other.
        with model.threads(1):
            found = _safely(name, look)
        yield from found
    if not quick:
        yield from _safely("speed", lambda: model.speed(device))


def _safely(name: str, look: Callable[[], list[Finding]]) -> list[Finding]:
    try:
        return look()
    # This command exists to report any error.
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        return [Finding(name, "wrong", what, f"fix what the message says, or {REPORT_IT}")]
