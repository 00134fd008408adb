"""Pages: one file each, nothing fetched, every text escaped."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from chargpt.errors import ChargptError
from chargpt.files import write_atomically


def render(name: str, **facts: Any) -> str:
    """Return the page that a template of `pages/` makes of some facts.

    Strings among them are shown as they are, whatever they hold; only `Markup` stands as HTML.
    """
    pages = Environment(
        loader=PackageLoader("chargpt.analysis", "pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    return pages.get_template(name).render(**facts)


def write_page(content: str, path: Path) -> Path:
    """Write a page to a file.

    Raises:
        ChargptError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content.encode())
    except OSError as error:
        raise ChargptError(f"{path} cannot be written ({error.strerror}); name another") from None
    return path
