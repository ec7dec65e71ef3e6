"""Labels of Python tokens, from the syntax tree of a source file.

A row is a logical line. Spans are written in IOB: ``def f(a, b)`` is ``O B-FUNCTION O B-PARAMETER O B-PARAMETER O``.
"""

import ast
import io
import token
import tokenize
from collections.abc import Iterator
from tokenize import TokenInfo

LAYOUT = {token.NEWLINE, token.NL, token.INDENT, token.DEDENT, token.COMMENT, token.ENDMARKER}
SHOWN = {token.STRING: '"..."', token.NUMBER: "0"}


def labeled_lines(source: str) -> Iterator[dict[str, list[str]]]:
    """``{"tokens", "labels"}`` of each logical line without f-strings, which versions of Python tokenize differently.

    The text of a string is "..." and that of a number 0.
    """
    source = source.encode("ascii", "replace").decode()  # the tree counts columns in bytes, the tokens in characters
    lines = list(logical_lines(source))
    tokens = [one for line in lines for one in line]
    labels = {}
    for kind, first, last in spans(ast.parse(source), tokens):
        for number in range(first, last + 1):
            labels[tokens[number].start] = f"{'B' if number == first else 'I'}-{kind}"
    for line in lines:
        if not any(is_f_string(one) for one in line):
            yield {
                "tokens": [SHOWN.get(one.type, one.string) for one in line],
                "labels": [labels.get(one.start, "O") for one in line],
            }


def logical_lines(source: str) -> Iterator[list[TokenInfo]]:
    """The tokens of each line, without comments and layout; with brackets it may span several lines of the file."""
    line: list[TokenInfo] = []
    for found in tokenize.generate_tokens(io.StringIO(source).readline):
        if found.type not in LAYOUT:
            line.append(found)
        elif found.type == token.NEWLINE:
            yield line
            line = []


def spans(tree: ast.AST, tokens: list[TokenInfo]) -> Iterator[tuple[str, int, int]]:
    """The names in a tree, as ``kind, first, last`` with the numbers of tokens.

    FUNCTION and CLASS at their definitions, BASE of a class, PARAMETER, MODULE that is imported (from), CALL: a name,
    dotted or not, that is called, KEYWORD in a call.
    """
    number_at = {one.start: number for number, one in enumerate(tokens)}
    for node in walk(tree):
        first = number_at.get((getattr(node, "lineno", 0), getattr(node, "col_offset", 0)), 0)
        match node:
            case ast.FunctionDef():
                yield "FUNCTION", first + 1, first + 1
            case ast.AsyncFunctionDef():
                yield "FUNCTION", first + 2, first + 2
            case ast.ClassDef():
                yield "CLASS", first + 1, first + 1
                yield from (dotted("BASE", base, number_at) for base in node.bases if is_dotted(base))
            case ast.arg():
                yield "PARAMETER", first, first
            case ast.keyword(arg=str()):
                yield "KEYWORD", first, first
            case ast.Call() if is_dotted(node.func):
                yield dotted("CALL", node.func, number_at)
            case ast.Import():
                for alias in node.names:
                    start = number_at[alias.lineno, alias.col_offset]
                    yield "MODULE", start, start + 2 * alias.name.count(".")
            case ast.ImportFrom():
                last = next(number for number in range(first, len(tokens)) if tokens[number].string == "import") - 1
                yield "MODULE", first + 1, last


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those in f-strings."""
    yield node
    for child in ast.iter_child_nodes(node):
        if type(child).__name__ not in ("JoinedStr", "TemplateStr"):
            yield from walk(child)


def is_dotted(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and is_dotted(node.value))


def dotted(kind: str, node: ast.expr, number_at: dict[tuple[int, int], int]) -> tuple[str, int, int]:
    first = number_at[node.lineno, node.col_offset]
    return kind, first, first + 2 * ast.unparse(node).count(".")


def is_f_string(one: TokenInfo) -> bool:
    """Whether a token is an f-string or a part of one."""
    is_part = token.tok_name[one.type].startswith(("FSTRING", "TSTRING"))
    return is_part or (one.type == token.STRING and "f" in one.string.lower().split(one.string[-1])[0])
