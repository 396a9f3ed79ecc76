"""The GPUs on which an integration leaves a package its own functions: those on which nobody has measured whether
flash_qla's are at least as fast. FLASH_QLA_ANY_GPU=1 in the environment puts flash_qla's in place there, too."""

import torch

from flash_qla_environment import is_on

_MEASURED = (9, 0)  # compute capability
REASON = "flash_qla was measured on Hopper GPUs alone; FLASH_QLA_ANY_GPU=1 runs it on others, too"


def keeps_theirs(device: torch.device) -> bool:
    """Whether the other package's functions run on this device."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) == _MEASURED:
        return False
    return not is_on("FLASH_QLA_ANY_GPU")
