"""The quantization_config of a checkpoint: which format each of its weights has.

A `Quantization` answers this for a module's name in the checkpoint. Whatever this library does not
run is refused by name here, before any weight is read.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

METHODS = ("fp8", "compressed-tensors", "gptq", "awq", "mxfp4")


@dataclass(frozen=True)
class Fp8:
    """Weights in FP8 (e4m3), with a scale for each block of `rows` x `columns`; 0: all of them.

    activations: how inputs are quantised to FP8 before the product.
        None: they are not.
        "token": with a scale for each token.
        "group": with a scale for each token and group of `columns` inputs.
        "tensor": with one scale, which the checkpoint holds.
    scale_name, input_scale_name: what the checkpoint calls a module's scales of weights and inputs.
    """

    rows: int
    columns: int
    activations: str | None
    scale_name: str = "weight_scale"
    input_scale_name: str = "input_scale"

    @property
    def description(self) -> str:
        """The format in words, for the line that an LLM logs when it is ready."""
        part = {(0, 0): "tensor", (1, 0): "row"}.get((self.rows, self.columns))
        weights = f"FP8 weights (a scale a {part or f'block of {self.rows} x {self.columns}'})"
        inputs = {
            None: "",
            "token": " and inputs (a scale a token)",
            "group": f" and inputs (a scale for each {self.columns})",
            "tensor": " and inputs (a static scale)",
        }
        return weights + inputs[self.activations]


@dataclass(frozen=True)
class Integers:
    """Weights in integers of `bits`, with a scale for each row and group of columns.

    layout: how a checkpoint packs them: "gptq", "awq" or "compressed-tensors".
    group: columns of a group; 0: all of them.
    has_zeros: whether a group has a zero point besides its scale.
    zeros_less_one: whether zero points are stored less one.
    has_g_idx: whether a tensor g_idx says which group each column belongs to.
    """

    layout: str
    bits: int
    group: int
    has_zeros: bool
    zeros_less_one: bool = False
    has_g_idx: bool = False

    @property
    def description(self) -> str:
        """The format in words, for the line that an LLM logs when it is ready."""
        name = {"gptq": "GPTQ ", "awq": "AWQ "}.get(self.layout, "")
        groups = f"groups of {self.group}" if self.group else "a scale a row"
        return f"{name}INT{self.bits} weights ({groups})"


@dataclass(frozen=True)
class Fp4:
    """Weights in FP4 (E2M1), with a scale for each row and group of columns.

    is_nvidia: NVFP4, whose groups of 16 have scales in e4m3 and which has one more scale for the
        tensor. Otherwise MXFP4, whose groups of 32 have a power of 2.
    """

    is_nvidia: bool

    @property
    def group(self) -> int:
        return 16 if self.is_nvidia else 32

    @property
    def description(self) -> str:
        """The format in words, for the line that an LLM logs when it is ready."""
        return f"{'NVFP4' if self.is_nvidia else 'MXFP4'} weights"


@dataclass(frozen=True)
class Int8:
    """Weights in int8, a scale a row, and inputs in int8, a scale for each 32.

    The head is quantised, too, because it holds a good part of a small model's weights.
    """

    description = "INT8 weights (a scale a row) and inputs (a scale for each 32)"


Scheme = Fp8 | Integers | Fp4 | Int8
Matcher = Callable[[str], bool]

# What the option `quantization` makes of a checkpoint that is not quantised. A scale a row suits
# weights of any size.
MADE_HERE: dict[str, Scheme] = {"fp8": Fp8(rows=1, columns=0, activations="token"), "int8": Int8()}


@dataclass(frozen=True)
class Quantization:
    """The formats of a model's weights.

    method: The checkpoint's quant_method, or "fp8" or "int8".
    rules: The format of the modules that each matcher names; None: they are not quantised. The
        first rule that matches a module counts.
    is_made_here: Whether the checkpoint is not quantised, and its weights are quantised as they are
        loaded.
    has_kv_scales: Whether the checkpoint has scales for a quantised KV cache.
    has_packed_head: Whether the rules are for the head (lm_head), too.
    """

    method: str
    rules: tuple[tuple[Matcher, Scheme | None], ...]
    is_made_here: bool = False
    has_kv_scales: bool = False
    has_packed_head: bool = False

    def scheme_of(self, module: str) -> Scheme | None:
        """Return the format of a module's weight, by the module's name in the checkpoint."""
        is_head = module.rpartition(".")[2] == "lm_head"
        if is_head and not self.has_packed_head:
            return None
        # Checkpoints of models that take images, too, name the text model in several ways, and
        # their quantization_config may name it in another way than their tensors.
        names = {module, "lm_head"} if is_head else {module}
        for prefix in ("language_model.model.", "model.language_model."):
            if module.startswith(prefix):
                rest = module.removeprefix(prefix)
                names |= {f"{p}{rest}" for p in ("model.", "model.language_model.", prefix)}
        for matches, scheme in self.rules:
            if any(map(matches, names)):
                return scheme
        return None

    @property
    def description(self) -> str:
        """The formats in words, for the line that an LLM logs when it is ready."""
        formats = {scheme.description for _, scheme in self.rules if scheme is not None}
        return ", ".join(sorted(formats))


def read_quantization(
    config: Any, wanted: str | None, *, keeps_mxfp4: bool = False
) -> Quantization | None:
    """Read which formats a model's weights have; None: the layers stay plain.

    config: The checkpoint's quantization_config, or None.
    wanted: The option `quantization`.
    keeps_mxfp4: Whether weights in MXFP4 stay packed where the option does not say so.
    Raises ValueError for a format that is not run here, and where `wanted` is another one.
    """
    if not config:
        if wanted is None:
            return None
        if wanted not in MADE_HERE:
            raise ValueError(
                f"quantization is {wanted!r}, but the checkpoint is not quantised: use 'fp8' or, "
                "on a CPU, 'int8', which quantise it while it is loaded, or give a checkpoint in "
                f"{wanted}"
            )
        return Quantization(
            wanted,
            ((everything, MADE_HERE[wanted]),),
            is_made_here=True,
            has_packed_head=wanted == "int8",
        )
    method = config.get("quant_method") if isinstance(config, dict) else None
    if method not in METHODS:
        refuse("quant_method", method, f"this library runs {', '.join(METHODS)}")
    if wanted is not None and wanted != method:
        remedy = f", or give a checkpoint in {wanted}" if wanted in METHODS else ""
        raise ValueError(
            f"quantization is {wanted!r}, but the checkpoint is in {method}: leave the option out"
            f"{remedy}"
        )
    rules = READERS[method](config)
    if method == "mxfp4" and wanted is None and not keeps_mxfp4:
        return None  # the loader dequantises it
    return Quantization(
        method,
        tuple(rules),
        has_kv_scales=bool(config.get("kv_cache_scheme")),
        # The libraries that make checkpoints of the other methods never quantise the head.
        has_packed_head=method == "compressed-tensors" or config.get("lm_head") is True,
    )


def check_kv_cache_scheme(config: Any) -> None:
    """Raise ValueError if a checkpoint's KV cache is quantised, and not to FP8.

    config: The checkpoint's quantization_config, or None.
    """
    scheme = config.get("kv_cache_scheme") if isinstance(config, dict) else None
    if not scheme:
        return
    expected = dict(num_bits=8, type="float", strategy="tensor", symmetric=True, dynamic=False)
    if not isinstance(scheme, dict) or any(
        scheme.get(name, value) != value for name, value in expected.items()
    ):
        raise ValueError(
            f"kv_cache_dtype is 'fp8', but kv_cache_scheme in config.json is {scheme!r:.200}, of "
            "which only FP8 with a static scale a tensor is run here: leave the option out"
        )


Rules = list[tuple[Matcher, Scheme | None]]


def read_fp8(config: dict[str, Any]) -> Rules:
    """Read the configuration of quant_method fp8."""
    one_of(config, "fmt", ("e4m3", None), "only e4m3 is run here")
    one_of(config, "scale_fmt", ("float", None), "scales must be float32 or bfloat16 numbers")
    scheme = one_of(
        config, "activation_scheme", ("dynamic", "static", None), "use dynamic or static"
    )
    block = config.get("weight_block_size")
    names = dict(scale_name="weight_scale_inv", input_scale_name="activation_scale")
    if block is None and "ignored_layers" in config:
        names = {}  # AutoFP8 made the checkpoint, and gives scales of tensors the usual names
    if block is None:
        fp8 = Fp8(0, 0, "tensor" if scheme == "static" else "token", **names)
    elif not is_block(block):
        refuse("weight_block_size", block, "it must be two numbers above 0, or null")
    elif scheme == "static":
        refuse("activation_scheme", scheme, "blocks of weights need dynamic")
    else:
        fp8 = Fp8(block[0], block[1], "group", **names)
    plain = [*left_plain(config, "modules_to_not_convert"), *left_plain(config, "ignored_layers")]
    return [*plain, (everything, fp8)]


def read_gptq(config: dict[str, Any]) -> Rules:
    """Read the configuration of quant_method gptq. `dynamic` gives modules values of their own."""
    one_of(config, "checkpoint_format", ("gptq", "gptq_v2", None), "use gptq or gptq_v2")
    one_of(config, "pack_dtype", ("int32", "torch.int32", None), "it must be int32")
    one_of(config, "lm_head", (True, False, None), "use true or false")
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, dict) or not all(isinstance(key, str) for key in dynamic):
        refuse("dynamic", dynamic, "it must map patterns to values")
    rules: Rules = []
    for pattern, values in dynamic.items():
        matches = regex(pattern.removeprefix("-:").removeprefix("+:"), "dynamic")
        if pattern.startswith("-:"):
            rules.append((matches, None))
        elif isinstance(values, dict):
            rules.append((matches, gptq_scheme(config | values)))
        else:
            refuse("dynamic", dynamic, "it must map patterns to objects")
    name = "modules_in_block_to_quantize"
    if config.get(name) is None:
        return [*rules, (everything, gptq_scheme(config))]
    lists = config[name]
    if not isinstance(lists, list) or not all(map(is_list_of_names, lists)):
        refuse(name, lists, "it must be a list of lists of names, or be left out")
    modules = [module for names in lists for module in names]
    modules += ["lm_head"] if config.get("lm_head") else []  # which is in no block
    return [*rules, *((named(module, name), gptq_scheme(config)) for module in modules)]


def gptq_scheme(config: dict[str, Any]) -> Integers:
    """Read the format of GPTQ's weights."""
    return Integers(
        "gptq",
        bits=one_of(config, "bits", (4, 8), "use 4 or 8"),
        group=read_group(config, "group_size"),
        has_zeros=True,
        zeros_less_one=config.get("checkpoint_format") != "gptq_v2",
        has_g_idx=bool(one_of(config, "desc_act", (True, False, None), "use true or false")),
    )


