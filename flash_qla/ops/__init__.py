"""The parts of the library's ops, torch.ops.flash_qla.*, that have to be Python: fakes, autograd, autocast, FLOP
counts and shardings of DTensor.

Schemas and kernels are in libflash_qla.so, which works without this package. `schemas` reads the arguments of each op
from its schema, and the other modules register by these names.
"""

from flash_qla.ops import (  # noqa: F401  importing a module registers what it has
    autocast,
    autograd,
    convolution_fakes,
    fakes,
    flops,
    region_fakes,
    sharding,
)
