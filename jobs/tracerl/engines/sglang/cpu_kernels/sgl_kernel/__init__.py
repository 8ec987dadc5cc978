"""Stands in for `sglang-kernel` where there is no CUDA: the real package cannot be imported without libcuda.

SGLang imports its kernels at module level and calls none of them on a CPU, so every name exists here and
raises when it is called. `tracerl.engines.sglang.server` puts this directory on the path of CPU rollouts.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence

__version__ = "0.4.10"


class _Missing:
    """A kernel, or a namespace of them."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __getattr__(self, name: str) -> _Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}")

    def __call__(self, *_args: object, **_options: object) -> object:
        raise RuntimeError(f"{self.__name__} is a CUDA kernel, which this CPU rollout must not need")


def _lookup(module: str) -> Callable[[str], _Missing]:
    def lookup(name: str) -> _Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{module}.{name}")

    return lookup


__getattr__ = _lookup("sgl_kernel")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every submodule."""

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None = None, _target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("sgl_kernel."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__dict__["__getattr__"] = _lookup(spec.name)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: `create_module` made all of it."""


sys.meta_path.append(_Finder())
