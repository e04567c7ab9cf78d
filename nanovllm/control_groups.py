"""The control groups of Linux, which bound the cores and the memory of a container."""

from collections.abc import Iterator
from pathlib import Path


def control_groups(controller: str, root: Path) -> Iterator[tuple[Path, int]]:
    """Yield the folder of each group around this process, the innermost first, and its version.

    controller: What the groups bound: "cpu" or "memory".
    root: The file system's root; another folder in tests.
    Yields nothing on other systems than Linux.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # this is not Linux
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        # In a container the path may be the host's and not exist here. Then the group at the top of
        # the tree is this container's.
        inner = top / group.strip("/")
        for folder in (inner, *inner.parents):
            if not folder.is_relative_to(top):
                break
            yield folder, 1 if controllers else 2
