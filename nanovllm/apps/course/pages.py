"""The course as pages for a browser: `python -m nanovllm course FOLDER --html`.

Only this file imports markdown-it-py and Pygments, optional packages. The pages need no network.
"""

import re
import shutil
from collections.abc import Callable
from functools import partial
from html import escape
from pathlib import Path

from markdown_it import MarkdownIt
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

from nanovllm.apps.course.runs import RUNS
from nanovllm.apps.course.skeleton import CHAPTERS, SOLUTION, check_new
from nanovllm.features.trace.files import write

TEMPLATE = Path(__file__).with_name("page.html")
DOCS = CHAPTERS.parent
STYLE = "default"  # of Pygments: readable on a light ground
QUOTE = re.compile(r"<!-- quote: (\S+) (\S+) -->")
IN_CHINESE = re.compile(r"^\[中文\].*\n\n", re.MULTILINE)  # leads to a page that is not written


def sources() -> dict[Path, str]:
    """Return the files that become pages, with the names of the pages."""
    chapters = {path: f"{path.stem}.html" for path in CHAPTERS.glob("[0-9]*.md")}
    others = {DOCS / f"{name}.md": f"{name}.html" for name in ("guide", "experiments")}
    solutions = {path: f"solution-{path.stem}.html" for path in SOLUTION.glob("[a-z]*.py")}
    return {CHAPTERS / "README.md": "index.html"} | chapters | others | solutions


def write_pages(folder: Path, say: Callable[[str], None] = print) -> None:
    """Write the pages, the drawings and the traces of the course into an empty or new folder."""
    check_new(folder)
    folder.mkdir(parents=True, exist_ok=True)
    names = sources()
    for path, name in names.items():
        text = path.read_text("utf-8")
        if path.suffix == ".py":
            title, content = f"The solution: {path.name}", solution(path.name, text)
        else:
            title, content = text.split("\n")[0].removeprefix("# "), chapter(path, text, names)
        (folder / name).write_text(page(title, name, content), encoding="utf-8")
    for path in CHAPTERS.glob("*.svg"):
        shutil.copy(path, folder / path.name)
    for number, run in RUNS.items():
        say(f"chapter {number}: run")
        write(run().traces[0], folder / f"chapter-{number}.html")


def page(title: str, name: str, content: str) -> str:
    """Put content into the template. `name` is the page's file."""
    links = {"index.html": "Contents"} | {
        f"{path.stem}.html": path.stem.split("-")[0]
        for path in sorted(CHAPTERS.glob("[0-9]*.md"), key=lambda p: int(p.stem.split("-")[0]))
    }
    entries = []
    for link, label in links.items():
        here = ' aria-current="page"' if link == name else ""
        spoken = "" if label == "Contents" else f' aria-label="Chapter {label}"'
        entries.append(f'        <li><a href="{link}"{here}{spoken}>{label}</a></li>')
    fills = {
        "TITLE-GOES-HERE": escape(title),
        "CODE-STYLE-GOES-HERE": HtmlFormatter(style=STYLE, nobackground=True).get_style_defs("pre"),
        "NAVIGATION-GOES-HERE": "\n".join(entries),
        "CONTENT-GOES-HERE": content,
    }
    text = TEMPLATE.read_text("utf-8")
    for place, fill in fills.items():
        assert text.count(place) == 1
        text = text.replace(place, fill)
    return text


def solution(name: str, source: str) -> str:
    """Make the content of a page that shows a file of the solution."""
    return f"<h1>The solution: <code>{name}</code></h1>\n{code(source, 'python', '')}"


def chapter(path: Path, text: str, names: dict[Path, str]) -> str:
    """Make the content of a page from Markdown, with the chapter's trace in it."""
    parser = MarkdownIt("commonmark", {"html": True, "highlight": code}).enable("table")
    tokens = parser.parse(IN_CHINESE.sub("", text))
    for i, token in enumerate(tokens):
        if token.type == "heading_open":
            token.attrSet("id", slug(tokens[i + 1].content))
    content = parser.renderer.render(tokens, parser.options, {})
    content = QUOTE.sub(r'<p class="source">from <code>\1</code>: <code>\2</code></p>', content)
    label = "a table that scrolls sideways where the window is narrow"
    content = content.replace(
        "<table>", f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table>'
    ).replace("</table>", "</table></div>")
    content = re.sub(r"<th>\s*</th>", "<td></td>", content)
    content = re.sub(
        r'<a href="([^"]*)">(.*?)</a>', partial(link, path.parent, names), content, flags=re.DOTALL
    )
    found = re.match(r"# (\d+)\.", text)
    return content if found is None else with_trace(content, int(found[1]))


def with_trace(content: str, number: int) -> str:
    """Put a chapter's trace after the section that speaks of it."""
    name = f"chapter-{number}.html"
    trace = f"""\
<div class="trace">
<p><a href="{name}">The trace in a page of its own</a></p>
<iframe src="{name}" title="The trace of chapter {number}" loading="lazy"></iframe>
</div>
"""
    before, heading, after = content.partition('<h2 id="look-at-the-trace">')
    assert heading, f"chapter {number} has no section of its trace"
    section, following, rest = after.partition("<h2")
    return before + heading + section + trace + following + rest


def link(folder: Path, names: dict[Path, str], found: re.Match) -> str:
    """Point a link to a page. What has no page becomes plain text."""
    target, _, anchor = found[1].partition("#")
    if target.startswith(("http:", "https:")) or not target:
        return found[0]
    name = names.get((folder / target).resolve())
    if name is None:
        return found[2]
    return f'<a href="{name}{"#" * bool(anchor)}{anchor}">{found[2]}</a>'


def code(source: str, language: str, attributes: str) -> str:
    """Make the markup of a block of code. A reader without a mouse can scroll it, too."""
    lexer = get_lexer_by_name(language if language in ("python", "bash") else "text", stripnl=False)
    formatter = HtmlFormatter(nowrap=True, style=STYLE)
    # Lines are left out at "...", perhaps the end of a docstring: what follows is code again.
    parts = re.split(r"(?m)^\.\.\.\n", source)
    marked = "...\n".join([highlight(part, lexer, formatter) for part in parts])
    return f'<pre tabindex="0"><code>{marked}</code></pre>\n'


def slug(heading: str) -> str:
    """Make the anchor of a heading, as forges do."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
