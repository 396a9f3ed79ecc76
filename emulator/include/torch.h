// The parts of PyTorch that the library's sources include. build.py compiles them once for all sources.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
