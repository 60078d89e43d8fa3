"""Templates of pages and reports."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

STYLES = Path(__file__).parent / "static"
"""What pages that stand alone include."""


def environment(*folders: Path) -> Environment:
    """Of the templates in these folders: everything is escaped, and an unknown name is an error."""
    return Environment(
        loader=FileSystemLoader(folders),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