def read_awq(config: dict[str, Any]) -> Rules:
    """Read the configuration of quant_method awq."""
    version = config.get("version")
    if not isinstance(version, str | None) or (version or "gemm").lower() != "gemm":
        refuse("version", version, "only gemm is run here")
    one_of(config, "zero_point", (True, None), "only true is run here")
    one_of(config, "lm_head", (False, None), "AWQ leaves the head as it is")
    bits = "w_bit" if "w_bit" in config else "bits"
    group = "q_group_size" if "q_group_size" in config else "group_size"
    one_of(config, bits, (4,), "use 4")
    awq = Integers("awq", 4, read_group(config, group), has_zeros=True)
    return [*left_plain(config, "modules_to_not_convert"), (everything, awq)]


def read_mxfp4(config: dict[str, Any]) -> Rules:
    """Read the configuration of quant_method mxfp4, in which experts alone are quantised."""
    return [
        *left_plain(config, "modules_to_not_convert"),
        (lambda name: ".experts" in name, Fp4(is_nvidia=False)),
    ]


def read_compressed_tensors(config: dict[str, Any]) -> Rules:
    """Read the configuration of quant_method compressed-tensors."""
    for name in ("sparsity_config", "transform_config"):
        value = config.get(name)
        is_dense = isinstance(value, dict) and value.get("format") == "dense"
        if value and not is_dense:
            refuse(name, value, "only quantised weights are run here")
    status = config.get("quantization_status")
    if status not in ("compressed", None):
        refuse("quantization_status", status, "only compressed weights are run here")
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        refuse("config_groups", groups, "it must hold one group or more")
    schemes: dict[str, Scheme] = {}
    for group in groups.values():
        if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
            refuse("config_groups", groups, "each must be an object with weights")
        targets = group.get("targets")
        if not is_list_of_names(targets):
            refuse("targets", targets, "it must be a list of names")
        scheme = group_scheme(group, group.get("format") or config.get("format"))
        schemes |= {target: scheme for target in targets or ()}
    # A module may match several targets. As in the makers' library, names count before patterns,
    # which count in alphabetical order, and the class that all modules have counts last.
    order = sorted(schemes, key=lambda one: (one == "Linear", one.startswith("re:"), one))
    rules: Rules = [(named(target, "targets"), schemes[target]) for target in order]
    return [*left_plain(config, "ignore"), *rules]


