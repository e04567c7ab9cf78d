"""The Chinese README and course say what the English pages say, block by block.

The prose itself cannot be compared. But headings, code, figures, tables, lists, paragraphs, links,
the names in backticks and the numbers in the text must be the same in the same order.
`python tests/test_translations.py` copies the code of the English pages into the Chinese ones.
"""

import os
import re
from collections import Counter
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import pytest

import nanovllm

DOCS = Path(nanovllm.__file__).parent / "docs"
ROOT = DOCS.parent.parent
CHINESE = DOCS / "zh"
COURSE = DOCS / "course"
TWINS = {path: CHINESE / "course" / path.name for path in sorted(COURSE.glob("*.md"))}
TWINS[ROOT / "README.md"] = CHINESE / "README.md"
# A page that links to its own translation has the link the other way round there.
OTHER_LANGUAGE = TWINS | {chinese: english for english, chinese in TWINS.items()}

CODE = re.compile(r"^(?:<!--[^\n]*-->\n)?```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#]*)(?:#([^)]*))?\)")
SPAN = re.compile(r"`[^`]+`")
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
ENGLISH_SENTENCE = re.compile(r"(?:\b[a-z]+ ){5}")


class Block(NamedTuple):
    """A part of a page that has a twin on the other page: a heading, a list item, a cell, ..."""

    kind: str
    text: str


def blocks(page: str) -> list[Block]:
    """Split a page into its blocks."""
    found = []
    end = 0
    for match in CODE.finditer(page):
        found += prose_blocks(page[end : match.start()])
        found.append(Block("code", match[0]))
        end = match.end()
    return found + prose_blocks(page[end:])


def prose_blocks(text: str) -> list[Block]:
    found = []
    for part in re.split(r"\n\s*\n", text.strip()):
        if heading := re.match(r"#+ ", part):
            found.append(Block(f"heading {heading[0].count('#')}", part))
        elif part.startswith("|"):
            for row, line in enumerate(part.splitlines()):
                cells = line.strip().strip("|").split("|")
                found += [Block(f"row {row}, column {i}", cell) for i, cell in enumerate(cells)]
        elif re.match(r"- |\d+\. ", part):
            items = re.split(r"^(?=- |\d+\. )", part, flags=re.MULTILINE)[1:]
            found += [Block("item", item) for item in items]
        elif part:
            found.append(Block("figure" if part.startswith("![") else "paragraph", part))
    return found


def headings(page: Path) -> list[str]:
    """What links to the headings of a page say after #, in order."""
    texts = [block.text.lstrip("# ") for block in blocks(page.read_text()) if "head" in block.kind]
    return [re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in texts]


def links(text: str, page: Path) -> list[tuple[Path | str, str]]:
    """Where the links and images of a text on this page lead: a file or an address, an anchor."""
    found: list[tuple[Path | str, str]] = []
    for target, anchor in LINK.findall(text):
        if not target.startswith("http"):
            target = Path(os.path.normpath(page.parent / target)) if target else page
        found.append((target, anchor))
    return found


def of_the_other_language(target: Path | str, anchor: str) -> tuple[Path | str, str]:
    """Where a link of a Chinese page must lead if the one of the English page leads to target."""
    if target not in OTHER_LANGUAGE:
        return target, anchor
    twin = OTHER_LANGUAGE[target]
    return twin, headings(twin)[headings(target).index(anchor)] if anchor else ""


def numbers(text: str) -> Counter:
    return Counter(NUMBER.findall(LINK.sub("]", SPAN.sub("", text))))


def spans(text: str) -> Counter:
    return Counter(" ".join(span.split()) for span in SPAN.findall(text))


def differences(english: str, chinese: str, page: Path) -> list[str]:
    """Tell where the text of an English page and that of its twin differ in more than words."""
    pairs = [*zip_longest(blocks(english), blocks(chinese), fillvalue=Block("end of page", ""))]
    for a, b in pairs:
        if a.kind != b.kind:  # all that follows is out of step
            return [f"{a.kind}: {a.text}\nbut {b.kind}: {b.text}"]
    told = []
    for a, b in pairs:
        leads_to = Counter(of_the_other_language(*link) for link in links(a.text, page))
        same = (
            a.text == b.text
            if a.kind == "code"
            else numbers(a.text) == numbers(b.text)
            and spans(a.text) == spans(b.text)
            and leads_to == Counter(links(b.text, TWINS[page]))
        )
        if not same:
            told.append(f"{a.kind}: {a.text}\nbut: {b.text}")
    return told


