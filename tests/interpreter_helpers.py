"""Triton's interpreter, made faster by what changes no result."""

import inspect
from dataclasses import replace
from functools import cache


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
