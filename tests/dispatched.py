"""Which ops PyTorch dispatched."""

from torch.utils._python_dispatch import TorchDispatchMode


class Ran(TorchDispatchMode):
    """Lists of flash_qla's ops that ran meanwhile, the backward's included, and of their arguments by name."""

    def __init__(self):
        super().__init__()
        self.ops, self.arguments = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "flash_qla":
            self.ops.append(function._schema.name.removeprefix("flash_qla::"))
            names = [x.name for x in function._schema.arguments]
            self.arguments.append({**dict(zip(names, args, strict=False)), **(kwargs or {})})
        return function(*args, **(kwargs or {}))
