"""Work that waits for the import of another module: of parts of PyTorch that are slow to import and that most programs
never import, and of inference engines, which import their layers late."""

import importlib.abc
import sys
import warnings
from collections.abc import Callable
from types import ModuleType

_callbacks: dict[str, list[tuple[Callable[[ModuleType], None], str]]] = {}


def when_imported(name: str, function: Callable[[ModuleType], None], warning: str) -> None:
    """Call function(module) as soon as the module has been imported, which may be now.

    An error in the function becomes a warning, because the import is another program's.

    Args:
        warning: the beginning of the warning, "flash_qla ...": what does not work then.
    """
    _callbacks.setdefault(name, []).append((function, warning))
    if sys.modules.get(name) is not None:
        _run(name)
    elif _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def _run(name: str) -> None:
    for function, warning in _callbacks.pop(name, ()):
        try:
            function(sys.modules[name])
        except Exception as error:
            warnings.warn(f"{warning}: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=2)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules as the other finders do, and has their loaders run what waits for them.

    A search alone, as importlib.util.find_spec, pkgutil and runpy make it, changes nothing.
    """

    def __init__(self):
        self._searches = set()

    def find_spec(self, name, path=None, target=None):
        # Another package's finder may ask the others too, this one among them. Only one thread searches at a time,
        # because Python holds its import lock around each finder.
        if name not in _callbacks or name in self._searches:
            return None
        self._searches.add(name)
        try:
            finders = (x for x in sys.meta_path if x is not self and hasattr(x, "find_spec"))
            spec = next(filter(None, (x.find_spec(name, path, target) for x in finders)), None)
        finally:
            self._searches.remove(name)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader:
    """A module's loader, which other modules may share, with something to do after the module has been executed."""

    def __init__(self, loader):
        self._loader = loader

    def __getattr__(self, name):
        return getattr(object.__getattribute__(self, "_loader"), name)  # a copy that is being made has none yet

    def exec_module(self, module):
        # The module has its own loader from here on, which other programs may ask for its source.
        module.__spec__.loader = module.__loader__ = self._loader
        name = module.__spec__.name
        self._loader.exec_module(module)
        if name in sys.modules:  # else it was executed apart, and its import is still to come
            _run(name)


_FINDER = _Finder()