def group_scheme(group: dict[str, Any], kind: Any) -> Scheme:
    """Read one of the config_groups of compressed-tensors."""
    weights, inputs = group["weights"], group.get("input_activations")
    if not isinstance(inputs, dict | None):
        refuse("input_activations", inputs, "it must be an object, or null")
    one_of(group, "output_activations", (None,), "outputs are not quantised here")
    strategy = weights.get("strategy")
    if kind == "pack-quantized":
        one_of(weights, "type", ("int",), "use int for pack-quantized")
        one_of(weights, "strategy", ("group", "channel"), "use group or channel")
        if inputs is not None:
            refuse("input_activations", inputs, "inputs are not quantised with integer weights")
        order = one_of(
            weights, "actorder", ("group", "weight", "static", "dynamic", False, None), "use group"
        )
        symmetric = one_of(weights, "symmetric", (True, False, None), "use true or false")
        return Integers(
            "compressed-tensors",
            bits=one_of(weights, "num_bits", (4, 8), "use 4 or 8"),
            group=read_group(weights, "group_size") if strategy == "group" else 0,
            has_zeros=symmetric is False,
            has_g_idx=order in ("group", "dynamic"),
        )
    if kind == "nvfp4-pack-quantized":
        one_of(weights, "type", ("float",), "use float for NVFP4")
        one_of(weights, "num_bits", (4,), "use 4 for NVFP4")
        one_of(weights, "group_size", (16,), "use 16 for NVFP4")
        return Fp4(is_nvidia=True)
    if kind not in ("float-quantized", "naive-quantized"):
        refuse(
            "format",
            kind,
            "this library runs float-quantized, pack-quantized and nvfp4-pack-quantized",
        )
    one_of(weights, "type", ("float",), "with this format, weights must be float")
    one_of(weights, "num_bits", (8,), "use 8")
    one_of(weights, "symmetric", (True, None), "use true")
    if strategy == "block":
        block = weights.get("block_structure")
        if not is_block(block):
            refuse("block_structure", block, "it must be two numbers above 0")
        rows, columns = block
    else:
        sizes = {"tensor": (0, 0), "channel": (1, 0)}
        one_of(weights, "strategy", tuple(sizes), "use tensor, channel or block")
        rows, columns = sizes[strategy]
    return Fp8(rows, columns, read_inputs(inputs, columns))


