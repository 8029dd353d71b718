"""Faults at random: processes that are killed, disks that are full, files that are damaged.

`make test-faults` runs hundreds of trials, each drawn from the seed that it prints, and
`test_faults.py` a few of each kind in CI. A trial ends well in one of two ways: the result is that
of a run without a fault, to the bit, or an error of one line names the file. Anything else is a
loss.

    damage.py     what may happen to the bytes of a file
    children.py   processes that die, or find the disk full, at a chosen access to a file
    writers.py    all that the library writes, and how it is read again
    trials.py     the kinds of trials
    __main__.py   the command
"""


class Lost(AssertionError):
    """A fault that cost a result, or changed one without a word."""


def expect(holds: bool, otherwise: object) -> None:
    """`assert`, with a text that does not depend on pytest."""
    if not holds:
        raise Lost(str(otherwise))
