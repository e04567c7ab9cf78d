"""The architecture: imports go down the shelves, and scheduling needs no torch."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from engine_helpers import PROMPTS

import nanovllm

PACKAGE = Path(nanovllm.__file__).parent
ROOT = PACKAGE.parent
FILES = {
    str(path.relative_to(PACKAGE)): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.relative_to(PACKAGE).parts[0] != "assets"
}
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}

# What each shelf may import beside itself. Plain data are files at the top of the package.
PLAIN_DATA = {
    "checks",
    "config",
    "control_groups",
    "foreign_names",
    "options",
    "outputs",
    "sampling_params",
    "whole_files",
}
CORE = ("weights", "layers", "models", "engine")
SHELVES: dict[str, set[str]] = {
    **{name: PLAIN_DATA for name in PLAIN_DATA},
    "weights": PLAIN_DATA,
    "layers": {*PLAIN_DATA, "weights"},
    "models": {*PLAIN_DATA, "weights", "layers"},
    "engine": {*PLAIN_DATA, "weights", "layers", "models"},
    "features": {*PLAIN_DATA, *CORE},
    "backends": {*PLAIN_DATA, *CORE, "features"},
    "frontend": {*PLAIN_DATA, *CORE},
    "build": {*PLAIN_DATA, *CORE, "features", "backends", "frontend"},
    "llm": {*PLAIN_DATA, *CORE, "features", "backends", "frontend", "build"},
    # Programs use what users import from the package itself, too.
    "apps": {*PLAIN_DATA, *CORE, "features", "frontend", "llm", *nanovllm.__all__},
    "__init__": {*PLAIN_DATA, "engine", "frontend", "llm"},
    "__main__": {"apps"},
}

WITHOUT_TORCH = [
    *(f"{name}.py" for name in sorted(PLAIN_DATA)),
    *(
        f"engine/{name}.py"
        for name in (
            "sequence",
            "batch",
            "packing",
            "scheduler",
            "block_manager",
            "block_tables",
            "stateful_blocks",
            "policy",
        )
    ),
    *(name for name in FILES if name.startswith("features/policies/")),
]
# Packages that a user may lack, and the only files that may import them.
OWNERS = {
    "triton": r"backends/cuda/.*",
    "flash_attn": r"backends/cuda/.*",
    "pyarrow": r"apps/jobs/parquet\.py",
    "llguidance": r"features/sampling/grammars\.py",
    "ray": r"apps/ray_replicas\.py",
    "lm_eval": r"apps/lm_eval\.py",
    "vllm": r"apps/bench/engines\.py",
    "matplotlib": r"apps/bench/report\.py",
    "markdown_it": r"apps/course/pages\.py",
    "pygments": r"apps/course/pages\.py",
}


def shelf_of(name: str) -> str:
    return name.split("/")[0].removesuffix(".py")


def imports(name: str) -> set[str]:
    """Dotted names of all that a file imports, in functions too: `from a import b` is a and a.b."""
    found = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{name}: imports are absolute"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def within(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def test_the_rules_see_the_whole_package():
    assert {shelf_of(name) for name in FILES} == {*SHELVES}
    assert {*WITHOUT_TORCH} <= {*FILES}


@pytest.mark.parametrize("shelf", sorted(SHELVES))
def test_imports_go_down_the_shelves(shelf):
    for name in FILES:
        if shelf_of(name) == shelf:
            used = {one.split(".")[1] for one in imports(name) if one.startswith("nanovllm.")}
            assert used - {shelf} <= SHELVES[shelf], name


def test_the_package_exports_every_public_name():
    errors = {"AsleepError", "ClosedError", "InvalidLogitsError", "RankError"}
    outputs = {"CompletionOutput", "Logprob", "RequestOutput", "StepRecord"}
    inputs = {"SamplingParams", "StructuredOutputsParams", "TextPrompt", "TokensPrompt"}
    public = {"LLM", "SchedulingPolicy", "TINY_MODEL"} | errors | outputs | inputs
    assert public == {*nanovllm.__all__} and public <= vars(nanovllm).keys()


def test_the_plain_core_knows_nothing_of_recurrent_state():
    """A reader of models of attention alone meets none; engine/stateful_blocks.py adds it."""
    modules = {f"nanovllm.engine.{name}" for name in ("snapshots", "branches", "stateful_blocks")}
    for name in ("scheduler", "block_tables", "block_manager"):
        assert not imports(f"engine/{name}.py") & modules, name


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_policy_never_imports_torch_even_indirectly(name):
    """Follows the package's own imports, and the packages on the way to what is imported."""
    seen, todo = set(), [name]
    while todo:
        file = todo.pop()
        seen.add(file)
        modules = imports(file)
        assert not any(within(module, "torch") for module in modules), f"torch is in {file}"
        for module in modules:
            if module.startswith("nanovllm."):
                parts = module.split(".")[1:]
                path = "/".join(parts)
                found = {f"{path}.py"}
                found |= {"/".join([*parts[:i], "__init__.py"]) for i in range(1, len(parts) + 1)}
                todo += found & {*FILES} - seen


@pytest.mark.parametrize("module", OWNERS)
def test_only_its_owner_imports_a_package_that_users_may_lack(module):
    users = {name for name in FILES if any(within(used, module) for used in imports(name))}
    assert users and all(re.fullmatch(OWNERS[module], name) for name in users), users


HIDE = """
import sys
class Hider:
    def find_spec(self, name, path=None, target=None):
        if name in {hidden}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hider())
"""
RUN = """
from nanovllm import LLM, SamplingParams
with LLM({folder!r}, max_model_len=256, kvcache_block_size=16, device="cpu") as llm:
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    for output in llm.generate({prompts}, params, use_tqdm=False):
        print(output["token_ids"])
"""


def run_without(hidden: list[str], checkpoint, tmp_path: Path) -> subprocess.CompletedProcess:
    """Generate in a process that cannot import the modules `hidden`."""
    (tmp_path / "sitecustomize.py").write_text(HIDE.format(hidden=hidden))
    return subprocess.run(
        [sys.executable, "-c", RUN.format(folder=str(checkpoint.folder), prompts=PROMPTS)],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )


def test_a_plain_generate_needs_no_package_that_users_may_lack(checkpoint, tmp_path):
    run = run_without([*OWNERS, "transformers"], checkpoint, tmp_path)
    expected = [str(checkpoint.expected(prompt, 9)) for prompt in PROMPTS]
    assert run.stdout.splitlines() == expected, run.stderr


def test_a_hidden_module_is_not_found(checkpoint, tmp_path):
    """Else the test above would say nothing."""
    run = run_without(["nanovllm.layers"], checkpoint, tmp_path)
    assert "No module named 'nanovllm.layers'" in run.stderr
