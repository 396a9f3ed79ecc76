"""Autocast: q, k and v, or x, or mixed and z, are cast to the autocast dtype, like the factors of a matrix product.

The ops convert the other arguments to their compute dtype. The backward casts to the dtype of A, because the forward's
autocast has chosen that one. Without A it casts nothing: autograd saves tensors that the forward's autocast has cast.
"""

import torch

from flash_qla.ops import schemas


def _register_autocast(op, device_type, dispatch_key, num_cast, dtype_index=None):
    excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, dispatch_key))

    def cast(x, dtype):
        # float64 stays float64, as in PyTorch's own ops.
        return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x

    @torch.library.impl(op._schema.name, dispatch_key)
    def _(*args):
        reference = None if dtype_index is None else args[dtype_index]
        if dtype_index is None or reference is not None:
            dtype = torch.get_autocast_dtype(device_type) if reference is None else reference.dtype
            args = (*(cast(x, dtype) for x in args[:num_cast]), *args[num_cast:])
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return op(*args)


_BACKWARD_DTYPE_INDEX = schemas.BackwardCall._fields.index("A")
for _device_type, _dispatch_key in (("cuda", "AutocastCUDA"), ("cpu", "AutocastCPU")):
    for _op in (
        *(schemas.forward, schemas.forward_low_level),
        *(schemas.prefill, schemas.decode, schemas.decode_buffered),
    ):
        _register_autocast(_op, _device_type, _dispatch_key, 3)
    for _op in (schemas.forward_packed, schemas.decode_packed, schemas.convolution, schemas.convolution_prefill):
        _register_autocast(_op, _device_type, _dispatch_key, 1)
    for _op in (schemas.region, schemas.region_prefill, schemas.region_decode):
        _register_autocast(_op, _device_type, _dispatch_key, 2)
    _register_autocast(schemas.backward, _device_type, _dispatch_key, 3, dtype_index=_BACKWARD_DTYPE_INDEX)
