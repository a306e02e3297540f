"""Renders a document as one HTML page without network or JavaScript, from the templates next to this folder."""

from __future__ import annotations

import functools
from importlib import resources
from itertools import groupby
from typing import TYPE_CHECKING

from fastloop.report.drawing.bars import NUMBER_ERRORS, Chart, choose_ink
from fastloop.report.drawing.curves import Curve
from fastloop.report.drawing.document import Document, strip_unprintable
from fastloop.report.drawing.markdown import CODE, to_markdown

if TYPE_CHECKING:
    import jinja2


def draw_reports(document: Document) -> dict[str, str]:
    """Return report.md and report.html by name. If the page cannot be made, it is missing, and report.md says why."""
    try:
        return {"report.md": to_markdown(document), "report.html": to_html(document)}
    except Exception as error:  # for example, jinja2 is missing; report.md must exist anyway
        return {"report.md": to_markdown(document, f"There is no report.html: {type(error).__name__}: {error}")}


def to_html(document: Document) -> str:
    """Render the whole document.

    Raises:
        ImportError: jinja2 is not installed.
    """
    columns = [(is_narrow, list(group)) for is_narrow, group in groupby(document.sections, lambda one: one.is_narrow)]
    return _compile_templates().get_template("document.html.jinja").render(document=document, columns=columns)


@functools.cache
def _compile_templates() -> jinja2.Environment:
    """The templates, compiled once in a process: that takes longer than rendering them."""
    import jinja2
    import markupsafe

    def source(name: str) -> str:
        return resources.files("fastloop.report").joinpath("templates", name).read_text(encoding="utf-8")

    made = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FunctionLoader(source),
        finalize=lambda value: strip_unprintable(value) if type(value) is str else value,
    )
    made.filters |= {"split_code": CODE.split, "choose_ink": choose_ink}
    bars, curve = (vars(made.get_template(f"{name}.html.jinja").module)[name] for name in ("bars", "curve"))

    def draw(picture: Chart | Curve) -> str:
        """Draw one picture, or if that fails, a line that says why, so that the rest of the page still appears."""
        try:
            return str(bars(picture) if isinstance(picture, Chart) else curve(picture))
        except NUMBER_ERRORS as error:
            return str(bars(Chart.missing(error)))

    made.filters["draw"] = lambda picture: markupsafe.Markup(draw(picture))
    return made
