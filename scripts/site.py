#!/usr/bin/env python3
"""Builds the site for scripts/site, which lays out what pages may link to. Ends with status 1 where a warning came: a link that leads
nowhere, an anchor that no heading has, a page that the list lacks.

    site.py PAGES SITE

docs/SUMMARY.md in PAGES is the list: its headings become captions, its nested items the pages below a page.
"""

import os
import pathlib
import re
import sys

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

# Diagrams are drawn where the network is there; else their text stands.
DIAGRAMS = """
const diagrams = document.querySelectorAll('div.highlight-mermaid');
if (diagrams.length > 0) {
  import('https://cdn.jsdelivr.net/npm/mermaid@11/dist/mermaid.esm.min.mjs').then(({ default: mermaid }) => {
    diagrams.forEach(text => {
      const drawn = document.createElement('pre');
      drawn.className = 'mermaid';
      drawn.textContent = text.textContent;
      text.replaceWith(drawn);
    });
    mermaid.initialize({ startOnLoad: false });
    mermaid.run();
  });
}
"""
LINK = re.compile(r"\]\(([^)\s:#]+)\)")


def main():
    pages, site = (pathlib.Path(folder).resolve() for folder in sys.argv[1:])
    name_folders(pages)
    put_list(pages)
    static = site.parent / "site-static"
    static.mkdir(exist_ok=True)
    (static / "diagrams.js").write_text(DIAGRAMS)
    settings = {"project": "Windlass", "html_title": "Windlass", "root_doc": "README", "extensions": ["myst_parser"], "html_theme": "furo",
                "source_suffix": {".md": "markdown"}, "myst_heading_anchors": 6, "html_static_path": [str(static)],
                "html_js_files": [("diagrams.js", {"type": "module"})], "html_copy_source": False, "html_show_copyright": False}
    app = Sphinx(pages, None, site, site.parent / "site-state", "html", confoverrides=settings, status=None, warningiserror=True,
                 freshenv=True)
    app.add_lexer("mermaid", TextLexer)
    app.build()
    (site / "index.html").write_text('<!doctype html><meta http-equiv="refresh" content="0; url=README.html">\n')
    sys.exit(app.statuscode)


def name_folders(pages):
    """Links to folders lead to their README; a folder that has none gets one, which lists its files."""
    for page in sorted(pages.rglob("*.md")):
        def target(link, page=page):
            folder = page.parent / link[1]
            if not folder.is_dir():
                return link[0]
            readme = folder / "README.md"
            if not readme.exists():
                files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
                readme.write_text("\n".join(["---", "orphan: true", "---", f"# {folder.name}", "", *(f"- [{file}]({file})" for file in files)]))
            return f"]({os.path.join(link[1], 'README.md')})"
        page.write_text(LINK.sub(target, page.read_text()))


def put_list(pages):
    """Each page that has others below it gets their list, which only the site's menu shows."""
    summary = pages / "docs" / "SUMMARY.md"
    lists, parents, caption = {}, {0: "README.md"}, ""
    for line in summary.read_text().splitlines():
        item = re.match(r"( *)- \[(.+)\]\((.+)\)$", line)
        if item:
            depth = len(item[1]) // 2 + 1
            page = os.path.normpath(os.path.join("docs", item[3]))
            parents[depth] = page
            lists.setdefault((parents[depth - 1], caption if depth == 1 else ""), []).append(f"{item[2]} </{page.removesuffix('.md')}>")
        elif line.startswith("# "):
            caption = line[2:]
    summary.unlink()
    for (page, caption), entries in lists.items():
        with (pages / page).open("a") as file:
            file.write("\n".join(["", "```{toctree}", ":hidden:", *([f":caption: {caption}"] if caption else []), "", *entries, "```", ""]))


if __name__ == "__main__":
    main()
