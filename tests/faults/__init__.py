"""Random faults: killed processes, full disks, damaged files.

`make test-faults` runs hundreds of trials, each drawn from the seed that it prints;
`test_faults.py` runs a few of each kind in CI. A trial passes in one of two ways: the result is
bit-identical to that of a run without a fault, or a one-line error names the file. Anything else is
a failure.

    damage.py     kinds of damage to the bytes of a file
    children.py   processes that die, or find the disk full, at a chosen file access
    writers.py    everything that the library writes, and how to read it back
    trials.py     the kinds of trials
    __main__.py   the command
"""


class Lost(AssertionError):
    """A fault that cost a result, or changed one without a word."""


def expect(holds: bool, otherwise: object) -> None:
    """`assert`, with a text that does not depend on pytest."""
    if not holds:
        raise Lost(str(otherwise))
