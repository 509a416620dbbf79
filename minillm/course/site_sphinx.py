"""What Sphinx loads to build the site: formulas as MathML, which browsers draw without a script."""

from __future__ import annotations

import re

from docutils import nodes

# What docutils' converter does not know or reads otherwise than TeX, in terms that it reads alike: an argument without
# braces is one digit, so that \frac12 is a half.
_SPELLINGS = (
    (re.compile(r"\\([dt]?frac)\s*(\d)"), r"\\\1{\2}"),
    (re.compile(r"(\\[dt]?frac\{\d\})\s*(\d)"), r"\1{\2}"),
    (re.compile(r"([\^_])(\d)(?=\d)"), r"\1{\2}"),
    (re.compile(r"\\dots(?![a-zA-Z])"), r"\\ldots"),
    (re.compile(r"\\texttt(?![a-zA-Z])"), r"\\text"),
    (re.compile(r"\\([bB]igg?)(?=\s*(?:[(\[]|\\[{lL]))"), r"\\\1l"),
    (re.compile(r"\\([bB]igg?)(?=\s*(?:[)\]|]|\\[}r|]))"), r"\\\1r"),
)


def setup(app) -> dict:
    """Called by Sphinx, which finds this module in the configuration."""
    app.add_html_math_renderer("mathml", (_inline, None), (_displayed, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def mathml(formula: str, displayed: bool = False) -> str:
    """A LaTeX formula as MathML. Raises docutils' MathError for a command that it does not know."""
    from docutils.utils.math.latex2mathml import tex2mathml

    for pattern, known in _SPELLINGS:
        formula = pattern.sub(known, formula)
    return re.sub(r"\\([_%&#$])", r"\1", tex2mathml(formula, as_block=displayed))  # \text keeps them as they are


def _inline(translator, node) -> None:
    translator.body.append(_or_warning(node.astext(), False, node))
    raise nodes.SkipNode


def _displayed(translator, node) -> None:
    translator.body.append(f'<div class="book-formula">{_or_warning(node.astext(), True, node)}</div>')
    raise nodes.SkipNode


def _or_warning(formula: str, displayed: bool, node) -> str:
    from docutils.utils.math import MathError
    from sphinx.util import logging

    try:
        return mathml(formula, displayed)
    except MathError as error:
        logging.getLogger(__name__).warning("formula %r: %s", formula, error, location=node)
        return ""
