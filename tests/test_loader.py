"""Loading: every parameter filled exactly once, and every fault of a checkpoint named."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub.errors
import pytest
import torch
from model_helpers import Driver, expected_logits, load, make_checkpoint, read_config
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Qwen3Config,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nanovllm import LLM
from nanovllm.engine.dtype import resolve_dtype
from nanovllm.layers.linear import ReplicatedLinear
from nanovllm.layers.parallel import ParallelGroup
from nanovllm.layers.rope_scaling import rope_frequencies
from nanovllm.models import build_model, load_model_config
from nanovllm.weights import hub, loader
from nanovllm.weights.weight_slice import WeightSlice

CONFIG = Qwen3Config(
    vocab_size=101,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    attention_bias=True,
    max_position_embeddings=64,
)
INDEX = "model.safetensors.index.json"
NORM = "model.norm.weight"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
PROJECTION = "model.layers.1.self_attn.q_proj"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    make_checkpoint(folder, CONFIG)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "model")


@pytest.fixture
def model():
    return build_model(read_config(CONFIG, architectures=["Qwen3ForCausalLM"]), ParallelGroup())


def tensors_of(folder):
    return {
        name: tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def rewrite(folder, tensors):
    """Save `tensors` as the folder's only file."""
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    save_file(tensors, folder / "model.safetensors")


def test_files_and_dtype_do_not_change_what_is_loaded(folder):
    assert len(list(folder.glob("*.safetensors"))) > 2
    sharded = load(folder).state_dict()
    rewrite(folder, {name: tensor.double() for name, tensor in tensors_of(folder).items()})
    for name, tensor in load(folder).state_dict().items():
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor, sharded[name], rtol=0, atol=0)


def test_a_file_the_index_does_not_name_is_not_read(folder):
    save_file({"stray": torch.zeros(1)}, folder / "consolidated.safetensors")
    load(folder)


def test_weights_in_the_form_of_mistral_beside_those_of_transformers_are_not_read(folder):
    tensors = tensors_of(folder)
    rewrite(folder, tensors)  # no index
    save_file({"stray": torch.zeros(1)}, folder / "consolidated.safetensors")
    assert torch.equal(load(folder).model.norm.weight, tensors[NORM])


def test_missing_tensor_is_named(folder):
    tensors = tensors_of(folder)
    del tensors[NORM]
    rewrite(folder, tensors)
    with pytest.raises(ValueError, match=rf"no file has {NORM}: download"):
        load(folder)


def test_extra_tensor_is_named(folder):
    rewrite(folder, tensors_of(folder) | {"model.layers.2.mlp.up_proj.weight": torch.zeros(48, 32)})
    with pytest.raises(ValueError, match=r"no place for model.layers.2.mlp.up_proj.weight"):
        load(folder)


def test_inverse_frequencies_of_old_checkpoints_are_ignored(folder):
    rewrite(
        folder,
        tensors_of(folder) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)},
    )
    load(folder)


def test_wrong_shape_is_named_with_both_shapes(folder):
    rewrite(folder, tensors_of(folder) | {NORM: torch.zeros(33)})
    with pytest.raises(
        ValueError, match=rf"model.safetensors: {NORM} has shape \(33,\), .* \(32,\)"
    ):
        load(folder)


def test_quantized_tensor_is_refused(folder):
    rewrite(folder, tensors_of(folder) | {NORM: torch.zeros(32).to(torch.float8_e4m3fn)})
    with pytest.raises(ValueError, match=rf"{NORM} is F8_E4M3"):
        load(folder)


@pytest.mark.parametrize(
    "added, fault",
    [
        ("qweight", rf"no file has {PROJECTION}.weight: {PROJECTION}.qweight is a part of a"),
        ("weight_packed", rf"no file has {PROJECTION}.weight: .* check quantization_config"),
        ("weight_scale", rf"no place for {PROJECTION}.weight_scale: .* check quantization_config"),
        ("hf_quant_config.json", rf"no place for {PROJECTION}.weight_scale: .* by ModelOpt, as hf"),
    ],
    ids=["gptq", "int4", "fp8", "modelopt"],
)
def test_quantised_weights_without_a_quantization_config_are_named(folder, added, fault):
    """Older checkpoints, and those of ModelOpt, say the format in a file of its own."""
    tensors = tensors_of(folder)
    if added in ("qweight", "weight_packed"):
        del tensors[f"{PROJECTION}.weight"]
    if added.endswith(".json"):
        (folder / added).write_text('{"quantization": {"quant_algo": "FP8"}}')
        added = "weight_scale"
    rewrite(folder, tensors | {f"{PROJECTION}.{added}": torch.zeros(4)})
    with pytest.raises(ValueError, match=fault):
        load(folder)


