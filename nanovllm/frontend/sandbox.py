"""A Jinja environment for chat templates in which no operation holds the interpreter for long.

A chat template is a program that comes with a model folder or with a request. Jinja's sandbox keeps
it away from Python's internals, but lets it compute `9**9**9`. Here, every operation is charged for
the most that it may read and write, before it runs. A template that has used up its work ends with
an error. So no single operation takes long, and Ctrl-C and SIGTERM end loops.
"""

import json
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sized
from datetime import datetime
from functools import lru_cache, wraps
from types import BuiltinMethodType, GeneratorType, MethodType
from typing import Any, cast

from jinja2 import Template, nodes, pass_context
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from markupsafe import EscapeFormatter, Markup

# Work is counted in characters. Other things cost about as much, in time or memory, as so many:
STEP = 2  # a turn of a loop, an operation
CALL = 16  # of a method, a macro or a filter
ITEM = 16  # an element of a container
WORK = 2**26  # for one conversation: half a minute of empty loops on an AMD EPYC, or 256 MiB
WORK_PER_INPUT = 64  # and so many times the work of reading the conversation
TEXTS, LISTS = (str, bytes), (list, tuple)
CONTAINERS: Any = (
    *LISTS,
    set,
    frozenset,
    range,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
)
# Methods, filters and tests that do not read all of what they are given.
QUICK_METHODS = ("get", "items", "keys", "values", "startswith", "endswith")
QUICK_FILTERS = (
    *("length", "count", "default", "d", "first", "last", "list", "items", "safe", "attr", "map"),
    *("select", "reject", "selectattr", "rejectattr", "batch", "slice"),
)
QUICK_TESTS = (
    *("defined", "undefined", "none", "boolean", "true", "false", "integer", "float", "number"),
    *("string", "mapping", "sequence", "iterable", "callable", "sameas", "filter", "test"),
)
REVERSE_SEARCHES = ("rfind", "rindex", "rsplit", "rpartition")
PLAIN_ENCODINGS = ("utf-8", "utf8", "ascii", "latin-1")
WIDTHS = re.compile(r"(\d+|\*)(?=(?:\.(?:\d*|\*))?[hlL]*[a-zA-Z])")  # in formats of `%`


class TooMuchWorkError(Exception):
    """The error of a template that does more work than it may."""


def work_of(*values: Any, most: float = float("inf")) -> int:
    """Return the work of reading values with all that they contain; past `most`, at least that."""
    total, todo = 0, list(values)
    while todo and total <= most:
        value = todo.pop()
        if isinstance(value, TEXTS):
            total += len(value)
        elif isinstance(value, int):
            total += square(value.bit_length())
        elif isinstance(value, range):
            total += ITEM * len(value)
        elif isinstance(value, dict):
            total += ITEM * len(value)
            todo += value.keys()
            todo += value.values()
        elif isinstance(value, CONTAINERS):
            total += ITEM * len(value)
            todo += value
    return total


def square(size: int) -> int:
    """Return the work of an operation that takes quadratic time, such as to write an integer."""
    return size * size >> 12


def render(template_text: str, variables: dict[str, Any]) -> str:
    """Return what the template writes. Raises TooMuchWorkError, or whatever the template raises."""
    environment, template = compile_template(template_text)
    with environment.working(WORK + WORK_PER_INPUT * work_of(variables)):
        return template.render(**variables)


@lru_cache(maxsize=32)
def compile_template(template_text: str) -> "tuple[BoundedEnvironment, Template]":
    environment = BoundedEnvironment()
    return environment, environment.from_string(template_text)


