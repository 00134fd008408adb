"""Pages: one file each, nothing fetched, every text escaped."""

import base64
import hashlib
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from chargpt.outputs import MARK, with_digest
from chargpt.text.display import CONTROL_NAMES, FIRST_CONTROL_PICTURE, FORMATS, printable

PAGES = Path(__file__).parent / "pages"
INVISIBLE = re.compile(f"[\u2400-\u241f]|{FORMATS.pattern}")


def render(
    name: str, script: str | None = None, *, folder: Path = PAGES, policy: str = "", **values: Any
) -> str:
    """Return the page that a template makes of some values.

    Strings among them are HTML-escaped, with control characters as signs; only `Markup` stands as
    HTML.
    The page's policy (Content-Security-Policy) forbids all fetching, and every script but the
    named one.

    Args:
        name: of the template in `folder`; it may extend those of `pages/`.
        script: name of the page's script in `folder`.
        folder: of the template and the script.
        policy: further directives of the page's policy, each begun by a semicolon.
        values: of the template.
    """
    pages = Environment(
        loader=FileSystemLoader([folder, PAGES]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
    )
    pages.filters["signs"] = signs
    code = "" if script is None else (folder / script).read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    source = f"'sha256-{digest}'" if code else "'none'"
    template = pages.get_template(name)
    return template.render(
        mark=MARK, script=Markup(code), script_source=Markup(source), policy=policy, **values
    )


def _shown(value: object) -> object:
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def signs(text: str) -> Markup:
    """Return a text as HTML in which control and format characters are shown as names or codes.

    The fonts of many systems lack the signs of control characters.
    """

    def element(found: re.Match[str]) -> str:
        is_format = FORMATS.match(found[0])
        code = ord(found[0])
        name = f"U+{code:04X}" if is_format else CONTROL_NAMES[code - FIRST_CONTROL_PICTURE]
        return f'<i class="sign" data-name="{name}">{found[0]}</i>'

    return Markup(INVISIBLE.sub(element, escape(printable(text))))


def encoded(page: str) -> bytes:
    """Return what `render` returned as the content of a file, with its digest."""
    return with_digest(page.encode(errors="replace"))
