"""The house rules: who may import whom, and how long a file may be."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import nanovllm

PACKAGE = Path(nanovllm.__file__).parent
FILES = sorted(
    path for path in PACKAGE.rglob("*.py") if "assets" not in path.relative_to(PACKAGE).parts
)
NAMES = [str(path.relative_to(PACKAGE)) for path in FILES]

ENVIRONMENT = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}

BOTTOM = {"config", "sampling_params", "utils"}
MAY_IMPORT = {
    "llm": BOTTOM | {"engine"},
    "engine": BOTTOM | {"engine", "models", "layers", "kernels"},
    "models": BOTTOM | {"models", "layers", "kernels"},
    "layers": BOTTOM | {"layers", "kernels"},
    "kernels": BOTTOM | {"kernels"},
    "utils": {"utils"},
    "config": set(),
    "sampling_params": set(),
}
WITHOUT_TORCH = {
    f"engine/{name}.py" for name in ("sequence", "batch", "scheduler", "block_manager", "request")
}
OWNERS = {
    "triton": lambda name: name.startswith("kernels/"),
    "flash_attn": lambda name: name.startswith("kernels/"),
    "flash_attn_interface": lambda name: name.startswith("kernels/"),
    "torch.distributed": lambda name: name == "utils/parallel.py",
}


def imports(path: Path) -> set[str]:
    """The dotted names of all that a file imports, inside functions too: `from a import b` gives
    a and a.b.
    """
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def within(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def test_the_rules_see_the_whole_package():
    assert len(FILES) > 20 and {name.split("/")[0].removesuffix(".py") for name in NAMES} == {
        *MAY_IMPORT,
        "__init__",
    }
    assert set(NAMES) >= WITHOUT_TORCH


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_imports_go_down_the_layers_only(path):
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if part == "__init__":
        return
    used = {name.split(".")[1] for name in imports(path) if name.startswith("nanovllm.")}
    assert used <= MAY_IMPORT[part], f"{part} must not know of {used - MAY_IMPORT[part]}"


@pytest.mark.parametrize("name", sorted(WITHOUT_TORCH))
def test_policy_never_imports_torch_even_indirectly(name):
    """Follows the package's own imports."""
    seen, todo = set(), [PACKAGE / name]
    while todo:
        path = todo.pop()
        seen.add(path)
        found = imports(path)
        assert not any(within(module, "torch") for module in found), (
            f"{name} reaches torch in {path.name}"
        )
        for module in found:
            if module.startswith("nanovllm."):
                target = PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py")
                if target.is_file() and target not in seen:
                    todo.append(target)


@pytest.mark.parametrize("module", OWNERS)
def test_each_outside_thing_has_one_owner(module):
    users = {
        name
        for path, name in zip(FILES, NAMES)
        if any(within(used, module) for used in imports(path))
    }
    assert all(OWNERS[module](name) for name in users), users


@pytest.mark.parametrize(
    "name, owner", [("CUDAGraph", "engine/cuda_graph.py"), ("distributed", "utils/parallel.py")]
)
def test_each_outside_name_has_one_owner(name, owner):
    """Reached through `torch.` too: torch.cuda.CUDAGraph, torch.distributed."""
    users = set()
    for path, file in zip(FILES, NAMES):
        if any(
            isinstance(node, ast.Attribute) and node.attr == name
            for node in ast.walk(ast.parse(path.read_text()))
        ):
            users.add(file)
    assert users <= {owner}


def test_the_library_runs_where_triton_and_flash_attn_are_not_installed(checkpoint):
    """In a process of its own, where importing them fails."""
    code = f"""
import sys
sys.modules |= dict.fromkeys(("triton", "flash_attn", "flash_attn_interface"))
from nanovllm import LLM, SamplingParams
llm = LLM({str(checkpoint.folder)!r}, device="cpu")
outputs = llm.generate([5, 6], SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
print(outputs[0]["token_ids"])
"""
    run = subprocess.run(
        [sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True
    )
    assert run.stdout.split("\n")[0] == str(checkpoint.expected([5, 6], 3)), run.stderr


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_no_file_is_longer_than_350_lines(path):
    assert len(path.read_text().splitlines()) <= 350


def test_every_module_says_what_it_knows():
    trees = {name: ast.parse(path.read_text()) for path, name in zip(FILES, NAMES)}
    assert not [name for name, tree in trees.items() if tree.body and not ast.get_docstring(tree)]
