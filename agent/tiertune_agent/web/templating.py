"""Templates of pages and reports."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

STYLES = Path(__file__).parent / "static"
"""Styles that self-contained pages include."""


def environment(*folders: Path) -> Environment:
    """Environment of the templates in these folders: everything is escaped, and an unknown name is an error."""
    return Environment(
        loader=FileSystemLoader(folders),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