def test_quantised_weights_of_more_layers_than_config_json_has_are_not_called_undeclared(folder):
    more = f"{PROJECTION}.other"
    tensors = {f"{more}.weight": torch.zeros(4), f"{more}.weight_scale": torch.zeros(4)}
    rewrite(folder, tensors_of(folder) | tensors)
    with pytest.raises(ValueError, match=rf"no place for {more}\S*, {more}\S*: check its config"):
        load(folder)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_weight_that_is_no_number_is_named(folder, number, dtype):
    """PyTorch's attention and the C++ kernels may make numbers of NaN, so no output would tell."""
    tensors = {name: tensor.to(dtype) for name, tensor in tensors_of(folder).items()}
    tensors[f"{PROJECTION}.weight"][-1, -1] = number
    rewrite(folder, tensors)
    fault = rf"model.safetensors: {PROJECTION}.weight has NaN or infinite numbers: download"
    with pytest.raises(ValueError, match=fault):
        load(folder)


def test_a_row_of_the_embedding_that_no_prompt_needs_may_hold_anything(folder):
    tensors = tensors_of(folder)
    tensors[EMBEDDING][7] = torch.nan
    rewrite(folder, tensors)
    assert load(folder).model.embed_tokens.weight[7].isnan().all()


@pytest.mark.parametrize("keep", [0, 5, 300, -1])
def test_truncated_file_is_named(folder, keep):
    path = sorted(folder.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=f"{path.name} is truncated or corrupt: download it again"):
        load(folder)


def test_missing_file_is_named(folder):
    path = sorted(folder.glob("*.safetensors"))[1]
    path.unlink()
    with pytest.raises(ValueError, match=f"lacks {path.name}, which {INDEX} names: download"):
        load(folder)


def test_corrupt_index_is_named(folder):
    (folder / INDEX).write_text("{}")
    with pytest.raises(ValueError, match=f"{INDEX} is corrupt: download it again"):
        load(folder)


def test_folder_without_weights_is_named(folder):
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    with pytest.raises(ValueError, match=r"has no \*.safetensors file: download"):
        load(folder)


def test_two_files_with_one_tensor_are_named(folder):
    tensors = tensors_of(folder)
    rewrite(folder, tensors)
    save_file({NORM: tensors[NORM]}, folder / "other.safetensors")
    with pytest.raises(ValueError, match=rf"both have {NORM}"):
        load(folder)


def tie(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))


@pytest.mark.parametrize("stored", [False, True])
def test_a_tied_head_that_is_absent_or_a_copy_is_the_embedding(folder, stored):
    tensors = tensors_of(folder)
    del tensors[HEAD]
    rewrite(folder, tensors | ({HEAD: tensors[EMBEDDING].clone()} if stored else {}))
    tie(folder)
    tied = load(folder)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    torch.testing.assert_close(tied.lm_head.weight.data, tensors[EMBEDDING])


@pytest.mark.parametrize("where", [(0, 0), (-1, -1)], ids=["first", "last"])
def test_a_stored_head_that_differs_from_its_embedding_is_used_as_transformers_does(folder, where):
    tensors = tensors_of(folder)
    head = tensors[EMBEDDING].clone()
    head[where] += 9
    rewrite(folder, tensors | {HEAD: head})
    tie(folder)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.testing.assert_close(reference.lm_head.weight.data, head)
    model = load(folder)
    tokens = list(range(50, 60))
    logits = Driver(model, num_sequences=1, max_tokens=12).step({}, {0: tokens})
    torch.testing.assert_close(logits, expected_logits(reference, tokens), rtol=0, atol=1e-4)
    torch.testing.assert_close(model.model.embed_tokens.weight.data, tensors[EMBEDDING])
    parts = [load(folder, rank, 2).lm_head.weight.data for rank in range(2)]
    torch.testing.assert_close(torch.cat(parts), head)


