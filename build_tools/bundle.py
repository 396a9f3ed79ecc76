"""Bundles: parameters of kernels that travel together, declared once.

A bundle is a class whose fields are tensors and scalars. A kernel takes it as one parameter:

    class Matrices(Bundle):
        def __init__(self, sizes):
            super().__init__(gates=T.Tensor([sizes.chunk_slots, sizes.H_v], "float32"), heads=T.int32)

    @T.prim_func
    def main(sizes: Sizes(), matrices: Matrices(sizes), ctas: T.int32): ...

The PrimFunc has a parameter for each field, under the field's name. C++ has one struct for the class, which all kernels
share; each kernel's arguments have it as the member `matrices` (build_tools/codegen.py). A field that a kernel does not
use costs nothing, because TileLang drops it from the device code. A field may be a bundle itself.

A kernel may have several bundles of a class that sets `repeats`: their parameters have the member's name before the
field's, `indices_kind` for the field kind of the member indices.
"""

from __future__ import annotations

from typing import NamedTuple


class Member(NamedTuple):
    """A member of C++'s arguments, or of another such member: a struct of a bundle, or a field of the bundle."""

    name: str
    struct: str  # "" for a field


class Bundle:
    repeats = False

    def __init__(self, **fields):
        """Each field is an annotation of a PrimFunc's parameter."""
        self._fields = tuple(fields)
        vars(self).update(fields)

    def declare(self, name, add) -> dict[str, list[Member]]:
        """Replaces each field by the parameter that `add(name, annotation)` returns. Returns the members on the way to
        each parameter, the outermost first; the last is the field."""
        member = Member(name, type(self).__name__)
        paths = {}
        for field in self._fields:
            value = getattr(self, field)
            if isinstance(value, Bundle):
                paths |= {parameter: [member, *path] for parameter, path in value.declare(field, add).items()}
            else:
                is_dtype = callable(value) and not isinstance(value, type)
                parameter = f"{name}_{field}" if self.repeats else field
                setattr(self, field, add(parameter, value() if is_dtype else value))
                paths[parameter] = [member, Member(field, "")]
        return paths
