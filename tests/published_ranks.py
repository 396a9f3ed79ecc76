"""What test_published.py and test_fla_function.py run on each rank of a group."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from cases import ALL_GRADIENTS_OF, Case, make_inputs
from cp_ranks import LAYOUTS, assert_near, local_case, run

import flash_qla
from flash_qla.cp import exchange_halo
from flash_qla.cp.published import FlashQLACPContext, build_cp_context
from flash_qla.integrations import fla

RESULTS = ("g_cumsum", "A", "o", "h", "final_state")  # of the low-level forward


def published_context_of(case: Case, device: str = "cpu") -> FlashQLACPContext:
    offsets = make_inputs(case, device)["cu_seqlens"]
    return build_cp_context(
        offsets, enable_inter=True, enable_intra=True, num_v_heads=case.H_v, chunk_size=64,
        conv1d_kernel_size=4, cu_seqlens_cpu=offsets.cpu(),
    )  # fmt: skip


def low_level_on_ranks(cases: list[Case], device: str = "cpu") -> int:
    """Both low-level functions give what the high-level function and its gradients are. Returns the number of cases."""
    checked = 0
    for case, layout in itertools.product(cases, LAYOUTS):
        inputs, gradients = local_case(case, layout, device)
        expected = run(inputs, gradients)
        context = inputs["cp_context"]
        if layout == "contiguous":
            inputs["cp_context"] = published_context_of(case, device)
        *results, h, final_state, cp_cache = flash_qla.chunk_gated_delta_rule_fwd(**inputs, output_h=True)
        g, A, o = results
        assert_near("o", o, expected["o"], rtol=1e-10, atol=1e-10)
        assert_near("final_state", final_state, expected["final_state"], rtol=1e-10, atol=1e-10)
        local = {name: x for name, x in inputs.items() if name not in ("cp_context", "initial_state")}
        local |= {"cu_seqlens": context.cu_seqlens, "initial_state": cp_cache.initial_state}
        again = flash_qla.chunk_gated_delta_rule_intermediates(**local, output_h=True)
        for name, x, y in zip(RESULTS, (*results, h, final_state), again, strict=True):
            assert_near(name, x, y, rtol=0, atol=0)

        with_gate = case.use_gate_in_kernel
        arguments = inputs | {"g": g, "A": A, "do": gradients["do"], "dht": gradients["dht"], "cp_cache": cp_cache}
        grads = flash_qla.chunk_gated_delta_rule_bwd(**arguments, g_raw=inputs["g"] if with_gate else None)
        names = list(ALL_GRADIENTS_OF.values())[: len(grads)]
        assert len(grads) == (8 if with_gate else 6)
        for name, x in zip(names, grads, strict=True):
            if x is None:
                assert name not in expected
            else:
                # Autograd rounds to the dtype of each input
                assert_near(name, x.to(expected[name].dtype), expected[name], rtol=1e-6, atol=1e-9)
        checked += layout == "contiguous"
    return checked


def published_context_on_ranks(case: Case, device: str = "cpu") -> None:
    inputs, gradients = local_case(case, "contiguous", device, 4)
    context = published_context_of(case, device)
    assert context.is_inter and context.is_intra and context.num_seqs == inputs["cp_context"].num_seqs
    expected = run(inputs, gradients)
    for published in (context, context.copy_for_backward()):
        actual = run(inputs | {"cp_context": published}, gradients)
        assert all(torch.equal(x, expected[name]) for name, x in actual.items())
    halos = [exchange_halo(inputs["v"], x) for x in (context, inputs["cp_context"])]
    assert torch.equal(*halos)


def fla_context_on_ranks(case: Case, device: str) -> None:
    """A context that the installed FLA has made gives the bits of flash_qla's own."""
    from fla.ops.cp import build_cp_context

    inputs, gradients = local_case(case, "contiguous", device, 4)
    offsets = make_inputs(case, device)["cu_seqlens"].long()
    context = build_cp_context(offsets, group=dist.group.WORLD, conv1d_kernel_size=4)
    expected, actual = (run(x, gradients) for x in (inputs, inputs | {"cp_context": context}))
    assert all(torch.equal(x, expected[name]) for name, x in actual.items())
    halos = [exchange_halo(inputs["v"], x) for x in (context, inputs["cp_context"])]
    assert torch.equal(*halos)


def without_the_cache(case: Case) -> str:
    inputs, gradients = local_case(case, "contiguous", "cpu")
    inputs["cp_context"] = published_context_of(case)
    g, A, *_ = flash_qla.chunk_gated_delta_rule_fwd(**inputs)
    try:
        flash_qla.chunk_gated_delta_rule_bwd(**inputs | {"g": g}, A=A, do=gradients["do"])
    except TypeError as error:
        return str(error)
    return "nothing"


def fla_contexts() -> tuple[bool, str, str]:
    """FLA's build_cp_context on this rank: whether the context is flash_qla's, and two refusals."""
    offsets = torch.tensor([0, 30, 64])
    context = fla.build_cp_context(offsets, dist.group.WORLD, 4, offsets.cpu(), True, "zigzag")
    expected = flash_qla.cp.build_cp_context(offsets, conv1d_kernel_size=4, layout="zigzag")
    same = vars(context).keys() == vars(expected).keys() and context._parts == expected._parts
    errors = []
    for arguments in ({"use_tf32x3_affine_chain": False}, {"no_such_keyword": 1}):
        try:
            fla.build_cp_context(offsets, dist.group.WORLD, **arguments)
        except (TypeError, ValueError) as error:
            errors.append(str(error))
    return same, *errors
