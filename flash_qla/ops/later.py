"""Registrations in modules of PyTorch that are slow to import, and that most programs never import."""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable


def when_imported(name: str, function: Callable[[], None]) -> None:
    """Call the function as soon as the module has been imported, which may be now."""
    if name in sys.modules:
        function()
    else:
        sys.meta_path.insert(0, _Finder(name, function))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module as the other finders do, once, and has its loader call a function afterwards."""

    def __init__(self, name: str, function: Callable[[], None]):
        self._name, self._function = name, function

    def find_spec(self, name, path=None, target=None):
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._function)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader, function: Callable[[], None]):
        self._loader, self._function = loader, function

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        # From here on the module has its own loader, which other programs may ask for its source.
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._function()
