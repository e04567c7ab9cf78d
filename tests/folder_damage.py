"""Damage to model folders: fields that lie, headers that lie, bytes that are lost or wrong.

A `Change` says what is done, in numbers that fit any file, so that hypothesis can make it smaller.
"""

import json
import struct
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import strategies as st

JSON_FILES = (
    "config.json",
    "config.json",  # of which most is read
    "generation_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "model.safetensors.index.json",
)
DEEP = "[" * 5000 + "]" * 5000
# Written as they are: some are no JSON.
VALUES = (
    *("null", "true", "false", "0", "1", "-1", "2", "3", "16", "0.5", "1.0", "-0.0", "1e-7"),
    *(
        "2147483648",
        "9223372036854775808",
        "1" + "0" * 400,
        "1" * 5000,
        "1e400",
        "NaN",
        "-Infinity",
    ),
    *('""', '"x"', '"false"', '"\\u0000"', '"\\ud800"', '"../../x"', '"code.py"', '"a/b--code.C"'),
    *("[]", "[null]", '["x"]', "[1, 2]", "[[1]]", "{}", '{"x": 1}', '{"type": "x"}', DEEP),
    *('"qwen2"', '"qwen3"', '"llama"', '"qwen3_moe"', '"gemma3_text"', '"linear"', '"yarn"'),
    *('"Qwen2Tokenizer"', '"LlamaTokenizerFast"', '"BertTokenizer"', '"BPE"', '"ByteLevel"'),
    *('["LlamaForCausalLM"]', '["Qwen2ForCausalLM"]', '["Phi3ForCausalLM"]', '"F16"', '"gelu"'),
    *('{"rope_type": "linear", "factor": 2.0}', '{"rope_type": "yarn", "factor": 0}', '"<|end|>"'),
)
# What a file may say beside what it does.
NAMES = (
    *("rope_scaling", "rope_parameters", "sliding_window", "layer_types", "quantization_config"),
    *(
        "text_config",
        "auto_map",
        "num_local_experts",
        "dtype",
        "partial_rotary_factor",
        "hidden_act",
    ),
    *("hidden_activation", "attention_bias", "mlp_bias", "original_max_position_embeddings"),
    *("tokenizer_class", "chat_template", "added_tokens_decoder", "extra_special_tokens"),
    *("add_bos_token", "bos_token", "additional_special_tokens", "eos_token_id", "post_processor"),
    *("normalizer", "truncation", "padding", "__metadata__", "", "x"),
)


PLACE = "the place of the value"


class Change(NamedTuple):
    file: int
    kind: str
    where: tuple[int, ...]
    value: str


def changes() -> st.SearchStrategy[list[Change]]:
    number = st.integers(0, 2**20)
    change = st.builds(
        Change,
        number,
        st.sampled_from(sorted(KINDS)),
        st.lists(number, min_size=1, max_size=4).map(tuple),
        st.sampled_from(VALUES),
    )
    return st.lists(change, min_size=1, max_size=3)


def damage(folder: Path, change: Change) -> str:
    """Change a file of the folder; returns its name."""
    paths = [folder / name for name in JSON_FILES]
    if change.kind in BYTES:
        paths = [path for path in sorted(folder.iterdir()) if path.suffix != ".py"]
    if change.kind in HEADERS:
        paths = sorted(folder.glob("*.safetensors"))
    path = paths[change.file % len(paths)]
    if path.exists():
        content = path.read_bytes()
        path.write_bytes(KINDS[change.kind](content, change))
    return path.name


def _changed_json(content: bytes, change: Change) -> bytes:
    """Replace, remove or add one value, at a place that `where` leads to."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):  # an earlier change has spoilt it
        return content
    root = {"": document}
    holder: Any = root
    key: Any = ""
    for step in change.where:
        inner = holder[key]
        if not isinstance(inner, (dict, list)) or not inner:
            break
        holder = inner
        key = sorted(inner)[step % len(inner)] if isinstance(inner, dict) else step % len(inner)
    if change.kind == "remove":
        del holder[key]
        return json.dumps(root.get("")).encode()
    if change.kind == "add a little" and type(holder[key]) in (int, float):
        holder[key] += (1, -1, holder[key], 0.5)[change.where[-1] % 4]
        return json.dumps(document).encode()
    if change.kind == "add" and isinstance(holder, dict) and holder is not root:
        key = NAMES[change.where[-1] % len(NAMES)]
    holder[key] = PLACE
    return json.dumps(root[""]).replace(json.dumps(PLACE), change.value).encode()


def _header(content: bytes, change: Change) -> bytes:
    """A safetensors file: the length of its header, the header, the tensors."""
    if len(content) < 8 or (length := struct.unpack("<Q", content[:8])[0]) > len(content) - 8:
        return content
    kind = {"header field": "replace", "header count": "add a little"}[change.kind]
    header = _changed_json(content[8 : 8 + length], change._replace(kind=kind))
    return struct.pack("<Q", len(header)) + header + content[8 + length :]


def _header_length(content: bytes, change: Change) -> bytes:
    return struct.pack("<Q", change.where[0] ** (1 + len(change.where)) % 2**64) + content[8:]


def _cut(content: bytes, change: Change) -> bytes:
    return content[: change.where[0] % (len(content) + 1)]


def _overwrite(content: bytes, change: Change) -> bytes:
    at = change.where[0] % (len(content) + 1)
    return content[:at] + change.value[:40].encode() + content[at + len(change.value[:40]) :]


def _insert(content: bytes, change: Change) -> bytes:
    at = change.where[0] % (len(content) + 1)
    return content[:at] + bytes(byte % 256 for byte in change.where) + content[at:]


def _drop(content: bytes, change: Change) -> bytes:
    at = change.where[0] % (len(content) + 1)
    return content[:at] + content[at + change.where[-1] % 64 :]


def _not_a_number(content: bytes, change: Change) -> bytes:
    """Numbers of a file of weights become NaN, or huge."""
    at = len(content) - 4 - 4 * (change.where[0] % (len(content) // 8 + 1))
    bad = struct.pack("<f", (float("nan"), float("inf"), 3e38)[change.where[-1] % 3])
    return content[:at] + bad + content[at + 4 :] if at > 0 else content


HEADERS = {
    "header field": _header,
    "header count": _header,
    "header length": _header_length,
    "not a number": _not_a_number,
}
BYTES = {"cut": _cut, "overwrite": _overwrite, "insert": _insert, "drop": _drop}
FIELDS = dict.fromkeys(("replace", "remove", "add", "add a little"), _changed_json)
KINDS = FIELDS | BYTES | HEADERS
