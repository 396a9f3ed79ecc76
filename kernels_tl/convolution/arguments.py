"""Arguments that the kernels of the causal depthwise convolution share, and its tile."""

import tilelang.language as T

from build_tools.bundle import Bundle
from kernels_tl.bundles import IndexTable, Slots
from kernels_tl.core.common import element_type, extern


def address(dtype="float32"):
    """A tensor whose shape, strides and perhaps dtype only CUDA code knows."""
    return T.Tensor([1], dtype)


def pointer(tensor, access="r"):
    return T.access_ptr(tensor[0], access)


class ConvRows(Bundle):
    """Rows [B, T, D] with any strides of batch and token, in elements."""

    repeats = True

    def __init__(self):
        super().__init__(data=address(), batch=T.int64, row=T.int64)

    def record(self):
        return extern("ConvRows", pointer(self.data), self.batch, self.row)


class Window(Bundle):
    """Windows [slots, D, columns] of any strides, in any Dtype but those of 8 bits."""

    repeats = True
    access = "r"

    def __init__(self):
        super().__init__(data=address(), dtype=T.int32, slot=T.int64, channel=T.int64, column=T.int64)

    def record(self):
        return extern("Window", pointer(self.data, self.access), self.dtype, self.slot, self.channel, self.column)


class WrittenWindow(Window):
    """The same for a kernel that writes them."""

    access = "w"


class ConvInputs(Bundle):
    """The convolution's inputs.

    offsets, N, length, tokens   cu_seqlens of N sequences or, without it, `length` tokens each; tokens = B * T
    x                            [B, T, D]
    initial, columns             the windows that sequences start from, W - 1 or W columns
    first_states, has_state      a FirstStates, and a bool for each sequence if it is FLAGGED
    slots                        the slot of each sequence's window, initial or final
    first_indices                the slots of initial windows; without the table they are those of final ones
    weight, bias                 [D, W] and [D], contiguous, each in its Dtype; a null address is no bias
    """

    def __init__(self):
        super().__init__(
            offsets=IndexTable(),
            N=T.int32,
            length=T.int32,
            tokens=T.int32,
            x=ConvRows(),
            initial=Window(),
            columns=T.int32,
            first_states=T.int32,
            has_state=address("int32"),
            has_state_stride=T.int64,
            slots=Slots(),
            first_indices=IndexTable(),
            weight=address(),
            bias=address(),
            weight_dtype=T.int32,
            bias_dtype=T.int32,
            W=T.int32,
            D=T.int32,
            use_silu=T.int32,
        )

    def record(self):
        """The ConvInputs of convolution.cuh."""
        windows = (self.initial.record(), self.columns, self.first_states, pointer(self.has_state))
        weights = (pointer(self.weight), pointer(self.bias), self.weight_dtype, self.bias_dtype, self.W)
        return extern(
            "ConvInputs",
            extern("ConvSequences", self.offsets.vector(), self.N, self.length, self.tokens),
            self.x.record(),
            extern("Windows", *windows, self.has_state_stride, self.slots.record(), self.first_indices.record()),
            extern("ConvFilter", *weights),
            self.D,
            self.use_silu != 0,
        )


class ConvGradients(Bundle):
    """The gradients of y and of the final windows; a null address of dht: there is none."""

    def __init__(self):
        super().__init__(dy=ConvRows(), dht=Window())

    def record(self):
        return extern("ConvGradients", self.dy.record(), self.dht.record())


class ConvGrid(Bundle):
    """The CTAs: `column_ctas` for the channels of each group of WARPS * warp_tokens tokens. in_pieces: whether every
    row of x, and of its gradients, is whole pieces at multiples of their size."""

    def __init__(self):
        super().__init__(ctas=T.int32, column_ctas=T.int32, warp_tokens=T.int32, in_pieces=T.int32)

    def record(self, cta):
        return extern("ConvTile", cta, self.column_ctas, self.warp_tokens, self.in_pieces != 0)


def template(function, dtype, channels):
    """A function of CUDA for elements of a dtype, which reads pieces of so many channels."""
    return f"{function}<{element_type(dtype)}, {channels}>"