def with_code_of(english: str, chinese: str) -> str:
    """Replace the code blocks of a Chinese page by those of the English page."""
    codes = CODE.findall(english)
    if len(codes) != len(CODE.findall(chinese)):
        raise ValueError("the pages have different numbers of code blocks: add or remove some")
    return CODE.sub(lambda _: codes.pop(0), chinese)


PAGE = pytest.mark.parametrize("page", TWINS, ids=lambda page: page.stem)


def test_each_page_is_translated_and_no_translation_is_left_over():
    assert {*CHINESE.rglob("*.md")} == {*TWINS.values()}


@PAGE
def test_a_translation_is_in_step_with_its_english_page(page):
    told = differences(page.read_text(), TWINS[page].read_text(), page)
    assert not told, f"{TWINS[page].relative_to(ROOT)} is out of step:\n" + "\n\n".join(told)


@PAGE
def test_links_of_a_translation_hold(page):
    chinese = TWINS[page]
    found = links(chinese.read_text(), chinese)
    assert found
    for target, anchor in found:
        if isinstance(target, Path):
            assert target.exists(), target
            assert not anchor or anchor in headings(target), (target, anchor)


@PAGE
def test_a_translation_is_chinese(page):
    for block in blocks(TWINS[page].read_text()):
        if block.kind != "code":
            assert not ENGLISH_SENTENCE.search(SPAN.sub("", block.text)), block.text


@pytest.mark.parametrize("page", [ROOT / "README.md", COURSE / "README.md"])
def test_the_first_pages_link_to_each_other(page):
    assert (TWINS[page], "") in links(page.read_text(), page)
    assert (page, "") in links(TWINS[page].read_text(), TWINS[page])


@pytest.mark.parametrize(
    "old, new",
    [
        ("block_tables[sequences, :", "block_tables[sequences, 1:"),  # code
        ("## The idea", "### The idea"),
        ("## Look at the trace\n\n", ""),
        ("3-blocks.svg", "4-slots.svg"),
        ("reserve 4,096 slots", "reserve 4,097 slots"),
        ("- When a sequence ends", "  When a sequence ends"),
        ("`self.free`", "`self.frees`"),
        ("\n\nYou could reserve less", " You could reserve less"),
        ("(../experiments.md)", "(../guide.md)"),
    ],
)
def test_a_change_of_an_english_page_alone_is_found(old, new):
    page = COURSE / "3-paged-attention.md"
    text, chinese = page.read_text(), TWINS[page].read_text()
    assert old in text
    assert differences(text.replace(old, new), chinese, page)


def test_a_change_of_an_english_table_alone_is_found():
    page = ROOT / "README.md"
    text, chinese = page.read_text(), TWINS[page].read_text()
    (row,) = re.findall(r"^\| `trace` .*\n", text, re.MULTILINE)
    assert differences(text.replace(row, ""), chinese, page)
    assert differences(text.replace(row, row.replace(" | a", " | x | a")), chinese, page)


def test_code_can_be_copied_into_a_translation():
    page = COURSE / "3-paged-attention.md"
    english, chinese = page.read_text(), TWINS[page].read_text()
    changed = english.replace("block_tables[sequences, :", "block_tables[sequences, 1:")
    assert differences(changed, chinese, page)
    copied = with_code_of(changed, chinese)
    assert not differences(changed, copied, page)
    assert with_code_of(english, copied) == chinese
    with pytest.raises(ValueError, match="different numbers"):
        with_code_of(english, chinese.replace("```bash", "", 1))


if __name__ == "__main__":
    for page, chinese in TWINS.items():
        chinese.write_text(with_code_of(page.read_text(), chinese.read_text()))
