"""The course: its engine, the skeleton that is cut from it, its chapters, runs and drawings."""

import ast
import json
import os
import re
import subprocess
import sys
import textwrap
from collections import deque
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser_helpers import browse, needs_chromium

import nanovllm
from nanovllm.__main__ import main
from nanovllm.apps.course import recorded, recording, runs
from nanovllm.apps.course.drawings import DRAWINGS
from nanovllm.apps.course.runs import RUNS
from nanovllm.apps.course.runs import main as run_chapter
from nanovllm.apps.course.skeleton import PACKAGE, PIECES, SOLUTION, TESTS, cut, write_skeleton
from nanovllm.apps.course.solution.block_manager import BlockManager
from nanovllm.apps.course.solution.engine import Engine
from nanovllm.apps.course.solution.model import Model
from nanovllm.apps.course.solution.scheduler import Scheduler

FOLDER = Path(nanovllm.__file__).parent
ROOT = FOLDER.parent
COURSE = FOLDER / "docs" / "course"
INDEX = COURSE / "README.md"
CHAPTERS = {int(path.name.split("-")[0]): path for path in COURSE.glob("[0-9]*.md")}
CHAPTERS = dict(sorted(CHAPTERS.items()))

# Runs tests in each of some folders. Each run is a fork, so that all is imported only once.
RUN_TESTS = """
import json, os, sys
import pytest, torch
from nanovllm import LLM, TINY_MODEL
torch.set_num_threads(1)
with LLM(TINY_MODEL, device="cpu", kernels="plain", num_kvcache_blocks=4) as llm:
    llm.generate("import", use_tqdm=False)
codes = []
for folder, prefixes in json.loads(sys.argv[1]):
    os.chdir(folder)
    names = sorted(os.listdir("tests"))
    tests = [f"tests/{name}" for prefix in prefixes for name in names if name.startswith(prefix)]
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        sys.path.insert(0, folder)
        os._exit(pytest.main(["-q", "-x", "--tb=short", "-p", "no:cacheprovider", *tests]))
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    print("FOLDER ENDS")
print(json.dumps(codes))
"""


