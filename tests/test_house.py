"""The architecture: who may import whom, what the core does not know, and that rooms can go."""

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
# All that people read and change; assets hold the recipe of the small model as it was run.
SOURCES = {
    **{f"nanovllm/{name}": path for name, path in FILES.items()},
    **{str(path.relative_to(ROOT)): path for path in sorted((ROOT / "tests").glob("*.py"))},
    **{name: ROOT / name for name in ("bench.py", "example.py")},
}

# The core: what each part may import besides itself, from the bottom to the top.
CORE = {
    "checks": set(),
    "structured_outputs": {"checks"},
    "constraint_checks": {"checks"},
    "sampling_params": {"checks", "constraint_checks", "structured_outputs"},
    "config": {"checks"},
    "weights": set(),
    "layers": {"sampling_params", "weights"},
    "models": {"weights", "layers"},
    "engine": {"sampling_params", "config", "weights", "layers", "models"},
    "log": {"config", "engine"},
    "inputs": {
        *("checks", "constraint_checks", "structured_outputs", "sampling_params", "config"),
        "engine",
    },
    "conversations": {"checks"},
    "outputs": {"engine"},
    "progress": {"engine"},
    "session": {"checks", "engine"},
    "scores": {"checks", "sampling_params", "engine", "inputs", "outputs", "progress", "session"},
    "streams": {"engine", "inputs", "session"},
    "llm": {
        *("checks", "sampling_params", "config", "engine", "log", "inputs", "conversations"),
        *("outputs", "progress", "session", "scores", "streams"),
        "compose",  # which knows the rooms, so that nothing else has to
    },
}
# The rooms may import the core up to the engine, and what is named here.
ROOMS = {
    "policies": set(),
    "text": set(),
    "sampling": set(),
    "structured": set(),
    "trace": set(),
    "cpu": set(),
    "kernels": set(),
    # Fused layers and graphs launch kernels, and so does what samples in the sampling room's way.
    "gpu": {"kernels", "sampling"},
    "trainer": set(),
    "compat": set(),
    "jobs": {"llm", "compose"},  # it calls an LLM, as any script does
    # A job's rows and lines are asked for alike; a model of another tool calls an LLM.
    "integrations": {"jobs", "llm", "text"},
    "distributed": {
        "kernels",  # ranks that read each other's memory sum in a kernel
        "compose",  # each rank's process puts its own runner together
    },
}
CLOSED_TO_ROOMS = {
    *("constraint_checks", "log", "inputs", "conversations", "outputs", "scores", "streams", "llm")
}
OPEN_TO_ROOMS = {*CORE} - CLOSED_TO_ROOMS
BESIDES = {"compose", "__init__", "__main__"}

WITHOUT_TORCH = [
    *(f"engine/{name}.py" for name in ("sequence", "batch", "packing", "scheduler")),
    *(
        "engine/block_manager.py",
        "engine/block_tables.py",
        "engine/policy.py",
        "sampling_params.py",
        "structured_outputs.py",
        "config.py",
    ),
    *(name for name in FILES if name.startswith("policies/")),
]
OWNERS = {
    "triton": r"kernels/triton/.*|gpu/.*",
    "flash_attn": r"kernels/.*",
    "torch.distributed": r"distributed/(collectives|symmetric_memory)\.py",
    "safetensors": r"weights/.*",
    "huggingface_hub": r"weights/.*",
    "tokenizers": r"text/.*",
    "transformers": r"weights/.*|text/.*|llm\.py",
    "tqdm": r"progress\.py",
    "pyarrow": r"jobs/parquet\.py",
    "llguidance": r"structured/grammars\.py",
    "sqlite3": r"jobs/journal\.py",
    "ray": r"integrations/ray_replicas\.py",
    "lm_eval": r"integrations/lm_eval\.py",
    "importlib": r"compose\.py|kernels/flash_attention\.py",  # by a name that no rule here sees
}
NAMES_OWNERS = {"CUDAGraph": r"gpu/cuda_graph\.py", "distributed": r"distributed/.*"}
ACCELERATORS = re.compile(
    r"\b(cuda|triton|nccl|gloo|h100|h200|hopper|graph|graphs|flash|symmetric|pinned|pin_memory"
    r"|tma|cpp)\w*",
    re.I,
)
# What a user types, so that config.py must say it.
OPTIONS = {"cuda", "triton", "flash", "symmetric_memory"}

MOST_COLUMNS = 100
MOST_LINES = 50
# Functions that may be longer, each with its reason.
LONG = {
    "nanovllm/kernels/triton/attention.py:_decode_kernel": "attends, counts itself and merges: "
    "what a program does in order, and no part of it is used twice",
    "nanovllm/kernels/triton/attention.py:_prefill_kernel": "half of it is its "
    "parameters, which stand one a line",
}


def part_of(name: str) -> str:
    return name.split("/")[0].removesuffix(".py")


def files_of(part: str) -> list[str]:
    return [name for name in FILES if part_of(name) == part]


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


def parts_imported(name: str) -> set[str]:
    """The parts of this package that a file imports, but for its own."""
    used = {module.split(".")[1] for module in imports(name) if module.startswith("nanovllm.")}
    return used - {part_of(name)}