def test_a_stored_head_of_a_wrong_shape_is_named_though_it_is_tied(folder):
    rewrite(folder, tensors_of(folder) | {HEAD: torch.zeros(100, 32)})
    tie(folder)
    with pytest.raises(ValueError, match=rf"{HEAD} has shape \(100, 32\), .* \(101, 32\)"):
        load(folder)


@pytest.mark.parametrize("count", [1, 3, 9_999, 100_000])
def test_another_number_of_layers_than_the_checkpoint_has_is_refused_before_it_is_built(
    folder, count
):
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": count}
    (folder / "config.json").write_text(json.dumps(config | {"layer_types": None}))
    with pytest.raises(ValueError, match=rf"num_hidden_layers is {count}\D"):
        LLM(folder, device="cpu")


def test_coverage_sees_gaps_and_overlaps(model):
    sources = list(loader.model_weight_slices(model))
    loader.check_coverage(model, sources)
    with pytest.raises(AssertionError):
        loader.check_coverage(model, sources[:5] + sources[6:])
    with pytest.raises(AssertionError):
        loader.check_coverage(model, sources + sources[:1])
    with pytest.raises(AssertionError):
        loader.check_coverage(model, sources + list(ReplicatedLinear(4, 4).weight_slices("")))


def test_coverage_takes_slices_that_are_transposed_and_sees_gaps_inside_of_one():
    layer = ReplicatedLinear(4, 4)

    def cover(*views):
        loader.check_coverage(layer, [WeightSlice("", view, (), ()) for view in views])

    cover(layer.weight.t())
    cover(layer.weight[:2].t(), layer.weight[2:])
    with pytest.raises(AssertionError):
        cover(layer.weight[:, :2], layer.weight[2:])  # as many bytes as the first half


def test_dummy_weights_depend_on_the_seed_alone(model):
    loader.init_dummy_weights(model, seed=1)
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    loader.init_dummy_weights(model, seed=1)
    assert all(torch.equal(tensor, first[name]) for name, tensor in model.state_dict().items())
    loader.init_dummy_weights(model, seed=2)
    assert not torch.equal(model.lm_head.weight, first["lm_head.weight"])
    assert torch.equal(model.model.norm.weight, torch.ones(32))
    assert 0.018 < first["lm_head.weight"].std() < 0.022
    assert not torch.equal(first["lm_head.weight"], first["model.embed_tokens.weight"])


@pytest.mark.parametrize("name", ["float17", "int8", "Tensor"], ids=repr)
def test_a_dtype_of_the_checkpoint_that_is_none_is_refused(name):
    cuda = torch.device("cuda")
    assert resolve_dtype("auto", "float16", cuda) == torch.float16
    assert resolve_dtype("auto", None, cuda) == resolve_dtype("bfloat16", name, cuda)
    with pytest.raises(ValueError, match="config.json: dtype is .*: it must be a floating-point"):
        resolve_dtype("auto", name, cuda)


def test_missing_folder_and_unknown_model_say_so(tmp_path, monkeypatch):
    assert hub.resolve_model_folder(str(tmp_path)) == tmp_path
    for name in (
        str(tmp_path / "absent"),
        "./absent",
        "~/absent",
        "~nouser/x",
        "a/b/c",
        "absent",
        "/" + "x" * 5000,
    ):
        with pytest.raises(ValueError, match="no such folder"):
            hub.resolve_model_folder(name)


OF_THE_HUB = {
    "GatedRepoError": "request access on https://huggingface.co/some/model, and set .* HF_TOKEN",
    "RepositoryNotFoundError": "no such model on the Hugging Face hub.* check the name",
    "HFValidationError": "no such folder, and it is not a hub id like Qwen/Qwen3-0.6B",
    "LocalEntryNotFoundError": "cannot be reached .*: check the network, .*TINY_MODEL",
    "HfHubHTTPError": "its download .* failed .*: try again, or give a folder",
}


