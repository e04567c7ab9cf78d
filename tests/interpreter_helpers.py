"""Triton's interpreter, made faster by what changes no result, and made to check addresses."""

import inspect
from dataclasses import replace
from functools import cache
from itertools import count

import numpy as np


def speed_up_the_interpreter() -> None:
    """Spare it most of what it does beside computing.

    Whenever an interpreted function is called, by another one too, the interpreter looks among a
    thousand members of triton.language for those that it must replace, though it has just replaced
    them. It also works out whether integers overflow, and drops the answer unless it debugs. What a
    release of Triton does in another way stays as it is.
    """
    try:
        from triton.language.core import is_builtin
        from triton.runtime import interpreter

        patch_attr, options = interpreter._patch_attr, interpreter.interpreter_builder.options
        no_scope = interpreter._LangPatchScope
        assert interpreter._patch_builtin and interpreter._patch_lang
    except (ImportError, AttributeError):
        return

    @cache
    def names_of_builtins(package) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

    def patch_builtin(package, *args):
        for name in names_of_builtins(package):
            member = getattr(package, name)
            if is_builtin(member):  # else it has been replaced already
                patch_attr(package, name, member, *args)

    interpreter._patch_builtin = patch_builtin
    interpreter._patch_lang = PatchedOnce(interpreter._patch_lang, no_scope)
    if not options.debug:
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)


class PatchedOnce:
    """Replaces the members that a function sees, unless the launch under way has done so."""

    def __init__(self, patch, no_scope) -> None:
        self.patch, self.no_scope = patch, no_scope
        self.seen: set[int] = set()  # by the functions of the launch

    def __call__(self, function):
        names = id(function.__globals__)
        if names in self.seen:
            return self.no_scope()
        scope = self.patch(function)
        if not self.seen:
            restore = scope.restore

            def end_launch():
                self.seen.clear()
                restore()

            scope.restore = end_launch
        self.seen.add(names)
        return scope


TAG = np.uint64(48)  # where the bits of an address begin that no CPU uses
TAGS = 2**15


class Bounds:
    """The bounds of the tensors that kernels were launched with.

    The pointers of each tensor carry a number of its own, so that they are told apart wherever they
    lead. An address that a kernel reads from memory has no number, and is not checked.
    """

    def __init__(self) -> None:
        self.of_tag: dict[int, tuple[int, int]] = {}
        self.numbers = count()

    def tag(self, tensor) -> np.uint64:
        """Return the bits that mark the pointers of a tensor."""
        storage = tensor.untyped_storage()
        number = next(self.numbers) % TAGS + 1  # older launches have ended
        begin = (number << int(TAG)) + storage.data_ptr()
        self.of_tag[number] = begin, begin + storage.nbytes()
        return np.uint64(number) << TAG

    def strip(self, pointers, mask, doing: str) -> np.ndarray:
        """Return addresses without tags. Raises IndexError unless those under the mask are right.

        `doing` says what is done at the addresses.
        """
        data = pointers.data
        used = data if mask is None else data[np.broadcast_to(mask.data, data.shape) != 0]
        if used.size and (number := int(used.flat[0] >> TAG)):
            size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
            begin, end = self.of_tag.get(number, (0, 0))
            if used.min() < begin or int(used.max()) + size > end:
                self.check_each(used, size, doing)
        return data & np.uint64((1 << int(TAG)) - 1)

    def check_each(self, used, size: int, doing: str) -> None:
        for address in map(int, used.flat):
            begin, end = self.of_tag.get(address >> int(TAG), (0, 0))
            if not begin <= address <= end - size:
                raise IndexError(
                    f"a kernel {doing} {size} bytes at byte {address - begin} of {end - begin}"
                )


def check_bounds() -> None:
    """Let a kernel raise that reads or writes outside of the memory of a tensor.

    A view's pointers may lead anywhere in the memory that it is a view of.
    """
    from triton.runtime import interpreter

    builder, convert, bounds = interpreter.InterpreterBuilder, interpreter._implicit_cvt, Bounds()

    def tagged(arg):
        out = convert(arg)
        if hasattr(arg, "data_ptr"):
            out.handle.data = out.handle.data + bounds.tag(interpreter._unwrap_tensor(arg))
        return out

    def checked(name: str, doing: str, place_of_mask: int | None) -> None:
        """Check the addresses of a method whose first tensor is one of pointers."""
        method = getattr(builder, name)

        def run(self, *args, **options):
            at = [isinstance(arg, interpreter.TensorHandle) for arg in args].index(True)
            mask = None if place_of_mask is None else args[place_of_mask]
            pointers = replace(args[at], data=bounds.strip(args[at], mask, doing))
            return method(self, *args[:at], pointers, *args[at + 1 :], **options)

        setattr(builder, name, run)

    interpreter._implicit_cvt = tagged
    checked("create_masked_load", "reads", 1)
    checked("create_masked_store", "writes", 2)
    checked("create_atomic_cas", "writes", None)
    checked("create_atomic_rmw", "writes", 3)