def read_inputs(inputs: dict[str, Any] | None, columns: int) -> str | None:
    """Read how compressed-tensors quantises inputs, as `Fp8.activations` says it."""
    if inputs is None:
        return None
    one_of(inputs, "num_bits", (8,), "use 8")
    one_of(inputs, "type", ("float",), "use float")
    one_of(inputs, "symmetric", (True, None), "use true")
    how = inputs.get("strategy"), inputs.get("dynamic") or False
    if how == ("group", True) and inputs.get("group_size") == columns:
        return "group"
    if how not in (("token", True), ("tensor", False)):
        refuse(
            "input_activations",
            inputs,
            "inputs may have dynamic scales of tokens (strategy token), a static scale of the "
            "tensor (strategy tensor), or, with blocks of weights, dynamic scales of groups as "
            "wide as a block",
        )
    return str(how[0])


READERS: dict[str, Callable[[dict[str, Any]], Rules]] = {
    "fp8": read_fp8,
    "compressed-tensors": read_compressed_tensors,
    "gptq": read_gptq,
    "awq": read_awq,
    "mxfp4": read_mxfp4,
}


def left_plain(config: dict[str, Any], name: str) -> Rules:
    """Read a list of modules that are not quantised."""
    names = config.get(name)
    if names is None:
        return []
    if not is_list_of_names(names):
        refuse(name, names, "it must be a list of names, or be left out")
    # A mixture of experts may have 100,000 weights, and a list hundreds of names.
    plain = [one for one in names if is_plain(one)]
    rules: Rules = [(named(one, name), None) for one in names if not is_plain(one)]
    return [(part_of_name(plain), None), *rules] if plain else rules