@pytest.mark.parametrize("name", OF_THE_HUB)
def test_each_failure_of_the_hub_is_one_line_with_its_remedy(name, monkeypatch):
    error_class = getattr(huggingface_hub.errors, name)

    def fail(*args, **kwargs):
        raise error_class.__new__(error_class)  # what else it is made of differs by release

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ValueError, match="^model is 'some/model': .*" + OF_THE_HUB[name]) as raised:
        hub.resolve_model_folder("some/model")
    assert "\n" not in str(raised.value) and raised.value.__suppress_context__


def test_a_connection_that_breaks_is_a_value_error_whatever_the_http_client_raises(monkeypatch):
    class ReadError(Exception):
        """As httpx's, which is no OSError."""

    def fail(*args, **kwargs):
        raise ReadError("connection reset\nsecond line")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ValueError, match=r"failed \(ReadError: connection reset\): try again"):
        hub.resolve_model_folder("some/model")


def test_without_a_network_the_quick_start_ends_in_one_error_that_names_the_tiny_model(tmp_path):
    nobody = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}  # nothing listens
    done = subprocess.run(
        [sys.executable, "-c", "from nanovllm import LLM; LLM('Qwen/Qwen3-0.6B')"],
        env=os.environ | nobody,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and done.stderr.count("Traceback") == 1
    assert "exception" not in done.stderr  # which joins the tracebacks of a chain
    *_, last = done.stderr.splitlines()
    assert last.startswith("ValueError: model is 'Qwen/Qwen3-0.6B'")
    assert "nanovllm.TINY_MODEL" in last and len(last) < 300


def test_config_errors_name_the_folder(tmp_path):
    with pytest.raises(ValueError, match="has no config.json"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json cannot be read"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="config.json: architectures is .*: this library runs"):
        load_model_config(tmp_path)


def test_a_scaling_beside_rope_parameters_counts(tmp_path):
    options = dict(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=1,
        intermediate_size=48,
    )
    Qwen3Config(**options, head_dim=8, architectures=["Qwen3ForCausalLM"]).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    scaling = dict(rope_type="linear", factor=4.0)
    values |= dict(rope_parameters=dict(rope_type="default", rope_theta=1e4), rope_scaling=scaling)
    (tmp_path / "config.json").write_text(json.dumps(values))
    want = ROPE_INIT_FUNCTIONS["linear"](AutoConfig.from_pretrained(tmp_path), torch.device("cpu"))[
        0
    ]
    settings = load_model_config(tmp_path).rope_settings()
    torch.testing.assert_close(rope_frequencies(settings, 8)[0], want)


@pytest.mark.parametrize("text", ["[]", "null", '"x"'])
def test_a_configuration_of_another_form_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="config.json cannot be read"):
        load_model_config(tmp_path)


def test_a_model_type_that_transformers_does_not_know_is_refused_with_those_that_run(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "nonsense", "architectures": ["Nonsense"]}'
    )
    with pytest.raises(ValueError, match="Nonsense.*this library runs Qwen3ForCausalLM"):
        load_model_config(tmp_path)


@pytest.mark.parametrize("name", ["model.gguf", "some/model-Q4.GGUF", "/nowhere/model.gguf"])
def test_a_gguf_file_hears_how_to_convert_it(tmp_path, name):
    with pytest.raises(
        ValueError, match="GGUF files are not read.*from_pretrained.*save_pretrained"
    ):
        hub.resolve_model_folder(name)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(
        ValueError, match="GGUF files are not read.*from_pretrained.*save_pretrained"
    ):
        hub.resolve_model_folder(str(tmp_path / "model.gguf"))
    with pytest.raises(
        ValueError, match="has no config.json.*GGUF files are not read.*save_pretrained"
    ):
        load_model_config(tmp_path)
    with pytest.raises(ValueError, match="has no .*safetensors file: .*gguf_file.*save_pretrained"):
        loader.open_checkpoint(tmp_path)


def test_a_file_is_no_model_folder(saved):
    with pytest.raises(ValueError, match="which is a file: give the folder that it lies in"):
        hub.resolve_model_folder(str(saved / "config.json"))


FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
FILES += (
    "model.safetensors",
    INDEX,
    "special_tokens_map.json",
    "additional_chat_templates/x.jinja",
)


