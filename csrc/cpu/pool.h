// Tables of indices on the CPU, and the checks of their contents.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "checks.h"
#include "layout.h"
#include "prefill.h"

namespace flash_qla::cpu {

// A table [rows] or [rows, columns] of int32 or int64, with any strides.
class Indices {
 public:
  explicit Indices(const std::optional<Tensor>& tensor) {
    if (tensor) {
      data_ = tensor->const_data_ptr();
      wide_ = has_dtype(*tensor, ScalarType::Long);
      columns = tensor->dim() > 1 ? tensor->size(1) : 1;
      row_stride_ = tensor->stride(0);
      column_stride_ = tensor->dim() > 1 ? tensor->stride(1) : 0;
    }
  }

  int64_t operator()(int64_t row, int64_t column = 0) const {
    const int64_t at = row * row_stride_ + column * column_stride_;
    return wide_ ? static_cast<const int64_t*>(data_)[at] : static_cast<const int32_t*>(data_)[at];
  }

  int64_t columns = 0;

 private:
  const void* data_ = nullptr;
  bool wide_ = false;
  int64_t row_stride_ = 0, column_stride_ = 0;
};

// The text name[n] or name[n, column].
template <typename... Column>
std::string entry(const char* name, int64_t n, Column... column) {
  std::string text = name + ("[" + std::to_string(n));
  ((text += ", " + std::to_string(column)), ...);
  return text + "]";
}

inline int64_t checked_index(const char* op, const std::string& name, int64_t value, int64_t least, int64_t most) {
  check(value >= least && value <= most, op, name, " is ", value, ", expected ", least, " to ", most);
  return value;
}

// The readers and writers of the slots of a pool, or of rows of states. One sequence may write a slot, once, and then
// no other sequence may read it. So results do not depend on the order in which sequences run.
class Slots {
 public:
  Slots(const char* op, int64_t slots, int64_t null_index) : op_(op), slots_(slots), null_index_(null_index) {}

  // The slot of a table's entry, or kNoState: no slot.
  int64_t checked(const std::string& name, int64_t index) const {
    return index <= null_index_ ? kNoState : checked_index(op_, name, index, 0, slots_ - 1);
  }
  // Record an access to a slot that exists.
  void read(const std::string& name, int64_t index, int64_t sequence) {
    Users& users = users_[index];
    check(users.writer == kNoState || users.writer == sequence, op_, name, " is ", index, ", which sequence ",
          users.writer, " writes: expected a slot that no other sequence writes");
    users.reader = users.reader == kNoState || users.reader == sequence ? sequence : kSeveral;
  }
  void write(const std::string& name, int64_t index, int64_t sequence) {
    Users& users = users_[index];
    check(users.writer == kNoState, op_, name, " is ", index, ", which is written already: expected a slot of its own");
    check(users.reader == kNoState || users.reader == sequence, op_, name, " is ", index,
          ", which another sequence reads: expected a slot of its own");
    users.writer = sequence;
  }

 private:
  static constexpr int64_t kSeveral = -2;
  struct Users {
    int64_t reader = kNoState, writer = kNoState;
  };

  const char* op_;
  int64_t slots_, null_index_;
  std::map<int64_t, Users> users_;
};

// The slots of each sequence's last and first state, and those of its checkpoints, or their rows. kNoState: no slot; as
// the first state, zeros.
struct SequenceSlots {
  std::vector<int64_t> last, first;
  std::vector<std::vector<int64_t>> checkpoints;
};

// Throws unless each slot exists, and no other sequence uses a slot that one writes. lengths: tokens of each sequence;
// `checkpoints`: the name of that argument.
SequenceSlots list_slots(const char* op, const PoolArguments& pool, const std::vector<int64_t>& lengths,
                         const char* checkpoints = "checkpoints");

// The same arguments, with tables on the CPU.
PoolArguments with_tables_on_cpu(PoolArguments pool);

}  // namespace flash_qla::cpu
