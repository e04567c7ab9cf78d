"""Files that are there whole or not at all, and that harm no file of others."""

import errno
import os

import pytest

from nanovllm import whole_files
from nanovllm.whole_files import part_of, whole_file


def test_a_file_appears_when_it_is_complete(tmp_path):
    path = tmp_path / "out"
    path.write_text("before")
    with whole_file(path) as file:
        file.write(b"after")
        file.flush()
        assert path.read_text() == "before"
    assert path.read_text() == "after" and len(list(tmp_path.iterdir())) == 1


def test_what_raises_leaves_nothing(tmp_path):
    path = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        with whole_file(path) as file:
            file.write(b"half")
            raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_an_error_of_a_full_disk_names_the_file(tmp_path):
    with pytest.raises(OSError, match=r"No space left on device: '.*/out'"):
        with whole_file(tmp_path / "out"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_what_a_killed_process_has_left_is_removed(tmp_path):
    path, left = tmp_path / "out", part_of(tmp_path / "out", "abc")
    left.write_text("half")
    with whole_file(path, "abc") as file:
        file.write(b"whole")
    assert path.read_text() == "whole" and not left.exists()


@pytest.mark.parametrize("is_link", [False, True])
def test_a_file_or_link_that_bears_the_name_of_a_part_is_not_written(
    tmp_path, monkeypatch, is_link
):
    path, other = tmp_path / "out", tmp_path / "precious"
    monkeypatch.setattr(whole_files, "draw_mark", lambda: "guessed")
    other.write_text("precious")
    in_the_way = part_of(path, "guessed")
    in_the_way.symlink_to(other) if is_link else in_the_way.write_text("mine")
    with pytest.raises(FileExistsError), whole_file(path):
        raise AssertionError("the file was opened")
    assert in_the_way.read_text() == ("precious" if is_link else "mine")
    # With a mark of its own it is known to be its own, and removed; what it leads to is not.
    with whole_file(path, "guessed") as file:
        file.write(b"whole")
    assert other.read_text() == "precious" and path.read_text() == "whole"
