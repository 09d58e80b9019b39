"""Griffe extension: turns the reStructuredText of docstrings into Markdown, which the documentation is made of.

Docstrings are written for ``help()``: roles such as ``:class:`~offload.OffloadModel``` and literal blocks after ``::``.
"""

from __future__ import annotations

import ast
import re
import textwrap
from typing import Any

import griffe  # of mkdocstrings, the extra docs

ROLE = re.compile(r":(?:class|meth|func|mod|attr|exc|data|obj):`(?P<title>[^`<>]*?)\s*(?:<(?P<target>[^`<>]+)>)?`")
LITERAL = re.compile(
    r"^(?P<indent>[ ]*)(?P<text>[^\n]*?)::[ ]*\n\n(?P<code>(?:(?P=indent)[ ]{4,}[^\n]*\n|[ ]*\n)+)", re.MULTILINE
)


def without_roles(text: str) -> str:
    """Each role becomes code: ``~a.b.C`` is shown as ``C``."""

    def code(match: re.Match[str]) -> str:
        title = match["title"] or match["target"]
        return f"`{title.rpartition('.')[2] if title.startswith('~') else title}`"

    return ROLE.sub(code, text)


def fenced(text: str) -> str:
    """Each literal block becomes a fenced one, marked as Python where it is Python."""

    def block(match: re.Match[str]) -> str:
        code = textwrap.dedent(match["code"]).strip("\n")
        try:
            ast.parse(code)
            language = "python"
        except SyntaxError:
            language = "text"
        lines = [f"```{language}", *code.splitlines(), "```"]
        introduction = f"{match['indent']}{match['text']}:\n\n" if match["text"].strip() else ""
        return introduction + "".join(f"{match['indent']}{line}".rstrip() + "\n" for line in lines) + "\n"

    return LITERAL.sub(block, text + "\n").rstrip("\n")


def comment_above(attribute: griffe.Attribute) -> str:
    """The lines above an attribute that begin with ``#:``."""
    lines = attribute.module.lines_collection[attribute.filepath][: (attribute.lineno or 1) - 1]
    above = [line.strip() for line in lines]
    first = len(above)
    while first and above[first - 1].startswith("#:"):
        first -= 1
    return "\n".join(line.removeprefix("#:").strip() for line in above[first:])


class Docstrings(griffe.Extension):
    """Rewrites the docstring of every object; an attribute without one gets the comment above it."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called once for each object, when its package is loaded."""
        if isinstance(obj, griffe.Attribute) and obj.docstring is None and (comment := comment_above(obj)):
            obj.docstring = griffe.Docstring(comment, lineno=obj.lineno, parent=obj)
        if obj.docstring is not None:
            obj.docstring.value = fenced(without_roles(obj.docstring.value))
