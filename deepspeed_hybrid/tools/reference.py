# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The API reference and the guide as HTML, by pdoc: ``python -m deepspeed_hybrid.tools.reference FOLDER``."""

import importlib
import inspect
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urldefrag, urlsplit

import deepspeed_hybrid

GUIDE = "deepspeed_hybrid.docs"
# What a user may import; everything else is private.
MODULES = (
    "deepspeed_hybrid",
    GUIDE,
    "deepspeed_hybrid.speculative.config",
    "deepspeed_hybrid.speculative.draft",
    "deepspeed_hybrid.speculative.mtp",
    "deepspeed_hybrid.speculative.mtp_config",
    "deepspeed_hybrid.speculative.mtp_train",
    "deepspeed_hybrid.speculative.mtp_weights",
    "deepspeed_hybrid.speculative.rope",
    "deepspeed_hybrid.speculative.train",
)
TITLE = re.compile(r"^# (.+)$", re.MULTILINE)


def build(out: Path) -> list[str]:
    """Write the pages to ``out``; what is wrong with their links, each as a sentence.

    Raises:
        ImportError: pdoc is not installed.
    """
    import pdoc

    out = out.resolve()  # as links are
    pdoc.render.configure(docformat="google", show_source=False, footer_text=deepspeed_hybrid.__version__)
    pdoc.pdoc(*(MODULES[0], rf"!{MODULES[0]}\.", *MODULES[1:]), output_directory=out)
    for name in MODULES:
        page = out.joinpath(*name.split(".")).with_suffix(".html")
        html = _without_links_to_inherited(page.read_text(), importlib.import_module(name))
        page.write_text(_as_one_page(html) if name == GUIDE else html)
    return [*broken_links(out), *unlinked_names(out)]


def _without_links_to_inherited(html: str, module: ModuleType) -> str:
    """pdoc links to members that a class has from DeepSpeed's or torch's, and does not document them."""
    ids = _Page(html).ids

    def replaced(link: re.Match) -> str:
        owner, member, text = link.groups()
        parents = getattr(module, owner, type(None)).__mro__[1:]
        inherited = any(member in {**vars(parent), **inspect.get_annotations(parent)} for parent in parents)
        return text if inherited and f"{owner}.{member}" not in ids else link.group()

    return re.sub(r'<a href="#(\w+)\.(\w+)">([^<]*)</a>', replaced, html)


def _as_one_page(html: str) -> str:
    """The guide's pages are files by themselves, and here parts of one; its names are the package's."""
    for path in (Path(deepspeed_hybrid.__file__).parent / "docs").glob("*.md"):
        title = TITLE.search(path.read_text())
        assert title is not None, f"{path.name} has no title"
        html = html.replace(f'href="{path.name}"', f'href="#{slug(title.group(1))}"')
        html = html.replace(f'href="{path.name}#', 'href="#')
    for name in deepspeed_hybrid.__all__:
        html = html.replace(
            f"<code>{name}</code>", f'<a href="../deepspeed_hybrid.html#{name}"><code>{name}</code></a>'
        )
    return html


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and pdoc make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


class _Page(HTMLParser):
    def __init__(self, text: str):
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loose: list[str] = []  # what is set as code outside of a link
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list) -> None:
        values = dict(attributes)
        if values.get("id"):
            self.ids.add(values["id"])
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        if tag in ("a", "code", "pre"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self._open:
            while self._open.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        if self._open == ["code"]:
            self.loose.append(data)


def broken_links(out: Path) -> list[str]:
    """Links within ``out`` to files or anchors that are not there."""
    pages = {path: _Page(path.read_text()) for path in out.rglob("*.html")}
    broken = []
    for path, page in pages.items():
        for link in page.links:
            address, anchor = urldefrag(link)
            if urlsplit(link).scheme:
                continue
            target = path if not address else (path.parent / unquote(address)).resolve()
            there = target in pages and (not anchor or unquote(anchor) in pages[target].ids)
            if not there:
                broken.append(f"{path.relative_to(out)} links to {link}, which is not there")
    return broken


def unlinked_names(out: Path) -> list[str]:
    """Public names set as code in a docstring that lead nowhere."""
    public = set(deepspeed_hybrid.__all__)
    return [
        f"{path.relative_to(out)} names {name} without a link"
        for path in out.rglob("*.html")
        for name in _Page(path.read_text()).loose
        if name in public
    ]


if __name__ == "__main__":
    problems = build(Path(sys.argv[1]))
    print("\n".join(problems) or f"wrote {sys.argv[1]}")
    sys.exit(bool(problems))
