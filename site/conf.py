"""Sphinx's settings: MyST reads the Markdown, Furo draws it, autodoc makes the API pages from docstrings."""

from __future__ import annotations

import re
from importlib.metadata import version as installed_version
from itertools import groupby
from typing import cast

from packaging.version import Version
from sphinx.application import Sphinx

project = "Leasehold"
author = "The Leasehold authors"
release = installed_version("leasehold")
version = "dev" if Version(release).is_devrelease else release

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
include_patterns = [
    "index.md",
    "python/*.md",
    "docs/**.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "bench/*.md",
    "examples/README.md",
]
myst_heading_anchors = 4  # the anchors that relative links use, made as code hosts make them
myst_enable_extensions = ["colon_fence"]
suppress_warnings = ["myst.header"]  # a page may begin a table's heading at level 3
default_role = "code"
smartquotes_action = "qe"  # not dashes: `--` in a table is an option or the end of options

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
add_module_names = False

html_theme = "furo"
html_title = f"Leasehold {version}"
html_static_path = ["static", "fonts"]
html_css_files = ["site.css"]
html_js_files = [("../../versions.js", {"priority": 100}), "versions.js"]
html_favicon = "fonts/icon.svg"
html_show_sourcelink = html_copy_source = html_show_copyright = html_show_sphinx = False
html_theme_options = {
    "light_logo": "icon.svg",
    "dark_logo": "icon.svg",
    "light_css_variables": {
        "font-stack": '"LH Sans", system-ui, sans-serif',
        "font-stack--monospace": '"LH Mono", ui-monospace, monospace',
        "color-brand-primary": "#0b7a5a",
        "color-brand-content": "#0b7a5a",
        "color-background-primary": "#ffffff",
        "color-background-secondary": "#f8f8f6",
        "color-foreground-primary": "#1c1b19",
        "color-foreground-secondary": "#595750",
        "color-highlight-on-target": "#e9f5f0",
        "color-sidebar-link-text": "var(--color-foreground-secondary)",
        "color-sidebar-link-text--top-level": "var(--color-foreground-secondary)",
    },
    "dark_css_variables": {
        "color-brand-primary": "#52cba4",
        "color-brand-content": "#52cba4",
        "color-background-primary": "#0e0f10",
        "color-background-secondary": "#141617",
        "color-foreground-primary": "#e8e8e4",
        "color-foreground-secondary": "#a6a8a7",
        "color-highlight-on-target": "#15302a",
        "color-sidebar-link-text": "var(--color-foreground-secondary)",
        "color-sidebar-link-text--top-level": "var(--color-foreground-secondary)",
    },
}

# -- docstrings: plain text, in which aligned lists explain parameters and indented blocks are code

_PARAMETER = re.compile(r"(\S+(?:, \S+)*)  +(\S.*)")


def _as_list(block: list[str]) -> list[str]:
    items: list[str] = []
    for line in block:
        if found := _PARAMETER.fullmatch(line):
            items.append(f"- `{found[1]}`: {found[2]}")
        else:
            items.append(f"  {line.strip()}")
    return items


def format_docstring(*event: object) -> None:
    """A handler of autodoc-process-docstring: changes its last argument, the lines, in place."""
    lines = cast("list[str]", event[-1])
    blocks = [list(block) for blank, block in groupby(lines, key=lambda line: not line.strip()) if not blank]
    formatted: list[str] = []
    for block in blocks:
        if all(line.startswith("    ") for line in block):
            formatted += ["::", "", *block, ""]
        elif _PARAMETER.fullmatch(block[0]):
            formatted += [*_as_list(block), ""]
        else:
            formatted += [*block, ""]
    lines[:] = formatted


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", format_docstring)
