"""Style of kernel source: docstrings, pointer names, and number of arguments."""

import ast
from pathlib import Path

import pytest

import flash_frac.ops

ROOT = Path(flash_frac.ops.__file__).parent
MOST_ARGUMENTS = 27


def is_compiled(node):
    """Whether a node is a function under triton.jit, with or without options."""
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
    names = [ast.unparse(d.func if isinstance(d, ast.Call) else d) for d in decorators]
    return "triton.jit" in names


def compiled_functions():
    """By file and name."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        nodes = filter(is_compiled, ast.parse(path.read_text()).body)
        found |= {(str(path.relative_to(ROOT)), node.name): node for node in nodes}
    return found


FUNCTIONS = compiled_functions()
KERNELS = [name for name in FUNCTIONS if name[1].endswith("_kernel")]


def parameters(file, name):
    """Of the function that a call means: one of the same file, or else an imported one."""
    owners = [key for key in FUNCTIONS if key[1] == name]
    key = (file, name) if (file, name) in owners else owners[0] if owners else None
    return [] if key is None else [argument.arg for argument in FUNCTIONS[key].args.args]


def base(node):
    """The name that a sum of a pointer and offsets starts with, less its fields; None if none."""
    while isinstance(node, ast.BinOp | ast.Attribute):
        node = node.left if isinstance(node, ast.BinOp) else node.value
    return node.id if isinstance(node, ast.Name) else None


def pointers(file, name):
    """What a function loads from, stores to, or passes on as a pointer."""
    found = set()
    for call in ast.walk(FUNCTIONS[file, name]):
        if not isinstance(call, ast.Call):
            continue
        called = ast.unparse(call.func)
        if called in ("tl.load", "tl.store"):
            found.add(base(call.args[0]))
        for parameter, argument in zip(parameters(file, called), call.args, strict=False):
            if parameter.startswith("p_"):
                found.add(base(argument))
    return found - {None}


@pytest.mark.parametrize(("file", "name"), KERNELS)
def test_kernels_are_explained_and_short_of_arguments(file, name):
    assert ast.get_docstring(FUNCTIONS[file, name])
    assert len(parameters(file, name)) <= MOST_ARGUMENTS
    assert pointers(file, name)


@pytest.mark.parametrize(("file", "name"), FUNCTIONS)
def test_names_of_pointers(file, name):
    assert [pointer for pointer in pointers(file, name) if not pointer.startswith("p_")] == []