def run_tests(runs: list[tuple[Path, list[str]]]) -> tuple[list[int], list[str]]:
    """Run the tests in each folder whose names begin with a prefix, up to the first that fails.

    Returns pytest's exit code and output for each folder.
    """
    done = subprocess.run(
        [sys.executable, "-c", RUN_TESTS, json.dumps([(str(path), names) for path, names in runs])],
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    *outputs, codes = done.stdout.split("FOLDER ENDS\n")
    return json.loads(codes), outputs


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """The outcome of all tests with the whole solution, then of two tests for each piece: its own
    and the one before, where this piece and all later ones are missing.
    """
    base = tmp_path_factory.mktemp("course")
    write_skeleton(base / "solution", {*PIECES})
    runs = [(base / "solution", ["test_"])]
    for before, piece in zip([0, *PIECES], PIECES):
        write_skeleton(base / f"{piece}", {*range(1, piece)})
        runs.append((base / f"{piece}", [f"test_{before}_", f"test_{piece}_"]))
    return [*zip(*run_tests(runs))]


def test_the_whole_solution_passes_all_tests(outcomes):
    code, output = outcomes[0]
    assert code == pytest.ExitCode.OK, output


@pytest.mark.parametrize("piece", PIECES)
def test_a_missing_piece_fails_its_own_test_and_not_the_one_before(outcomes, piece):
    """So the pieces can be solved in order, and no test is empty."""
    code, output = outcomes[[*PIECES].index(piece) + 1]
    assert code == pytest.ExitCode.TESTS_FAILED, output
    assert re.findall(r"FAILED tests/test_(\d+)_", output) == [f"{piece}"], output


def test_each_piece_has_a_test_and_a_place():
    numbers = [int(path.name.split("_")[1]) for path in TESTS.glob("test_*.py")]
    assert sorted(numbers) == [*PIECES]
    for piece, (_, files) in PIECES.items():
        for name in files.split(" and "):
            assert f"# <piece {piece}" in (SOLUTION / name).read_text(), (piece, name)


def test_the_skeleton_has_nothing_of_the_solution_and_is_valid(tmp_path):
    assert main(["course", str(tmp_path / "new")]) == 0
    sources = {path.name: path.read_text() for path in (tmp_path / "new" / PACKAGE).glob("*.py")}
    assert {*sources} == {path.name for path in SOLUTION.glob("*.py")}
    for name, source in sources.items():
        compile(source, name, "exec")
        assert "<piece" not in source and "apps.course" not in source
    for piece in PIECES:
        assert any(f"TODO piece {piece}" in source for source in sources.values())
    assert (tmp_path / "new" / "README.md").read_text().count("tests/test_") >= len(PIECES)


def test_a_piece_is_cut_or_kept():
    source = "a\n    # <piece 1: hint>\n    b\n    # </piece>\nc\n"
    assert cut(source, {1}) == "a\n    b\nc\n"
    hole = '    # TODO piece 1: hint\n    raise NotImplementedError("piece 1 is missing here")\n'
    assert cut(source, set()) == f"a\n{hole}c\n"
    source = "# <piece 2>\nb\n# <until then>\n# if c:\n#     d\n# </piece>\n"
    assert cut(source, {2}) == "b\n"
    assert cut(source, {1}) == "# TODO piece 2\nif c:\n    d\n"


def test_a_folder_that_is_not_empty_is_refused(tmp_path, capsys):
    mine = tmp_path / "mine.txt"
    mine.write_text("keep")
    assert main(["course", str(tmp_path)]) == 2
    assert "is not empty: name a new folder" in capsys.readouterr().err
    assert main(["course", str(mine)]) == 2
    assert "which is a file: name a new folder" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == [mine] and mine.read_text() == "keep"


# Changes that chapter 6 proposes, with what it says that they do.


@pytest.fixture(scope="module")
def model():
    model = Model()
    model.end_token = -1
    return model


def found_again(blocks: BlockManager) -> list[int]:
    """Tell how many blocks of prompts A, B, A, C, A are found, each of two blocks."""
    found = []
    for token in "ABACA":
        tokens = [ord(token)] * 2 * blocks.block_size
        shared = blocks.match(tokens)
        blocks.share(shared)
        table = shared + blocks.allocate(2 - len(shared))
        blocks.register(tokens, table)
        blocks.release(table)
        found.append(len(shared))
    return found


def test_first_in_first_out_loses_what_is_used_most(model):
    class FirstOut(BlockManager):
        def allocate(self, count):
            order = list(self.key_of)
            known = sorted((block for block in self.free if block in self.key_of), key=order.index)
            for block in known:
                self.free.move_to_end(block)
            return super().allocate(count)

    assert found_again(BlockManager(4, 16)) == [0, 0, 2, 0, 2]
    assert found_again(FirstOut(4, 16)) == [0, 0, 2, 0, 0]


def test_smaller_blocks_find_more_of_a_prompt(model):
    prompts = [[*range(30), 100], [*range(30), 200]]
    outputs, cached = [], []
    for num_blocks, size in ((64, 16), (256, 4)):
        engine = Engine(model, num_blocks=num_blocks, block_size=size)
        outputs.append(engine.generate(prompts[:1], 6))
        seq = engine.add(prompts[1], 6)
        engine.step()
        cached.append(seq.num_cached)
    assert cached == [16, 28] and outputs[0] == outputs[1]


def test_block_tables_of_a_prompt_that_is_added_again_begin_alike(model):
    engine = Engine(model)
    one = engine.add([*range(40)], 9)
    engine.step()
    two = engine.add([*range(40)], 9)
    engine.step()
    assert engine.scheduler.running == [one, two]
    assert one.block_table[:2] == two.block_table[:2]
    assert not {*one.block_table[2:]} & {*two.block_table[2:]}


def test_a_policy_of_the_fewest_tokens_left_ends_the_shortest_first(model):
    def order(engine):
        seqs = [engine.add([1, 2, 3], count) for count in (9, 3, 6)]
        ended = []
        while len(ended) < len(seqs):
            ended += engine.step()
        return [seq.max_tokens for seq in ended]

    class ShortestFirst(Scheduler):
        def schedule(self):
            self.waiting = deque(sorted(self.waiting, key=lambda s: s.max_tokens - len(s.output)))
            return super().schedule()

    engine = Engine(model, max_seqs=1)
    assert order(engine) == [9, 3, 6]
    engine.scheduler = ShortestFirst(engine.blocks, model.end_token, max_seqs=1)
    assert order(engine) == [3, 6, 9]


# The chapters.

QUOTE = re.compile(r"^<!-- quote: (\S+) (\S+) -->\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CHAPTER = pytest.mark.parametrize("chapter", CHAPTERS)


def source_of(file: str, name: str) -> str:
    """The source of a class, function or method, without the indentation of the whole."""
    text = (FOLDER / file).read_text()
    node: ast.AST = ast.parse(text)
    for part in name.split("."):
        node = next(one for one in node.body if getattr(one, "name", None) == part)
    return textwrap.dedent("\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno]))


def contains_in_order(source: str, quote: str) -> bool:
    """Whether the parts of a quote, between lines of "...", are whole lines of the source."""
    begin = 0
    source = f"\n{source}\n"
    for part in re.split(r"^\.\.\.\n", quote, flags=re.MULTILINE):
        found = source.find(f"\n{part}", begin)
        if found < 0:
            return False
        begin = found + len(part)
    return True


@CHAPTER
def test_quotes_are_lines_of_the_source(chapter):
    text = CHAPTERS[chapter].read_text()
    quotes = QUOTE.findall(text)
    assert len(quotes) >= 2 and len(quotes) == text.count("```python")
    for file, name, quote in quotes:
        assert contains_in_order(source_of(file, name), quote), (file, name, quote)


def test_a_quote_that_differs_is_found():
    source = source_of("engine/scheduler.py", "Scheduler._preempt")
    first, *_, last = source.splitlines(keepends=True)
    assert contains_in_order(source, f"{first}...\n{last}\n")
    assert not contains_in_order(source, f"{last}\n...\n{first}")
    assert not contains_in_order(source, source.replace("num_preemptions", "preemptions") + "\n")


@CHAPTER
def test_the_figures_are_those_of_the_run(chapter, monkeypatch, tmp_path, capsys):
    """All but times of the machine that runs the test."""
    monkeypatch.chdir(tmp_path)
    run_chapter([f"{chapter}"])
    printed = capsys.readouterr().out
    command = f"python -m nanovllm.apps.course.runs {chapter}"
    found = re.search(
        rf"```bash\n{command}\n```\n\n```text\n(.*?)```", CHAPTERS[chapter].read_text(), re.S
    )

    def without_times(text: str) -> str:
        """Replace the times that were measured here. Others were recorded on a GPU."""
        return re.sub(r"^(?!an H200|Qwen3)(.*?)[\d.]+ ms", r"\1TIME", text, flags=re.MULTILINE)

    assert found and without_times(found[1]) == without_times(printed)
    assert "TRACE-GOES-HERE" not in (tmp_path / f"chapter-{chapter}.html").read_text()


def test_the_recording_measures_what_the_chapters_show(tmp_path):
    """On a CPU there are no kernels. What is left has the same form."""
    kept = recorded.figures()
    with recording.measured("tiny", tmp_path, kvcache_block_size=16, device="cpu") as one:
        found = recording.overlap_lanes(one, 2)
        steps = recording.decode_figures(one, (1, 2))
        form = recording.one_sequence(one, tmp_path, "plain")
    assert found.keys() == kept["overlap"].keys()
    for word in runs.WORDS:
        assert found[word].keys() == kept["overlap"][word].keys()
        spans = [*found[word]["host"], *kept["overlap"][word]["host"]]
        assert {part for part, *_ in spans} <= {"schedule", "launch", "wait", "commit"}
        assert all(begin <= end for _, _, begin, end in spans)
    assert [step["sequences"] for step in steps] == [1, 2]
    assert all(512 < step["context"] < 512 + 96 and step["step_us"] > 0 for step in steps)
    assert steps[0].keys() == kept["qwen3-8b decode"]["steps"][0].keys()
    assert form["kernels"] == 0 and {*form} < {*kept["plain"]}
    assert not (tmp_path / "trace.jsonl").exists()


def test_the_index_says_where_the_figures_were_recorded():
    of = recorded.figures()
    words = [of["machine"], *(f"{name} {of['versions'][name]}" for name in ("torch", "triton"))]
    assert all(word in INDEX.read_text() for word in words), words


def numbers_and_rest(svg: str) -> tuple[list[float], str]:
    number = r"\d+\.\d"  # of coordinates; other numbers must be equal
    return [float(one) for one in re.findall(number, svg)], re.sub(number, "N", svg)


@pytest.mark.parametrize("name", DRAWINGS)
def test_drawings_are_those_of_the_runs(name):
    kept, drawn = (COURSE / name).read_text(), str(DRAWINGS[name]())
    numbers, rest = numbers_and_rest(kept)
    assert rest == numbers_and_rest(drawn)[1]
    assert numbers == pytest.approx(numbers_and_rest(drawn)[0], abs=1)


def test_the_index_lists_the_chapters_that_are_there():
    assert {*CHAPTERS} == {*RUNS} >= {*PIECES}
    listed = re.findall(r"^\| \[(\d+)\. (.*?)\]\((.*?)\)", INDEX.read_text(), re.MULTILINE)
    titles = [(f"{i}", path.read_text().split("\n")[0], path.name) for i, path in CHAPTERS.items()]
    assert [(i, f"# {i}. {title}", name) for i, title, name in listed] == titles


@pytest.mark.parametrize("path", [INDEX, *CHAPTERS.values()], ids=lambda path: path.stem)
def test_links_and_pictures_exist(path):
    links = re.findall(r"\]\((?!http)([^)#]+)", path.read_text())
    assert links and all((path.parent / link).exists() for link in links), links


@pytest.mark.parametrize("piece", PIECES)
def test_a_chapter_has_its_exercise_test_drawing_and_solution(piece):
    text = CHAPTERS[piece].read_text()
    (test,) = TESTS.glob(f"test_{piece}_*.py")
    assert f"\npython -m pytest tests/{test.name}\n" in text
    assert f"## Your turn: piece {piece}" in text and ".svg)" in text
    for name in PIECES[piece][1].split(" and "):
        assert f"(../../apps/course/solution/{name})" in text
    assert text.startswith(f"# {piece}. {PIECES[piece][0]}\n")


# The pages.


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> Path:
    """The folder of the course's pages."""
    pytest.importorskip("markdown_it")
    pytest.importorskip("pygments")
    folder = tmp_path_factory.mktemp("pages") / "course"
    assert main(["course", str(folder), "--html"]) == 0
    return folder


class Page(HTMLParser):
    """What a page links to, loads and offers as anchors, and whether its tags are balanced."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links, self.loads, self.ids, self.open = [], [], [], []
        self.feed(path.read_text("utf-8"))
        self.close()
        assert self.open == [], path

    def handle_starttag(self, tag, attributes):
        of = dict(attributes)
        self.links += [of["href"]] if tag == "a" else []
        self.loads += [of[key] for key in ("src", "href") if key in of and tag != "a"]
        self.ids += [of["id"]] if "id" in of else []
        assert tag != "img" or of["alt"]
        assert tag != "iframe" or of["title"]
        if tag not in ("meta", "link", "img", "br", "hr"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("meta", "link", "img", "br", "hr"):
            assert self.open.pop() == tag, tag


def text_pages(folder: Path) -> list[Path]:
    """The pages but those that the trace makes."""
    return [path for path in sorted(folder.glob("*.html")) if "chapter-" not in path.name]


def test_links_of_the_pages_hold_and_nothing_is_loaded_from_elsewhere(pages):
    found = {path.name: Page(path) for path in text_pages(pages)}
    assert {f"{path.stem}.html" for path in CHAPTERS.values()} < {*found}
    assert "中文" in INDEX.read_text() and "中文" not in (pages / "index.html").read_text()
    for name, page in found.items():
        for link in page.links:
            if link.startswith("https://"):
                continue
            target, _, anchor = link.partition("#")
            assert (pages / target).is_file() or not target, (name, link)
            if anchor:
                assert anchor in found[target or name].ids, (name, link)
        for load in page.loads:
            assert load == "data:," or (pages / load).is_file(), (name, load)
        assert len({*page.ids}) == len(page.ids), name


@CHAPTER
def test_a_chapter_has_a_page_with_its_trace_and_code(pages, chapter):
    page = Page(pages / f"{CHAPTERS[chapter].stem}.html")
    assert page.loads.count(f"chapter-{chapter}.html") == 1
    text = (pages / f"{CHAPTERS[chapter].stem}.html").read_text()
    assert text.count("<pre") == CHAPTERS[chapter].read_text().count("```") / 2
    assert text.count('class="source"') == len(QUOTE.findall(CHAPTERS[chapter].read_text()))
    for solution in re.findall(r"solution/(\w+)\.py\)", CHAPTERS[chapter].read_text()):
        assert f"solution-{solution}.html" in page.links


def test_pages_are_not_written_over_something_else(tmp_path, capsys):
    pytest.importorskip("markdown_it")
    (tmp_path / "mine.txt").write_text("keep")
    assert main(["course", str(tmp_path), "--html"]) == 2
    assert "is not empty: name a new folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_without_its_packages_the_command_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "nanovllm.apps.course.pages", None)
    monkeypatch.setitem(sys.modules, "markdown_it", None)
    monkeypatch.delitem(sys.modules, "nanovllm.apps.course.pages")
    assert main(["course", str(tmp_path / "new"), "--html"]) == 2
    assert "pip install 'nanovllm[course]'" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


# The width of the page and of the window, and how many drawings and traces there are to see.
MEASURE = """
const wide = document.documentElement.scrollWidth - window.innerWidth;
const drawn = [...document.images].filter((image) => image.complete && image.naturalWidth > 0);
document.body.dataset.found = JSON.stringify([wide, drawn.length, document.images.length]);
"""


@needs_chromium
def test_pages_fit_into_800_pixels_and_log_no_error(pages):
    names = ["index.html", *(f"{path.stem}.html" for path in CHAPTERS.values())]
    for path in [pages / name for name in [*names, "guide.html", "solution-model.html"]]:
        dom = browse(
            path, script=f"window.addEventListener('load', () => {{{MEASURE}}})", width=800
        )
        wide, drawn, images = json.loads(re.search(r'data-found="([^"]*)"', dom)[1])
        assert wide <= 0 and drawn == images, path
