"""What can be said of an installed wheel without torch: it compiles, is described, and its plain
part works.
"""

import compileall
import importlib
import sys
import types
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

wheel = distribution("nanovllm")
package = Path(find_spec("nanovllm").submodule_search_locations[0])
assert Path(sys.prefix) in package.parents, f"{package} is not the installed one"
assert compileall.compile_dir(package, quiet=1), "a file is no Python of this version"
assert wheel.version and wheel.metadata["Requires-Python"] == ">=3.10"
needed = " ".join(wheel.requires)
assert all(name in needed for name in ("torch", "transformers", "tokenizers", "safetensors")), (
    needed
)
for name in (
    "assets/tiny-qwen3/model.safetensors",
    "assets/tiny-qwen3/tokenizer.json",
    "backends/cpu/cpp_ops.cpp",
):
    assert (package / name).stat().st_size, name

# The package's own __init__ imports torch: leave it out, and import the modules that never do.
stub = sys.modules["nanovllm"] = types.ModuleType("nanovllm")
stub.__path__ = [str(package)]
for name in (
    "checks",
    "config",
    "outputs",
    "sampling_params",
    "engine.batch",
    "engine.block_manager",
    "engine.scheduler",
):
    importlib.import_module(f"nanovllm.{name}")
assert "torch" not in sys.modules

from nanovllm.config import Config
from nanovllm.sampling_params import SamplingParams

assert SamplingParams(0.5, top_k=3, stop="x").stop == ("x",)
assert Config.from_options("model", {"max_num_seqs": 3}).max_num_seqs == 3
try:
    SamplingParams(max_token=3)
except TypeError as error:
    assert "did you mean max_tokens" in str(error)
print(
    f"nanovllm {wheel.version} on Python {sys.version.split()[0]}: installed, compiled and "
    "imported without torch"
)
