#!/usr/bin/env python3
"""Builds the site for scripts/site, which lays out what pages may link to. Ends with status 1 where a warning came: a link that leads
nowhere, an anchor that no heading has, a page that the list lacks, a file from the net.

    site.py PAGES SITE VERSION

No page loads anything from the net: clusters often have none. docs/SUMMARY.md in PAGES is the list: its headings become captions, its nested items the pages below a page.
"""

import html
import os
import pathlib
import re
import sys

from sphinx.application import Sphinx

# Plots have black lines on white. A diagram is part of its page, so that it has the colours of the page's theme.
STYLE = """
@media (prefers-color-scheme: dark) { body:not([data-theme=light]) img[src$="-graph.svg"] { filter: invert(1) hue-rotate(180deg) } }
body[data-theme=dark] img[src$="-graph.svg"] { filter: invert(1) hue-rotate(180deg) }
article p:has(> img), .diagram { display: block; overflow-x: auto }
.diagram svg { width: 100%; min-width: 36rem; height: auto }
@media (max-width: 40rem) { td code { overflow-wrap: anywhere } td:first-child:has(code) { min-width: 10rem } }
@media (max-width: 40rem) { article img[src$="-graph.svg"] { max-width: none; width: 48rem } }
"""
LINK = re.compile(r"\]\(([^)\s:#]+)\)")


def main():
    pages, site = (pathlib.Path(folder).resolve() for folder in sys.argv[1:3])
    version = sys.argv[3]
    name_folders(pages)
    keep_one_title(pages)
    put_list(pages)
    static = site.parent / "site-static"
    static.mkdir(exist_ok=True)
    diagrams = {path.name: path.read_text() for path in (pages / "docs/diagrams").glob("*.svg")}
    (static / "windlass.css").write_text(STYLE + style_of(diagrams))
    settings = {"project": "Windlass", "release": version, "html_title": f"Windlass {version}", "root_doc": "README",
                "extensions": ["myst_parser", "sphinx_copybutton"], "html_theme": "furo", "source_suffix": {".md": "markdown"},
                "myst_heading_anchors": 6, "html_static_path": [str(static)], "html_css_files": ["windlass.css"],
                "copybutton_selector": ", ".join(f"div.highlight-{language} pre" for language in ("sh", "yaml", "dockerfile", "text")),
                "html_copy_source": False, "html_show_copyright": False}
    app = Sphinx(pages, None, site, site.parent / "site-state", "html", confoverrides=settings, status=None, warningiserror=True,
                 freshenv=True)
    app.build()
    (site / "index.html").write_text('<!doctype html><meta http-equiv="refresh" content="0; url=README.html">\n')
    for page in site.rglob("*.html"):
        page.write_text(describe(draw(page.read_text(), diagrams)))
    loaded = [f"{path.relative_to(site)}: {found}" for path in site.rglob("*") if path.suffix in (".html", ".css")
              for found in from_net(path.read_text())]
    print(*loaded, sep="\n", end="\n" if loaded else "", file=sys.stderr)
    sys.exit(app.statuscode or bool(loaded))


def from_net(text):
    """What a page or style sheet loads from another host. Links that a reader may follow are no such thing."""
    tags = re.findall(r"<(?:script|img|link|iframe|source|video|object)\b[^>]*?(?:src|href|data)=\"((?:https?:)?//[^\"]*)", text)
    return tags + ["".join(found) for found in re.findall(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')]*)|import\([\"']((?:https?:)?//[^\"']*)", text)]


def style_of(diagrams):
    """The style of diagrams, for diagrams alone. Colours come from the page."""
    lines = {line for text in diagrams.values() for line in re.search(r"<style>\n(.*?)</style>", text, re.DOTALL)[1].splitlines()}
    return ".diagram {\n" + "\n".join(sorted(line for line in lines if "svg {" not in line)) + "\n}\n"


def draw(page, diagrams):
    """Puts diagrams into the page, in the place of images."""
    def drawn(image):
        text = diagrams.get(image[1])
        if text is None:
            return image[0]
        return '<span class="diagram">' + re.sub(r"\s*<style>.*?</style>", "", text, flags=re.DOTALL) + "</span>"
    return re.sub(r'<img [^>]*src="[^"]*/?_images/([^"/]+)"[^>]*>', drawn, page)


def describe(page):
    """The first paragraph of a page describes it to search engines."""
    first = re.search(r"<article.*?<p>(.*?)</p>", page, re.DOTALL)
    if first is None:
        return page
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", first[1])).strip()
    return page.replace("<head>", f'<head><meta name="description" content="{html.escape(html.unescape(text))}">', 1)


def keep_one_title(pages):
    """The menu shows a page by its title. A page with several titles keeps the first; all later headings go one level down."""
    for page in pages.rglob("*.md"):
        blocks = page.read_text().split("```")
        titles = 0
        for number in range(0, len(blocks), 2):
            lines = blocks[number].split("\n")
            for at, line in enumerate(lines):
                titles += line.startswith("# ")
                if titles > 1 and re.match(r"#{1,5} ", line):
                    lines[at] = "#" + line
            blocks[number] = "\n".join(lines)
        if titles > 1 and page.name != "SUMMARY.md":
            page.write_text("```".join(blocks))


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
            file.write("\n".join(["", "```{toctree}", ":hidden:", ":titlesonly:", *([f":caption: {caption}"] if caption else []), "", *entries, "```", ""]))


if __name__ == "__main__":
    main()
