"""Bundles: parameters of kernels that travel together, declared once.

A bundle is a class whose fields are tensors and scalars. A kernel takes it as one parameter:

    class Matrices(Bundle):
        def __init__(self, sizes):
            super().__init__(gates=T.Tensor([sizes.chunk_slots, sizes.H_v], "float32"), heads=T.int32)

    @T.prim_func
    def main(sizes: Sizes(), matrices: Matrices(sizes), ctas: T.int32): ...

The PrimFunc has a parameter for each field, under the field's name. C++ has one struct for the class, which all kernels
share; each kernel's arguments have it as the member `matrices` (build_tools/codegen.py). A field that a kernel does not
use costs nothing, because TileLang drops it from the device code.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Membership:
    """The place of a parameter in C++: this member of the arguments, a struct of this name."""

    member: str
    struct: str


class Bundle:
    def __init__(self, **fields):
        """Each field is an annotation of a PrimFunc's parameter."""
        self._fields = tuple(fields)
        vars(self).update(fields)

    def declare(self, name, add) -> dict[str, Membership]:
        """Replaces each field by the parameter that `add(name, annotation)` returns."""
        for field in self._fields:
            value = getattr(self, field)
            is_dtype = callable(value) and not isinstance(value, type)
            setattr(self, field, add(field, value() if is_dtype else value))
        return dict.fromkeys(self._fields, Membership(name, type(self).__name__))
