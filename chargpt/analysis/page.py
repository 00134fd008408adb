"""Pages: one file each, nothing fetched, every text escaped."""

import base64
import hashlib
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from chargpt.errors import ChargptError
from chargpt.files import write_output


def render(name: str, script: str | None = None, **facts: Any) -> str:
    """Return the page that a template of `pages/` makes of some facts.

    Strings among them are shown as they are, whatever they hold; only `Markup` stands as HTML. The
    page's policy forbids all fetching, and every script but the named one of `pages/`.
    """
    pages = Environment(
        loader=PackageLoader("chargpt.analysis", "pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    words = "" if script is None else (Path(__file__).parent / "pages" / script).read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(words.encode()).digest()).decode()
    source = f"'sha256-{digest}'" if words else "'none'"
    template = pages.get_template(name)
    return template.render(script=Markup(words), script_source=Markup(source), **facts)


def write_page(content: str, path: Path) -> Path:
    """Write a page to a file.

    Raises:
        ChargptError: the file cannot be written.
    """
    try:
        write_output(path, content.encode(errors="replace"))
    except OSError as error:
        raise ChargptError(f"{path} cannot be written ({error.strerror}); name another") from None
    return path
