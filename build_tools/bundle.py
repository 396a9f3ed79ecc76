"""Bundles: parameters of kernels that travel together, declared once.

A bundle is a class with fields, tensors and scalars, that a kernel takes as one parameter:

    class Matrices(Bundle):
        def __init__(self, sizes):
            super().__init__(gates=T.Tensor([sizes.chunk_slots, sizes.H_v], "float32"), heads=T.int32)

    @T.prim_func
    def main(sizes: Sizes(), matrices: Matrices(sizes), ctas: T.int32): ...

The PrimFunc has a parameter for each field, under the field's own name. C++ has one struct of the class's name, which
all kernels share, and each kernel's arguments have it as the member `matrices` (build_tools/codegen.py). A field that a
kernel does not use costs nothing: TileLang drops it from the device code.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Membership:
    """Where a parameter stands in C++: in this member of the arguments, a struct of this name."""

    member: str
    struct: str


class Bundle:
    def __init__(self, **fields):
        """The fields are what annotates a parameter of a PrimFunc."""
        self._fields = tuple(fields)
        vars(self).update(fields)

    def declare(self, name, add) -> dict[str, Membership]:
        """Makes each field a parameter by `add(name, annotation)`; the attributes then are these parameters."""
        for field in self._fields:
            value = getattr(self, field)
            is_dtype = callable(value) and not isinstance(value, type)
            setattr(self, field, add(field, value() if is_dtype else value))
        return dict.fromkeys(self._fields, Membership(name, type(self).__name__))