def is_plain(pattern: str) -> bool:
    """Tell whether a pattern is a name or a part of one, in which "*" may stand for names."""
    return pattern != "Linear" and not re.search(r"^re:|[\\()\[\]|^$+?]", pattern)


def part_of_name(patterns: list[str]) -> Matcher:
    """Return a function that tells whether a name has one of the plain patterns as a part."""
    inner = "|".join(re.escape(one.strip(".")).replace(r"\*", r"[^.]*") for one in patterns)
    part = re.compile(rf"(^|.*\.)(?:{inner})(\.|$)")
    return lambda name: part.match(name) is not None


def named(pattern: str, field: str) -> Matcher:
    """Return a function that tells whether a pattern of the config names a module.

    pattern: one of four kinds.
        "Linear": all modules, because all that are quantised here are linear layers.
        "re:" and a regular expression: modules whose names begin as it says.
        A name or a part of one: whole names between dots, of which "*" stands for any one.
        Any other text: a regular expression, which must end where a name ends, as in transformers.
    field: the field of the config that has the pattern, for errors.
    """
    if pattern.startswith("re:"):
        return regex(pattern.removeprefix("re:"), field)
    if pattern == "Linear":
        return everything
    if is_plain(pattern):
        return part_of_name([pattern])
    return regex(pattern, field, end=r"(?:(?<=\.)|(?=\.|$))")


def regex(pattern: str, field: str, end: str = "") -> Matcher:
    """Return a function that tells whether a name begins as a regular expression says.

    end: a further regular expression, which must match after it.
    """
    try:
        compiled = re.compile(pattern)  # first alone: an error speaks of the file's own pattern
        if end:
            compiled = re.compile(f"(?:{pattern}){end}")
    except (re.error, OverflowError, RecursionError) as error:
        refuse(field, pattern, f"it is no regular expression ({error})")
    return lambda name: compiled.match(name) is not None


def everything(name: str) -> bool:
    return True


def read_group(config: dict[str, Any], name: str) -> int:
    """Read the number of columns of a group; 0: all of a row, which is -1 in files."""
    value = config.get(name)
    if type(value) is not int or not (value == -1 or 8 <= value <= 2**20 and value % 8 == 0):
        refuse(name, value, "it must be a multiple of 8, or -1 for whole rows")
    return max(value, 0)


def one_of(config: dict[str, Any], name: str, allowed: tuple[Any, ...], remedy: str) -> Any:
    """Return a field of a configuration. Raises ValueError unless its value is an allowed one."""
    value = config.get(name)
    if not any(type(value) is type(one) and value == one for one in allowed):
        refuse(name, value, remedy)
    return value


def is_block(value: Any) -> bool:
    is_pair = isinstance(value, list) and len(value) == 2
    return is_pair and all(type(size) is int and 0 < size <= 2**20 for size in value)


def is_list_of_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) and name for name in value)


def refuse(name: str, value: Any, remedy: str) -> NoReturn:
    """Raise ValueError for a field of quantization_config."""
    raise ValueError(
        f"config.json: quantization_config: {name} is {value!r:.200}: {remedy}; choose another "
        "checkpoint of the model"
    )
