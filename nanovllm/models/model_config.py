"""The typed configuration of a model: what config.json says, each field declared once.

    sliding_window: int | None = None
    num_experts: int = json_field(names=("num_local_experts", "num_experts"))

The annotation of a field and `json_field` define its default, the names that checkpoints give it,
and the values that are refused. A family adds its own fields, and its own defaults, in a subclass
on its page. config.json may say more than a class declares; the rest is not read.
"""

import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, ClassVar, NoReturn, TypeVar, get_args, get_origin

# Far above what any model has. With more layers Python is busy for minutes, and the product of two
# larger sizes does not fit into 64 bits.
MAX_LAYERS = 10_000
MAX_SIZE = 2**31 - 1
LARGEST = 3e38  # the bound of float fields, because models compute in float32

C = TypeVar("C", bound="ModelConfig")


def json_field(
    default: Any = MISSING,
    *,
    names: tuple[str, ...] = (),
    computed: Callable[[Any], Any] | None = None,
    **limits: float,
) -> Any:
    """Declare a field that needs more than an annotation and a default.

    A subclass may give the field another default, and need not repeat the rest.

    Args:
        default: the value if config.json does not say the field. A field without a default is
            required.
        names: the names of the field in config.json, of which the first one that is neither null
            nor empty counts. Empty: the name of the field.
        computed: takes the configuration and returns the value of a field that config.json does
            not say, or says to be null.
        limits: `ge` and `le` bound an integer (default: 1 and MAX_SIZE); `ge` and `lt`, both
            together, bound a float (default: above 0).
    """
    if computed is not None:
        default = None
    declared = {"names": names, "computed": computed, "limits": limits}
    return field(default=default, metadata=declared)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The configuration of a Llama, and the fields that other families share with it."""

    layer_kinds: ClassVar[tuple[str, ...]] = ("full_attention", "sliding_attention")
    activations: ClassVar[tuple[str, ...]] = ("silu", "swish")  # the values of hidden_act
    has_windows: ClassVar[bool] = False  # whether layers may have a sliding window
    default_rope: ClassVar[dict[str, Any]] = {}  # for a config.json without rope_parameters

    architecture: str  # the entry of config.json's architectures that runs here
    dtype: str | None = json_field(None, names=("dtype", "torch_dtype"))
    quantization_config: dict | None = None

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int = json_field(le=MAX_LAYERS)
    num_attention_heads: int
    num_key_value_heads: int = json_field(computed=lambda config: config.num_attention_heads)
    head_dim: int = json_field(
        computed=lambda config: config.hidden_size // config.num_attention_heads
    )
    max_position_embeddings: int
    rms_norm_eps: float = json_field(1e-6, ge=0, lt=1)
    hidden_act: str = json_field("silu", names=("hidden_activation", "hidden_act"))
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    is_causal: bool | None = True
    num_experts: int = json_field(0, ge=0)  # 0: MLPs. ExpertsConfig requires it

    # The kind of each layer. Without layer_types, the next three fields say it.
    layer_types: tuple[str, ...] = json_field(computed=lambda config: config.default_layer_types())
    sliding_window: int | None = json_field(None, ge=0)  # 0 is none, too
    use_sliding_window: bool = True
    full_attention_interval: int | None = json_field(
        None, names=("full_attention_interval", "sliding_window_pattern")
    )

    # Rotary embeddings. rope_settings reads these fields into one form.
    rope_parameters: dict | None = json_field(None, names=("rope_scaling", "rope_parameters"))
    rope_theta: float = 10_000.0
    rope_local_base_freq: float | None = None  # the base of layers with a window; None: rope_theta
    partial_rotary_factor: float = 1.0
    original_max_position_embeddings: int | None = None

    @classmethod
    def from_json(cls: type[C], json: dict[str, Any]) -> C:
        """Read the content of a config.json, which names its `architecture`.

        Raises ValueError for a configuration that makes no model that runs here.
        """
        return cls(**{one.name: read_field(cls, one, json) for one in fields(cls)})

    def __post_init__(self) -> None:
        for one in fields(self):
            computed = declaration_of(type(self), one.name).get("computed")
            if computed is not None and getattr(self, one.name) is None:
                object.__setattr__(self, one.name, computed(self))
        self.check()

    def default_layer_types(self) -> tuple[str, ...]:
        """Return the kind of each layer for a config.json without layer_types."""
        full, other = self.layer_kinds
        if every := self.full_attention_interval:
            return tuple(
                full if (index + 1) % every == 0 else other
                for index in range(self.num_hidden_layers)
            )
        return (other if self.window_is_on else full,) * self.num_hidden_layers

    @property
    def window_is_on(self) -> bool:
        """Whether config.json gives a window to the layers whose kind is sliding_attention."""
        return bool(self.sliding_window) and self.use_sliding_window

    def window_of(self, index: int) -> int | None:
        """Return how many tokens a token sees in layer `index`, itself included.

        None: it sees all up to itself. A window as large as the model's context is none.
        """
        window = self.sliding_window
        if not window or not self.window_is_on or self.layer_types[index] != "sliding_attention":
            return None
        return window if window < self.max_position_embeddings else None

    @property
    def largest_window(self) -> int | None:
        """The largest window of any layer; None if a layer has none."""
        windows = [self.window_of(index) for index in range(self.num_hidden_layers)]
        sizes = [window for window in windows if window is not None]
        return max(sizes) if len(sizes) == len(windows) else None

    def head_dim_of(self, kind: str) -> int:
        """Return the size of a head in layers of a kind."""
        return self.head_dim

    def kv_heads_of(self, kind: str) -> int:
        """Return the number of key-value heads in layers of a kind."""
        return self.num_key_value_heads

    def rope_settings(self, kind: str = "full_attention") -> dict[str, Any]:
        """Return the settings of the rotary embedding of layers of a kind, in one form.

        Checkpoints give them as rope_theta and rope_scaling, as rope_parameters, or as
        rope_parameters for each kind of layers. A setting that is null is absent.
        """
        rope = without_nulls(self.rope_parameters or self.default_rope)
        nested = [name for name, value in rope.items() if isinstance(value, dict)]
        is_local = kind == "sliding_attention" and self.rope_local_base_freq is not None
        if kind in nested:
            rope = without_nulls(rope[kind])
        elif is_local:
            rope = {}
        elif nested:
            raise ValueError(
                "config.json: the rope settings are given for kinds of layers "
                f"({', '.join(map(str, nested))}), and not for {kind}: give them for each"
            )
        rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
        rope.setdefault("rope_theta", self.rope_local_base_freq if is_local else self.rope_theta)
        rope.setdefault("partial_rotary_factor", self.partial_rotary_factor)
        original = "original_max_position_embeddings"
        # At the top level it wins over the one among the rope settings, as in transformers.
        if self.original_max_position_embeddings is not None and not nested:
            rope[original] = self.original_max_position_embeddings
        rope.setdefault(original, self.max_position_embeddings)
        rope["max_position_embeddings"] = self.max_position_embeddings
        return rope

    def check(self) -> None:
        """Raise ValueError for values that describe no model, or none that runs here.

        `read_field` has checked the type and the limits of each field. A family extends this
        method for relations between its fields.
        """
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if heads % kv_heads:
            raise ValueError(
                f"config.json: num_attention_heads is {heads}, num_key_value_heads is {kv_heads}: "
                "the second must divide the first"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(
                f"config.json: head_dim is {self.head_dim} (or hidden_size / num_attention_heads): "
                "it must be even"
            )
        if self.hidden_act not in self.activations:
            known = ", ".join(map(repr, self.activations))
            raise ValueError(
                f"config.json: hidden_act is {self.hidden_act!r}: {self.architecture} has {known}"
            )
        if not self.is_causal:  # transformers reads is_causal for every family
            refuse_later_tokens("is_causal", self.is_causal)
        self._check_layer_types()

    def _check_layer_types(self) -> None:
        kinds, layers = self.layer_types, self.num_hidden_layers
        if len(kinds) < layers or not all(kind in self.layer_kinds for kind in kinds):
            raise ValueError(
                f"config.json: layer_types is {list(kinds)}: it must say for each of {layers} "
                f"layers which one of {', '.join(self.layer_kinds)} it is; choose another model if "
                "it has others"
            )
        if not self.window_is_on:
            if "sliding_attention" in kinds:
                raise ValueError(
                    "config.json: layer_types has sliding_attention, but sliding_window is "
                    f"{self.sliding_window!r}, or use_sliding_window false: give the window's size "
                    "and set use_sliding_window"
                )
        elif (self.sliding_window or 0) < self.max_position_embeddings and not self.has_windows:
            raise ValueError(
                f"config.json: sliding_window is {self.sliding_window!r}: {self.architecture} has "
                "no windows here, choose a model without one"
            )


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(ModelConfig):
    """The configuration of a model with a mixture of experts."""

    num_experts: int = json_field(names=("num_local_experts", "num_experts"))
    num_experts_per_tok: int

    def check(self) -> None:
        super().check()
        check_experts(self.num_experts, self.num_experts_per_tok)


def check_experts(num_experts: int, num_experts_per_tok: int) -> None:
    """Raise ValueError if a token has more experts than there are."""
    if num_experts_per_tok > num_experts:
        raise ValueError(
            f"config.json: num_experts_per_tok is {num_experts_per_tok}, more than num_experts or "
            f"num_local_experts, which is {num_experts}: check both"
        )


def language_model_of(json: dict[str, Any]) -> dict[str, Any]:
    """Return the language model's configuration from that of a multimodal model.

    A configuration without text_config is returned as it is. What is said of the whole model
    counts for the language model.
    """
    language = json.get("text_config")
    if not isinstance(language, dict):
        return json
    whole = ("architectures", "dtype", "torch_dtype", "quantization_config", "tie_word_embeddings")
    return {**json, **language} | {n: json[n] for n in whole if json.get(n) is not None}


def read_field(cls: type[ModelConfig], one: Field, json: dict[str, Any]) -> Any:
    """Read one field of `cls` in the form to store. Raises ValueError if it is missing or wrong."""
    declared = declaration_of(cls, one.name)
    names = declared.get("names") or (one.name,)
    given = [name for name in names if name in json]
    if not given:
        if one.default is MISSING:
            raise ValueError(
                f"config.json has no {' or '.join(names)}, which {json['architecture']} needs: "
                "add it, or check its architectures"
            )
        return one.default
    name = next((name for name in given if json[name] not in (None, {})), given[0])
    value = json[name]
    kinds = get_args(one.type) if isinstance(one.type, types.UnionType) else (one.type,)
    if value is None and (types.NoneType in kinds or declared.get("computed") is not None):
        return None
    is_right, must = check_value(value, kinds[0], declared.get("limits", {}))
    if not is_right:
        raise ValueError(f"config.json: {name} is {value!r}: it must be {must}")
    return tuple(value) if isinstance(value, list) else value


def declaration_of(cls: type, name: str) -> Mapping[str, Any]:
    """Return what `json_field` declares of a field, in `cls` or in the next class above it."""
    declared = (vars(base).get("__dataclass_fields__", {}).get(name) for base in cls.__mro__)
    return next((one.metadata for one in declared if one is not None and one.metadata), {})


def check_value(value: Any, kind: Any, limits: dict[str, float]) -> tuple[bool, str]:
    """Return whether a value has the type of a field and lies within limits, and what it must be.

    The text "false" is refused for a bool, because Python would take it for true. A bool is refused
    for a number.
    """
    if kind is int:
        least, most = limits.get("ge", 1), limits.get("le", MAX_SIZE)
        is_right = type(value) is int and least <= value <= most
        return is_right, f"an integer from {least} to {most}"
    if kind is float:
        is_number = type(value) in (int, float)
        if "ge" in limits:
            least, bound = limits["ge"], limits["lt"]
            return is_number and least <= value < bound, f"a number from {least} to {bound}"
        return is_number and 0 < value < LARGEST, "a finite number above 0"
    if get_origin(kind) is tuple:
        element = get_args(kind)[0]
        is_right = isinstance(value, list) and all(type(x) is element for x in value)
        return is_right, f"a list of {'names' if element is str else 'integers'}"
    names = {bool: "true or false", str: "a name", dict: "an object, or be left out"}
    return type(value) is kind, names[kind]


def without_nulls(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def refuse_later_tokens(name: str, value: Any) -> NoReturn:
    """Raise ValueError for a field that lets tokens attend to later ones."""
    raise ValueError(
        f"config.json: {name} is {value!r}: no model here sees later tokens, choose one that "
        "generates text"
    )
