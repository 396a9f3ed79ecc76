"""The library's ops under short names, and the arguments of each by the names that its schema gives them."""

import collections

import torch

from flash_qla import _binary  # noqa: F401  loads the library, or reports what is missing in a tree without a build

forward = torch.ops.flash_qla.chunk_gated_delta_rule.default
forward_low_level = torch.ops.flash_qla.chunk_gated_delta_rule_fwd.default
backward = torch.ops.flash_qla.chunk_gated_delta_rule_bwd.default
forward_packed = torch.ops.flash_qla.chunk_gated_delta_rule_packed.default
backward_packed = torch.ops.flash_qla.chunk_gated_delta_rule_packed_bwd.default
forward_begin = torch.ops.flash_qla.gated_delta_rule_forward_begin.default
forward_finish = torch.ops.flash_qla.gated_delta_rule_forward_finish.default
backward_begin = torch.ops.flash_qla.gated_delta_rule_backward_begin.default
backward_replay = torch.ops.flash_qla.gated_delta_rule_backward_replay.default
backward_finish = torch.ops.flash_qla.gated_delta_rule_backward_finish.default
prefill = torch.ops.flash_qla.prefill_gated_delta_rule.default
decode = torch.ops.flash_qla.decode_gated_delta_rule.default
decode_packed = torch.ops.flash_qla.decode_gated_delta_rule_packed.default
decode_buffered = torch.ops.flash_qla.decode_gated_delta_rule_buffered.default
norm = torch.ops.flash_qla.gated_rms_norm.default
norm_backward = torch.ops.flash_qla.gated_rms_norm_bwd.default

convolution = torch.ops.flash_qla.causal_conv1d.default
convolution_backward = torch.ops.flash_qla.causal_conv1d_bwd.default
convolution_prefill = torch.ops.flash_qla.prefill_causal_conv1d.default
region = torch.ops.flash_qla.gated_delta_net.default
region_backward = torch.ops.flash_qla.gated_delta_net_bwd.default
region_decode = torch.ops.flash_qla.decode_gated_delta_net.default
region_prefill = torch.ops.flash_qla.prefill_gated_delta_net.default


def call_of(op):
    """A named tuple of the op's arguments, with their defaults and the op's name.

    The dispatcher leaves out trailing arguments that have their defaults.
    """
    arguments = op._schema.arguments
    defaults = [x.default_value for x in arguments if x.has_default_value()]
    return collections.namedtuple(op._opname, [x.name for x in arguments], defaults=defaults)


ForwardCall, BackwardCall = map(call_of, (forward, backward))
DecodeCall, DecodePackedCall = map(call_of, (decode, decode_packed))