class Generation(Extension):
    """The tag `generation`, around what the assistant writes. It changes no text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_write"), [], [], body).set_lineno(line)

    def _write(self, caller: Callable[[], str]) -> str:
        return caller()


class ChargedNodes(NodeTransformer):
    """Adds charges to a template where Jinja has no hook: loops, comparisons, `~`, slices."""

    def _charge_body(self, node: Any) -> Any:
        self.generic_visit(node)
        work = STEP
        for child in node.body:
            for part in (child, *child.find_all(nodes.Node)):
                if isinstance(part, nodes.TemplateData):
                    work += len(part.data)
                elif isinstance(part, (nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair)):
                    work += ITEM
                elif isinstance(part, nodes.Expr):
                    work += STEP
        step = nodes.Filter(nodes.Const(work), "charge", [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        return node

    visit_Macro = visit_CallBlock = _charge_body

    def visit_For(self, node: nodes.For) -> nodes.For:
        self._charge_body(node)
        if node.test is not None:  # which may let no item through
            node.test = charged(node.test, always=True)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        operands = [node.expr, *[operand.expr for operand in node.ops]]
        if len(operands) == 2 and is_quick(node.ops[0], operands):
            return node
        node.expr = charged(node.expr)
        for operand in node.ops:
            is_search = operand.op in ("in", "notin")
            operand.expr = charged(operand.expr, "charged_search" if is_search else "charged")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Concat:
        self.generic_visit(node)
        node.nodes = [charged(one) for one in node.nodes]
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Pair:
        self.generic_visit(node)
        node.key = charged(node.key)  # which is hashed
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Getitem:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = charged(node.node, "charged_shallow")
        return node


def is_quick(operand: nodes.Operand, operands: list[nodes.Expr]) -> bool:
    """Tell whether a comparison with a constant takes no longer than to read the constant."""
    if operand.op in ("in", "notin"):
        constants = operands[1]
        return isinstance(constants, (nodes.List, nodes.Tuple)) and all(
            isinstance(one, nodes.Const) for one in constants.items
        )
    return any(isinstance(one, nodes.Const) for one in operands)


def charged(node: Any, by: str = "charged", always: bool = False) -> nodes.Expr:
    if isinstance(node, nodes.Const) and not always:
        return node
    return nodes.Filter(node, by, [], [], None, None, lineno=node.lineno)


class ChargedCode(CodeGenerator):
    def visit_Template(self, node: nodes.Template, frame: Any = None) -> None:
        ChargedNodes().visit(node)
        super().visit_Template(node, frame)


class BoundedFormatter(SandboxedFormatter):
    """`str.format`, which may ask for any width."""

    _env: "BoundedEnvironment"

    def convert_field(self, value: Any, conversion: Any) -> Any:
        self._env.charge_for(value)
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> str:
        self._env.charge_for(value)
        self._env.charge(sum(map(number, re.findall(r"\d+", format_spec))))
        return super().format_field(value, format_spec)


class BoundedEscapeFormatter(BoundedFormatter, EscapeFormatter):
    """The formatter of text that is marked as safe."""


class TemplateNamespace(Namespace):
    """The `namespace` of templates. Keeps names that begin with an underscore out."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that an attribute may be called `self`
        self, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        check_name(name)
        super().__setitem__(name, value)

    __repr__ = object.__repr__  # Namespace's writes all that is in it


def check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no attribute {name!r}: name it without underscore")