def within(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def test_the_rules_see_the_whole_package():
    assert {part_of(name) for name in FILES} == {*CORE, *ROOMS, *BESIDES}
    assert {*WITHOUT_TORCH} <= {*FILES}


def test_the_parts_of_the_core_stand_above_what_they_import():
    order = list(CORE)
    for part, below in CORE.items():
        assert below - BESIDES <= {*order[: order.index(part)]}


@pytest.mark.parametrize("part", CORE)
def test_the_core_imports_downwards_and_no_room(part):
    for name in files_of(part):
        assert parts_imported(name) <= CORE[part], name


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_the_core_and_the_rooms_it_is_allowed(room):
    for name in files_of(room):
        assert parts_imported(name) <= OPEN_TO_ROOMS | ROOMS[room], name


def test_the_rooms_do_not_need_each_other_in_circles():
    def needs(room: str) -> set[str]:
        return ROOMS[room] - BESIDES - {*CORE}

    done: set[str] = set()
    while ready := {room for room in ROOMS if room not in done and needs(room) <= done}:
        done |= ready
    assert done == {*ROOMS}


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
                path = "/".join(module.split(".")[1:])
                found = {f"{path}.py", f"{path}/__init__.py", f"{part_of(path)}/__init__.py"}
                todo += found & {*FILES} - seen


@pytest.mark.parametrize("module", OWNERS)
def test_each_outside_thing_has_one_owner(module):
    users = {name for name in FILES if any(within(used, module) for used in imports(name))}
    assert users and all(re.fullmatch(OWNERS[module], name) for name in users), users


@pytest.mark.parametrize("attribute", NAMES_OWNERS)
def test_each_outside_name_has_one_owner(attribute):
    """Reached through `torch.` too: torch.cuda.CUDAGraph, torch.distributed."""
    users = {
        name
        for name, tree in TREES.items()
        if any(
            isinstance(node, ast.Attribute) and node.attr == attribute for node in ast.walk(tree)
        )
    }
    assert all(re.fullmatch(NAMES_OWNERS[attribute], name) for name in users), users


@pytest.mark.parametrize("part", [*CORE, "__init__"])
def test_the_core_mentions_no_accelerator(part):
    for name in files_of(part):
        mentions = {match[0] for match in ACCELERATORS.finditer(FILES[name].read_text())}
        assert mentions <= (OPTIONS if part == "config" else set()), name


def lines_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """From `def` to the end; of a Triton kernel the body, for its parameters stand one a line."""
    is_kernel = any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    return node.end_lineno + 1 - (node.body[0] if is_kernel else node).lineno


def test_a_function_fits_on_a_screen():
    long = {
        f"{name}:{node.name}": lines_of(node)
        for name, path in SOURCES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if lines_of(node) > MOST_LINES
    }
    assert {*long} == {*LONG}, long


def test_lines_are_short():
    lines = [
        f"{name}:{number}"
        for name, path in SOURCES.items()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > MOST_COLUMNS
    ]
    assert not lines


def test_code_is_laid_out_by_the_formatter():
    """But for tables: who lays one out by hand names it here."""
    switch = re.compile(r"#\s*fmt:")
    by_hand = [name for name, path in SOURCES.items() if switch.search(path.read_text())]
    assert by_hand == []


def test_every_module_says_what_it_knows():
    silent = [name for name, tree in TREES.items() if tree.body and not ast.get_docstring(tree)]
    assert not silent


# What Python runs at its start, in the processes of ranks too. To delete a folder from a copy of
# the package would not do: where that is installed as editable, Python still finds its modules.
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
with LLM({folder!r}, max_model_len=256, kvcache_block_size=16, **{options}) as llm:
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    for output in llm.generate({prompts}, params, use_tqdm=False):
        print(output["token_ids"])
"""


def assert_greedy_without(hidden: list[str], checkpoint, tmp_path: Path, **options) -> None:
    """Where these modules cannot be imported, the tokens are the reference's."""
    (tmp_path / "sitecustomize.py").write_text(HIDE.format(hidden=hidden))
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            RUN.format(folder=str(checkpoint.folder), options=options, prompts=PROMPTS),
        ],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    expected = [str(checkpoint.expected(prompt, 9)) for prompt in PROMPTS]
    assert run.stdout.splitlines() == expected, run.stderr


def rooms_but(*kept: str) -> list[str]:
    return [f"nanovllm.{room}" for room in ROOMS if room not in kept]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("room", ROOMS)
def test_a_room_can_be_taken_out(room, device, checkpoint, tmp_path):
    assert_greedy_without([f"nanovllm.{room}"], checkpoint, tmp_path, device=device)


def test_the_core_runs_alone(checkpoint, tmp_path):
    assert_greedy_without(rooms_but(), checkpoint, tmp_path, device="cpu")


def test_ranks_need_no_other_room(checkpoint, tmp_path):
    hidden = rooms_but("distributed")
    assert_greedy_without(hidden, checkpoint, tmp_path, device="cpu", tensor_parallel_size=2)


def test_the_library_runs_where_triton_and_flash_attn_are_not_installed(checkpoint, tmp_path):
    assert_greedy_without(["triton", "flash_attn"], checkpoint, tmp_path, device="cpu")


def test_a_hidden_room_is_not_found(checkpoint, tmp_path):
    """Else the tests above would say nothing."""
    with pytest.raises(AssertionError, match="No module named 'nanovllm.layers'"):
        assert_greedy_without(["nanovllm.layers"], checkpoint, tmp_path, device="cpu")
