"""Which ops PyTorch dispatched."""

from torch.utils._python_dispatch import TorchDispatchMode


class Ran(TorchDispatchMode):
    """A list of flash_qla's ops that ran meanwhile, the backward's included."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "flash_qla":
            self.ops.append(function._schema.name.removeprefix("flash_qla::"))
        return function(*args, **(kwargs or {}))