@pytest.mark.parametrize("name", FILES)
def test_a_pipe_or_a_device_among_the_files_is_refused_and_not_opened(folder, name):
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(ValueError, match=f"{name} is a pipe, a device or a socket: remove it"):
        LLM(folder, device="cpu")
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=f"{name} is a pipe, a device or a socket: remove it"):
        LLM(folder, device="cpu")


def test_links_are_followed_and_one_that_leads_nowhere_does_no_harm(folder):
    path = max(folder.glob("*.safetensors"))
    path.rename(folder / "blob")
    path.symlink_to("blob")
    (folder / "README.md").symlink_to("gone")
    assert hub.resolve_model_folder(str(folder)) == folder
    load(folder)


DEEP = "[" * 200_000 + "]" * 200_000


@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", INDEX],
)
def test_values_nested_too_deep_are_an_error_that_names_the_file_and_a_remedy(folder, name):
    if name.startswith("tokenizer"):
        kind = '{"tokenizer_class": "PreTrainedTokenizerFast"}'
        (folder / "tokenizer_config.json").write_text(kind)
    (folder / name).write_text(f'{{"a": {DEEP}}}')
    names = "its tokenizer cannot be loaded" if name == "tokenizer.json" else name
    with pytest.raises(ValueError, match=rf"(?s){names}.*ownload it again"):
        LLM(folder, device="cpu")


def name_in_index(folder: Path, old: str, new: str) -> None:
    """Let the index name a file otherwise."""
    path = folder / INDEX
    index = json.loads(path.read_text())
    index["weight_map"] = {
        tensor: new if file == old else file for tensor, file in index["weight_map"].items()
    }
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    "name",
    ["../other/it.safetensors", "a/../it.safetensors", "a/../../other/it.safetensors", "/it"],
)
def test_an_index_that_names_a_file_outside_of_the_folder_is_refused(folder, tmp_path, name):
    """Also where the path would lead back, and although the file is the right one."""
    path = max(folder.glob("*.safetensors"))
    (tmp_path / "other").mkdir()
    (folder / "a").mkdir()
    shutil.copy(path, tmp_path / "other" / "it.safetensors")
    path.rename(folder / "it.safetensors")
    if name.startswith("/"):
        name = str(tmp_path / "other" / "it.safetensors")
    name_in_index(folder, path.name, name)
    message = f"{INDEX}: weight_map names '{name[:60]}.* outside of the folder: put the file into "
    with pytest.raises(ValueError, match=message):
        load(folder)


def test_an_index_leads_nowhere_through_a_linked_folder(folder, tmp_path):
    path = max(folder.glob("*.safetensors"))
    (tmp_path / "other").mkdir()
    path.rename(tmp_path / "other" / path.name)
    (folder / "part").symlink_to(tmp_path / "other")
    name_in_index(folder, path.name, f"part/{path.name}")
    with pytest.raises(ValueError, match=f"names 'part/{path.name}', which lies outside of"):
        load(folder)


@pytest.mark.parametrize("linked", [False, True], ids=["", "the folder is a link"])
def test_an_index_may_name_a_file_in_a_folder_of_the_folder(folder, tmp_path, linked):
    path = max(folder.glob("*.safetensors"))
    (folder / "part").mkdir()
    path.rename(folder / "part" / path.name)
    name_in_index(folder, path.name, f"part/{path.name}")
    (tmp_path / "link").symlink_to(folder)
    load(tmp_path / "link" if linked else folder)


def test_files_of_the_hubs_cache_are_links_out_of_the_folder(folder, tmp_path):
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for i, path in enumerate(sorted(folder.iterdir())):
        shutil.copy(path, blobs / str(i))
        (snapshot / path.name).symlink_to(f"../../blobs/{i}")
    assert hub.resolve_model_folder(str(snapshot)) == snapshot
    load(snapshot)


@pytest.mark.parametrize("names", [["x" * 5000], ["a\0b"], [5], [None], ["."], [""]], ids=repr)
def test_an_index_that_names_no_file_is_refused(folder, names):
    (folder / INDEX).write_text(
        json.dumps({"weight_map": {str(i): name for i, name in enumerate(names)}})
    )
    with pytest.raises(
        ValueError, match=f"{INDEX} is corrupt: download it again|which {INDEX} names: download"
    ):
        loader.open_checkpoint(folder)
