"""The course: its engine, the skeleton that is cut from it, its chapters, runs and drawings."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import nanovllm
from nanovllm.__main__ import main
from nanovllm.apps.course.skeleton import PACKAGE, PIECES, SOLUTION, TESTS, cut, write_skeleton

PACKAGE_FOLDER = Path(nanovllm.__file__).parent
ROOT = PACKAGE_FOLDER.parent
CHAPTERS = PACKAGE_FOLDER / "docs" / "course"

# Runs the test of one piece in each of some folders. torch is imported once: each run is a fork.
RUN_TESTS = """
import json, os, sys
import pytest, torch, nanovllm
codes = []
for folder, piece in json.loads(sys.argv[1]):
    os.chdir(folder)
    tests = [f"tests/{name}" for name in os.listdir("tests") if name.startswith(f"test_{piece}_")]
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        sys.path.insert(0, folder)
        os._exit(pytest.main(["-q", "-x", "--tb=short", "-p", "no:cacheprovider", *tests]))
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(json.dumps(codes))
"""


def run_tests(runs: list[tuple[Path, int]]) -> tuple[list[int], str]:
    """Run the tests of a piece in each folder. Returns pytest's exit codes, and its output."""
    asked = json.dumps([(str(folder), piece) for folder, piece in runs])
    done = subprocess.run(
        [sys.executable, "-c", RUN_TESTS, asked],
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stdout


def test_pieces_solved_in_order_pass_their_tests_and_a_missing_piece_fails_its_own(tmp_path):
    runs = []
    for piece in PIECES:
        missing, solved = tmp_path / f"missing-{piece}", tmp_path / f"solved-{piece}"
        write_skeleton(missing, {*range(1, piece)})
        write_skeleton(solved, {*range(1, piece + 1)})
        runs += [(missing, piece), (solved, piece)]
    codes, output = run_tests(runs)
    assert codes == [pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.OK] * len(PIECES), output


def test_the_whole_solution_passes_all_tests(tmp_path):
    write_skeleton(tmp_path / "solution", {*PIECES})
    codes, output = run_tests([(tmp_path / "solution", piece) for piece in PIECES])
    assert codes == [pytest.ExitCode.OK] * len(PIECES), output


def test_each_piece_has_a_test_and_a_place():
    numbers = [int(path.name.split("_")[1]) for path in sorted(TESTS.glob("test_*.py"))]
    assert numbers == [*PIECES]
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
