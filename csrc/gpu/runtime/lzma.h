// Unpacks files of the format .lzma (LZMA_Alone of the LZMA SDK), in which the library embeds its kernels' code. There
// is no dependency, because neither torch nor the manylinux platform has a library for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace flash_qla {

// The contents, which have `bytes` bytes. Throws std::runtime_error if the file is damaged.
std::vector<char> unpack_lzma(std::span<const uint8_t> file, size_t bytes);

}  // namespace flash_qla