class TemplateDict:
    """The `dict` of templates, without the attributes of a class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict:
        return dict.fromkeys(*args)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The environment that transformers gives chat templates, with a bound on their work."""

    code_generator_class = ChargedCode
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        self._work = threading.local()  # left to the template that this thread renders
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[Generation, loopcontrols],
            finalize=at_run_time(self.charge_for),
            optimized=False,  # or constants would be computed before their work is counted
        )
        del self.globals["lipsum"]  # random text, of any length
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = self._strftime_now
        self.globals["dict"] = TemplateDict()
        self.globals["namespace"] = TemplateNamespace
        self.filters["tojson"] = self._to_json
        self.filters = {name: self._bounded(name, one) for name, one in self.filters.items()}
        tests: dict[str, Any] = dict(self.tests)
        self.tests = {
            name: one if name in QUICK_TESTS else self._bounded(name, one)
            for name, one in tests.items()
        }
        # A template may name these, too, and then charges itself.
        self.filters["charge"] = at_run_time(self._charge_constant)
        self.filters["charged"] = at_run_time(self.charge_for)
        self.filters["charged_search"] = at_run_time(self._charge_search)
        self.filters["charged_shallow"] = at_run_time(self._charge_shallow)

    # The count of work.

    def working(self, work: int) -> "Working":
        """Let this thread do `work` inside a block."""
        return Working(self._work, work)

    def charge(self, work: float) -> None:
        """Use up `work`. Raises TooMuchWorkError if less than that is left."""
        left = getattr(self._work, "left", 0) - work
        self._work.left = left
        if left < 0:
            raise TooMuchWorkError("it loops without end, or makes what takes too much memory")

    def _charge_constant(self, work: Any) -> None:
        self.charge(max(STEP, work) if isinstance(work, int) else STEP)

    def charge_for(self, value: Any) -> Any:
        """Charge the reading of a value. Returns the value."""
        if isinstance(value, str):
            self.charge(STEP + len(value))
        else:
            self.charge(STEP + work_of(value, most=self._left()))
        return value

    def _left(self) -> float:
        return getattr(self._work, "left", 0)

    def _charge_search(self, value: Any) -> Any:
        if not isinstance(value, dict):  # where a key is found at once
            self.charge_for(value)
        return value

    def _charge_shallow(self, value: Any) -> Any:
        if isinstance(value, (*TEXTS, *LISTS, range)):
            self.charge(STEP + len(value))
        return value

    def _count(self, generator: Iterator[Any]) -> Iterator[Any]:
        """Yield what a generator yields, each item charged."""
        for item in generator:
            self.charge(ITEM + (len(item) if isinstance(item, TEXTS) else 0))
            yield item

    # What Jinja calls.

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.charge(STEP + self._work_of_operator(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def _work_of_operator(self, operator: str, left: Any, right: Any) -> float:
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() + right.bit_length()
            if operator == "**" and abs(left) > 1 and right > 0:
                bits = left.bit_length() * right
            return square(bits)
        if operator == "%" and isinstance(left, TEXTS):
            return self._work_of_format(left, right)
        if operator == "*":
            many, times = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(many, (*TEXTS, *LISTS)) and isinstance(times, int):
                return size_of(many) * max(0, times)
        return size_of(left) + size_of(right)

    def _work_of_format(self, text: str | bytes, values: Any) -> float:
        """Return the work of `text % values`."""
        if isinstance(text, bytes):
            text = text.decode("latin-1")
        given = values if isinstance(values, tuple) else (values,)
        widest = max((abs(one) for one in given if isinstance(one, int)), default=0)
        widths = sum([widest if one == "*" else number(one) for one in WIDTHS.findall(text)])
        return len(text) + widths + text.count("%") * work_of(values, most=self._left())

    def getitem(self, obj: Any, argument: Any) -> Any:
        if not isinstance(argument, (int, str)):
            self.charge_for(argument)  # to hash it
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Any:
        if super().wrap_str_format(value) is None:
            return None
        text, takes_mapping = value.__self__, value.__name__ == "format_map"
        formatter = BoundedFormatter(self)
        if isinstance(text, Markup):
            formatter = BoundedEscapeFormatter(self, escape=text.escape)

        def format(*args: Any, **kwargs: Any) -> str:
            if takes_mapping:
                (kwargs,), args = args, ()
            return type(text)(formatter.vformat(text, args, kwargs))

        return format

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        self, function = __self, __obj
        self.charge(CALL)
        if isinstance(function, (BuiltinMethodType, MethodType)):
            receiver, name = function.__self__, function.__name__
            args = tuple([self._listed(one) for one in args])
            if name not in QUICK_METHODS:
                self.charge_for(receiver)
            self.charge_for((args, kwargs))
            if isinstance(receiver, (*TEXTS, int)):
                self.charge(work_of_method(receiver, name, args, kwargs))
        elif not isinstance(function, (Macro, LoopContext)):
            self.charge_for((args, kwargs))
        return super().call(__context, function, *args, **kwargs)

    def _listed(self, value: Any) -> Any:
        """Turn a generator into a list, so that what takes all items at once can be charged."""
        return list(value) if isinstance(value, GeneratorType) else value

    def _bounded(self, name: str, function: Callable) -> Callable:
        """Wrap a filter or a test, so that its work is charged before it runs."""
        is_passed_context = getattr(function, "jinja_pass_arg", None) is not None
        work = WORK_OF_FILTERS.get(name)

        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            first = args[: int(is_passed_context)]
            values = args[int(is_passed_context) :]
            if name in TAKE_ALL:
                values = (self._listed(values[0]), *values[1:])
            self.charge(CALL)
            if name not in QUICK_FILTERS:
                self.charge_for((values, kwargs))
            if name == "format":
                text = values[0] if isinstance(values[0], TEXTS) else ""
                self.charge(self._work_of_format(text, kwargs or values[1:]))
            elif work is not None:
                self.charge(work(values[0], [*values[1:], *kwargs.values()]))
            result = function(*first, *values, **kwargs)
            return self._count(result) if isinstance(result, GeneratorType) else result

        return bounded

    def _strftime_now(self, format: str) -> str:
        self.charge(256 * count_of(format))  # Python tries with so much memory
        return datetime.now().strftime(format)

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        """Return JSON without the escapes for HTML of Jinja's own filter."""
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        if indent is None and separators is None:
            return encoder.encode(value)
        # A piece has an indent for each list around it.
        self.charge(sys.getrecursionlimit() * (whole([indent]) + longest([indent])))
        pieces = []
        for piece in encoder.iterencode(value):
            self.charge(STEP + len(piece))
            pieces.append(piece)
        return "".join(pieces)


class Working:
    """A context that gives a thread an amount of work; afterwards it has its former amount."""

    def __init__(self, count: threading.local, work: int) -> None:
        self._count, self._work = count, work

    def __enter__(self) -> None:
        self._before = getattr(self._count, "left", 0)
        self._count.left = self._work

    def __exit__(self, *exc: object) -> None:
        self._count.left = self._before


def at_run_time(function: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """Make a function that Jinja calls while a template runs, never while it is compiled."""
    return pass_context(lambda context, value: function(value))


def raise_exception(message: str) -> None:
    raise TemplateError(message)


def number(digits: str) -> float:
    return float(digits[:300])  # int() takes long for thousands of digits


def size_of(value: Any) -> int:
    """Return the work of copying a value, but not what it contains."""
    if isinstance(value, LISTS):
        return ITEM * len(value)
    return len(value) if isinstance(value, TEXTS) else 0


def whole(values: Any) -> float:
    """Return the sum of the integers among arguments, such as a width."""
    return sum([abs(one) for one in values if isinstance(one, int)])


def longest(values: Any) -> int:
    return max([len(one) for one in values if isinstance(one, TEXTS)], default=0)


def work_of_method(
    receiver: str | bytes | int, name: str, args: tuple, kwargs: dict[str, Any]
) -> float:
    """Return the work of a method beside the reading of its receiver and arguments."""
    values = (*args, *kwargs.values())
    if isinstance(receiver, int):
        return whole(values)  # to_bytes
    if name in ("strip", "lstrip", "rstrip", *REVERSE_SEARCHES):
        work = len(receiver) * longest(values) / 16
        return work + (ITEM * len(receiver) / 2 if name == "rsplit" else 0)
    if name == "splitlines" or name == "split":
        separator = values[0] if values and isinstance(values[0], type(receiver)) else None
        pieces = receiver.count(separator) if separator else len(receiver) // 2  # type: ignore
        return ITEM * pieces
    if name == "replace":
        return work_of_replace(receiver, values)
    if name == "join" and values:
        return len(receiver) * count_of(values[0])
    if name == "translate" and values and isinstance(values[0], dict):
        return len(receiver) * longest(values[0].values())
    if name == "expandtabs":
        return len(receiver) * (whole(values) or 8)
    if name in ("encode", "decode"):
        return 0 if {*values} <= {*PLAIN_ENCODINGS} else square(8 * len(receiver))
    return whole(values)  # center, ljust, rjust, zfill


def work_of_replace(text: Any, values: Any) -> float:
    if not isinstance(text, TEXTS) or len(values) < 2:
        return 0
    old, new = values[:2]
    if isinstance(text, bytes) or not (isinstance(old, str) and isinstance(new, str)):
        return len(text) * longest(values)
    # By keyword, they may come in the other order.
    return max(text.count(old) * len(new), text.count(new) * len(old))


def count_of(value: Any) -> int:
    return len(cast(Sized, value)) if isinstance(value, (*TEXTS, dict, *CONTAINERS)) else 0


def lines_of(value: Any) -> int:
    return len(value.splitlines()) + 1 if isinstance(value, TEXTS) else 1


# Filters that take all items of a generator at once, in an operation of the interpreter.
TAKE_ALL = ("join", "sum", "list", "sort", "min", "max", "unique")
# The work of filters beside the reading of what they are given: of a value and the arguments.
WORK_OF_FILTERS: dict[str, Callable[[Any, list], float]] = {
    "center": lambda value, values: whole(values),
    "indent": lambda value, values: lines_of(value) * (whole(values) + longest(values) + 4),
    "replace": work_of_replace,
    "join": lambda value, values: count_of(value) * longest(values),
    "trim": lambda value, values: count_of(value) * longest(values) / 16,
    "batch": lambda value, values: ITEM * whole(values),
    "slice": lambda value, values: ITEM * whole(values),
    "round": lambda value, values: square(4 * int(min(whole(values), 10**9))),
    "int": lambda value, values: square(4 * longest([value])),
    "sum": lambda value, values: (
        count_of(value) * work_of(value) if any(isinstance(one, LISTS) for one in values) else 0
    ),
    "list": lambda value, values: ITEM * count_of(value),
    "wordwrap": lambda value, values: count_of(value) * longest(values),
    "urlize": lambda value, values: count_of(value) * longest(values),
    "striptags": lambda value, values: count_of(value) * str(value).count("<"),
    "pprint": lambda value, values: 32 * work_of(value),
}
