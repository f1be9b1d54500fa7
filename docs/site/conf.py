"""Sphinx's configuration for the site: `make docs`. docs/site/assemble.py lays the pages out."""

from importlib import metadata

project = "quota-ledger"
author = "the quota-ledger authors"
release = metadata.version("quota-ledger")
html_title = f"quota-ledger {release}"
html_theme = "furo"
extensions = ["myst_parser"]
myst_heading_anchors = 4
html_copy_source = False
html_show_copyright = False
# A transcript has placeholders that are not of its language.
suppress_warnings = ["misc.highlighting_failure"]
