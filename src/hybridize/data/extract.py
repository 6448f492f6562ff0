"""Documentation strings, or bare code, out of Python source files that are parsed and never imported.

Standard library only, and also a script: workers run this file by its path, reading `{"kind", "files"}` as JSON from
stdin and writing one list a file to stdout, so that they start in milliseconds and load no package.
"""

from __future__ import annotations

import ast
import gc
import inspect
import json
import re
import sys
import warnings
from collections.abc import Iterator

_TRIPLE = re.compile(rb'"""(.*?)"""|\'\'\'(.*?)\'\'\'', re.DOTALL)
_DOCUMENTED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_UNPARSABLE = (SyntaxError, ValueError, RecursionError, MemoryError)


def docstrings(source: bytes, module: str, minimum: int = 400) -> list[tuple[str, str]]:
    """Headings and documentation strings of a module, in the order of its source.

    A file whose triple-quoted strings are shorter than `minimum` characters together gives nothing and is not parsed.
    """
    if sum(match.end() - match.start() - 6 for match in _TRIPLE.finditer(source)) < minimum:
        return []
    try:
        tree = ast.parse(source)
    except _UNPARSABLE:
        return []
    pairs = []
    for node, name in _walk(tree, module):
        text = _doc(node)
        if text:
            pairs.append((_heading(node, name), text))
    return pairs


def code(source: bytes) -> str:
    """The module's code without comments and documentation strings; empty where it does not parse."""
    try:
        tree = ast.parse(source)
    except _UNPARSABLE:
        return ""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, *_DOCUMENTED)) and _doc(node):
            node.body = node.body[1:] or [ast.Pass()]
    try:
        return ast.unparse(tree)
    except RecursionError:
        return ""


def _walk(node: ast.AST, name: str) -> Iterator[tuple[ast.AST, str]]:
    """The module, its classes and functions (not those inside functions), with their dotted names."""
    yield node, name
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return
    stack: list[ast.AST] = list(reversed(getattr(node, "body", [])))
    while stack:
        child = stack.pop()
        if isinstance(child, _DOCUMENTED):
            yield from _walk(child, f"{name}.{child.name}")
        elif isinstance(child, (ast.If, ast.Try, ast.With)):
            stack.extend(
                reversed([node for node in ast.iter_child_nodes(child) if isinstance(node, ast.stmt)])
            )


def _doc(node: ast.AST) -> str:
    body = getattr(node, "body", None)
    if not body or not isinstance(body[0], ast.Expr):
        return ""
    value = body[0].value
    if not isinstance(value, ast.Constant) or not isinstance(value.value, str):
        return ""
    # A lone surrogate in a literal cannot be encoded, and no tokenizer knows one.
    return inspect.cleandoc(value.value).strip().encode("utf-8", "ignore").decode()


def _heading(node: ast.AST, name: str) -> str:
    if isinstance(node, ast.ClassDef):
        return f"class {name}"
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return name
    spec = node.args
    names = [argument.arg for argument in spec.posonlyargs + spec.args]
    if names[:1] in (["self"], ["cls"]):
        names = names[1:]
    if spec.vararg:
        names.append(f"*{spec.vararg.arg}")
    elif spec.kwonlyargs:
        names.append("*")
    names += [argument.arg for argument in spec.kwonlyargs]
    if spec.kwarg:
        names.append(f"**{spec.kwarg.arg}")
    return f"{name}({', '.join(names)})"


def _main() -> None:
    warnings.simplefilter("ignore")  # invalid escapes in other people's sources
    gc.disable()  # syntax trees have no cycles, and collecting over them takes a quarter of the time
    request = json.load(sys.stdin)
    for path, module in request["files"]:
        try:
            with open(path, "rb") as file:
                source = file.read()
        except OSError:
            source = b""
        print(json.dumps(code(source) if request["kind"] == "code" else docstrings(source, module)))


if __name__ == "__main__":
    _main()
